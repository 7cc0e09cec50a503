"""How many requests an endpoint runs at once, told from who had to wait."""

from math import inf

from epp.plugin import Load
from epp.scheduling.fullness import Seats


def seats(*scrapes: tuple[int, int]) -> float:
    """After scrapes of (running, waiting)."""
    found = Seats()
    for at, (running, waiting) in enumerate(scrapes):
        found.look(Load(running=running, waiting=waiting, at=float(at)))
    return found.most


def test_as_many_twice_with_others_waiting_are_all_it_runs() -> None:
    assert seats((64, 3), (64, 9)) == 64
    assert seats((64, 3), (64, 9), (40, 0)) == 64, "that some left says nothing"


def test_who_waits_for_the_next_step_only_says_nothing() -> None:
    assert seats((12, 3), (15, 2), (11, 4)) == inf
    assert seats((64, 0), (64, 0)) == inf
    assert seats((0, 3), (0, 3)) == inf
    assert seats() == inf


def test_more_than_that_shows_that_it_was_wrong() -> None:
    assert seats((64, 3), (64, 9), (65, 0)) == inf


def test_a_scrape_counts_once_and_none_does_not() -> None:
    found, load = Seats(), Load(running=8, waiting=2, at=1.0)
    found.look(load)
    found.look(load)
    found.look(Load(running=8, waiting=2))
    assert found.most == inf
