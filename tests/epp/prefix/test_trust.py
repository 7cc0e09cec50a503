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
