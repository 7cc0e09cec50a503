"""Admission: only requests of negative priority are shed, and only while the pool is full."""

from collections.abc import Sequence
from math import inf

import pytest

from epp import protocol
from epp.errors import InternalError, Rejected
from epp.plugin import Detector, Endpoint, Request
from epp.route import Admission

ENDPOINTS = [Endpoint("a", "a:1")]


class At(Detector):
    """As full as it is told, for so long; counts how often it is asked."""

    def __init__(self, saturation: float, seconds: float = inf) -> None:
        self.full = saturation
        self.seconds = seconds
        self.asked = 0

    def falls_in(self, endpoints: Sequence[Endpoint]) -> float:
        return self.seconds

    def saturation(self, endpoints: Sequence[Endpoint]) -> float:
        self.asked += 1
        if self.full < 0:
            raise ZeroDivisionError
        return self.full


def request(priority: int) -> Request:
    return Request(id="r", model="m", priority=priority)


@pytest.mark.parametrize(("priority", "saturation"), [(0, 9.0), (5, 1.0), (-1, 0.99), (-7, 0.0), (-1, float("nan"))])
def test_passes(priority: int, saturation: float) -> None:
    detector = At(saturation)
    Admission(detector).admit(request(priority), ENDPOINTS)
    assert detector.asked == (priority < 0)


@pytest.mark.parametrize("saturation", [1.0, 2.5, float("inf")])
def test_sheds_negative_priority_while_full(saturation: float) -> None:
    with pytest.raises(Rejected, match="the pool is full") as shed:
        Admission(At(saturation)).admit(request(-1), ENDPOINTS)
    assert shed.value.status == 429
    assert shed.value.reason == protocol.DROP_SATURATED


@pytest.mark.parametrize(("seconds", "again"), [(0.0, "1"), (2.1, "3"), (900.0, "60"), (inf, None)])
def test_it_says_when_to_ask_again_where_that_is_known(seconds: float, again: str | None) -> None:
    with pytest.raises(Rejected) as shed:
        Admission(At(1.0, seconds)).admit(request(-1), ENDPOINTS)
    assert shed.value.headers.get("retry-after") == again


def test_nobody_is_asked_for_requests_that_cannot_be_shed() -> None:
    detector = At(-1.0)
    Admission(detector).admit(request(0), ENDPOINTS)
    assert detector.asked == 0


def test_a_detector_that_fails_is_named() -> None:
    detector = At(-1.0)
    detector.name = "mine"
    with pytest.raises(InternalError, match="plugin 'mine' failed"):
        Admission(detector).admit(request(-1), ENDPOINTS)
