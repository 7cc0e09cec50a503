"""How a record of promises becomes a share, from answers and from counters."""

from epp.plugin import Load
from epp.prefix.trust import Trust


def scrape(at: float, hits: int, running: int = 0) -> Load:
    return Load(at=at, prefix_hits=hits, running=running)


def test_edges_of_blocks_are_no_broken_promises() -> None:
    load = scrape(0, 0)
    trust = Trust(load)
    for _ in range(100):
        trust.sent(1000, load)
        trust.ended(1000, 984, load)
    assert trust.value == 1


def test_one_broken_promise_is_forgiven_and_many_are_not() -> None:
    load = scrape(0, 0)
    trust = Trust(load)
    trust.sent(800, load)
    trust.ended(800, 0, load)
    assert trust.value == 1
    for _ in range(100):
        trust.sent(800, load)
        trust.ended(800, 400, load)
    assert 0.5 < trust.value < 0.65


def test_more_than_was_promised_makes_up_for_nothing() -> None:
    load = scrape(0, 0)
    trust = Trust(load)
    for _ in range(100):
        trust.sent(1000, load)
        trust.ended(1000, 0, load)
        trust.sent(1000, load)
        trust.ended(1000, 100_000, load)
    assert trust.value < 0.7


def test_counters_tell_where_answers_do_not() -> None:
    trust = Trust(scrape(0, 0))
    for at in range(1, 60):
        trust.sent(1000, scrape(at, 300 * (at - 1)))
        trust.ended(1000, -1, scrape(at + 0.5, 300 * at))
    assert trust.value < 0.5


def test_counters_say_nothing_while_others_use_the_engine() -> None:
    trust = Trust(scrape(0, 0))
    for at in range(1, 60):
        load = scrape(at, 0, running=9)
        trust.sent(1000, load)
        trust.ended(1000, -1, load)
    assert trust.value == 1


def test_a_counter_that_fell_is_another_process() -> None:
    trust = Trust(scrape(0, 10_000))
    for at in range(1, 60):
        load = scrape(at, 10_000 - at)
        trust.sent(1000, load)
        trust.ended(1000, -1, load)
    assert trust.value == 1


def test_answers_are_believed_before_counters() -> None:
    trust = Trust(scrape(0, 0))
    for at in range(1, 60):
        load = scrape(at, 0)
        trust.sent(1000, load)
        trust.ended(1000, 1000, load)
    assert trust.value == 1


def test_what_waits_in_the_engine_is_no_broken_promise() -> None:
    trust = Trust(scrape(0, 0))
    trust.sent(60_000, scrape(1, 0))
    trust.sent(60_000, scrape(2, 60_000, running=1))
    for at in range(3, 9):  # the second and all who follow wait; their hits are not counted yet
        trust.sent(0, Load(at=at, prefix_hits=60_000, running=1, waiting=at - 2))
    assert trust.value == 1
    trust.sent(0, scrape(9, 120_000, running=8))  # all were looked up
    assert trust.value == 1


def test_promises_are_counted_once_nothing_waits() -> None:
    trust = Trust(scrape(0, 0))
    for _ in range(4):
        trust.sent(60_000, scrape(1, 0))
    trust.sent(60_000, Load(at=2, prefix_hits=0, running=1, waiting=3))
    assert trust.value == 1
    trust.sent(60_000, Load(at=3, prefix_hits=30_000, running=5))
    assert trust.value < 0.2


def test_others_seen_anywhere_in_the_window_spoil_it() -> None:
    trust = Trust(scrape(0, 0))
    for _ in range(4):
        trust.sent(60_000, scrape(1, 0))
    trust.sent(60_000, Load(at=2, prefix_hits=0, running=1, waiting=9))
    trust.sent(60_000, Load(at=3, prefix_hits=0, running=5))
    assert trust.value == 1


def test_nothing_was_promised_of_what_was_never_computed() -> None:
    trust = Trust(scrape(0, 0))
    for at in range(1, 60):
        trust.sent(1000, scrape(at, 0))
        trust.ended(1000, -1, scrape(at + 0.5, 0), computed=False)
    assert trust.value == 1
