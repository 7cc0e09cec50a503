"""The pod's model: scheduling, memory, time; and its laws under random traffic."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tooling.simulator.engine import (
    H100_8B,
    LAPTOP,
    Engine,
    EngineParameters,
    Job,
    NeverFits,
    Step,
    Stored,
    Transfer,
)
from tooling.simulator.tiers import CHUNK, Lower, Tier

SMALL = EngineParameters(
    block_size=4,
    blocks=16,
    max_batched_tokens=16,
    max_running=4,
    base=1.0,
    per_decode=0.1,
    per_context_token=0.01,
    linear=0.5,
    attention=0.001,
)


def prompt(document: int, tokens: int) -> list[int]:
    """A chain for `tokens` tokens of a document and the answer after them; equal documents share all of it."""
    return [document * 1000 + index for index in range(tokens // SMALL.block_size)]


def run(engine: Engine, now: float = 0.0) -> Iterator[Step]:
    while step := engine.step(now):
        now = step.ends_at
        yield step


def served(engine: Engine, chain: list[int], *, prompt: int, output: int = 1) -> Job:
    job = engine.add(f"r{chain}{prompt}{engine.totals.prefix_queries}", chain, prompt=prompt, output=output, now=0.0)
    for _ in run(engine):
        pass
    engine.check()
    return job


def test_an_idle_engine_has_no_step() -> None:
    assert Engine(SMALL).step(0.0) is None


def test_a_prompt_is_prefilled_in_chunks_and_decoded_token_by_token() -> None:
    engine = Engine(SMALL)
    job = engine.add("a", prompt(1, 24), prompt=20, output=3, now=5.0)
    assert list(engine.waiting) == [job]
    steps = list(run(engine, 10.0))
    assert [(step.prefill, step.decodes, len(step.tokens)) for step in steps] == [
        (16, 0, 0),
        (4, 0, 1),
        (0, 1, 1),
        (0, 1, 1),
    ]
    assert steps[0].duration == pytest.approx(1 + 0.5 * 16 + 0.001 * 16 * 8)
    assert steps[1].duration == pytest.approx(1 + 0.5 * 4 + 0.001 * 4 * 18)
    assert steps[2].duration == pytest.approx(1 + 0.1 + 0.01 * 20)
    assert steps[1].first == [job]
    assert steps[3].finished == [job]
    assert (job.arrived_at, job.admitted_at) == (5.0, 10.0)
    assert job.first_token_at == steps[1].ends_at
    assert job.ended_at == steps[3].ends_at
    assert engine.free_blocks == SMALL.blocks
    assert engine.totals.generation_tokens == 3


def test_decodes_go_before_prefills_and_share_the_budget() -> None:
    engine = Engine(SMALL)
    first = engine.add("a", [], prompt=4, output=9, now=0.0)
    engine.step(0.0)
    second = engine.add("b", [], prompt=16, output=1, now=0.0)
    step = engine.step(1.0)
    assert step is not None
    assert (step.decodes, step.prefill, step.tokens) == (1, 15, [first])
    step = engine.step(2.0)
    assert step is not None
    assert (step.decodes, step.prefill, step.tokens) == (1, 1, [first, second])


def test_the_whole_prompt_is_never_taken_from_the_cache() -> None:
    engine = Engine(SMALL)
    chain = prompt(1, 16)
    assert served(engine, chain, prompt=16).cached == 0
    assert served(engine, chain, prompt=16).cached == 12, "the last token must be computed"
    assert served(engine, chain, prompt=17).cached == 16
    assert served(engine, prompt(2, 16), prompt=16).cached == 0


def test_generated_blocks_are_cached_too_when_the_chain_covers_them() -> None:
    engine = Engine(SMALL)
    served(engine, prompt(1, 20), prompt=10, output=9)
    assert served(engine, prompt(1, 20), prompt=20).cached == 16, "18 tokens were computed, the 19th was not"
    served(engine, prompt(2, 8), prompt=10, output=9)
    assert served(engine, prompt(2, 20), prompt=20).cached == 8


def test_equal_prompts_in_one_step_share_blocks() -> None:
    engine = Engine(SMALL)
    jobs = [engine.add(name, prompt(1, 8), prompt=9, output=1, now=0.0) for name in "abc"]
    step = engine.step(0.0)
    assert step is not None
    assert [job.cached for job in jobs] == [0, 8, 8]
    assert step.prefill == 9 + 1 + 1
    assert engine.totals.prefix_queries == 27
    assert engine.totals.prefix_hits == 16


def test_nobody_overtakes_a_prompt_that_does_not_fit() -> None:
    engine = Engine(SMALL)
    engine.add("holder", [], prompt=16, output=9, now=0.0)
    engine.step(0.0)
    big = engine.add("big", [], prompt=52, output=1, now=0.0)
    small = engine.add("small", [], prompt=2, output=1, now=0.0)
    engine.step(1.0)
    assert list(engine.waiting) == [big, small]
    order = [job.id for step in run(engine, 2.0) for job in step.finished]
    assert order == ["holder", "big", "small"]


def test_the_batch_is_bounded() -> None:
    engine = Engine(SMALL)
    for name in "abcdef":
        engine.add(name, [], prompt=1, output=2, now=0.0)
    engine.step(0.0)
    assert len(engine.running) == SMALL.max_running
    assert len(engine.waiting) == 2


def test_the_last_come_is_preempted_and_recovers() -> None:
    engine = Engine(replace(SMALL, blocks=5))
    old = engine.add("old", prompt(1, 20), prompt=8, output=10, now=0.0)
    young = engine.add("young", prompt(2, 20), prompt=7, output=9, now=0.0)
    steps = list(run(engine))
    engine.check()
    assert [job.id for step in steps for job in step.preempted] == ["young"]
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert (old.generated, young.generated) == (10, 9)
    assert sum(young in step.tokens for step in steps) == 9, "tokens given before the preemption are not given again"
    assert sum(young in step.first for step in steps) == 1
    assert young.cached == 0, "the figure of its first admission stays"
    assert engine.totals.preemptions == 1


def test_what_can_never_fit_is_refused() -> None:
    engine = Engine(SMALL)
    with pytest.raises(NeverFits, match="60 prompt and 5 generated tokens do not fit in 64"):
        engine.add("a", [], prompt=60, output=5, now=0.0)
    engine.add("a", [], prompt=60, output=4, now=0.0)
    with pytest.raises(ValueError, match="already"):
        engine.add("a", [], prompt=1, output=1, now=0.0)
    for length, output in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            engine.add("b", [], prompt=length, output=output, now=0.0)


def test_abort_frees_wherever_the_request_is() -> None:
    engine = Engine(SMALL)
    engine.add("running", [], prompt=60, output=4, now=0.0)
    engine.add("waiting", [], prompt=60, output=4, now=0.0)
    engine.step(0.0)
    assert engine.abort("waiting")
    assert engine.abort("running")
    assert not engine.abort("running")
    assert engine.free_blocks == SMALL.blocks
    assert engine.kv_usage == 0
    assert engine.step(1.0) is None
    engine.check()


def test_the_prefix_cache_is_reset_only_when_idle() -> None:
    engine = Engine(SMALL)
    engine.add("a", prompt(1, 8), prompt=9, output=2, now=0.0)
    engine.step(0.0)
    assert not engine.reset_prefix_cache()
    engine.abort("a")
    assert engine.reset_prefix_cache()
    assert served(engine, prompt(1, 8), prompt=9).cached == 0


@pytest.mark.parametrize(
    ("change", "message"), [({"blocks": 0}, "blocks: 0"), ({"base": 0.0}, "base"), ({"linear": -1.0}, "linear")]
)
def test_impossible_parameters_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(("preset", "low", "high"), [(H100_8B, 15_000, 25_000), (LAPTOP, 3_000, 10_000)])
def test_presets_prefill_at_the_speed_they_claim(preset: EngineParameters, low: float, high: float) -> None:
    engine = Engine(preset)
    engine.add("a", [], prompt=8000, output=1, now=0.0)
    seconds = sum(step.duration for step in run(engine))
    assert low < 8000 / seconds < high


def test_an_h100_decodes_in_seven_to_ten_milliseconds() -> None:
    engine = Engine(H100_8B)
    for number in range(16):
        engine.add(str(number), [], prompt=500, output=3, now=0.0)
    steps = list(run(engine))
    assert 0.0065 < steps[-1].duration < 0.010


# --- laws under random traffic ------------------------------------------------------------------------------------

Arrival = tuple[int, int, int, int]
"""Steps since the one before, document, prompt tokens, output tokens."""
ARRIVALS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 30), st.integers(1, 12)), max_size=25
)
SIZES = st.sampled_from([SMALL, replace(SMALL, blocks=11), replace(SMALL, max_batched_tokens=3, max_running=2)])


class NaiveCache:
    """What requests would find that come one after the other: the memory as one list, next to be evicted first."""

    def __init__(self, capacity: int) -> None:
        self.memory: list[tuple[int, int | None]] = [(0, None)] * capacity
        """Per block: when its content was computed, and the content's hash."""
        self.age = 0

    def serve(self, chain: list[int], prompt: int, output: int) -> int:
        """Cached tokens of a request that has the pod for itself."""
        size = SMALL.block_size
        hits: list[tuple[int, int | None]] = []
        for value in chain[: (prompt - 1) // size]:
            copies = [block for block in self.memory if block[1] == value]
            if not copies:
                break
            hits.append(min(copies))
        for block in hits:
            self.memory.remove(block)
        written = prompt + output - 1
        used = hits.copy()
        for index in range(len(hits), -(-written // size)):
            self.memory.pop(0)
            self.age += 1
            used.append((self.age, chain[index] if index < min(len(chain), written // size) else None))
        if written % size:
            self.memory.insert(0, used.pop())
        self.memory += used[::-1]
        return len(hits) * size


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 12), st.booleans()), max_size=20))
def test_cached_tokens_equal_a_naive_model_while_requests_come_one_by_one(
    requests: list[tuple[int, int, int, bool]],
) -> None:
    naive, engine = NaiveCache(SMALL.blocks), Engine(SMALL)
    for number, (document, length, output, answer_known) in enumerate(requests):
        chain = prompt(document, 48 if answer_known else length)
        job = engine.add(str(number), chain, prompt=length, output=output, now=0.0)
        for _ in run(engine):
            pass
        assert job.cached == naive.serve(chain, length, output)


def drive(parameters: EngineParameters, arrivals: list[Arrival], aborted: set[int]) -> list[tuple[object, ...]]:
    """Run traffic, checking the books after each step; returns all that a caller can see."""
    engine = Engine(parameters)
    seen: list[tuple[object, ...]] = []
    jobs: list[Job] = []
    now, due, queue = 0.0, 0, list(enumerate(arrivals))
    while queue or engine.running or engine.waiting:
        while queue and (due >= queue[0][1][0] or not (engine.running or engine.waiting)):
            number, (_gap, document, length, output) = queue.pop(0)
            due = 0
            jobs.append(engine.add(str(number), prompt(document, 44), prompt=length, output=output, now=now))
        step = engine.step(now)
        assert step is not None, "there is work, so there is a step"
        engine.check()
        assert step.prefill + step.decodes <= parameters.max_batched_tokens
        assert len(engine.running) <= parameters.max_running
        seen.append((step.duration, *([job.id for job in jobs] for jobs in (step.tokens, step.first, step.preempted))))
        now, due = step.ends_at, due + 1
        for job in list(step.tokens):
            if int(job.id) in aborted and job.ended_at is None:
                assert engine.abort(job.id)
                engine.check()
    assert engine.free_blocks == parameters.blocks
    for job in jobs:
        assert job.ended_at is not None or int(job.id) in aborted, "a request is lost"
        assert (job.generated == job.output) == (job.ended_at is not None)
    assert engine.totals.prefix_hits == sum(job.cached for job in jobs if job.admitted_at is not None)
    assert engine.totals.generation_tokens == sum(job.generated for job in jobs)
    assert engine.totals.preemptions == sum(job.preemptions for job in jobs)
    admitted = [job.admitted_at for job in jobs if job.admitted_at is not None]
    assert admitted == sorted(admitted), "first come, first served"
    seen.extend((job.id, job.cached, job.first_token_at, job.ended_at) for job in jobs)
    return seen


@settings(max_examples=200)
@given(SIZES, ARRIVALS, st.sets(st.integers(0, 24), max_size=5))
def test_books_balance_and_nobody_is_lost(
    parameters: EngineParameters, arrivals: list[Arrival], aborted: set[int]
) -> None:
    fitting = [arrival for arrival in arrivals if arrival[2] + arrival[3] <= parameters.capacity]
    assert drive(parameters, fitting, aborted) == drive(parameters, fitting, aborted), "equal calls, equal results"


# --- adapters ---------------------------------------------------------------------------------------------------------

SLOTS = replace(SMALL, blocks=64, max_batched_tokens=64, adapter_slots=2, adapter_load=7.0)


def started(engine: Engine, *adapters: str, output: int = 3) -> list[Job]:
    have = engine.totals.prompt_tokens + len(engine.waiting)
    return [
        engine.add(f"{have} {n}", [], prompt=4, output=output, now=0.0, adapter=adapter)
        for n, adapter in enumerate(adapters)
    ]


def test_an_adapter_is_loaded_before_the_step_that_needs_it_and_stays() -> None:
    engine = Engine(SLOTS)
    started(engine, "poet", "cook", "poet", output=1)
    step = engine.step(0.0)
    assert step is not None
    assert step.duration == pytest.approx(1 + 0.5 * 12 + 0.001 * 3 * 8 + 2 * 7.0)
    assert engine.totals.adapters_loaded == 2
    started(engine, "cook", "")
    list(run(engine))
    assert engine.totals.adapters_loaded == 2
    engine.check()


def test_a_request_without_a_slot_is_passed_by_until_one_comes_free() -> None:
    engine = Engine(SLOTS)
    poet, cook, clerk, second, plain = started(engine, "poet", "cook", "clerk", "poet", "")
    engine.step(0.0)
    assert list(engine.running) == [poet, cook, second, plain]
    assert list(engine.waiting) == [clerk]
    assert engine.leap(0.0) == [], "somebody may be admitted at any step"
    engine.check()
    list(run(engine))
    assert clerk.first_token_at is not None
    assert engine.totals.adapters_loaded == 3


def test_the_adapter_unused_longest_gives_way() -> None:
    engine = Engine(SLOTS)
    for adapter in ("poet", "cook", "poet", "clerk", "poet", "cook"):
        started(engine, adapter, output=1)
        list(run(engine))
        engine.check()
    assert engine.totals.adapters_loaded == 4, "poet stays all the time"


def test_who_leaves_lets_go_of_an_adapter() -> None:
    engine = Engine(SLOTS)
    poet, _, clerk = started(engine, "poet", "cook", "clerk")
    engine.step(0.0)
    assert engine.abort(poet.id)
    engine.check()
    engine.step(0.0)
    assert clerk in engine.running


# --- leaps ------------------------------------------------------------------------------------------------------------


def played(parameters: EngineParameters, arrivals: list[Arrival], *, leaping: bool) -> tuple[list[object], int]:
    """What becomes of traffic, by steps or by leaps where they are possible; and the steps that were leapt over."""
    engine = Engine(parameters)
    engine.watch()
    ends: list[float] = []
    jobs: list[Job] = []
    now, due, leapt, queue = 0.0, 0, 0, list(enumerate(arrivals))
    while queue or engine.running or engine.waiting:
        while queue and (due >= queue[0][1][0] or not (engine.running or engine.waiting)):
            number, (_gap, document, length, output) = queue.pop(0)
            due = 0
            jobs.append(engine.add(str(number), prompt(document, 90), prompt=length, output=output, now=now))
        ahead = engine.leap(now) if leaping else []
        if queue:
            ahead = ahead[: queue[0][1][0] - due]
        if ahead:
            for half in (len(ahead) // 2, len(ahead) - len(ahead) // 2):
                engine.leapt(half)
                engine.check()
            ends += ahead
            now, due, leapt = ends[-1], due + len(ahead), leapt + len(ahead)
            continue
        step = engine.step(now)
        assert step is not None
        now, due = step.ends_at, due + 1
        ends.append(now)
    served = [(job.id, job.cached, job.first_token_at, job.ended_at, job.preemptions) for job in jobs]
    kept = [engine.cached_blocks(prompt(document, 90), 22) for document in range(4)]
    changes = [
        (change.job.id, change.start, change.end) if isinstance(change, Stored) else change
        for change in engine.changes()
    ]
    return [ends, served, kept, engine.totals, changes], leapt


LONG_ARRIVALS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 3), st.integers(1, 30), st.integers(1, 40)), max_size=15
)
LARGE = [replace(SMALL, blocks=80), replace(SMALL, blocks=24), replace(SMALL, blocks=40, max_running=2)]


@settings(max_examples=300)
@given(st.sampled_from(LARGE), LONG_ARRIVALS)
def test_leaping_changes_nothing_that_can_be_seen(parameters: EngineParameters, arrivals: list[Arrival]) -> None:
    fitting = [arrival for arrival in arrivals if arrival[2] + arrival[3] <= parameters.capacity]
    stepped, _ = played(parameters, fitting, leaping=False)
    leapt, _ = played(parameters, fitting, leaping=True)
    assert leapt == stepped


def test_a_leap_ends_before_anything_but_decoding_happens() -> None:
    arrivals: list[Arrival] = [(0, 1, 8, 40), (0, 2, 8, 30)]
    _, leapt = played(LARGE[0], arrivals, leaping=True)
    assert leapt == 28 + 9, "all but the first step and each last token"
    engine = Engine(SMALL)
    engine.add("a", [], prompt=8, output=10, now=0.0)
    assert engine.leap(0.0) == [], "nothing has been prefilled"
    engine.step(0.0)
    assert len(engine.leap(1.0)) == 8
    engine.add("b", [], prompt=8, output=10, now=0.0)
    assert engine.leap(1.0) == [], "somebody would be admitted"


def test_a_leap_does_not_pass_over_one_who_waits_for_blocks_being_computed() -> None:
    """The first in line does not fit, but begins with the answer that is being generated."""
    engine = Engine(replace(SMALL, blocks=8))
    engine.add("a", prompt(1, 32), prompt=4, output=20, now=0.0)
    engine.step(0.0)
    assert engine.leap(0.0)
    engine.add("b", prompt(1, 32), prompt=31, output=1, now=0.0)
    engine.step(0.0)
    assert [job.id for job in engine.waiting] == ["b"]
    assert engine.leap(0.0) == []
    engine.abort("b")
    engine.add("c", prompt(2, 32), prompt=31, output=1, now=0.0)
    assert engine.leap(0.0), "a stranger who does not fit is no reason to look at every step"


@pytest.mark.parametrize("leaping", [False, True])
def test_an_answer_that_nobody_can_ask_for_takes_its_turn_in_memory(leaping: bool) -> None:
    engine = Engine(replace(SMALL, blocks=12))
    served(engine, prompt(1, 16), prompt=16)
    engine.add("a", prompt(2, 4), prompt=4, output=17, now=0.0)
    engine.step(0.0)
    if leaping:
        engine.leapt(len(engine.leap(0.0)))
    for _ in run(engine):
        pass
    served(engine, prompt(3, 20), prompt=20)
    assert engine.cached_blocks(prompt(1, 16), 4) == 2, "three blocks were never used, the two oldest are gone"
    assert engine.cached_blocks(prompt(2, 4), 1) == 1


@pytest.mark.parametrize("known", [0, 4, 6])
def test_cached_blocks_counts_what_a_prompt_would_find(known: int) -> None:
    engine = Engine(SMALL)
    if known:
        served(engine, prompt(1, 4 * known), prompt=4 * known + 1)
    assert engine.cached_blocks(prompt(1, 40), 10) == known
    assert engine.cached_blocks(prompt(1, 40), 3) == min(known, 3)
    assert engine.cached_blocks(prompt(2, 40), 10) == 0


# --- tiers below ------------------------------------------------------------------------------------------------------

TIERED = replace(LAPTOP, blocks=64)
"""1,024 tokens."""


def tiered(l1: int = 100, speed: float = 100_000.0, parameters: EngineParameters = TIERED) -> Engine:
    return Engine(parameters, Lower(Tier(l1 * CHUNK), None, l1_speed=speed))


def ask(engine: Engine, document: int, tokens: int, now: float, output: int = 1) -> Job:
    chain = [document * 1000 + at for at in range(tokens // 16)]
    chunks = [document * 1000 + at for at in range(tokens // CHUNK)]
    return engine.add(f"{document} {now}", chain, prompt=tokens, output=output, now=now, chunks=chunks)


def play(engine: Engine, now: float) -> float:
    """Until nothing is left to do; when that was."""
    while True:
        if (step := engine.step(now)) is not None:
            now = step.ends_at
            engine.settle()
        elif engine.ready_at < float("inf"):
            now = engine.ready_at
        else:
            return now
        engine.check()


def test_what_the_device_forgot_is_loaded_and_what_is_loaded_is_cached_again() -> None:
    engine = tiered()
    now = 0.0
    for document in (1, 2):  # each fills most of the device
        job = ask(engine, document, 800, now)
        now = play(engine, now)
        assert (job.cached, job.l1) == (0, 0)
    engine.watch()
    again = ask(engine, 1, 800, now)
    start, now = now, play(engine, now)
    assert (again.cached, again.l1, again.l2) == (768, 544, 0), "its first 14 blocks were not overwritten"
    computed = TIERED.base + TIERED.linear * 32 + TIERED.attention * 32 * (768 + 16)
    assert now - start == pytest.approx(again.l1 / 100_000 + computed)
    assert engine.totals.prefix_hits == 14 * 16, "the engine counts its own cache alone"
    assert any(isinstance(change, Stored) and change.job is again for change in engine.changes())
    job = ask(engine, 1, 800, now)
    play(engine, now)
    assert (job.cached, job.l1) == (784, 0), "from the device"


def test_others_go_on_while_one_waits_for_what_it_loads() -> None:
    engine = tiered(speed=2000.0, parameters=replace(TIERED, linear=1e-2, blocks=200))
    now = play(engine, 0.0)
    ask(engine, 1, 1024, now)
    now = play(engine, now)
    assert engine.reset_prefix_cache()
    loading = ask(engine, 1, 1024, now)
    assert engine.step(now) is None
    assert engine.ready_at == now + 768 / 2000
    assert list(engine.waiting) == [loading]
    assert list(engine.running) == []
    other = ask(engine, 2, 20, now + 0.01)
    step = engine.step(now + 0.01)
    assert step is not None
    assert step.first == [other]
    engine.check()
    second = ask(engine, 1, 1024, now + 0.02)
    play(engine, step.ends_at)
    assert loading.first_token_at is not None
    assert second.first_token_at is not None
    assert second.ready_at >= loading.ready_at, "one way, one after the other"


def test_who_goes_while_it_loads_leaves_nothing_behind() -> None:
    engine = tiered(speed=5000.0, parameters=replace(TIERED, linear=1e-2))
    ask(engine, 1, 800, 0.0)
    now = play(engine, 0.0)
    assert engine.reset_prefix_cache()
    job = ask(engine, 1, 800, now)
    assert engine.step(now) is None
    assert engine.abort(job.id)
    engine.check()
    assert engine.free_blocks == TIERED.blocks
    assert engine.ready_at == float("inf")


def test_loading_that_takes_longer_than_computing_is_left() -> None:
    engine = tiered(speed=1000.0)
    ask(engine, 1, 800, 0.0)
    now = play(engine, 0.0)
    assert engine.reset_prefix_cache()
    job = ask(engine, 1, 800, now)
    play(engine, now)
    assert (job.cached, job.l1) == (0, 0)


def test_a_leap_ends_when_something_loaded_is_there() -> None:
    engine = tiered(speed=50_000.0, parameters=replace(TIERED, blocks=200))
    ask(engine, 1, 1024, 0.0)
    now = play(engine, 0.0)
    assert engine.reset_prefix_cache()
    ask(engine, 2, 20, now, output=200)
    step = engine.step(now)
    assert step is not None
    loading = ask(engine, 1, 1024, step.ends_at)
    second = engine.step(step.ends_at)
    assert second is not None
    ends = engine.leap(second.ends_at)
    assert all(end < engine.ready_at for end in ends[:-1])
    engine.leapt(len(ends))
    play(engine, ends[-1] if ends else second.ends_at)
    assert (loading.cached, loading.l1) == (768, 768)


def test_blocks_stay_until_they_were_fetched() -> None:
    engine = Engine(SMALL)
    job = engine.add("p", prompt(1, 16), prompt=16, output=1, now=0.0, keeps=True)
    (*_, last) = run(engine)
    assert last.finished == [job]
    assert (engine.kept_blocks, engine.free_blocks) == (4, 12)
    assert engine.reset_prefix_cache() is False
    engine.check()
    assert engine.fetched("p")
    assert not engine.fetched("p"), "once"
    assert (engine.kept_blocks, engine.free_blocks) == (0, 16)
    assert served(engine, prompt(1, 16), prompt=16).cached == 12, "and they are cached"


def test_kept_blocks_take_room_from_others() -> None:
    engine = Engine(SMALL)
    engine.add("p", prompt(1, 40), prompt=40, output=1, now=0.0, keeps=True)
    assert [*run(engine)]
    engine.add("q", prompt(2, 32), prompt=32, output=1, now=0.0)
    assert engine.step(10.0) is None
    engine.fetched("p")
    assert engine.step(11.0) is not None
    engine.check()


def test_a_prompt_computed_elsewhere_is_not_computed_again() -> None:
    engine = Engine(SMALL)
    job = engine.add("d", prompt(1, 32), prompt=32, output=2, now=0.0, transfer=Transfer(0.5, 28.0))
    assert engine.step(0.0) is None
    assert engine.ready_at == 1.5, "28 of 32 tokens, the last block is not full without the last token"
    step = engine.step(1.5)
    assert step is not None
    assert (step.prefill, step.first) == (4, [job])
    assert engine.totals.computed_tokens == 4
    again = engine.add("e", prompt(1, 32), prompt=32, output=1, now=3.0, transfer=Transfer(0.5, 28.0))
    engine.step(3.0)
    assert again.ready_at <= 3.5 + 1e-9, "what is held already is not fetched"
    engine.check()


def test_transfers_share_one_way() -> None:
    engine = Engine(SMALL)
    jobs = [
        engine.add(name, prompt(at, 16), prompt=16, output=1, now=0.0, transfer=Transfer(0.0, 12.0))
        for at, name in enumerate("ab", 1)
    ]
    engine.step(0.0)
    assert [job.ready_at for job in jobs] == [1.0, 2.0]
