import pytest

from epp.replicas.unreported import Unreported


def test_as_many_are_unreported_as_come_while_one_is_told_of() -> None:
    unreported = Unreported(100.0)
    for turn in range(1, 41):
        for _ in range(50):
            unreported.add()
        unreported.look(0.003, 100.0 + turn / 2)
    assert unreported.requests == pytest.approx(100 * 0.003, rel=0.01)
    unreported.look(0.003, 120.0)
    assert unreported.requests == pytest.approx(100 * 0.003, rel=0.01), "no time has passed"
    for turn in range(1, 41):
        unreported.look(0.003, 120.0 + turn / 2)
    assert unreported.requests < 0.001
