"""`expected-ttft`: bills by hand, bursts, what is not ours, and accounts that return to nothing."""

import gc
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from epp.plugin import CacheRoom, Endpoint, FailureShare, Load, PrefixMatch, Request, Response, Slo, Usage
from epp.scheduling.constants import Stretch
from epp.scheduling.cost import ExpectedTtft
from epp.scheduling.slo import chance
from tests.support.scheduling.signals import with_signal

ROOMY = CacheRoom(0, 1_000_000)
DONE = Response(status=200, complete=True)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def pool(count: int) -> list[Endpoint]:
    return [Endpoint(f"pod-{i}", f"10.0.0.{i}:8000") for i in range(count)]


def round_numbers(*, learn_speeds: bool = True) -> tuple[ExpectedTtft, Clock]:
    """1 ms a token, no attention; a full chunk takes one second."""
    cost = ExpectedTtft(
        prefill_seconds_per_token=1e-3,
        attention_seconds_per_token_pair=0.0,
        step_seconds=0.1,
        step_seconds_per_decode=0.01,
        step_seconds_per_context_token=1e-5,
        max_num_batched_tokens=1000,
        residence_seconds=20.0,
        learn_speeds=learn_speeds,
    )
    cost.clock = clock = Clock()
    return cost, clock


def request(
    endpoints: Sequence[Endpoint],
    tokens: int,
    held: Mapping[Endpoint, int] | None = None,
    rooms: Mapping[Endpoint, CacheRoom] | None = None,
    seen: bool = True,
    slo: Slo | None = None,
) -> Request:
    made = Request(id="r", model="m", tokens=tokens, sees_answer=seen, stream=True, slo=slo)
    made = with_signal(made, PrefixMatch, {e: PrefixMatch((held or {}).get(e, 0), 0, 0) for e in endpoints})
    made = with_signal(made, CacheRoom, {e: (rooms or {}).get(e, ROOMY) for e in endpoints})
    return made


def bill(cost: ExpectedTtft, made: Request, endpoint: Endpoint) -> dict[str, float]:
    (row,) = cost.bill(made, [endpoint])
    return dict(zip(cost.terms, row, strict=True))


def only(**terms: float) -> object:
    return pytest.approx({name: terms.get(name, 0.0) for name in ExpectedTtft.terms})


def test_an_idle_endpoint_costs_the_work_and_half_of_it_again() -> None:
    cost, _ = round_numbers()
    (a,) = pool(1)
    assert bill(cost, request([a], 1000), a) == only(own=1.0, shared=0.5, crowd=0.1 * 1.5)
    assert bill(cost, request([a], 1000, {a: 900}), a) == only(own=0.1, shared=0.05, crowd=0.1 * 0.15)
    assert bill(cost, request([a], 1000, {a: 1000}), a) == only()


def test_attention_counts_the_tokens_before() -> None:
    cost = ExpectedTtft(
        prefill_seconds_per_token=1e-3, attention_seconds_per_token_pair=1e-6, step_seconds=0.0, work_weight=1.0
    )
    (a,) = pool(1)
    # 400 new tokens behind 600 held ones see 800 on average.
    assert bill(cost, request([a], 1000, {a: 600}), a)["own"] == pytest.approx(0.4 + 1e-6 * 400 * 800)


def test_answers_are_asked_for_by_what_is_computed_for_them() -> None:
    cost, _ = round_numbers()
    (a,) = pool(1)

    def asked(tokens: int, held: int = 0, **fields: Any) -> bool:
        made = replace(request([a], tokens, {a: held}, seen=False), watchable=0.1, **fields)
        return cost.asks_for_answer(made, a)

    assert not any(asked(9000, 8990) for _ in range(200)), "most of it is held"
    assert asked(9000), "one that is computed"
    many = [asked(9000) for _ in range(3000)]
    assert sum(many[1000:]) == pytest.approx(200, abs=20), "no more than the share"
    assert not asked(90_000, stream=False), "its first byte comes with its last"
    assert asked(90_000, stream=False, stage="decode"), "what a prefill elsewhere takes is seen"
    assert asked(90_000)
    assert cost.statistics()["answers_asked_for"] == 3 + sum(many)


def test_what_waits_and_what_decodes_there_is_on_the_bill() -> None:
    cost, _ = round_numbers()
    (a,) = pool(1)
    first, second = request([a], 500), request([a], 300)
    cost.on_picked(first, a)
    cost.on_picked(second, a)
    # Two in flight, of whom 1 s of its own brings 1 s / 20 s more, and 0.8 s of pending work.
    stall = 0.2 * 2 * (1 * (1 + 1 / 20) + 0.8)
    assert bill(cost, request([a], 1000), a) == only(
        pending=0.8, own=1.0, shared=0.5, stall=stall, crowd=0.1 * (2.3 + stall)
    )
    cost.on_first_token(first, a)
    rate, stall = 0.1 + 0.01 + 1e-5 * 500, 0.2 * 2 * (1 * (1 + 1 / 20) + 0.3)
    assert bill(cost, request([a], 1000), a) == only(
        pending=0.3, own=1.0, shared=0.5, stall=stall, crowd=rate * (1.8 + stall)
    )
    short = bill(cost, request([a], 100), a)["stall"]
    assert short == pytest.approx(0.2 * 2 * (0.1 * (1 + 0.1 / 20) + 0.1)), "what waits counts once"
    cost.on_finished(first, a, DONE)
    cost.on_finished(second, a, DONE)
    assert bill(cost, request([a], 1000), a) == only(own=1.0, shared=0.5, crowd=0.15)


@pytest.mark.parametrize(("residence", "picked"), [(1000.0, "pod-1"), (5.0, "pod-0")])
def test_a_long_prompt_goes_where_few_come_while_it_is_computed(residence: float, picked: str) -> None:
    """On pod-0 somebody waits, on pod-1 four decode: where requests follow fast, those who come meanwhile decide."""
    cost, _ = round_numbers()
    a, b = pool(2)
    cost.on_picked(request([a], 8000), a)
    for _ in range(4):
        decoding = request([b], 10)
        cost.on_picked(decoding, b)
        cost.on_first_token(decoding, b)
    cost._residence = residence
    rows = cost.bill(request([a, b], 8000), [a, b])
    assert min(zip(map(sum, rows), (a.name, b.name), strict=True))[1] == picked


def test_requests_that_take_no_time_leave_a_bill() -> None:
    cost, _ = round_numbers()
    (a,) = pool(1)
    cost._residence = 0.0
    for _ in range(2):
        made = request([a], 10)
        cost.on_picked(made, a)
        cost.on_finished(made, a, DONE)
    cost.on_picked(request([a], 10), a)
    assert 0 < bill(cost, request([a], 10), a)["stall"] < inf


def test_an_endpoint_that_was_busy_costs_more_and_is_forgiven() -> None:
    cost, clock = round_numbers()
    (a,) = pool(1)
    first = request([a], 500)
    cost.on_picked(first, a)
    shared = []
    for _ in range(4):
        shared.append(bill(cost, request([a], 1000), a)["shared"])
        clock.now += 60
    assert shared == pytest.approx([0.5 + 1 - 0.36787944**n for n in range(4)], rel=1e-4)
    cost.on_finished(first, a, DONE)
    clock.now += 600
    assert bill(cost, request([a], 1000), a)["shared"] == pytest.approx(0.5, abs=1e-3)


def test_memory_that_is_missing_has_to_come_free_first() -> None:
    cost, _ = round_numbers()
    (a,) = pool(1)
    full = {a: CacheRoom(9_500, 10_000)}
    assert bill(cost, request([a], 1000, rooms=full), a)["memory"] == pytest.approx(500 / (10_000 / 20.0))
    assert bill(cost, request([a], 500, rooms=full), a)["memory"] == 0
    assert bill(cost, request([a], 500, rooms={a: CacheRoom(9_500, 0)}), a)["memory"] == 0


def test_a_shared_document_stays_where_it_is_until_its_queue_is_as_long_as_its_copy() -> None:
    cost, _ = round_numbers()
    a, b = pool(2)
    held = {a: 980}
    for waiting in range(40):
        made = request([a, b], 1000, held)
        on_a, on_b = (sum(row) for row in cost.bill(made, [a, b]))
        assert on_a < on_b, f"copied with {waiting} short requests waiting"
        cost.on_picked(made, a)


@pytest.mark.parametrize("seen", [True, False])
def test_without_sight_of_the_answer_the_first_token_is_modelled(seen: bool) -> None:
    cost, clock = round_numbers()
    (a,) = pool(1)
    requests = [request([a], 1000, seen=seen) for _ in range(3)]
    for one in requests:
        cost.on_picked(one, a)
    pending = []
    for _ in range(4):
        pending.append(bill(cost, request([a], 1), a)["pending"])
        clock.now += 1.11
    assert pending == pytest.approx([3, 2, 1, 0] if seen is False else [3, 3, 3, 3])
    if not seen:
        assert cost.statistics()["decodes"] == 3
    for one in requests:
        cost.on_finished(one, a, DONE)
    assert_nothing_left(cost)


def test_modelled_service_begins_when_the_one_before_has_ended() -> None:
    cost, clock = round_numbers()
    (a,) = pool(1)
    first, second = request([a], 10_000, seen=False), request([a], 1000, seen=False)
    cost.on_picked(first, a)
    cost.on_picked(second, a)
    clock.now += 5
    cost.on_finished(first, a, Response())  # its client left
    assert bill(cost, request([a], 1), a)["pending"] == pytest.approx(1.0)
    clock.now += 1.0
    assert bill(cost, request([a], 1), a)["pending"] == pytest.approx(1.0)
    clock.now += 0.2
    assert bill(cost, request([a], 1), a)["pending"] == 0


def test_an_answer_in_one_piece_is_modelled_too_since_its_first_byte_is_its_last() -> None:
    cost, clock = round_numbers()
    (a,) = pool(1)
    whole = Request(id="r", model="m", tokens=1000, sees_answer=True, stream=False)
    cost.on_picked(whole, a)
    clock.now += 1.2
    assert bill(cost, request([a], 1), a)["pending"] == 0


def test_an_answer_that_ends_shows_that_those_before_it_were_served() -> None:
    cost, clock = round_numbers()
    (a,) = pool(1)
    slow, quick = request([a], 100_000, seen=False), request([a], 10, seen=False)
    cost.on_picked(slow, a)
    cost.on_picked(quick, a)
    clock.now += 1
    cost.on_finished(quick, a, DONE)
    assert bill(cost, request([a], 1), a)["pending"] == 0


def begun(cost: ExpectedTtft, a: Endpoint, clock: Clock, first_tokens: int, running: int) -> float:
    """A scrape of `a` has counted so many first tokens. Returns what still waits there, in seconds."""
    a.load = Load(first_tokens=first_tokens, running=running, at=clock.now)
    cost.on_scraped(a)
    return bill(cost, request([a], 1), a)["pending"]


@pytest.mark.parametrize(("counted", "left"), [(0, 3), (1, 2), (2, 1), (3, 0)])
@pytest.mark.parametrize("modelled", [0, 1, 2, 3])
def test_the_first_tokens_that_the_engine_counts_say_who_still_waits(counted: int, left: float, modelled: int) -> None:
    cost, clock = round_numbers(learn_speeds=False)
    (a,) = pool(1)
    assert begun(cost, a, clock, 7, 0) == 0, "what it counted before is not ours"
    requests = [request([a], 1000, seen=False) for _ in range(3)]
    for one in requests:
        cost.on_picked(one, a)
    clock.now += 0.6 + 1.15 * modelled
    assert begun(cost, a, clock, 7 + counted, 3) == pytest.approx(left)
    assert cost.statistics()["decodes"] == counted
    if counted > modelled and left:
        clock.now += 0.5
        assert bill(cost, request([a], 1), a)["pending"] == pytest.approx(left)
        clock.now += 0.2
        assert bill(cost, request([a], 1), a)["pending"] == pytest.approx(left - 1), "the next had half of it left"
    if counted < modelled:
        late = clock.now - (100 + 1.1 + 1.12 * counted)
        clock.now += late - 0.1
        assert bill(cost, request([a], 1), a)["pending"] == pytest.approx(left)
        clock.now += 0.2
        assert bill(cost, request([a], 1), a)["pending"] == pytest.approx(3 - modelled), "they come as late again"
    for one in requests:
        cost.on_finished(one, a, DONE)
    assert_nothing_left(cost)


def test_a_count_that_cannot_be_ours_says_nothing() -> None:
    cost, clock = round_numbers(learn_speeds=False)
    (a,) = pool(1)
    assert begun(cost, a, clock, 7, 0) == 0
    cost.on_picked(request([a], 1000, seen=False), a)
    assert begun(cost, a, clock, 7, 1) == 1
    assert begun(cost, a, clock, 8, 2) == 1, "one of two is not ours"
    assert begun(cost, a, clock, 0, 1) == 1, "not counted"
    assert begun(cost, a, clock, 2, 1) == 0
    cost.on_picked(request([a], 500, seen=False), a)
    assert begun(cost, a, clock, 1, 2) == 0.5, "it has started anew"
    cost.on_picked(request([a], 300, seen=True), a)
    assert begun(cost, a, clock, 3, 3) == pytest.approx(0.3), "of the third its first token will be seen"


def test_who_was_thought_to_have_begun_waits_again_but_not_for_ever() -> None:
    cost, clock = round_numbers(learn_speeds=False)
    (a,) = pool(1)
    assert begun(cost, a, clock, 7, 0) == 0
    cost.on_picked(request([a], 1000, seen=False), a)
    found = []
    for late in range(5):
        clock.now += 1.2 * 2**late
        found.append(begun(cost, a, clock, 7, 1))
    assert found == [1, 1, 1, 0, 0]


def scraped(endpoint: Endpoint, clock: Clock, waiting: int, running: int, kv_usage: float = 0.0) -> None:
    endpoint.load = Load(waiting=waiting, running=running, kv_usage=kv_usage, at=clock.now)


def counted(a: Endpoint, clock: Clock, prompts: int, each: int, generated: int = 0) -> None:
    """A scrape of `a` that counts so many prompts of `each` computed tokens, each in a step of its own."""
    a.load = Load(
        first_tokens=prompts,
        computed_tokens=prompts * each,
        generated_tokens=prompts + generated,
        steps=prompts,
        running=1,
        at=clock.now,
    )


def learned(seconds: float, gap: float = 0.0, *, prompts: int = 1, learn: bool = True, before: int = 0) -> float:
    """The speed of an endpoint that takes `seconds` for each of 20 prompts of 1,000 tokens (1.1 s of work with its
    step), where no answer is shown. `gap`: seconds after each in which it has nothing of ours; `prompts`: those it
    counts for each.
    """
    cost, clock = round_numbers(learn_speeds=learn)
    (a,) = pool(1)
    counted(a, clock, before, 1000)
    for n in range(1, 21):
        made = request([a], 1000, seen=False)
        cost.bill(made, [a])
        cost.on_picked(made, a)
        clock.now += seconds
        if gap:
            cost.on_finished(made, a, DONE)
            clock.now += gap
        counted(a, clock, n * prompts, 1000)
        cost.bill(made, [a])
    return cost.endpoint_statistics()[a]["speed"]


@pytest.mark.parametrize("seconds", [3.0, 1.0, 0.4, 0.06])
def test_speeds_are_learned_from_what_the_engine_counts(seconds: float) -> None:
    assert learned(seconds) == pytest.approx(1.1 / seconds, rel=0.01)


def test_foreign_prompts_count_as_work_there() -> None:
    assert learned(3.0, prompts=3) == pytest.approx(1.1, rel=0.01)


@pytest.mark.parametrize("how", ["it was idle between", "it is not to learn", "it was restarted"])
def test_nothing_is_learned_where_it_cannot_be_known(how: str) -> None:
    if how == "it was restarted":
        assert learned(3.0, prompts=-1, before=100) == 1
    else:
        assert learned(3.0, gap=5.0 if "idle" in how else 0.0, learn="learn" not in how) == 1


def test_an_engine_that_counts_nothing_has_the_modelled_speed() -> None:
    cost, clock = round_numbers()
    (a,) = pool(1)
    for _ in range(20):
        made = request([a], 1000, seen=False)
        cost.bill(made, [a])
        cost.on_picked(made, a)
        clock.now += 3
        a.load = Load(running=1, at=clock.now)
    assert cost.endpoint_statistics()[a] == {"speed": 1, "speed_observations": 0}


def test_what_waits_ends_by_the_speed_as_it_is_known_now() -> None:
    cost, clock = round_numbers()
    (a,) = pool(1)
    for _ in range(2):
        made = request([a], 1000, seen=False)
        cost.bill(made, [a])
        cost.on_picked(made, a)
    cost.accounts[a].speed.factor = 3.0
    clock.now += 1.5
    assert bill(cost, request([a], 1), a)["pending"] == pytest.approx(3), (
        "the first has begun, by the speed of its pick"
    )
    clock.now += 2
    assert bill(cost, request([a], 1), a)["pending"] == pytest.approx(3), "the second takes three seconds"
    clock.now += 1
    assert bill(cost, request([a], 1), a)["pending"] == 0


def test_predictions_are_compared_with_first_tokens() -> None:
    cost, clock = round_numbers()
    cost.learn_speeds = False
    (a,) = pool(1)
    assert "ttft_error" not in cost.statistics()
    for seconds, watched in (
        (1.0, ""),
        (9.0, "asked"),
        (1.0, ""),
        (2.0, ""),
        (2.0, "sampled"),
        (9.0, "asked"),
        (2.0, ""),
    ):
        made = replace(request([a], 1000), watched=watched)
        cost.bill(made, [a])
        cost.on_picked(made, a)
        clock.now += seconds
        cost.on_first_token(made, a)
        cost.on_finished(made, a, DONE)
    assert cost.statistics()["ttft_error"] == pytest.approx(0.4), (
        "1.2 s were predicted where 2 s were measured, but for those asked for"
    )


def served(cost: ExpectedTtft, clock: Clock, made: Request, endpoint: Endpoint, seconds: float) -> None:
    cost.bill(made, [endpoint])
    cost.on_picked(made, endpoint)
    clock.now += seconds
    cost.on_first_token(made, endpoint)
    cost.on_finished(made, endpoint, DONE)


def test_what_first_tokens_take_beside_computing_is_learned_for_predictions_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cost, clock = round_numbers()
    monkeypatch.setattr(cost._speeds, "observe", lambda *_, **__: None)
    (a,) = pool(1)
    bills = [bill(cost, request([a], tokens), a) for tokens in (10, 3000)]
    for tokens in [100, 1000, 300, 2000] * 20:
        served(cost, clock, request([a], tokens), a, 0.5 + 0.1 + 0.8 * 1.1 * tokens * 1e-3)
        clock.now += 600
    assert cost.predict(request([a], 10), [a])[a].ttft == pytest.approx(0.6, rel=0.05)
    assert cost.predict(request([a], 3000), [a])[a].ttft == pytest.approx(0.6 + 0.8 * 3.3, rel=0.05)
    seen = cost.statistics()
    assert seen["ttft_overhead_seconds"] == pytest.approx(0.5, rel=0.05)
    assert seen["ttft_seconds_per_token"] == pytest.approx(0.8e-3, rel=0.05)
    assert seen["prefill_seconds_per_token"] == 1e-3
    clock.now += 600
    for tokens, before in zip((10, 3000), bills, strict=True):
        assert bill(cost, request([a], tokens), a) == pytest.approx(before, abs=1e-3), "as if nothing was learned"


def test_a_slow_endpoint_computes_longer_and_takes_the_same_beside() -> None:
    cost, _ = round_numbers()
    a, b = endpoints = pool(2)
    cost.speeds = {"pod-1": 0.5}
    cost.__post_init__()
    cost._overhead.seconds, cost._overhead.share = 0.3, 0.5
    seen = cost.predict(request(endpoints, 1000), endpoints)
    assert seen[a].ttft == pytest.approx(0.3 + 0.5 * 1.1 + 0.1)
    assert seen[b].ttft == pytest.approx(0.3 + 2 * (0.5 * 1.1 + 0.1))
    assert [each.parts for each in seen.values()] == [pytest.approx((1.1, 0.1)), pytest.approx((2.2, 0.2))]


@pytest.mark.parametrize("why", ["whole answer", "not shown", "speeds are not learned", "memory", "adapter"])
def test_what_says_nothing_of_it_teaches_predictions_nothing(why: str) -> None:
    cost, clock = round_numbers(learn_speeds=why != "speeds are not learned")
    (a,) = pool(1)
    rooms = {a: CacheRoom(9500, 10_000)} if why == "memory" else {}
    made = request([a], 1000, rooms=rooms, seen=why != "not shown")
    if why == "whole answer":
        made = replace(made, stream=False)
    if why == "adapter":
        told_of_adapters(cost, a)
        for name in ("cook", "clerk"):  # who take both slots
            a.load = Load(lora_max=2, lora_waiting=frozenset({name}))
            cost.on_scraped(a)
            cost.on_picked(replace(request([a], 1), model=name), a)
        made = replace(made, model="poet")
    served(cost, clock, made, a, 7.0)
    assert cost.statistics()["ttft_overhead_seconds"] == 0.0
    assert all(piece[0] != "" for piece in cost.snapshot())
    served(cost, clock, request([a], 1000), a, 7.0)
    assert (cost.statistics()["ttft_overhead_seconds"] > 0) == cost.learn_speeds


def test_who_comes_while_a_step_is_computed_waits_for_the_rest_of_it() -> None:
    cost, clock = round_numbers()
    (a,) = pool(1)
    running = request([a], 500)
    cost.on_picked(running, a)
    waits = cost.predict(request([a], 1000), [a])[a]
    assert waits.parts == pytest.approx((1.5 * 1.1, 0.1)), "of a prompt that is computed the rest is ahead"
    cost.on_first_token(running, a)
    step, each = 0.1 + 0.01 + 1e-5 * 500, cost.predict(request([a], 1000), [a])[a]
    assert each.tpot_before == pytest.approx(step / (1 - 0.05))
    assert each.parts == pytest.approx((1 + step, step + 0.5 * each.tpot_before)), "half of it in the mean"
    cost.on_finished(running, a, DONE)
    clock.now += 100
    assert cost.predict(request([a], 1000), [a])[a].parts == pytest.approx((1.1, 0.1)), "nothing runs"
    a.load = replace(a.load, running=4, at=clock.now)
    bill(cost, request([a], 10), a)
    a.load = replace(a.load, at=clock.now + 1)
    clock.now += 1
    bill(cost, request([a], 10), a)
    foreign = cost.predict(request([a], 1000), [a])[a]
    assert foreign.parts is not None
    assert foreign.parts[1] == pytest.approx(0.1 + 0.5 * foreign.tpot_before), "nor does it ask who sent it"


def test_what_predictions_learned_is_taken_over_by_a_replica_that_starts() -> None:
    old, clock = round_numbers()
    new, _ = round_numbers()
    (a,) = pool(1)
    for tokens in (100, 1000, 300, 2000):
        served(old, clock, request([a], tokens), a, 0.6 + tokens * 1e-3)
    for piece in old.snapshot():
        new.restore(piece, {a.name: a})
    figure = "ttft_overhead_seconds"
    assert new.statistics()[figure] == pytest.approx(old.statistics()[figure])
    assert new.statistics()[figure] > 0.1
    with pytest.raises(ValueError, match="first tokens"):
        round_numbers()[0].restore(("", [1.0]), {})


def test_requests_that_come_one_by_one_teach_the_speed() -> None:
    """Ten times too slow by the configuration, and each prompt a small part of what a step can take."""
    cost, clock = round_numbers()
    (a,) = pool(1)
    for _ in range(40):
        made = request([a], 1000)
        cost.bill(made, [a])
        cost.on_picked(made, a)
        clock.now += 0.12
        cost.on_first_token(made, a)
        cost.on_finished(made, a, DONE)
        clock.now += 5
    assert cost.predict(request([a], 1000), [a])[a].ttft == pytest.approx(0.12, rel=0.1)


@pytest.mark.parametrize("other", ["before", "after"])
def test_a_request_that_shared_its_endpoint_was_not_alone(other: str) -> None:
    cost, clock = round_numbers()
    (a,) = pool(1)
    made, beside = request([a], 1000), request([a], 10)
    for one in (beside, made) if other == "before" else (made, beside):
        cost.on_picked(one, a)
    clock.now += 0.5
    cost.on_first_token(made, a)
    assert not cost.accounts[a].speed.lone_seen
    cost.on_finished(made, a, DONE)
    cost.on_finished(beside, a, DONE)
    alone = request([a], 1000)
    cost.on_picked(alone, a)
    clock.now += 0.5
    cost.on_first_token(alone, a)
    assert [each.seconds for each in cost.accounts[a].speed.lone_seen] == [0.5]


def test_foreign_traffic_is_seen_smoothed_and_fades() -> None:
    cost, clock = round_numbers()
    a, b = pool(2)
    foreign = []
    for _ in range(6):
        clock.now += 1
        scraped(a, clock, waiting=4, running=10, kv_usage=0.5)
        scraped(b, clock, waiting=0, running=0)
        on_a, on_b = cost.bill(request([a, b], 1000), [a, b])
        foreign.append(on_a[cost.terms.index("foreign")])
        assert on_b[cost.terms.index("foreign")] == 0
    assert foreign == sorted(foreign)
    assert foreign[0] > 0
    assert 0.9 < cost.statistics()["foreign_requests"] / 14 <= 1
    clock.now += 10
    faded = bill(cost, request([a], 1000), a)["foreign"]
    assert 0.4 < faded / foreign[-1] < 0.5  # queue and decodes both halve, and a part of the term is their product
    for _ in range(8):
        clock.now += 1
        scraped(a, clock, waiting=0, running=0)
        bill(cost, request([a], 1000), a)
    assert bill(cost, request([a], 1000), a)["foreign"] == 0


def test_foreign_answers_bring_others_meanwhile_as_ours_do() -> None:
    cost, clock = round_numbers()
    (a,) = pool(1)
    clock.now += 1
    scraped(a, clock, waiting=0, running=10)
    foreign = {}
    for residence in (inf, 20.0, 10.0):
        cost._residence = residence
        foreign[residence] = bill(cost, request([a], 1000), a)["foreign"]
    more = foreign[20.0] - foreign[inf]
    assert more > 0
    assert foreign[10.0] - foreign[inf] == pytest.approx(2 * more)


def test_foreign_memory_takes_room() -> None:
    cost, clock = round_numbers()
    (a,) = pool(1)
    rooms = {a: CacheRoom(1000, 10_000)}
    for _ in range(20):
        clock.now += 1
        scraped(a, clock, waiting=0, running=5, kv_usage=1.0)
        row = bill(cost, request([a], 1000, rooms=rooms), a)
    assert row["memory"] == pytest.approx(1000 / 10_000 * 20, rel=0.01)


@given(st.lists(st.sampled_from(["pick", "token", "end", "scrape", "late"]), max_size=80), st.randoms())
def test_traffic_of_our_own_is_never_foreign(events: list[str], draw: object) -> None:
    cost, clock = round_numbers()
    (a,) = pool(1)
    live: list[Request] = []
    taken = Load()
    for event in events:
        clock.now += 0.5
        made = request([a], 1000)
        if event == "pick":
            assert bill(cost, made, a)["foreign"] == 0
            cost.on_picked(made, a)
            live.append(made)
        elif event == "token" and live:
            cost.on_first_token(live[0], a)
        elif event == "end" and live:
            cost.on_finished(live.pop(0), a, DONE)
        elif event == "scrape":
            taken = Load(waiting=len(live) // 2, running=len(live) - len(live) // 2, kv_usage=0.9, at=clock.now)
        else:
            a.load = taken  # what was scraped some time ago arrives now
    assert bill(cost, request([a], 1000), a)["foreign"] == 0


@pytest.mark.parametrize("seen", [False, True])
def test_accounts_of_endpoints_that_left_are_freed_without_the_collector(seen: bool) -> None:
    cost, clock = round_numbers()
    gc.collect()
    gc.disable()
    try:
        for endpoint in pool(5):
            asked = [request([endpoint], 1000, seen=seen) for _ in range(3)]
            for made in asked:
                cost.on_picked(made, endpoint)
            clock.now += 10
            bill(cost, asked[0], endpoint)  # the first tokens of those that are not seen are thought to have come
            cost.on_finished(asked[0], endpoint, DONE)
            cost.on_removed(endpoint)
            for made in asked[1:]:
                cost.on_finished(made, endpoint, DONE)
        del asked, made
        assert gc.collect() == 0
    finally:
        gc.enable()


def assert_nothing_left(cost: ExpectedTtft) -> None:
    for account in cost.accounts.values():
        assert (account.pending, account.decodes, account.context, account.requests) == (0, 0, 0, 0)
        assert not account.queue


event = st.tuples(
    st.sampled_from(["pick", "token", "end", "fail", "wait", "move", "remove", "count"]), st.integers(0, 99)
)


@given(st.lists(event, max_size=120))
def test_accounts_return_to_exactly_nothing(events: list[tuple[str, int]]) -> None:
    cost, clock = round_numbers()
    endpoints = pool(3)
    live: list[tuple[Request, Endpoint]] = []
    for kind, number in events:
        endpoint = endpoints[number % 3]
        if kind == "pick":
            made = request(endpoints, 37 * number + 1, {endpoint: 7}, seen=number % 2 == 0)
            cost.bill(made, endpoints)
            cost.on_picked(made, endpoint)
            live.append((made, endpoint))
        elif kind == "wait":
            clock.now += number / 20
        elif kind == "remove":
            cost.on_removed(endpoint)
        elif kind == "count":
            endpoint.load = Load(first_tokens=number, at=clock.now)
            cost.on_scraped(endpoint)
        elif live:
            made, where = live.pop(number % len(live))
            if kind == "token":
                cost.on_first_token(made, where)
                live.append((made, where))
            else:
                cost.on_finished(made, where, DONE if kind == "end" else Response())
                if kind == "move":
                    cost.on_picked(made, endpoint)
                    live.append((made, endpoint))
    for made, where in live:
        cost.on_finished(made, where, DONE)
    assert_nothing_left(cost)


@pytest.mark.parametrize(
    ("tiers", "work", "load", "shared"),
    [
        ((0, 0), 0.8, 0.0, 0.4),
        ((300, 0), 0.5, 0.03, 0.25 + 0.06),  # 1 ms to compute a token, 0.1 ms to load it
        ((300, 200), 0.3, 0.03 + 0.1, 0.4),  # and 0.5 ms from storage; 0.15 + 0.26 would be more than without a load
        ((800, 0), 0.0, 0.08, 0.16),
        ((0, 800), 0.0, 0.4, 0.4),
    ],
)
def test_what_lower_tiers_hold_costs_what_it_takes_to_load(
    tiers: tuple[int, int], work: float, load: float, shared: float
) -> None:
    cost, _ = round_numbers()
    cost.l1_tokens_per_second, cost.l2_tokens_per_second = 10_000, 2000
    (a,) = pool(1)
    made = request([a], 1000)
    made = with_signal(made, PrefixMatch, {a: PrefixMatch(200, 2, 10, *tiers)})
    assert bill(cost, made, a) == only(own=work + load, shared=shared, crowd=0.1 * (work + shared))
    cost.on_picked(made, a)
    assert bill(cost, request([a], 0), a)["pending"] == pytest.approx(work + load)


def test_a_load_stalls_nobody() -> None:
    cost, _ = round_numbers()
    cost.l1_tokens_per_second = 10_000
    (a,) = pool(1)
    running = request([a], 0)
    cost.on_picked(running, a)
    cost.on_first_token(running, a)
    made = request([a], 1000)
    assert bill(cost, made, a)["stall"] == pytest.approx(0.2 * (1 + 1 / 20))
    made = with_signal(made, PrefixMatch, {a: PrefixMatch(0, 0, 10, 1000)})
    assert bill(cost, made, a)["stall"] == 0.0


def test_what_is_slower_to_load_than_to_compute_is_computed() -> None:
    cost, _ = round_numbers()
    cost.l1_tokens_per_second, cost.l2_tokens_per_second = 10_000, 500
    (a,) = pool(1)
    made = request([a], 1000)
    made = with_signal(made, PrefixMatch, {a: PrefixMatch(200, 2, 10, 300, 200)})
    assert bill(cost, made, a)["own"] == pytest.approx(0.5 + 0.03)
    cost.l1_tokens_per_second = 100
    assert bill(cost, made, a)["own"] == pytest.approx(0.8)


def test_an_endpoint_that_can_load_is_preferred_to_one_that_has_to_compute() -> None:
    cost = ExpectedTtft()
    a, b, c = pool(3)
    made = request([a, b, c], 8000)
    nothing = PrefixMatch(0, 0, 500)
    made = with_signal(
        made, PrefixMatch, {a: nothing, b: PrefixMatch(0, 0, 500, 0, 7000), c: PrefixMatch(0, 0, 500, 7000, 0)}
    )
    costs = [sum(row) for row in cost.bill(made, [a, b, c])]
    assert sorted(costs, reverse=True) == costs


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefill_seconds_per_token", 0.0),
        ("max_num_batched_tokens", 0),
        ("l1_tokens_per_second", 0.0),
        ("l2_tokens_per_second", 0.0),
        ("residence_seconds", -1.0),
        ("work_weight", -1.0),
        ("stall_weight", -0.1),
    ],
)
def test_parameters_without_meaning_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        ExpectedTtft(**{name: value})  # type: ignore[arg-type]


def lora(endpoints: Sequence[Endpoint], tokens: int = 1000) -> Request:
    return replace(request(endpoints, tokens), model="poet")


def told_of_adapters(cost: ExpectedTtft, *endpoints: Endpoint) -> None:
    for endpoint in endpoints:
        endpoint.load = Load(lora_max=2, lora_waiting=frozenset({"poet"}), at=cost.clock())
        cost.on_scraped(endpoint)


def test_an_adapter_costs_its_load_where_it_is_not() -> None:
    cost, _ = round_numbers()
    a, b = pool(2)
    assert bill(cost, lora([a]), a)["adapter"] == 0.0, "nobody has said that it is one"
    told_of_adapters(cost, a, b)
    assert bill(cost, lora([a]), a) == only(own=1.0, shared=0.5, crowd=0.1 * 1.5, adapter=0.5)
    cost.on_picked(lora([a, b]), a)
    assert bill(cost, lora([a, b]), a)["adapter"] == 0.0
    assert bill(cost, lora([a, b]), b)["adapter"] == 0.5
    assert bill(cost, request([a, b], 1000), b)["adapter"] == 0.0, "of the base model"
    assert bill(cost, request([a, b], 1000), a)["pending"] == pytest.approx(1.5), "others wait for the load too"


def test_who_is_there_waits_for_a_load_and_a_request_for_a_slot() -> None:
    cost, _ = round_numbers()
    (a,) = pool(1)
    told_of_adapters(cost, a)
    for name in ("cook", "clerk"):
        made = replace(request([a], 1000), model=name)
        a.load = Load(lora_max=2, lora_waiting=frozenset({name}))
        cost.on_scraped(a)
        cost.on_picked(made, a)
    stalled = 0.5 * (1 + 0.2 * 2)
    assert bill(cost, lora([a]), a)["adapter"] == pytest.approx(stalled + 20.0 / 2), "one of two in 20 s each"


def test_loads_and_waits_for_slots_say_nothing_of_speed() -> None:
    cost, clock = round_numbers()
    (a,) = pool(1)
    told_of_adapters(cost, a)
    first = lora([a], 100)
    cost.on_picked(first, a)
    before = replace(a.load, steps=10, first_tokens=10, computed_tokens=1000, at=clock.now)
    a.load = before
    bill(cost, lora([a]), a)
    clock.now += 1.0
    a.load = replace(before, steps=11, first_tokens=11, computed_tokens=1100, at=clock.now)
    bill(cost, lora([a]), a)
    assert cost.statistics()["speed_observations"] == 0


def test_adapters_are_known_to_a_replica_that_starts() -> None:
    old, _ = round_numbers()
    new, _ = round_numbers()
    (a,) = pool(1)
    told_of_adapters(old, a)
    made = lora([a])
    old.on_picked(made, a)
    old.on_finished(made, a, Response(status=200))
    for piece in old.snapshot():
        new.restore(piece, {a.name: a})
    assert bill(new, lora([a]), a)["adapter"] == 0.0
    assert "poet" in new.adapters.known


def test_what_was_learned_is_taken_over_by_a_replica_that_starts() -> None:
    old, _ = round_numbers()
    new, _ = round_numbers()
    for name in ("a", "b"):
        seconds = 3.0 if name == "a" else 1.0
        old._open(Endpoint(name, "10.0.0.1:1"), 100.0).speed.seen.extend([Stretch(1.0, 0.0, 0.0, seconds)] * 12)
    old._speeds.constants.stretches.append(Stretch(1.0, 2.0, 1.0, 3.0))
    old._residence = 7.0
    piece, *_ = old.snapshot()
    here = {name: Endpoint(name, "10.0.0.1:1") for name in ("a", "b")}
    new.restore(piece, here)
    assert new.statistics()["residence_seconds"] == 7.0
    speeds = new.endpoint_statistics()
    assert speeds[here["a"]]["speed"] < speeds[here["b"]]["speed"]
    assert speeds[here["a"]]["speed_observations"] == 12
    assert next(iter(new.snapshot()))[-1] == [Stretch(1.0, 2.0, 1.0, 3.0)]
    with pytest.raises(ValueError, match="in flight"):
        new.restore((-1.0, 0, 0, 1, [], []), here)
    with pytest.raises(ValueError, match="a stretch of"):
        round_numbers()[0].restore((7.0, 0, 0, 1, [("a", [(0.0, 0.0, 0.0, 1.0)])], []), here)


@pytest.mark.parametrize(
    ("prefill", "step", "decode"), [(3.0, 1.0, 1.0), (1.0, 3.0, 3.0), (0.2, 2.0, 2.0), (1.0, 0.5, 3.0), (1.0, 2.0, 0.5)]
)
def test_the_pools_own_constants_are_learned_with_their_errors(prefill: float, step: float, decode: float) -> None:
    """Of an engine that takes so many times the configured seconds, in times of prompts and of answers, many at once
    and few.
    """
    cost, clock = round_numbers()
    (a,) = pool(1)
    totals = [0, 0, 0, 0]
    for n in range(400):
        made = request([a], 1000, seen=False)
        cost.bill(made, [a])
        cost.on_picked(made, a)
        prompts, decoded, together = ((3, 0, 1), (1, 30, 1), (1, 300, 10))[n // 20 % 3]
        steps = prompts + decoded // together
        clock.now += prefill * prompts + step * 0.1 * steps + decode * (0.01 + 1e-5 * 1000) * decoded
        totals = [x + y for x, y in zip(totals, (prompts, 1000 * prompts, prompts + decoded, steps), strict=True)]
        first, computed, generated, all_steps = totals
        a.load = Load(
            first_tokens=first, computed_tokens=computed, generated_tokens=generated, steps=all_steps, at=clock.now
        )
        cost.bill(made, [a])
    learned = cost.statistics()
    assert learned["prefill_seconds_per_token"] == pytest.approx(prefill * 1e-3, rel=0.1)
    assert learned["step_seconds"] == pytest.approx(step * 0.1, rel=0.1)
    assert learned["step_seconds_per_decode"] == pytest.approx(decode * 0.01, rel=0.15)
    assert learned["step_seconds_per_context_token"] == pytest.approx(decode * 1e-5, rel=0.15)
    assert 0 < learned["prefill_error"] < 0.1
    assert 0 < learned["step_error"] < 0.1
    assert 0 < learned["decode_error"] < 0.2


def test_what_waits_is_not_thought_to_wait_on_where_the_pool_is_faster_than_configured() -> None:
    cost, clock = round_numbers()
    (a,) = pool(1)
    for _ in range(4):
        made = request([a], 1000, seen=False)
        cost.bill(made, [a])
        cost.on_picked(made, a)
        clock.now += 1
    assert bill(cost, request([a], 1), a)["pending"] > 0
    cost.accounts[a].speed.factor = cost._speeds.pool = 0.3
    cost._adopt()
    assert bill(cost, request([a], 1), a)["pending"] == 0, "each began when it was sent and took 0.33 s"


@pytest.mark.parametrize("others", [0, 4])
def test_of_a_few_answers_that_are_seen_speeds_are_learned(others: int) -> None:
    """An endpoint of half the modelled speed, of whose requests one in `others + 1` is seen."""
    cost, clock = round_numbers()
    [slow] = endpoints = pool(1)
    ends, free = [], clock.now
    for turn in range(400):
        seen = turn % (others + 1) == 0
        clock.now = max(clock.now + 0.9, free - 0.5)
        made = request(endpoints, 300, seen=seen)
        cost.bill(made, endpoints)
        cost.on_picked(made, slow)
        free = max(free, clock.now) + 2 * 0.3 + 0.1
        ends.append((free, made, seen))
        while ends and ends[0][0] <= clock.now + 0.9:
            clock.now, made, was_seen = max(clock.now, ends[0][0]), *ends.pop(0)[1:]
            if was_seen:
                cost.on_first_token(made, slow)
            cost.on_finished(made, slow, DONE)
    assert cost.endpoint_statistics()[slow]["speed"] == pytest.approx(0.5, rel=0.3)


# --- flow control ---------------------------------------------------------------------------------------------------


def test_an_endpoint_is_full_while_what_waits_there_takes_longer_than_a_step() -> None:
    cost, clock = round_numbers()
    a, b = pool(2)
    assert cost.saturation([a, b]) == 0.0
    cost.on_picked(request([a], 300), a)
    assert cost.saturation([a]) == 1.0
    assert cost.saturation([a, b]) == 0.5
    assert cost.falls_in([a, b]) == pytest.approx(0.2)
    clock.now += 0.25  # 50 ms of it are left, of a step of 100 ms
    assert cost.saturation([a]) == pytest.approx(0.5)


def test_with_flow_control_a_bill_says_what_is_left_of_a_prompt() -> None:
    cost, clock = round_numbers(learn_speeds=False)
    a, b = pool(2)
    for endpoint in (a, b):
        cost.on_picked(request([a, b], 1000), endpoint)
        clock.now += 0.5
    newcomer = request([a, b], 10)
    assert bill(cost, newcomer, a)["pending"] == bill(cost, newcomer, b)["pending"] == pytest.approx(1.0)
    cost.saturation([a, b])
    assert bill(cost, newcomer, b)["pending"] == pytest.approx(0.5)
    assert bill(cost, newcomer, a)["pending"] == pytest.approx(0.0, abs=1e-6), "as long as it takes by the model"
    cost.on_picked(request([a, b], 300), b)
    assert bill(cost, newcomer, b)["pending"] == pytest.approx(0.8), "of those behind it, all"
    assert best(cost, newcomer, [b, a]) is a


def test_memory_counts_in_its_last_tenth_and_with_the_request_itself() -> None:
    cost, _ = round_numbers()
    (a,) = pool(1)
    room = CacheRoom(pinned=800, capacity=1000, shared=50)
    found = [cost.saturation_for(request([a], tokens, rooms={a: room}), [a]) for tokens in (50, 150, 200, 250, 400)]
    assert found == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.0])


def test_an_adapter_is_waited_for_where_no_slot_is_free() -> None:
    cost, _ = round_numbers()
    a, b = pool(2)
    assert cost.scarce(lora([a])) == "", "nobody has said that it is one"
    told_of_adapters(cost, a, b)
    assert cost.scarce(lora([a])) == "poet"
    assert cost.scarce(request([a], 1000)) == ""
    for name in ("cook", "clerk"):
        a.load = Load(lora_max=2, lora_waiting=frozenset({name}))
        cost.on_scraped(a)
        made = replace(request([a], 1000), model=name)
        cost.on_picked(made, a)
    assert cost.ready(lora([a, b]), [a, b]) == [b]
    assert cost.ready(replace(lora([a, b]), model="cook"), [a, b]) == [a, b]
    cost.on_finished(made, a, Response(status=200))
    assert cost.ready(lora([a, b]), [a, b]) == [a, b]


def test_seats_count_in_their_last_tenth() -> None:
    cost, clock = round_numbers(learn_speeds=False)
    (a,) = pool(1)
    made = [request([a], 1) for _ in range(10)]
    for each in made:
        cost.on_picked(each, a)
        cost.on_first_token(each, a)
    clock.now += 1.0
    full = {}
    for most in (20, 10):
        for at in range(2):
            a.load = Load(running=most, waiting=5, at=clock.now + at)
            full[most] = cost.saturation([a])
        clock.now += 5.0
    assert full[20] < full[10] == 1.0


# --- SLOs


def best(cost: ExpectedTtft, made: Request, endpoints: Sequence[Endpoint]) -> Endpoint:
    costs = [sum(row) for row in cost.bill(made, endpoints)]
    return endpoints[costs.index(min(costs))]


Traffic = st.lists(
    st.tuples(
        st.integers(1, 5000),
        st.sampled_from([None, Slo(0.5), Slo(tpot=0.12), Slo(3.0, 0.3), Slo(60.0, 2.0)]),
        st.booleans(),
        st.floats(0.0, 3.0),
    ),
    max_size=25,
)


@given(traffic=Traffic, packing=st.sampled_from([0.0, 10.0, -10.0]))
def test_a_request_without_an_slo_is_billed_as_if_there_were_none_whoever_runs_there(
    traffic: list[tuple[int, Slo | None, bool, float]], packing: float
) -> None:
    with_slos, clock = round_numbers()
    without, _ = round_numbers()
    with_slos.slo_packing, without.slo, without.clock = packing, "ignore", clock
    endpoints = pool(3)
    for tokens, slo, starts, pause in traffic:
        made = request(endpoints, tokens, slo=slo)
        if slo is None:
            rows = with_slos.bill(made, endpoints)
            assert rows == without.bill(made, endpoints)
            assert {row[-1] for row in rows} == {0.0}
        chosen = best(with_slos, made, endpoints)
        for cost in (with_slos, without):
            cost.on_picked(made, chosen)
            if starts:
                cost.on_first_token(made, chosen)
        clock.now += pause


@given(traffic=Traffic, tokens=st.integers(1, 3000))
def test_an_slo_is_missed_only_for_other_slos_or_for_as_many_seconds_as_it_is_worth(
    traffic: list[tuple[int, Slo | None, bool, float]], tokens: int
) -> None:
    cost, clock = round_numbers()
    endpoints = pool(4)
    promised_at: dict[Endpoint, list[float]] = {endpoint: [] for endpoint in endpoints}
    for turn, (length, promised, starts, pause) in enumerate(traffic):
        earlier = request(endpoints, length, slo=promised)
        cost.on_picked(earlier, endpoints[turn * turn % 4])
        if promised is not None and promised.tpot is not None:
            promised_at[endpoints[turn * turn % 4]].append(promised.tpot)
        if starts:
            cost.on_first_token(earlier, endpoints[turn * turn % 4])
        clock.now += pause
    slo = Slo(4.0, 0.25)
    made = request(endpoints, tokens, slo=slo)
    seen = cost.predict(made, endpoints)
    keepers = {e for e, p in seen.items() if p.ttft <= 4.0 and p.tpot <= 0.25 and p.tpot_after <= p.promised}
    missed = {}
    for endpoint, p in seen.items():
        own = 1 - (1 - chance(p.ttft / 4.0)) * (1 - chance(p.tpot / 0.25))
        others = (chance(p.tpot_after / tpot) - chance(p.tpot_before / tpot) for tpot in promised_at[endpoint])
        missed[endpoint] = own + sum(others)
    seconds = dict(zip(endpoints, (sum(row[:-1]) for row in cost.bill(made, endpoints)), strict=True))
    chosen = best(cost, made, endpoints)
    for other in endpoints:
        saved = seconds[other] - seconds[chosen]
        assert cost.slo_seconds * (missed[chosen] - missed[other]) <= saved + 1e-6
    cost.slo = "shed"
    assert bool(cost.refusal(made, endpoints)) == (not keepers)


def test_what_a_request_would_find_is_predicted() -> None:
    cost, _ = round_numbers()
    (a,) = pool(1)
    idle = cost.predict(request([a], 1000), [a])[a]
    assert [idle.ttft, idle.tpot] == pytest.approx([1.0 * 1.1 + 0.1, 0.1 + 0.01 + 1e-5 * 1000])
    assert (idle.requests, idle.promised) == (0, inf)
    cost.on_picked(request([a], 500, slo=Slo(tpot=0.2)), a)
    seen = cost.predict(request([a], 1000), [a])[a]
    assert seen.ttft == pytest.approx(1.5 * 1.1 + 0.1), "who waits there goes first"
    each = 0.1 + 0.01 * 2 + 1e-5 * 1500
    assert seen.tpot == pytest.approx(each / (1 - 0.05)), "half a second of prefill in ten"
    assert seen.tpot_after == pytest.approx(each / (1 - 0.15)), "and for who is there a second more"
    assert (seen.requests, seen.promised) == (1, 0.2)
    full = request([a], 1000, rooms={a: CacheRoom(9500, 10_000)})
    assert cost.predict(full, [a])[a].ttft == pytest.approx(1.75 + 500 / 10_000 * 20.0), "until memory comes free"


def test_a_newcomer_that_would_break_what_was_promised_to_others_goes_elsewhere() -> None:
    cost, clock = round_numbers()
    quiet, busy = pool(2)
    for _ in range(3):
        chat = request([quiet], 10, slo=Slo(1.0, 0.15))
        cost.on_picked(chat, quiet)
        cost.on_first_token(chat, quiet)
    cost.on_picked(request([busy], 3000), busy)
    clock.now += 1.0
    report = request([quiet, busy], 2000, slo=Slo(30.0, 1.0))
    assert best(cost, report, [quiet, busy]) is busy
    cost.slo = "ignore"
    assert best(cost, report, [quiet, busy]) is quiet, "where it would be served at once"


@pytest.mark.parametrize(("packing", "name"), [(10.0, "pod-1"), (-10.0, "pod-2"), (0.0, "pod-2")])
def test_a_request_goes_where_it_just_fits_or_where_most_is_left(packing: float, name: str) -> None:
    cost, _ = round_numbers()
    cost.slo_packing = packing
    full, half, _ = endpoints = pool(3)
    cost.on_picked(request(endpoints, 6000), full)
    cost.on_picked(request(endpoints, 1000), half)
    assert best(cost, request(endpoints, 100, slo=Slo(5.0, 1.0)), endpoints).name == name


def test_packing_does_not_compute_what_is_cached_elsewhere() -> None:
    cost, _ = round_numbers()
    cost.slo_packing = 10.0
    cold, warm = endpoints = pool(2)
    assert best(cost, request(endpoints, 3000, {warm: 2900}, slo=Slo(9.0)), [cold, warm]) is warm


def test_packing_never_prefers_an_endpoint_that_keeps_nothing() -> None:
    cost, _ = round_numbers()
    cost.slo_packing, cost.slo_seconds = 10.0, 0.01
    late, idle = endpoints = pool(2)
    cost.on_picked(request(endpoints, 6000), late)
    made = request(endpoints, 100, slo=Slo(5.0))
    assert best(cost, made, endpoints) is idle
    assert [row[-1] for row in cost.bill(made, endpoints)] == pytest.approx([10.01, 9.78])


def test_a_request_leaves_a_margin_for_what_is_not_predicted() -> None:
    cost, _ = round_numbers()
    warm, _ = endpoints = pool(2)
    cost.on_picked(request(endpoints, 1000), warm)
    made = request(endpoints, 2000, {warm: 1990}, slo=Slo(1.4))
    assert cost.predict(made, endpoints)[warm].ttft < 1.4, "just"
    assert best(cost, request(endpoints, 2000, {warm: 1990}), endpoints) is warm
    assert cost.bill(made, endpoints)[0][-1] > 0
    wide = request(endpoints, 2000, {warm: 1990}, slo=Slo(4.0))
    assert [row[-1] for row in cost.bill(wide, endpoints)] == [0.0, 0.0], "nothing changes where all keep it"


def test_what_is_lost_anyway_takes_no_more_room_of_others() -> None:
    """An endpoint whose answers are all late already takes the next late one, rather than one that keeps its own."""
    cost, _ = round_numbers()
    lost, kept = endpoints = pool(2)
    for endpoint, context in ((lost, 5000), (kept, 100)):
        for _ in range(4):
            there = request([endpoint], context, slo=Slo(tpot=0.17))
            cost.on_picked(there, endpoint)
            cost.on_first_token(there, endpoint)
    report = request(endpoints, 1000, slo=Slo(60.0))
    assert cost.bill(report, endpoints)[0][-1] == 0.0 < cost.bill(report, endpoints)[1][-1]


def test_where_none_keeps_it_it_is_served_where_it_costs_least_or_the_answer_is_no() -> None:
    cost, _ = round_numbers()
    a, b = endpoints = pool(2)
    cost.on_picked(request(endpoints, 9000), a)
    cost.on_picked(request(endpoints, 6000), b)
    made = request(endpoints, 100, slo=Slo(2.0, 0.5))
    assert cost.refusal(made, endpoints) == "", "best effort"
    assert best(cost, made, endpoints) is b
    cost.slo = "shed"
    why = cost.refusal(made, endpoints)
    assert why.startswith("no endpoint would keep the SLO (TTFT 2000 ms, TPOT 500 ms) of this request")
    assert "the best now are a TTFT of 6810 ms" in why
    assert cost.refusal(request(endpoints, 100, slo=Slo(20.0)), endpoints) == ""
    assert cost.refusal(request(endpoints, 100), endpoints) == ""


def test_what_it_waited_in_flow_control_is_gone_of_its_ttft() -> None:
    cost, _ = round_numbers()
    cost.slo = "shed"
    endpoints = pool(1)
    made = request(endpoints, 1000, slo=Slo(2.0))
    assert cost.refusal(made, endpoints) == ""
    assert cost.refusal(replace(made, waited=1.0, kept={}), endpoints) != ""


def test_an_endpoint_that_is_suspended_keeps_nothing() -> None:
    cost, _ = round_numbers()
    broken, fine = endpoints = pool(2)
    cost.on_picked(request(endpoints, 6000), fine)
    made = with_signal(request(endpoints, 100, slo=Slo(9.0)), FailureShare, {broken: FailureShare(0.9, suspended=True)})
    assert best(cost, made, endpoints) is fine


def test_promises_end_with_their_requests_and_replicas_tell_each_other_of_them() -> None:
    ours, _ = round_numbers()
    theirs, _ = round_numbers()
    (a,) = pool(1)
    made = request([a], 100, slo=Slo(1.0, 0.15))
    ours.on_picked(made, a)
    told = Request(id="r", model="m", tokens=100, elsewhere=True)
    theirs.from_peer(told, a, ours.to_peers(made, a))
    for cost, each in ((ours, made), (theirs, told)):
        assert cost.predict(request([a], 10), [a])[a].promised == 0.15
        cost.on_finished(each, a, DONE)
        assert cost.predict(request([a], 10), [a])[a].promised == inf
    assert ours.to_peers(request([a], 100), a) is None


def test_another_replica_s_request_is_on_account_with_the_work_that_its_picker_found() -> None:
    ours, _ = round_numbers()
    theirs, _ = round_numbers()
    (a,) = pool(1)
    made = with_signal(request([a], 1000), PrefixMatch, {a: PrefixMatch(400, 25, 62)})
    ours.on_picked(made, a)
    told = Request(id="r", model="m", tokens=1000, elsewhere=True)
    theirs.from_peer(told, a, ours.to_peers(made, a))
    assert theirs.statistics()["pending_seconds"] == ours.statistics()["pending_seconds"] > 0
    unknown = Request(id="s", model="m", tokens=1000, elsewhere=True)
    theirs.from_peer(unknown, a, None)
    assert theirs.accounts[a].pending > 2 * ours.accounts[a].pending, "nothing is known to be held of it"
    before = theirs.accounts[a].pending
    for wrong in ((-1.0, 0.0, None), (0.1, -1.0, None), (0.1, 0.0, 0.0), (inf, 0.0, None), ("a", 0.0, None), (0.1,)):
        with pytest.raises((ValueError, TypeError, OverflowError)):
            theirs.from_peer(Request(id="t", model="m", tokens=1000, elsewhere=True), a, wrong)
    assert (theirs.accounts[a].pending, theirs.accounts[a].requests) == (before, 2), "and what cannot be is not"


def test_predictions_are_kept_of_the_chosen_one_and_with_an_slo_of_all_and_compared() -> None:
    cost, clock = round_numbers()
    a, _ = endpoints = pool(2)
    plain, wanted = request(endpoints, 1000), request(endpoints, 1000, slo=Slo(9.0))
    for made in (plain, wanted):
        assert not cost.predictions(made)
        cost.bill(made, endpoints)
        cost.on_picked(made, a)
    assert list(cost.predictions(plain)) == [a]
    assert list(cost.predictions(wanted)) == endpoints
    assert cost.predictions(plain)[a].ttft == pytest.approx(1.2)
    assert "tpot_error" not in cost.statistics()
    clock.now += 1.2
    cost.on_first_token(plain, a)
    clock.now += 10 * 2 * cost.predictions(plain)[a].tpot
    cost.on_finished(plain, a, Response(status=200, complete=True, usage=Usage(1000, 11, 0)))
    assert cost.statistics()["tpot_error"] == pytest.approx(0.5), "half of what was measured"
