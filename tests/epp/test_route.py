import asyncio
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from epp import route
from epp.errors import BadRequest, EppError, NoEndpoint, OwnAnswer, Rejected
from epp.flow.control import FlowControl
from epp.flow.guards import Guards
from epp.flow.limits import Limits, LimitSettings, TenantLimits
from epp.flow.policies import FirstComeFirstServed, GlobalStrict, StaticLimit
from epp.flow.queues import BandSettings, FlowSettings
from epp.flow.saturation import ConcurrencyDetector
from epp.parsing.parser import Parser
from epp.parsing.request import Objective, RawRequest, Response
from epp.plugin import Detector, Endpoint, Filter, Guard, Plugin, Producer, Refusal, Request, annotated
from epp.pool.store import Pool, PoolState, Rewrite, Target
from epp.route import Admission, Policy, Router
from epp.scheduling.decision import Decision
from epp.scheduling.pickers import RoundRobinPicker
from tests.support.scheduling.schedulers import pod, scheduler

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
CHAT = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'


@dataclass
class Diary:
    """RequestObserver, and of each hook too."""

    lines: list[str] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)

    def decided(self, decision: Decision, complete_at: float) -> None:
        self.lines.append(f"decided {decision.endpoint.name} at {complete_at:g}")

    def finished(self, decision: Decision, response: Response) -> None:
        self.lines.append(f"finished {decision.endpoint.name} {response.status}")
        self.responses.append(response)

    def failed(self, raw: RawRequest, error: EppError) -> None:
        self.lines.append(f"failed {error.status}")


@dataclass(eq=False)
class Accounts(Plugin):
    """What is open, by the hooks a plugin has."""

    open: list[str] = field(default_factory=list)
    first: list[str] = field(default_factory=list)
    answered: list[tuple[str, int]] = field(default_factory=list)

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        self.open.append(endpoint.name)

    def on_answered(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        self.answered.append((endpoint.name, response.status))

    def on_first_token(self, request: Request, endpoint: Endpoint) -> None:
        self.first.append(endpoint.name)

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        self.open.remove(endpoint.name)

    def answer_headers(self, request: Request, endpoint: Endpoint) -> Mapping[str, str]:
        return {"x-by": endpoint.name}


@dataclass(eq=False)
class Slow(Producer[int]):
    """While it waits, the pool may change."""

    pool: Pool
    produces = int

    async def prepare(self, request: Request) -> None:
        self.pool.replace([pod("b", address=B)])

    def produce(self, request: Request, endpoints: Sequence[Endpoint]) -> Mapping[Endpoint, int]:
        return dict.fromkeys(endpoints, 1)


class Endless(Producer[int]):
    """It never finds out."""

    produces = int

    async def prepare(self, request: Request) -> None:
        await asyncio.Event().wait()

    def produce(self, request: Request, endpoints: Sequence[Endpoint]) -> Mapping[Endpoint, int]:
        return dict.fromkeys(endpoints, 1)


class Denies(Guard):
    def check(self, request: Request) -> Request | Refusal | None:
        team = request.header("x-team") or ""
        return Refusal(451, "no") if team == "mallory" else annotated(request, tenant=team)


class Nobody(Filter):
    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        return []


class Rig:
    """A router over two endpoints that take turns."""

    def __init__(self, *, state: PoolState | None = None, filters: Sequence[Filter] = (), slow: bool = False) -> None:
        self.pool = Pool("p", random=Random(1))
        endpoints = (pod("a", address=A), pod("b", address=B))
        self.pool.apply(state or PoolState("p", endpoints=endpoints, objectives={"batch": Objective(-1)}))
        self.diary, self.accounts, self.detector = Diary(), Accounts(), ConcurrencyDetector(max_concurrency=1)
        self.now = 0.0
        self.router = Router(
            self.pool,
            Parser(self.pool, lambda model, size: size // 4, lambda: "made-up", trusted=True),
            Policy(
                Admission(self.detector),
                scheduler(
                    picker=RoundRobinPicker(),
                    filters=filters,
                    producers=[Slow(self.pool)] if slow else [],
                    others=[self.accounts, self.detector],
                ),
            ),
            self.diary,
            lambda: self.now,
        )

    def reload(self, *others: Plugin, detector: Detector | None = None) -> None:
        """What a new configuration does."""
        fresh = scheduler(picker=RoundRobinPicker(), others=others)
        self.router.policy = Policy(Admission(detector or self.detector), fresh)

    async def refusal(self, raw: RawRequest) -> EppError:
        with pytest.raises(EppError) as error:
            async with self.router.route(raw):
                raise AssertionError("it was routed")
        return error.value


def chat(*, body: bytes = CHAT, subset: tuple[str, ...] | None = None, **headers: str) -> RawRequest:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return RawRequest("POST", "/v1/chat/completions", named, body, subset, sees_answer=True)


def unloaded() -> Rig:
    rig = Rig()
    rig.pool = rig.router.pool = Pool("p", random=Random(1))
    rig.router.parser = Parser(rig.pool, lambda model, size: size // 4, lambda: "made-up", trusted=True)
    return rig


async def test_a_request_that_comes_before_the_pool_waits_for_it() -> None:
    rig = unloaded()
    rewrites = (Rewrite(("m",), (Target("n"),)),)

    async def ask() -> tuple[str, bytes | None]:
        async with rig.router.route(chat()) as routed:
            return routed.destination, routed.body

    asking = asyncio.ensure_future(ask())
    await asyncio.sleep(0)
    assert not asking.done()
    rig.pool.apply(PoolState("p", endpoints=(pod("a", address=A),), rewrites=rewrites))
    destination, body = await asking
    assert destination == A
    assert body == CHAT.replace(b'"m"', b'"n"')


async def test_a_pool_that_does_not_come_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "NEW_POOL_SECONDS", 0.01)
    error = await unloaded().refusal(chat())
    assert (error.status, str(error)) == (503, "pool default/p is not loaded yet")


def limited(rig: Rig, **usual: Any) -> Limits:
    """The rig with limits of one tenant, who is who says nothing."""
    limits = Limits(LimitSettings(TenantLimits(**usual)), lambda: rig.now, lambda *_: None, lambda: None)
    fresh = scheduler(picker=RoundRobinPicker(), others=[rig.accounts, rig.detector, limits])
    rig.router.policy = replace(rig.router.policy, scheduler=fresh, limits=limits)
    return limits


async def test_a_tenants_request_counts_from_its_coming_to_its_end() -> None:
    rig = Rig()
    limited(rig, concurrent_requests=1, requests_per_minute=9)
    async with rig.router.route(chat()) as routed:
        error = await rig.refusal(chat())
        assert (error.status, error.code) == (429, "rate_limit_exceeded")
        headers = routed.answered(200, A)
        assert headers["x-ratelimit-remaining-requests"] == "8"
    async with rig.router.route(chat()):
        pass
    assert rig.diary.lines[1] == "failed 429"


async def test_what_the_answer_reports_takes_the_place_of_the_estimate() -> None:
    rig = Rig()
    limited(rig, tokens_per_minute=100)
    body = CHAT.replace(b"}]}", b'}], "max_tokens": 60}')
    for _ in range(3):
        async with rig.router.route(chat(body=body)) as routed:
            routed.answered(200, A, "application/json")
            routed.answer_chunk(b'{"usage": {"prompt_tokens": 9, "completion_tokens": 2}}', end=True)
    assert (await rig.refusal(chat(body=body))).status == 429


async def test_a_request_that_finds_no_endpoint_or_loses_its_client_has_used_nothing() -> None:
    rig = Rig()
    limits = limited(rig, concurrent_requests=1, requests_per_minute=1)
    assert (await rig.refusal(chat(subset=()))).status == 503
    rig.router.policy = replace(rig.router.policy, scheduler=scheduler(producers=[Endless()]))
    asking = asyncio.ensure_future(rig.router.route(chat()).__aenter__())
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert limits.admit(Request(id="r", model="m", body=b"x")).tenant == "anonymous"


async def test_guards_come_first_and_their_refusal_is_the_answer() -> None:
    rig = Rig()
    limits = limited(rig, requests_per_minute=1)
    rig.router.policy = replace(rig.router.policy, guards=Guards([Denies()], lambda plugin, error: None))
    for _ in range(2):
        error = await rig.refusal(chat(x_team="mallory"))
        assert (error.status, error.message, error.reason) == (451, "no", "rejected-guard")
    async with rig.router.route(chat(x_team="a")) as routed:
        assert routed.decision.request.tenant == "a"
    assert (await rig.refusal(chat(x_team="a"))).status == 429
    assert limits.admit(Request(id="r", model="m", body=b"x", tenant="b")).tenant == "b"


async def test_a_pool_that_went_is_not_waited_for() -> None:
    rig = Rig()
    rig.pool.replace([])
    rig.pool.ready = False
    asking = asyncio.ensure_future(rig.refusal(chat()))
    for _ in range(10):
        await asyncio.sleep(0)
    assert asking.done()
    assert asking.result().status == 503


async def test_a_request_is_decided_watched_and_finished_once() -> None:
    rig = Rig()
    rig.now = 5.0
    async with rig.router.route(chat()) as routed:
        assert routed.destination in (A, B)
        assert routed.body is None
        name = routed.decision.endpoint.name
        assert rig.accounts.open == [name]
        assert routed.answered(200, routed.destination, "application/json") == {"x-by": name}
        rig.now = 6.0
        routed.answer_chunk(b'{"usage": {"prompt_tokens": 7, "completion_tokens": 2}', end=False)
        rig.now = 7.0
        routed.answer_chunk(b"}", end=True)
        assert rig.accounts.first == [name]
    assert rig.accounts.open == []
    assert rig.diary.lines == [f"decided {name} at 5", f"finished {name} 200"]
    [response] = rig.diary.responses
    assert (response.first_token_at, response.complete) == (6.0, True)
    assert response.usage is not None
    assert (response.usage.prompt, response.usage.completion) == (7, 2)


async def test_a_client_that_leaves_closes_the_account() -> None:
    rig = Rig()
    with pytest.raises(ConnectionError):
        async with rig.router.route(chat()):
            raise ConnectionError
    assert rig.accounts.open == []
    assert [line.split()[0] for line in rig.diary.lines] == ["decided", "finished"]
    assert not rig.diary.responses[0].complete


async def test_a_retry_that_was_served_elsewhere_moves_the_account() -> None:
    rig = Rig()
    async with rig.router.route(chat()) as routed:
        first = routed.decision.endpoint
        [other] = [endpoint for endpoint in rig.pool.endpoints if endpoint is not first]
        assert routed.answered(200, other.address) == {"x-by": other.name}
        assert rig.accounts.open == [other.name]
    assert rig.accounts.open == []
    assert rig.diary.lines[-1] == f"finished {other.name} 200"


@pytest.mark.parametrize("status", [200, 503])
async def test_a_client_that_asks_and_may_is_told_where_its_request_went(status: int) -> None:
    rig = Rig()
    rig.router.explains = True
    async with rig.router.route(chat(x_warmpath_explain="1", x_request_id="r 1")) as routed:
        chosen = routed.decision.endpoint
        [other] = [endpoint for endpoint in rig.pool.endpoints if endpoint is not chosen]
        line = routed.answered(status, chosen.address)["x-warmpath-decision"]
        assert line.startswith(f"id=r%201; endpoint={chosen.name}; tokens=")
        moved = routed.answered(status, other.address)["x-warmpath-decision"]
        assert moved == f"{line}; served={other.address}"


@pytest.mark.parametrize(("explains", "said"), [(False, "1"), (True, "0"), (True, "false"), (True, "")])
async def test_others_are_told_nothing(explains: bool, said: str) -> None:
    rig = Rig()
    rig.router.explains = explains
    async with rig.router.route(chat(x_warmpath_explain=said)) as routed:
        assert "x-warmpath-decision" not in routed.answered(200, A)


@pytest.mark.parametrize("served", ["", "10.9.9.9:1", "nonsense"])
async def test_an_unknown_server_moves_nothing(served: str) -> None:
    rig = Rig()
    async with rig.router.route(chat()) as routed:
        name = routed.decision.endpoint.name
        routed.answered(200, served)
        assert rig.accounts.open == [name]


async def test_an_error_of_the_endpoint_gets_no_headers_of_ours() -> None:
    rig = Rig()
    async with rig.router.route(chat()) as routed:
        assert routed.answered(404, routed.destination) == {}
    assert rig.diary.responses[0].status == 404


async def test_an_answer_that_shows_no_headers_first_is_counted_still() -> None:
    rig = Rig()
    async with rig.router.route(chat()) as routed:
        routed.answer_chunk(b"", end=False)
        assert rig.accounts.first == []
        routed.answer_chunk(b"x", end=True)
    assert rig.accounts.first == [routed.decision.endpoint.name]
    assert rig.diary.responses[0].usage is None


async def test_a_bad_request_is_refused_without_an_account() -> None:
    rig = Rig()
    error = await rig.refusal(chat(body=b'{"messages": []}'))
    assert isinstance(error, BadRequest)
    assert error.param == "model"
    assert (rig.accounts.open, rig.diary.lines) == ([], ["failed 400"])


@pytest.mark.parametrize("subset", [(), ("10.7.7.7:1",)])
async def test_a_subset_of_nobody_is_503(subset: tuple[str, ...]) -> None:
    rig = Rig()
    assert isinstance(await rig.refusal(chat(subset=subset)), NoEndpoint)
    assert rig.diary.lines == ["failed 503"]


async def test_a_subset_is_kept_to() -> None:
    rig = Rig()
    for _ in range(3):
        async with rig.router.route(chat(subset=(B,))) as routed:
            assert routed.destination == B


async def test_filters_that_drop_all_are_503_without_an_account() -> None:
    rig = Rig(filters=[Nobody()])
    assert isinstance(await rig.refusal(chat()), NoEndpoint)
    assert rig.accounts.open == []


async def test_an_empty_pool_is_503() -> None:
    assert (await Rig(state=PoolState("p")).refusal(chat())).status == 503


async def test_only_low_priority_is_shed_by_a_full_pool() -> None:
    rig = Rig()
    low = chat(x_llm_d_inference_objective="batch")
    async with rig.router.route(chat()), rig.router.route(chat()):
        assert isinstance(await rig.refusal(low), Rejected)
        async with rig.router.route(chat()):
            assert len(rig.accounts.open) == 3
    async with rig.router.route(low):
        assert len(rig.accounts.open) == 1


async def test_a_rewritten_model_makes_another_body() -> None:
    rewrite = Rewrite(("m",), (Target("tuned"),))
    rig = Rig(state=PoolState("p", endpoints=(pod("a", address=A),), rewrites=(rewrite,)))
    async with rig.router.route(chat()) as routed:
        assert routed.body == CHAT.replace(b'"m"', b'"tuned"')
        assert routed.decision.request.model == "tuned"
        routed.body = None  # as its bytes are let go of once they are sent
        assert routed.renamed == ("tuned", "m")
    async with Rig().router.route(chat()) as routed:
        assert routed.renamed is None


async def test_the_gateways_subset_may_be_left_aside() -> None:
    rig = Rig()
    assert isinstance(await rig.refusal(chat(subset=())), NoEndpoint)
    rig.router.honour_subset = False
    async with rig.router.route(chat(subset=())) as routed:
        assert routed.destination == A


@dataclass(eq=False)
class Reader(Plugin):
    """How much of the prompt and the body is there at each hook."""

    seen: list[tuple[str, int, int]] = field(default_factory=list)

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        self.seen.append(("picked", len(request.prompt), len(request.body)))

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        self.seen.append(("finished", len(request.prompt), len(request.body)))


async def test_the_prompt_is_let_go_once_the_request_is_on_its_way() -> None:
    rig, reader = Rig(), Reader()
    rig.reload(reader)
    large = CHAT.replace(b"hello", b"x" * 1_000_000)
    tracemalloc.start()
    async with AsyncExitStack() as waiting:
        for _ in range(10):
            await waiting.enter_async_context(rig.router.route(chat(body=bytes(bytearray(large)))))
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert held < len(large)
    prompt = len(b'[{"role": "user", "content": "hello"}]') - 5 + 1_000_000
    assert sorted(set(reader.seen)) == [("finished", 0, 0), ("picked", prompt, len(large))]


async def test_candidates_are_those_after_the_wait() -> None:
    rig = Rig(slow=True)
    async with rig.router.route(chat()) as routed:
        assert routed.destination == B


async def test_a_reload_leaves_requests_under_way_where_they_are() -> None:
    rig, fresh = Rig(), Accounts()
    async with rig.router.route(chat()):
        rig.reload(fresh)
        async with rig.router.route(chat()):
            assert (len(rig.accounts.open), len(fresh.open)) == (1, 1)
        assert (len(rig.accounts.open), len(fresh.open)) == (1, 0)
    assert rig.accounts.open == []


class Full(Detector):
    def saturation(self, endpoints: Sequence[Endpoint]) -> float:
        return 1.0


async def test_a_reload_replaces_the_detector_too() -> None:
    rig = Rig()
    rig.reload(detector=Full())
    assert isinstance(await rig.refusal(chat(x_llm_d_inference_objective="batch")), Rejected)


async def test_a_request_is_admitted_by_the_configuration_that_chooses_for_it() -> None:
    rig = Rig(slow=True)
    asked = rig.router.route(chat(x_llm_d_inference_objective="batch"))
    rig.reload(detector=Full())  # as while it waits for its tokens
    async with asked:
        assert len(rig.accounts.open) == 1


async def test_an_errors_text_is_no_first_token() -> None:
    rig = Rig()
    async with rig.router.route(chat()) as routed:
        routed.answered(500, routed.destination, "application/json")
        routed.answer_chunk(b'{"error": {"message": "no"}}', end=True)
        assert rig.accounts.first == []
    assert rig.diary.responses[0].first_token_at is None


async def test_the_answers_headers_are_reported_of_the_endpoint_that_gave_them() -> None:
    rig = Rig()
    async with rig.router.route(chat()) as routed:
        [other] = [each for each in rig.pool.endpoints if each is not routed.decision.endpoint]
        assert rig.accounts.answered == []
        routed.answered(200, other.address)
        assert rig.accounts.answered == [(other.name, 200)]
    assert rig.accounts.answered == [(other.name, 200)]


# --- explanations ---------------------------------------------------------------------------------------------------


async def test_an_explanation_is_the_next_decision_and_leaves_nothing() -> None:
    rig = Rig()
    explained = [await rig.router.explain(chat()) for _ in range(3)]
    assert {decision.endpoint.name for decision in explained} == {"a"}, "no turn is taken"
    assert [endpoint.name for endpoint in explained[0].runs[0].endpoints] == ["a", "b"]
    assert not rig.accounts.open
    assert rig.diary.lines == []
    async with rig.router.route(chat()) as routed:
        assert routed.decision.endpoint.name == "a"


async def test_what_would_be_refused_is_refused() -> None:
    rig = Rig()
    with pytest.raises(BadRequest):
        await rig.router.explain(RawRequest("POST", "/v1/chat/completions", {}, b"{}"))
    rig.pool.replace([])
    with pytest.raises(NoEndpoint):
        await rig.router.explain(chat())


# --- the list of models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models?limit=5", "/team/v1/models/"])
async def test_the_list_of_models_is_answered_here_once_it_is_known(path: str) -> None:
    rig = Rig()
    asked, known = RawRequest("GET", path, {}), b""
    rig.router.models = lambda endpoints, may: known or None
    async with rig.router.route(asked) as routed:
        assert routed.destination in (A, B)
    known = b"{}"
    answer = await rig.refusal(asked)
    assert isinstance(answer, OwnAnswer)
    assert answer.body == b"{}"
    assert rig.diary.lines[2:] == [], "it is no request of an endpoint, and no failure"
    async with rig.router.route(RawRequest("POST", "/v1/models", {})) as routed:
        assert routed.destination in (A, B)


async def test_guards_come_before_the_list_of_models_and_a_subset_bounds_it() -> None:
    rig = Rig()
    seen: list[Sequence[Endpoint]] = []
    told: list[bool] = []

    def models(endpoints: Sequence[Endpoint], may: Callable[[str], bool] | None) -> bytes:
        seen.append(endpoints)
        told.append(may is None or may("n"))
        return b"{}"

    rig.router.models = models
    rig.router.policy = replace(rig.router.policy, guards=Guards([Denies()], lambda plugin, error: None))
    denied = await rig.refusal(RawRequest("GET", "/v1/models", {"x-team": "mallory"}))
    assert denied.status == 451
    assert seen == []
    await rig.refusal(RawRequest("GET", "/v1/models", {}, subset=(B,)))
    assert [endpoint.address for endpoint in seen[0]] == [B]
    limits = Limits(LimitSettings(TenantLimits(models=("m",))), lambda: rig.now, lambda *refused: None, lambda: None)
    rig.router.policy = replace(rig.router.policy, limits=limits)
    await rig.refusal(RawRequest("GET", "/v1/models", {}))
    assert told == [True, False], "what limits forbid is not listed"


# --- while it waits -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Prompts(Plugin):
    """What is there of each prompt when it is picked for."""

    read: list[bytes] = field(default_factory=list)

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        self.read.append(request.prompt)


async def test_a_body_that_waits_is_held_once_and_its_prompt_is_there_when_it_is_picked_for() -> None:
    rig, reader, size, count = Rig(), Prompts(), 100_000, 20
    limits = Limits(LimitSettings(TenantLimits(models=("m",))), lambda: rig.now, lambda *refused: None, lambda: None)
    band = BandSettings(GlobalStrict(), FirstComeFirstServed())
    settings = FlowSettings(rig.detector, StaticLimit(), band, band)
    loop = asyncio.get_running_loop()
    flow = FlowControl(
        settings, rig.pool.candidates, rig.pool.why_empty, loop.call_later, lambda *ended: None,
        lambda plugin, error: pytest.fail(f"{plugin}: {error}"), clock=lambda: rig.now, trusted=False,
    )  # fmt: skip
    others = (rig.detector, flow, reader)
    chooser = scheduler(picker=RoundRobinPicker(), others=others)
    rig.router.policy = Policy(Admission(rig.detector), chooser, flow, None, limits)
    texts = [b"%d " % number + b"x" * size for number in range(count)]

    async def ask(number: int) -> None:
        tools = b'"tools": [1], ' if number % 2 else b""
        body = b'{"model": "m", %s"messages": [{"content": "%s"}]}' % (tools, texts[number])
        async with rig.router.route(chat(body=body)):
            pass

    async with AsyncExitStack() as full:
        for _ in range(2):
            await full.enter_async_context(rig.router.route(chat(body=b'{"model": "m", "messages": []}')))
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        asking = [asyncio.ensure_future(ask(number)) for number in range(count)]
        await asyncio.sleep(0)
        held = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert [row[2] for row in flow.figures().waiting] == [count]
    await asyncio.gather(*asking)
    assert held / count < 1.2 * size
    messages = [b'[{"content": "%s"}]' % text for text in texts]
    assert reader.read[2:] == [b"[1]" * (number % 2) + one for number, one in enumerate(messages)]
