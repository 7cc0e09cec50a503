from argparse import Namespace
from contextlib import nullcontext

import pytest

from hack.benches import flow
from hack.benches.flow import CASES, Case, Outcome
from tooling.replay.generators import WORKLOADS
from tooling.replay.trace import Trace
from tooling.simulator.presets import PRESETS


def test_the_table_has_medians_and_what_is_lost() -> None:
    found = {
        flow.WITHOUT: [Outcome([1.0] * 20, 500.0, 1), Outcome([3.0] * 20, 300.0, 0)],
        flow.ALONE: [Outcome([0.1] * 20, 0.0, 0)] * 2,
    }
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in flow.table(found).splitlines()[2:]]
    assert rows == [
        [flow.ALONE, "0.100 s", "0.100 s", "1.00", "0", "0.00", "0"],
        [flow.WITHOUT, "2.000 s", "2.000 s", "20.00", "400", "1.00", "1"],
    ]


@pytest.mark.parametrize("name", CASES)
def test_workloads_have_who_must_not_wait_priorities_that_have_names_and_no_conversations(name: str) -> None:
    trace = WORKLOADS[name](0, 400, "poisson")
    assert 0 < len(trace.only(CASES[name].watched).asks) < len(trace.asks)
    assert {ask.priority for ask in trace.asks} <= {*flow._PRIORITIES}
    assert not any(ask.answer for ask in trace.asks)
    assert CASES[name].kind in PRESETS


@pytest.mark.parametrize("name", CASES)
def test_each_workload_is_played_after_a_warm_up_of_its_first_requests(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some begin with hundreds of requests of those who may wait."""
    plays: list[tuple[int, int]] = []

    async def played(port: int, trace: Trace, watched: str, slower: float, salt: str) -> Outcome:
        ttfts = [0.1 for ask in trace.asks if ask.label == watched]
        plays.append((len(trace.asks), len(ttfts)))
        return Outcome(ttfts, 1.0, 0)

    monkeypatch.setattr(flow, "running_pool", lambda *_: nullcontext({flow.WITHOUT: 1}))
    monkeypatch.setattr(flow, "played", played)
    found = flow.run({flow.WITHOUT: ""}, name, CASES[name], Namespace(requests=600, slower=2.0, rounds=1))
    (warm, _), (alone, all_of_these), (whole, some) = plays
    assert warm == flow._WARM_UP
    assert alone == all_of_these == some < whole
    assert [*found] == [flow.ALONE, flow.WITHOUT]


@pytest.mark.long
@pytest.mark.envoy
def test_every_picker_answers_through_envoy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "_WARM_UP", 6)
    case = Case("quiet", 1, "laptop", 20.0)
    found = flow.run(flow._COMMANDS, "noisy-neighbour", case, Namespace(requests=20, slower=0.5, rounds=1))
    assert [*found] == [flow.ALONE, *flow._COMMANDS]
    assert found[flow.ALONE][0].others == 0
    for name, (outcome,) in found.items():
        assert outcome.lost == 0, name
        assert len(outcome.ttfts) >= 2
        assert name == flow.ALONE or outcome.others > 0
