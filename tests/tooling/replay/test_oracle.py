"""The oracle knows what is in the pods; nobody who does not may be much better on any workload."""

from statistics import fmean

import pytest

from tests.support.scheduling.replaying import play, waits
from tooling.replay.generators import WORKLOADS
from tooling.replay.trace import Piece, Trace, TraceRequest


@pytest.mark.long
@pytest.mark.parametrize(
    ("workload", "pods", "rate"),
    [
        ("chats", "2*h100-8b", 6.0),
        ("documents-8k", "3*h100-8b", 8.0),
        ("bursts", "4*h100-8b", 10.0),
        ("independent", "2*h100-8b,2*h100-8b@0.5", 8.0),
    ],
)
def test_nobody_beats_the_oracle_by_more_than_noise(workload: str, pods: str, rate: float) -> None:
    trace = WORKLOADS[workload](1, 500, "poisson")
    trace = trace.scaled(rate / trace.rate)
    best = fmean(waits(play(trace, pods=pods, name="oracle")))
    for name in ("prefix-aware", "least-load", "round-robin"):
        assert fmean(waits(play(trace, pods=pods, name=name))) > 0.93 * best, name


def test_it_sees_a_restart_and_foreign_traffic_that_others_cannot() -> None:
    """Two pods of different speed: only the oracle knows which."""
    trace = Trace("t", [TraceRequest(float(n), (Piece(n + 1, 800),), 5) for n in range(20)])
    made = play(trace, pods="laptop@0.2,laptop", name="oracle")
    assert {served.pod for served in made.served} == {1}
