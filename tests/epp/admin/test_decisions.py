"""The list of decisions of `epp.admin.recorder`."""

import tracemalloc
from typing import Any

from epp.admin.recorder import Decisions, Record, without_prompt
from epp.plugin import Request, Response, Usage
from tests.support.scheduling.decisions import SECRET, decision, endpoint


def record(request_id: str, pods: int = 1, **extra: Any) -> Record:
    made = decision(request_id, [endpoint(n) for n in range(pods)])
    return Record(made, made.endpoint, "p", "ns", "m", 10.0, 10.002, 7, None, **extra)


def ids(decisions: Decisions, limit: int) -> list[str]:
    return [one.decision.request.id for one in decisions.newest(limit)]


def test_the_newest_come_first_and_the_oldest_make_room() -> None:
    decisions = Decisions(kept=3)
    for n in range(5):
        decisions.add(record(f"r{n}"))
    assert ids(decisions, 10) == ["r4", "r3", "r2"]
    assert ids(decisions, 1) == ["r4"]
    assert len(decisions) == 3


def test_large_pools_keep_fewer_decisions_but_always_one() -> None:
    decisions = Decisions(kept=1000, rows=100)
    for n in range(50):
        decisions.add(record(f"r{n}", pods=10))
    assert len(decisions) == 10
    decisions.add(record("large", pods=200))
    assert ids(decisions, 10) == ["large"]
    decisions.add(record("small"))
    assert ids(decisions, 10) == ["small"]


def test_of_two_requests_with_one_id_the_newer_is_found() -> None:
    decisions = Decisions()
    first, second = record("same"), record("same")
    decisions.add(first)
    decisions.add(second)
    assert decisions.find("same") is second
    assert decisions.find("none") is None


def test_a_record_tells_how_it_ended() -> None:
    under_way = record("r")
    assert under_way.as_dict()["outcome"] is None
    assert under_way.ttft is None
    response = Response(status=200, first_token_at=10.5, usage=Usage(100, 20, 64), complete=True)
    reported = record("r", response=response, ended_at=12.0).as_dict()
    assert (reported["pool"], reported["namespace"]) == ("p", "ns")
    assert reported["decision_ms"] == 2.0
    assert reported["outcome"] == {
        "status": 200,
        "complete": True,
        "ttft_ms": 500.0,
        "tpot_ms": None,
        "duration_ms": 2000.0,
        "usage": {"prompt": 100, "completion": 20, "cached": 64},
    }
    assert SECRET not in str(reported)


def test_what_is_kept_of_a_request_holds_no_bytes_of_it() -> None:
    tracemalloc.start()
    kept = [without_prompt(Request(id=str(n), model="m", body=bytes(1_000_000), prompt=bytes(1000))) for n in range(20)]
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1_000_000
    assert [request.id for request in kept] == [str(n) for n in range(20)]
