import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count as counting
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.configuration.loader import load_strategy
from epp.errors import InternalError, NoEndpoint, SloUnmet
from epp.plugin import (
    Admitter,
    Endpoint,
    Filter,
    LatencyPrediction,
    Load,
    Picked,
    Plugin,
    PrefixMatch,
    Producer,
    ProfileHandler,
    Request,
    Response,
    RunProfile,
    Scorer,
    Slo,
)
from epp.scheduling.inflight import InFlightLoad
from epp.scheduling.pickers import MaxScorePicker
from epp.scheduling.scorers import ActiveRequestScorer, NoHitLruScorer, PrefixCacheScorer, QueueScorer
from epp.testing import services
from tests.support.scheduling.schedulers import Held, ask, fail, pod, pods, scheduler


@dataclass(eq=False)
class Diary(Plugin):
    """Writes down every hook."""

    lines: list[str] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        self.lines.append(f"picked {endpoint.name}")

    def on_first_token(self, request: Request, endpoint: Endpoint) -> None:
        self.lines.append(f"first token {endpoint.name}")

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        self.lines.append(f"finished {endpoint.name}")
        self.responses.append(response)

    def on_removed(self, endpoint: Endpoint) -> None:
        self.lines.append(f"removed {endpoint.name}")

    def answer_headers(self, request: Request, endpoint: Endpoint) -> Mapping[str, str]:
        return {"x-served-by": endpoint.name}

    def statistics(self) -> Mapping[str, float]:
        return {"lines": len(self.lines)}


class Broken(Plugin):
    """Raises in every hook."""

    name = "bad"

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        raise RuntimeError

    def on_first_token(self, request: Request, endpoint: Endpoint) -> None:
        raise RuntimeError

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        raise RuntimeError

    def on_removed(self, endpoint: Endpoint) -> None:
        raise RuntimeError

    def answer_headers(self, request: Request, endpoint: Endpoint) -> Mapping[str, str]:
        raise RuntimeError

    def statistics(self) -> Mapping[str, float]:
        raise RuntimeError


class Broadcasts(Producer[PrefixMatch]):
    produces = PrefixMatch

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.prepared = 0

    async def prepare(self, request: Request) -> None:
        self.prepared += 1
        if self.error:
            raise self.error

    def from_peer(self, request: Request, endpoint: Endpoint, state: Any) -> None:
        assert state is None, "it shares nothing"

    def produce(self, request: Request, endpoints: Sequence[Endpoint]) -> Mapping[Endpoint, PrefixMatch]:
        if self.error:
            raise self.error
        return {endpoint: PrefixMatch(10, 1, 1) for endpoint in endpoints}


class Drops(Filter):
    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        return []


def ranks(name: str, size: int, at: float | None = 1.0, **load: Any) -> list[Endpoint]:
    return [Endpoint(f"{name}-rank-{n}", f"{name}:8000", load=Load(at=at, **load), rank=n) for n in range(size)]


def test_a_header_names_the_rank_of_an_address() -> None:
    first, second = ranks("a", 2)
    first.load = Load(at=1.0, waiting=3)
    s = scheduler(QueueScorer(), fallbacks=2)
    decision = s.choose(ask(), [first, second, pod("b")])
    assert decision.endpoints == [second]
    assert decision.destination == "a:8000"
    assert decision.headers == {"x-data-parallel-rank": "1"}
    assert s.choose(ask(), [first]).headers == {"x-data-parallel-rank": "0"}
    plain = s.choose(ask(), [pod("b"), *ranks("a", 2, waiting=1)])
    assert (plain.endpoint.name, len(plain.endpoints), plain.headers) == ("b", 1, {})


def test_no_rank_is_named_that_no_page_has_shown() -> None:
    (first, *_) = ranks("a", 2, at=None)
    assert scheduler(QueueScorer()).choose(ask(), [first]).headers == {}


def test_a_retry_names_the_same_rank_elsewhere() -> None:
    a, b, c = ranks("a", 3), ranks("b", 3, waiting=2), ranks("c", 2, waiting=1)
    for each in a[:2]:
        each.load = Load(at=1.0, waiting=1)
    s = scheduler(QueueScorer(), fallbacks=2)
    decision = s.choose(ask(), [*c, *b, *a])
    assert decision.endpoints == [a[2], b[2]]
    a[0].load = Load(at=1.0)
    a[2].load = Load(at=1.0, waiting=1)
    decision = s.choose(ask(), [*c, *b, *a])
    assert decision.endpoints == [a[0], c[0], b[0]]
    assert decision.destination == "a:8000,c:8000,b:8000"
    assert decision.served_by("c:8000") is c[0]


def test_a_pickers_several_are_of_one_rank() -> None:
    a, b = ranks("a", 2), ranks("b", 2)
    s = scheduler(QueueScorer(), picker=MaxScorePicker(max_num_of_endpoints=4))
    chosen = s.choose(ask(), [*a, *b]).endpoints
    assert len(chosen) == 2
    assert chosen[0].rank == chosen[1].rank


def test_the_life_of_a_request() -> None:
    a, b = pod("a", waiting=3), pod("b")
    diary = Diary()
    s = scheduler(QueueScorer(), others=[diary])
    decision = s.choose(ask(), [a, b])
    assert decision.endpoint is b
    assert decision.at == 1.5
    s.first_token(decision)
    s.first_token(decision)
    assert s.answer_headers(decision) == {"x-served-by": "b"}
    response = Response(status=200, complete=True)
    s.finished(decision, response)
    s.finished(decision, response)
    s.first_token(decision)
    assert diary.lines == ["picked b", "first token b", "finished b"]
    assert diary.responses == [response]


def test_a_retry_elsewhere_moves_the_account() -> None:
    a, b, c = pods("abc")
    diary = Diary()
    s = scheduler(others=[diary])
    decision = s.choose(ask(), [a, b])
    response = Response(status=200, served=c.address)
    s.moved(decision, c, response)
    s.moved(decision, c, response)
    assert decision.endpoints == [c, a]
    assert s.answer_headers(decision) == {"x-served-by": "c"}
    s.finished(decision, response)
    s.moved(decision, a, response)
    assert diary.lines == ["picked a", "finished a", "picked c", "finished c"]
    failed, served = diary.responses
    assert (failed.status, failed.complete, failed.served) == (0, False, c.address)
    assert served is response


def test_moving_to_a_fallback_keeps_each_endpoint_once() -> None:
    a, b, c = pods("abc")
    s = scheduler()
    decision = s.choose(ask(), [a])
    decision.endpoints = [a, b, c]
    s.moved(decision, b, Response())
    assert decision.endpoints == [b, a, c]


def test_a_removed_endpoint_is_reported_and_its_requests_still_end() -> None:
    a, b = pods("ab")
    diary = Diary()
    s = scheduler(others=[diary])
    decision = s.choose(ask(), [a, b])
    s.removed(a)
    s.finished(decision, Response())
    assert diary.lines == ["picked a", "removed a", "finished a"]


def test_a_peers_decision_is_accounted_as_our_own() -> None:
    a, b = pods("ab")
    diary, load = Diary(), InFlightLoad()
    s = scheduler(ActiveRequestScorer(), producers=[load, Broadcasts()], others=[diary])
    adopted = s.adopt(ask("theirs", tokens=30), a, {"InFlightLoad": (20, 0)})
    assert adopted.endpoint is a
    assert load.produce(ask(), [a, b])[a] == (1, 20), "its picker knew that 10 of 30 tokens are held there"
    assert s.choose(ask("ours"), [a, b]).endpoint is b
    adopted.first_token()
    adopted.first_token()
    adopted.finished(Response(status=200))
    adopted.finished(Response(status=200))
    adopted.first_token()
    assert diary.lines == ["picked a", "picked b", "first token a", "finished a"]


class NeedsThePrompt(Producer[PrefixMatch]):
    """Prepares itself, and shares nothing."""

    produces = PrefixMatch

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def prepare(self, request: Request) -> None:
        self.seen.append("prepare")

    def produce(self, request: Request, endpoints: Sequence[Endpoint]) -> Mapping[Endpoint, PrefixMatch]:
        self.seen.append("produce")
        return {endpoint: PrefixMatch(0, 0, 1) for endpoint in endpoints}

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        self.seen.append("picked")


def test_a_plugin_that_cannot_do_without_the_prompt_is_not_called_for_a_peers_request() -> None:
    [a] = pods("a")
    plugin = NeedsThePrompt()
    s = scheduler(producers=[plugin])
    s.adopt(ask(elsewhere=True), a, {}).finished(Response(status=200))
    assert plugin.seen == []
    s.choose(ask(), [a])
    assert plugin.seen == ["produce", "picked"]


@dataclass(eq=False)
class Shares(Plugin):
    """Shares what it is asked to."""

    name: str = "shares"
    taken: list[Any] = field(default_factory=list)

    def to_peers(self, request: Request, endpoint: Endpoint) -> Any:
        return [request.id, endpoint.name]

    def from_peer(self, request: Request, endpoint: Endpoint, state: Any) -> None:
        self.taken.append(state)

    def snapshot(self) -> Iterator[Any]:
        yield from ("one", "two")

    def restore(self, piece: Any, endpoints: Mapping[str, Endpoint]) -> None:
        if piece == "bad":
            raise ValueError(piece)
        self.taken.append((piece, sorted(endpoints)))


def test_what_a_plugin_shares_reaches_its_like_and_what_it_cannot_read_is_reported() -> None:
    [a] = pods("a")
    here, there, seen = Shares(), Shares(), list[str]()
    s, other = scheduler(others=[here]), scheduler(others=[there], on_error=lambda name, error: seen.append(name))
    states = s.to_peers(ask("r7"), a)
    assert states == {"shares": ["r7", "a"]}
    other.adopt(ask(elsewhere=True), a, states)
    other.adopt(ask(elsewhere=True), a, {"unknown": 1})
    for name, piece in s.snapshot():
        other.restore(name, piece, {"a": a})
    other.restore("unknown", "piece", {})
    other.restore("shares", "bad", {})
    assert there.taken == [["r7", "a"], None, ("one", ["a"]), ("two", ["a"])]
    assert seen == ["shares"]


@dataclass(eq=False)
class Asks(Plugin):
    """Wants to see the answers of one model."""

    model: str = "llama"
    asked: list[str] = field(default_factory=list)
    picked: list[tuple[str, bool]] = field(default_factory=list)

    def asks_for_answer(self, request: Request, endpoint: Endpoint) -> bool:
        self.asked.append(endpoint.name)
        return request.model == self.model

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        self.picked.append((request.watched, request.sees_answer))


def test_an_answer_is_asked_for_where_a_plugin_wants_to_see_it_and_all_plugins_know() -> None:
    [a] = pods("a")
    wants, other = Asks(), Asks(model="other")
    s = scheduler(others=[other, wants])
    for fields in ({"watchable": 0.02}, {"watchable": 0.02, "model": "none"}, {"sees_answer": True}, {}):
        decision = s.choose(ask(**fields), [a])
        assert (decision.request.watched == "asked") == (fields == {"watchable": 0.02})
        assert decision.request.watchable in (0.0, 0.02 if "model" in fields else 0.0)
    assert wants.asked == other.asked == ["a", "a"], "only where the gateway would show it"
    assert wants.picked == other.picked == [("asked", True), ("", False), ("", True), ("", False)]


def test_where_a_prompt_is_computed_elsewhere_it_is_asked_of_that_endpoint_and_both_parts_are_seen() -> None:
    a, b = pods("ab")
    wants = Asks()
    s = scheduler(handler=Handles(Picked([b], prefill=a)), others=[wants])
    decision = s.choose(ask(watchable=0.02), [a, b])
    assert wants.asked == ["a"]
    assert [request.watched for request, _ in decision.parts] == ["asked"]
    assert wants.picked == [("asked", True)] * 2


def test_a_plugin_that_raises_asks_for_nothing_and_the_next_is_asked() -> None:
    class Raises(Plugin):
        name = "raises"

        def asks_for_answer(self, request: Request, endpoint: Endpoint) -> bool:
            raise RuntimeError

    [a] = pods("a")
    seen: list[str] = []
    s = scheduler(others=[Raises(), Asks()], on_error=lambda plugin, error: seen.append(plugin))
    assert s.choose(ask(watchable=0.02), [a]).request.watched == "asked"
    assert seen == ["raises"]


def test_nothing_is_asked_for_where_nothing_is_decided() -> None:
    [a] = pods("a")
    wants = Asks()
    s = scheduler(others=[wants])
    assert s.explain(ask(watchable=0.02), [a]).request.watched == ""
    s.adopt(ask(watchable=0.02, elsewhere=True), a, {})
    assert wants.asked == []


def test_no_decision_opens_no_account() -> None:
    diary = Diary()
    s = scheduler(filters=[Drops()], others=[diary])
    with pytest.raises(NoEndpoint, match="Drops"):
        s.choose(ask(), pods("ab"))
    assert diary.lines == []


def test_a_hook_that_raises_breaks_nothing_and_is_reported() -> None:
    a, b = pods("ab")
    diary = Diary()
    seen: Counter[str] = Counter()
    s = scheduler(others=[Broken(), diary], on_error=lambda plugin, error: seen.update([plugin]))
    decision = s.choose(ask(), [a])
    s.first_token(decision)
    s.moved(decision, b, Response())
    assert s.answer_headers(decision) == {"x-served-by": "b"}
    s.finished(decision, Response())
    s.removed(a)
    assert diary.lines == ["picked a", "first token a", "finished a", "picked b", "finished b", "removed a"]
    assert s.statistics() == {"Diary": {"lines": 6}}
    assert seen == {"bad": 8}


def test_plugins_without_hooks_are_never_called() -> None:
    s = scheduler(QueueScorer(), producers=[Held()], filters=[])
    assert (s._on_picked, s._on_first_token, s._on_finished) == ([], [], [])
    hooks = (s._answer_headers, s._statistics, s._prepare, s._to_peers, s._from_peer, s._snapshots)
    assert (*hooks, s._endpoint_statistics) == ([], [], [], [], [], [], [])
    assert [name for name, _ in s._on_removed] == ["MaxScorePicker"]


async def test_prepare_runs_the_producers_that_prepare() -> None:
    producer = Broadcasts()
    await scheduler(producers=[producer, Held()]).prepare(ask())
    assert producer.prepared == 1


async def test_prepare_can_be_cancelled() -> None:
    started = asyncio.Event()

    class Waits(Broadcasts):
        async def prepare(self, request: Request) -> None:
            started.set()
            await asyncio.Event().wait()

    seen: list[str] = []
    s = scheduler(producers=[Waits()], on_error=lambda plugin, error: seen.append(plugin))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(s.prepare(ask()))
        await started.wait()
        task.cancel()
    assert task.cancelled()
    assert seen == []


async def test_a_producer_that_raises_makes_the_pick_worse_and_says_so() -> None:
    a, b = pod("a", waiting=9), pod("b")
    seen: list[str] = []
    s = scheduler(
        PrefixCacheScorer(),
        QueueScorer(),
        producers=[Broadcasts(RuntimeError("lost"))],
        on_error=lambda plugin, error: seen.append(plugin),
    )
    request = ask()
    await s.prepare(request)
    assert s.choose(request, [a, b]).endpoint is b
    assert seen == ["Broadcasts", "Broadcasts", "PrefixCacheScorer"]


def test_signals_are_found_again_for_each_choice() -> None:
    a, b = pods("ab")
    request = ask()
    s = scheduler(PrefixCacheScorer(), producers=[Held(b=(10, 1))])
    s.choose(request, [a])
    assert s.choose(request, [a, b]).endpoint is b


@dataclass(eq=False)
class Handles(ProfileHandler):
    answer: Picked | None = None

    def handle(self, request: Request, profiles: Sequence[str], run: RunProfile) -> Picked:
        return self.answer or Picked(run("unknown"))


def test_a_handler_sets_headers_and_order() -> None:
    a, b = pods("ab")
    s = scheduler(handler=Handles(Picked([b, a], {"x-prefiller-host-port": "a:8000"})))
    decision = s.choose(ask(), [a, b])
    assert decision.destination == "b:8000,a:8000"
    assert decision.headers == {"x-prefiller-host-port": "a:8000"}


@pytest.mark.parametrize("handler", [Handles(), Handles(Picked([]))])
def test_a_broken_handler_fails_the_request(handler: Handles) -> None:
    seen: list[str] = []
    s = scheduler(handler=handler, on_error=lambda plugin, error: seen.append(plugin))
    with pytest.raises(InternalError, match="Handles"):
        s.choose(ask(), pods("ab"))
    assert seen == ["Handles"]


@pytest.mark.parametrize(("count", "size"), [(30, 8), (8, 8), (3, 8), (64, 5)])
def test_a_burst_of_equal_requests_does_not_herd(count: int, size: int) -> None:
    endpoints = pods("abcdefgh"[:size])
    s = scheduler(ActiveRequestScorer(), producers=[InFlightLoad()])
    picked = Counter(s.choose(ask(str(i)), endpoints).endpoint.name for i in range(count))
    assert max(picked.values()) - min(picked[e.name] for e in endpoints) <= 1


@given(
    busy=st.lists(st.integers(0, 6), min_size=2, max_size=8),
    burst=st.integers(1, 40),
)
def test_a_burst_fills_the_least_busy_first(busy: list[int], burst: int) -> None:
    endpoints = pods("abcdefgh"[: len(busy)])
    s = scheduler(ActiveRequestScorer(), producers=[InFlightLoad()])
    counts = Counter({e.name: 0 for e in endpoints})
    for endpoint, requests in zip(endpoints, busy, strict=True):
        for _ in range(requests):
            counts[s.choose(ask(), [endpoint]).endpoint.name] += 1
    for _ in range(burst):
        low = min(counts[e.name] for e in endpoints)
        name = s.choose(ask(), endpoints).endpoint.name
        assert counts[name] == low
        counts[name] += 1


STEP = st.tuples(
    st.sampled_from(["choose", "moved", "first_token", "finished", "finished_twice", "removed"]),
    st.integers(0, 30),
    st.integers(0, 3),
)


@given(st.lists(STEP, max_size=60))
def test_accounts_are_zero_after_every_sequence_of_exits(steps: list[tuple[str, int, int]]) -> None:
    endpoints = pods("abcd")
    diary, load, lru = Diary(), InFlightLoad(add_estimated_output_tokens=True), NoHitLruScorer(lru_size=2)
    s = scheduler(lru, ActiveRequestScorer(), producers=[Held(), load], others=[diary])
    decisions = []
    for step, which, where in steps:
        if step == "choose":
            decisions.append(s.choose(ask(tokens=which * 7), endpoints[where:]))
        elif step == "removed":
            s.removed(endpoints[where])
        elif decisions:
            decision = decisions[which % len(decisions)]
            if step == "moved":
                s.moved(decision, endpoints[where], Response(status=200))
            elif step == "first_token":
                s.first_token(decision)
            else:
                for _ in range(1 + (step == "finished_twice")):
                    s.finished(decision, Response())
    for decision in decisions:
        s.finished(decision, Response())
    seen = Counter(line for line in diary.lines)
    assert all(seen[f"picked {e.name}"] == seen[f"finished {e.name}"] for e in endpoints)
    assert load.statistics() == {"requests": 0, "uncached_tokens": 0}
    assert not s._open
    assert len(lru._last) <= 2


@dataclass(eq=False)
class Likes(Scorer):
    names: str

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return [float(e.name in self.names) for e in endpoints]


def test_recorded_runs_keep_what_was_seen_when_choosing() -> None:
    a, b = pods("ab")
    s = scheduler((Likes("a"), 3), (Likes("b"), 2))
    (run,) = s.choose(ask(), [a, b]).runs
    assert run.profile == "default"
    assert (run.endpoints, run.totals, run.picks) == ([a, b], [3.0, 2.0], [a])


def test_fallbacks_are_the_next_best_and_equals_follow_in_a_circle() -> None:
    endpoints = [pod("a", waiting=3), pod("b", waiting=0), pod("c", waiting=1), pod("d", waiting=3)]
    chosen = scheduler(QueueScorer(), fallbacks=2).choose(ask(), endpoints).endpoints
    assert [endpoint.name for endpoint in chosen] == ["b", "c", "d"]
    everybody = scheduler(QueueScorer(), fallbacks=9).choose(ask(), endpoints).endpoints
    assert sorted(endpoint.name for endpoint in everybody) == ["a", "b", "c", "d"]


def test_a_picker_that_names_enough_is_left_alone() -> None:
    picker = MaxScorePicker(max_num_of_endpoints=3)
    endpoints = [pod("a", waiting=2), pod("b"), pod("c", waiting=1)]
    chosen = scheduler(QueueScorer(), picker=picker, fallbacks=1).choose(ask(), endpoints).endpoints
    assert [endpoint.name for endpoint in chosen] == ["b", "c", "a"]


@dataclass(eq=False)
class Refuses(Admitter):
    why: str = "no"
    error: Exception | None = None

    def refusal(self, request: Request, endpoints: Sequence[Endpoint]) -> str:
        if self.error is not None:
            raise self.error
        return self.why if request.slo is not None else ""


def test_an_admitter_says_no_before_anything_is_picked() -> None:
    diary = Diary()
    s = scheduler(others=[diary, Refuses()])
    with pytest.raises(SloUnmet, match=r"^no$") as error:
        s.choose(ask(slo=Slo(1.0, objective="chat")), pods("ab"))
    assert (error.value.objective, error.value.reason, error.value.status) == ("chat", "rejected-slo", 429)
    assert not diary.lines
    s.choose(ask(), pods("ab"))
    assert diary.lines == ["picked a"]


def test_an_admitter_that_fails_says_nothing() -> None:
    failed: list[str] = []
    s = scheduler(others=[Refuses(error=RuntimeError())], on_error=lambda name, error: failed.append(name))
    assert s.choose(ask(slo=Slo(1.0)), pods("ab")).endpoint.name == "a"
    assert failed == ["Refuses"]


class Foresees(Plugin):
    def predictions(self, request: Request) -> Mapping[Endpoint, LatencyPrediction]:
        return {endpoint: LatencyPrediction(1.0, 0.1) for endpoint in BOTH}


BOTH = pods("ab")


def test_what_was_predicted_is_kept_with_the_decision() -> None:
    s = scheduler(others=[Foresees()])
    decision = s.choose(ask(slo=Slo(2.0)), BOTH)
    assert decision.predicted == LatencyPrediction(1.0, 0.1)
    shown = decision.as_dict()
    assert (shown["slo"], shown["predicted"]) == ({"ttft_ms": 2000.0}, {"ttft_ms": 1000.0, "tpot_ms": 100.0})
    assert [row["predicted"]["ttft_ms"] for row in shown["profiles"][0]["endpoints"]] == [1000.0, 1000.0]
    assert scheduler().choose(ask(), BOTH).predicted is None


@pytest.mark.parametrize("strategy", ["prefix-aware", "kv-aware", "session", "least-load", "round-robin"])
def test_a_wall_clock_that_jumps_changes_no_pick(strategy: str) -> None:
    def picks(wall_clock: Iterator[float]) -> list[str]:
        now, found, failing = 100.0, [], pods("abcd")
        pipeline = load_strategy(strategy, clock=lambda: now, random=Random(1))
        made = pipeline.scheduler(wall_clock=lambda: next(wall_clock), on_error=fail)
        for plugin in pipeline.plugins:
            plugin.start(services(failing, wall_clock=lambda: next(wall_clock)))
        for number in range(200):
            prompt = f"{number % 7} is what the prompt is about ".encode() * 60
            request = ask(f"{number}", prompt=prompt, tokens=500, headers={"x-session-id": f"{number % 5}"})
            decision = made.choose(request, failing)
            found.append(decision.endpoint.name)
            now += 0.05
            response = Response(status=500 if decision.endpoint.name == "a" else 200)
            made.answered(decision, response)
            if number % 3:
                made.finished(decision, response)
            for endpoint in failing:
                endpoint.load = Load(running=number % 5, at=now)
                made.scraped(endpoint)
        return found

    steady = picks(counting(1e9, 0.01))
    assert len({*steady}) > 1
    assert picks(1e9 + (86_400.0 if number % 20 < 10 else -86_400.0) for number in counting()) == steady
