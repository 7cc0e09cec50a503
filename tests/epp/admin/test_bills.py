from math import inf, nan
from typing import Any

import pytest

from epp.admin.bills import BEST, MEANING, MOST, best, milliseconds, name, profile_view
from epp.plugin import Endpoint
from epp.scheduling.decision import Scored
from epp.telemetry.text import printable
from tests.support.scheduling.decisions import decision, endpoint


def profile(*costs: tuple[float, float], **extra: Any) -> dict[str, Any]:
    rows = [
        {
            "endpoint": f"pod-{at}",
            "total": 1 / (at + 1),
            "scores": {"expected-ttft": {"score": 1.0, "weight": 1.0}},
            "bill_ms": {"idle": 0.0, "queue": queue, "work": work},
            "cost_ms": queue + work,
        }
        for at, (queue, work) in enumerate(costs)
    ]
    return {"profile": "default", "dropped": [], "endpoints": rows, "picks": ["pod-0"], **extra}


def test_the_pick_comes_first_and_then_the_best() -> None:
    seen = profile_view(profile((1.0, 2.0), (2.0, 2.0), (0.5, 0.5), picks=["pod-2", "pod-0"]), "pod-2")
    assert [row["name"] for row in seen["rows"]] == ["pod-2", "pod-0", "pod-1"]
    assert [row["chosen"] for row in seen["rows"]] == [True, False, False]
    assert [row["cost"] for row in seen["rows"]] == ["1.0 ms", "3.0 ms", "4.0 ms"]


def test_a_bill_has_the_terms_that_somebody_pays_in_colours_that_stay() -> None:
    seen = profile_view(profile((0.0, 2.0), (3.0, 2.0)), "pod-0")
    assert [term[:3] for term in seen["terms"]] == [("queue", 1, ""), ("work", 2, "")]
    first, second = seen["rows"]
    assert (first["terms"], second["terms"]) == (["0", "2.0"], ["3.0", "2.0"])
    assert 'role="img"><title>work 2.0 ms</title>' in first["bar"]
    assert 'role="img"><title>queue 3.0, work 2.0 ms</title>' in second["bar"]
    assert 'class="a1" x="0.0" width="120.0"' in second["bar"]  # of the dearest, which is as wide as there is room
    assert seen["scorers"] == []
    assert first["total"] == ""


def test_a_segment_says_what_its_term_is_as_far_as_its_plugin_does() -> None:
    seen = profile_view(profile((3.0, 2.0), terms={"work": "prefill " * 100, "idle": "nothing"}), "pod-0")
    queue, work = seen["terms"]
    assert queue[:3] == ("queue", 1, "")
    assert work[:3] == ("work", 2, printable("prefill " * 100, MEANING))
    assert "><title>queue 3.0 ms</title></rect>" in seen["rows"][0]["bar"]
    assert f"><title>work 2.0 ms: {work.meaning}</title></rect>" in seen["rows"][0]["bar"]


def test_a_list_says_what_the_terms_are_too() -> None:
    made = decision("r", [endpoint(1)])
    made.runs[0].scored[0].meanings = {"work": "prefill"}
    seen = best(made)
    assert seen is not None
    assert [term[:3] for term in seen.terms] == [("queue", 0, ""), ("work", 1, "prefill")]


def test_scores_are_shown_where_there_is_no_bill() -> None:
    rows = [{"endpoint": "a", "total": 0.5, "scores": {"queue": {"score": 0.25, "weight": 2.0}}}]
    seen = profile_view({"profile": "p", "dropped": [], "endpoints": rows, "picks": ["a"]}, "a")
    assert seen["scorers"] == ["queue"]
    assert (seen["rows"][0]["bar"], seen["rows"][0]["scores"], seen["rows"][0]["total"]) == (None, ["0.250"], "0.500")


def test_a_large_profile_is_cut_and_says_so() -> None:
    seen = profile_view(profile(*[(1.0, 1.0)] * (MOST + 7), others=3), "pod-0")
    assert (len(seen["rows"]), seen["more"], seen["others"]) == (MOST, 7, 3)


def test_who_was_dropped_is_named_up_to_a_number() -> None:
    dropped = [{"filter": "healthy", "endpoints": [f"e{n}" for n in range(25)]}, {"filter": "idle", "endpoints": []}]
    [line] = profile_view(profile(dropped=dropped), "x")["dropped"]
    assert line.startswith("healthy: e0, e1, ")
    assert line.endswith("e19 and 5 more")


def test_a_list_shows_the_best_of_many() -> None:
    pods = [endpoint(n) for n in range(1, 40)]
    made = decision("r", pods)
    made.runs[0].totals = made.runs[0].scored[0].scores
    seen = best(made)
    assert seen is not None
    assert [row.name for row in seen.rows] == [pod.name for pod in pods[:BEST]]
    assert seen.others == 39 - BEST
    made.endpoints = [pods[-1]]
    seen = best(made)
    assert seen is not None
    assert [row.chosen for row in seen.rows] == [True] + [False] * (BEST - 1)
    assert [row.name for row in seen.rows] == [pod.name for pod in (pods[-1], *pods[: BEST - 1])]
    made.endpoints = [pods[2]]
    seen = best(made)
    assert seen is not None
    assert [row.name for row in seen.rows] == [pods[at].name for at in (2, 0, 1, 3)]


def test_a_list_shows_of_a_decision_what_its_own_page_does() -> None:
    """But for the endpoints that it leaves out."""
    pods = [endpoint(n) for n in range(1, 4)]
    made = decision("r", pods)
    made.runs[0].scored[0].bills = [(0.002, 0.01), (0.0, 0.0125), (4e-7, 0.02)]
    made.runs[0].scored[0].meanings = {"work": "<prefill> & more"}
    made.runs[0].totals = [1.0, 0.9, 0.8]
    for scored in ([*made.runs[0].scored], [Scored("queue-scorer", 1.0, [1.0, 0.9, 0.8])]):
        made.runs[0].scored = scored
        seen, [whole] = best(made), [profile_view(run, made.endpoint.name) for run in made.as_dict()["profiles"]]
        assert seen is not None
        shown = [(row.name, row.chosen, row.bar or None, row.figure) for row in seen.rows]
        assert shown == [(row["name"], row["chosen"], row["bar"], row["cost"] or row["total"]) for row in whole["rows"]]
        assert [*seen.terms] == whole["terms"]
        assert (seen.others, whole["others"]) == (0, 0)


def test_a_list_shows_the_bill_of_the_last_cost_and_only_terms_that_somebody_pays() -> None:
    made = decision("r", [endpoint(1), endpoint(2)])
    first, scores = made.runs[0].scored[0], Scored("queue-scorer", 1.0, [1.0, 1.0])
    last = Scored("own-cost", 1.0, [1.0, 1.0], ("free", "paid"), [(0.0, 0.25), (4e-7, 0.5)])
    made.runs[0].scored = [first, last, scores]
    seen = best(made)
    assert seen is not None
    assert [term.name for term in seen.terms] == ["paid"]
    assert [row.figure for row in seen.rows] == ["250 ms", "500 ms"]


@pytest.mark.parametrize("wrong", [nan, inf, -1.0])
def test_a_list_shows_figures_of_plugins_as_they_are(wrong: float) -> None:
    made = decision("r", [endpoint(1), endpoint(2)])
    made.runs[0].scored[0].bills = [(wrong, 0.01), (0.0, 0.01)]
    seen = best(made)
    assert seen is not None
    assert [row.chosen for row in seen.rows] == [True, False]
    assert "work 10.0 ms" in seen.rows[1].bar


def test_a_decision_without_a_profile_has_no_bill() -> None:
    made = decision("r", [Endpoint("a", "a")])
    made.runs = []
    assert best(made) is None


def test_texts_of_others_are_one_line_and_short() -> None:
    assert name("a\nb\x1b[31m") == "a\\nb\\x1b[31m"
    assert len(name("x" * 5000)) <= 201
    assert (milliseconds(3.14159), milliseconds(12345.6)) == ("3.1 ms", "12,346 ms")
