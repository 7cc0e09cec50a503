from pathlib import Path

import pytest

from epp.errors import ConfigError
from tests.tooling.replay.test_trace import line
from tooling.replay.figures import Figures, Slo
from tooling.replay.policies import policy
from tooling.replay.replay import Conditions, Failure
from tooling.replay.runs import Plan, Rate, Results, Source, compare, saturation, with_oracle
from tooling.simulator.presets import pods


def plan(
    source: Source | None = None,
    *,
    kinds: str = "3*laptop",
    rate: Rate | None = None,
    seeds: tuple[int, ...] = (0,),
    workers: int = 1,
    conditions: Conditions | None = None,
) -> Plan:
    return Plan(
        source or Source("demo"),
        tuple(pods(kinds)),
        (policy("prefix-aware"), policy("round-robin")),
        conditions or Conditions(),
        rate or Rate("times", 1.0),
        Slo(),
        seeds,
        workers,
    )


def run(made: Plan) -> tuple[Results, dict[str, tuple[int, int]]]:
    seen: dict[str, tuple[int, int]] = {}

    def progress(what: str, ended: int, total: int) -> None:
        assert seen.get(what, (0, total)) <= (ended, total)
        seen[what] = ended, total

    return compare(made, progress), seen


def test_policies_meet_the_same_requests() -> None:
    results, seen = run(plan(seeds=(3, 4)))
    assert [(one.policy, one.seed) for one in results.runs] == [
        ("prefix-aware", 3), ("prefix-aware", 4), ("round-robin", 3), ("round-robin", 4),
    ]  # fmt: skip
    assert {one.requests for one in results.runs} == {107}
    ours, theirs = results.runs[0], results.runs[2]
    assert ours.hit_bound == theirs.hit_bound
    assert ours.hit_rate > theirs.hit_rate
    assert results.pods == ("laptop",) * 3
    assert results.saturation is None
    assert seen["round-robin, seed 4"] == (107, 107)


def test_processes_change_nothing() -> None:
    alone, _ = run(plan())
    together, seen = run(plan(workers=2))
    assert together == alone
    assert seen == {"prefix-aware": (107, 107), "round-robin": (107, 107)}


def test_a_rate_is_what_it_says() -> None:
    steady = Source("independent", 200, arrivals="steady")
    results, _ = run(plan(steady, kinds="2*h100-8b", rate=Rate("rate", 5.0)))
    assert results.rate == 5.0
    assert results.runs[0].requests == 200
    assert results.runs[0].seconds == pytest.approx(40, rel=0.1)


@pytest.mark.long
def test_a_load_is_a_share_of_what_the_pods_can_do() -> None:
    half, seen = run(plan(Source("independent", 2500), kinds="laptop", rate=Rate("load", 0.5)))
    over, _ = run(plan(Source("independent", 2500), kinds="laptop", rate=Rate("load", 2.0)))
    assert "saturation" in seen
    assert half.saturation == over.saturation
    assert half.saturation
    assert half.rate == pytest.approx(0.5 * half.saturation)
    assert half.runs[0].ttft_p90 < 5.0
    assert over.runs[0].ttft_p90 > 60.0
    assert over.runs[0].requests / over.runs[0].seconds == pytest.approx(over.saturation, rel=0.1)


def test_a_workload_without_a_number_of_requests_lasts_five_minutes() -> None:
    results, _ = run(plan(Source("independent"), kinds="laptop", rate=Rate("rate", 2.0)))
    assert results.runs[0].requests == 600
    results, _ = run(plan(Source("independent"), kinds="laptop", rate=Rate("rate", 0.1)))
    assert results.runs[0].requests == 500, "but never so few that figures say nothing"


def test_a_trace_plays_at_its_own_rate_or_times_that(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join(line(at * 1000, ids=(at, at + 1000)) for at in range(50)))
    once, _ = run(plan(Source(str(file))))
    twice, _ = run(plan(Source(str(file)), rate=Rate("times", 2.0)))
    assert once.rate == pytest.approx(50 / 49)
    assert twice.runs[0].seconds == pytest.approx(once.runs[0].seconds / 2, rel=0.1)


@pytest.mark.long
def test_saturation_of_twice_the_pods_is_about_twice_as_high() -> None:
    trace = Source("independent", 5000).trace(0)
    one = saturation(trace, pods("laptop"), 0, lambda *reported: None)
    two = saturation(trace, pods("2*laptop"), 0, lambda *reported: None)
    assert two == pytest.approx(2 * one, rel=0.1)


def test_what_cannot_be_played_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"no file or workload 'chat'.*did you mean 'chats'"):
        run(plan(Source("chat")))
    with pytest.raises(ConfigError, match="laptop holds 10240 tokens; the longest request has"):
        run(plan(Source("documents-64k", 10)))
    with pytest.raises(ConfigError, match="there are 3 pods, so no pod-9"):
        run(plan(conditions=Conditions(failures=(Failure(8, 1.0, 1.0),))))


def test_the_oracle_is_added_once() -> None:
    names = [each.name for each in with_oracle([policy("round-robin")])]
    assert names == ["round-robin", "oracle"]
    assert len(with_oracle([policy("oracle"), policy("round-robin")])) == 2


OWN = Path(__file__).parents[3] / "tooling" / "policies"


@pytest.fixture(scope="module")
def attainment() -> dict[str, Figures]:
    """Of a pool that is nearly full."""
    others = ("shedding-slos", "without-slos", "llm-d-predicted-latency")
    plan = Plan(
        Source("chats-and-reports", 900),
        tuple(pods("4*h100-8b")),
        (policy("prefix-aware"), *(policy(str(OWN / f"{name}.yaml")) for name in others)),
        Conditions(),
        Rate("rate", 11.0),
        Slo(),
    )
    return {run.policy: run for run in compare(plan, lambda what, ended, total: None).runs}


@pytest.mark.long
def test_near_saturation_slos_are_kept_at_least_ten_points_more_often_than_without_and_than_by_llm_ds_policy(
    attainment: dict[str, Figures],
) -> None:
    kept = {name: run.goodput for name, run in attainment.items()}
    assert kept["prefix-aware"] > max(kept["without-slos"], kept["llm-d-predicted-latency"]) + 0.1
    assert kept["shedding-slos"] > kept["prefix-aware"]
    assert attainment["prefix-aware"].tokens_per_second > 0.9 * attainment["without-slos"].tokens_per_second


@pytest.mark.long
def test_who_would_miss_is_shed(attainment: dict[str, Figures]) -> None:
    shed = {name: sum(each.shed for each in run.classes.values()) for name, run in attainment.items()}
    assert 0 < shed["shedding-slos"] < 0.1 * 900
    assert shed["prefix-aware"] == shed["without-slos"] == 0
    assert attainment["shedding-slos"].failed == shed["shedding-slos"]
