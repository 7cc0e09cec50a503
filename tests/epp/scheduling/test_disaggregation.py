"""Prefill and decode apart: who gets which stage, what the headers say, and accounts that end once."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from epp.configuration.loader import Pipeline, load_strategy, load_text, strategies
from epp.errors import ConfigError, NoEndpoint, SloUnmet
from epp.plugin import CacheRoom, Endpoint, FailureShare, InFlight, Plugin, PrefixMatch, Request, Response, Slo
from epp.pool.ranks import ranks_of
from epp.replicas import wire
from epp.scheduling.cost import ExpectedTtft
from epp.scheduling.decision import Decision
from epp.scheduling.scheduler import Scheduler
from epp.testing import endpoint, services
from epp.testing import request as ask

LONG = "word " * 8000
"""10,000 tokens."""
SHORT = "word " * 16


def pod(name: str, role: str = "", **labels: str) -> Endpoint:
    return endpoint(name, labels={**labels, **({"llm-d.ai/role": role} if role else {})}, block_size=16, blocks=30_000)


def two_and_two() -> tuple[Endpoint, Endpoint, Endpoint, Endpoint]:
    return pod("p1", "prefill"), pod("p2", "prefill"), pod("d1", "decode"), pod("d2", "decode")


@dataclass(eq=False)
class Diary(Plugin):
    """Who was given what, and what has not ended."""

    open: list[tuple[str, str]] = field(default_factory=list)
    ends: list[tuple[str, str, int]] = field(default_factory=list)

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        self.open.append((request.stage, endpoint.name))

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        self.open.remove((request.stage, endpoint.name))
        self.ends.append((request.stage, endpoint.name, response.status))


class Pool:
    """A configuration at work over some endpoints."""

    def __init__(self, pipeline: Pipeline, endpoints: Sequence[Endpoint], clock: Callable[[], float]) -> None:
        self.diary = Diary()
        self.degraded: list[tuple[str, str]] = []
        self.endpoints = tuple(endpoints)
        self.pipeline = pipeline
        given = services(
            self.endpoints,
            degraded=lambda reason, detail="", lasting=False: self.degraded.append((reason, detail)),
            engine_of=pipeline.engines.of,
        )
        for plugin in pipeline.plugins:
            plugin.start(given)
        self.ended: list[str] = []
        """Who has done a part of a request for another endpoint."""
        self.scheduler: Scheduler = pipeline.scheduler(
            wall_clock=clock,
            on_error=_raise,
            fallbacks=1,
            others=[self.diary],
            on_parts_ended=lambda parts: self.ended.extend(where.name for _, where in parts),
        )

    def choose(self, prompt: str = LONG, endpoints: Sequence[Endpoint] | None = None, **fields: Any) -> Decision:
        request = asyncio.run(self.scheduler.prepare(ask(prompt, stream=True, **fields)))
        return self.scheduler.choose(request, self.endpoints if endpoints is None else endpoints)

    def in_flight(self, kind: type[Any] = InFlight) -> Mapping[Endpoint, Any]:
        return self.scheduler.look(ask(SHORT), self.endpoints, {PrefixMatch, CacheRoom, kind}).signals[kind]


def _raise(plugin: str, error: Exception) -> None:
    raise error


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def by_strategy(name: str, *endpoints: Endpoint) -> Pool:
    clock = Clock()
    return Pool(load_strategy(name, clock=clock, random=random.Random(0)), endpoints, clock)


def busy(name: str, *endpoints: Endpoint) -> Pool:
    """Each endpoint that decodes has some answers to generate, so a long prompt would stall them."""
    pool = by_strategy(name, *endpoints)
    for number in range(6):
        pool.scheduler.first_token(pool.choose(f"{number} " + SHORT))
    pool.diary.open.clear()
    return pool


def always(*endpoints: Endpoint) -> Pool:
    """The default strategy, but every prompt is prefilled elsewhere."""
    handler = "- {type: role-profile-handler, parameters: {decider: always-disagg-pd-decider}}\n"
    return by_config(handler + "- {type: expected-ttft}\n", *endpoints, stages="")


HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
STAGES = """
- {type: decode-filter}
- {type: prefill-filter}
- {type: encode-filter}
- {type: prefix-cache-scorer}
- {type: max-score-picker}
schedulingProfiles:
- {name: prefill, plugins: [{pluginRef: prefill-filter}, {pluginRef: prefix-cache-scorer}]}
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: prefix-cache-scorer}]}
- {name: encode, plugins: [{pluginRef: encode-filter}]}
"""


def by_config(plugins: str, *endpoints: Endpoint, stages: str = STAGES) -> Pool:
    clock = Clock()
    return Pool(
        load_text(HEAD + "plugins:\n" + plugins + stages, clock=clock, random=random.Random(0)), endpoints, clock
    )


def refusal(plugins: str, stages: str = STAGES) -> str:
    with pytest.raises(ConfigError) as refused:
        by_config(plugins, stages=stages)
    return str(refused.value)


# --- the strategies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", strategies())
def test_a_prefill_pod_never_decodes(strategy: str) -> None:
    pool = by_strategy(strategy, *two_and_two(), pod("e", "encode"))
    for turn in range(20):
        decision = pool.choose(LONG if turn % 2 else SHORT, headers={"x-session-id": str(turn % 3)})
        assert {each.name for each in decision.endpoints} <= {"d1", "d2"}
    assert "no-prefiller" not in dict(pool.degraded)
    assert len(by_strategy("prefix-aware", *two_and_two()).choose().endpoints) == 2


@pytest.mark.parametrize("strategy", strategies())
def test_a_long_prompt_is_prefilled_elsewhere(strategy: str) -> None:
    p1, p2, d1, d2 = two_and_two()
    pool = busy(strategy, p1, p2, d1, d2)
    decision = pool.choose()
    ((part, where),) = decision.parts
    assert where in (p1, p2)
    assert decision.headers == {"x-prefiller-host-port": where.address}
    assert (part.stage, part.max_tokens, part.stream, decision.request.stage) == ("prefill", 1, False, "decode")
    assert decision.as_dict()["prefill"] == [where.name]
    assert decision.division == "prefill-decode"


@pytest.mark.parametrize("strategy", strategies())
def test_what_one_endpoint_answers_is_not_prefilled_elsewhere(strategy: str) -> None:
    pool = busy(strategy, *two_and_two())
    assert len(pool.choose().parts) == 1
    assert len(pool.scheduler.stages(ask(LONG), pool.endpoints)) == 2
    assert pool.choose(whole=True).parts == ()
    (decode,) = pool.scheduler.stages(ask(LONG, whole=True), pool.endpoints)
    assert {each.name for each in decode} == {"d1", "d2"}


@pytest.mark.parametrize("strategy", strategies())
def test_without_roles_nothing_is_apart(strategy: str) -> None:
    pool = by_strategy(strategy, pod("a"), pod("b"))
    decision = pool.choose()
    assert (decision.parts, decision.headers, decision.request.stage) == ((), {}, "")
    assert (len(decision.runs), decision.division) == (1, "")


def test_who_decodes_and_prefills_serves_as_a_whole() -> None:
    pool = by_strategy("prefix-aware", pod("both", "both"))
    assert pool.choose().parts == ()
    assert pool.degraded == []


def test_without_a_prefiller_it_is_said() -> None:
    pool = by_strategy("prefix-aware", pod("d1", "decode"), pod("e", "encode"))
    decision = pool.choose()
    assert (decision.endpoint.name, decision.headers) == ("d1", {})
    assert [reason for reason, _ in pool.degraded] == ["no-prefiller"]
    assert "none of 2 endpoints prefills for d1" in pool.degraded[0][1]
    assert pool.scheduler.statistics()["role-profile-handler"]["no-prefiller"] == 1


def test_a_setting_refuses_instead() -> None:
    plugins = "- {type: role-profile-handler, parameters: {whenNoPrefiller: refuse}}\n- {type: expected-ttft}\n"
    pool = by_config(plugins, pod("d1", "decode"), stages="")
    with pytest.raises(NoEndpoint, match="none of 1 endpoints prefills for d1, and whenNoPrefiller is refuse"):
        pool.choose()
    assert pool.diary.open == []
    assert pool.choose(SHORT).endpoint.name == "d1"


def test_a_pool_of_prefillers_serves_nobody() -> None:
    pool = by_strategy("least-load", pod("p1", "prefill"))
    with pytest.raises(NoEndpoint, match="none of 1 endpoints decodes"):
        pool.choose()


def test_a_gateway_s_subset_without_prefillers_is_no_shortage_of_long() -> None:
    p1, p2, d1, d2 = two_and_two()
    pool = by_strategy("prefix-aware", p1, p2, d1, d2)
    assert pool.choose(endpoints=(d1, d2)).parts == ()
    assert [reason for reason, _ in pool.degraded] == ["no-prefiller"]


# --- engines that decode and cannot compute a prompt ----------------------------------------------------------------


SGLANG = {"llm-d.ai/engine-type": "sglang"}
DISAGG = "- {type: disagg-profile-handler%s}\n"


@pytest.mark.parametrize("prompt", [SHORT, LONG])
@pytest.mark.parametrize("strategy", strategies())
def test_of_sglang_every_prompt_is_prefilled_elsewhere(strategy: str, prompt: str) -> None:
    p, d = pod("p", "prefill", **SGLANG), pod("d", "decode", **SGLANG)
    pool = by_strategy(strategy, p, d)
    for _ in range(2):  # the second finds it in the cache of the one that decodes
        decision = pool.choose(prompt)
        assert (decision.endpoint, decision.headers) == (d, {"x-prefiller-host-port": p.address})
        pool.scheduler.finished(decision, Response(status=200))
    assert needed(pool, prompt) == [["d"], ["p"]]


@pytest.mark.parametrize(
    "parameters",
    ["", ", parameters: {deciders: {prefill: prefix-based-pd-decider}}"],
    ids=["no decider", "one that wants nothing"],
)
def test_of_sglang_so_it_is_whatever_the_configuration_decides(parameters: str) -> None:
    plugins = "- {type: prefix-based-pd-decider, parameters: {nonCachedTokens: 0}}\n" + DISAGG % parameters
    pool = by_config(plugins, pod("p", "prefill", **SGLANG), pod("d", "decode", **SGLANG))
    assert pool.choose(SHORT).parts
    assert not by_config(plugins, pod("p", "prefill"), pod("d", "decode")).choose(SHORT).parts


@pytest.mark.parametrize("prompt", [SHORT, LONG])
def test_of_sglang_a_request_is_refused_where_nobody_prefills(prompt: str) -> None:
    said = "prefills for d, and SGLang computes no prompt where it decodes"
    d = pod("d", "decode", **SGLANG)
    pool = by_strategy("prefix-aware", d)
    with pytest.raises(NoEndpoint, match=said):
        pool.choose(prompt)
    assert [reason for reason, _ in pool.degraded] == ["no-prefiller"]
    assert pool.scheduler.statistics()["role-profile-handler"]["no-prefiller"] == 1
    with pytest.raises(NoEndpoint, match="SGLang computes no prompt"):
        by_config(ALWAYS + DISAGG % ", parameters: {deciders: {prefill: always-disagg-pd-decider}}", d).choose(prompt)


@pytest.mark.parametrize(
    ("parameters", "labels"),
    [
        ("defaultEngine: sglang", {}),
        ("engineLabelKey: example.com/engine", {"example.com/engine": "sglang", "llm-d.ai/engine-type": "vllm"}),
    ],
)
def test_of_sglang_it_is_too_where_the_configuration_says_so(parameters: str, labels: Mapping[str, str]) -> None:
    plugins = f"- {{type: core-metrics-extractor, parameters: {{{parameters}}}}}\n" + DISAGG % ""
    p, d = pod("p", "prefill", **labels), pod("d", "decode", **labels)
    assert by_config(plugins, p, d).choose(SHORT).parts
    vllm = pod("v", "decode", **{"llm-d.ai/engine-type": "vllm", "example.com/engine": "vllm"})
    assert not by_config(plugins, p, vllm).choose(SHORT).parts


def test_of_sglang_what_has_no_role_or_prefills_too_serves_as_a_whole() -> None:
    assert by_strategy("prefix-aware", pod("a", **SGLANG), pod("b", **SGLANG)).choose().parts == ()
    assert by_strategy("prefix-aware", pod("a", "prefill-decode", **SGLANG)).choose().parts == ()


def test_of_sglang_what_sidecars_pass_on_whole_names_nobody() -> None:
    pool = by_strategy("prefix-aware", pod("p", "prefill", **SGLANG), pod("d", "decode", **SGLANG))
    assert pool.choose(whole=True).headers == {}


# --- the decision by seconds ----------------------------------------------------------------------------------------


def test_a_short_prompt_and_a_cached_one_stay() -> None:
    pool = busy("prefix-aware", pod("p", "prefill"), pod("d", "decode"))
    short = pool.choose(SHORT)
    assert (short.parts, short.division) == ((), "decode-only")
    first = pool.choose()
    assert first.parts
    pool.scheduler.finished(first, Response(status=200))
    assert pool.choose().parts == ()


def needed(pool: Pool, prompt: str) -> list[list[str]]:
    """The groups of endpoints that flow control has the request wait for."""
    asked = asyncio.run(pool.scheduler.prepare(ask(prompt)))
    return [[one.name for one in group] for group in pool.scheduler.stages(asked, pool.endpoints)]


@pytest.mark.parametrize("made", [lambda *pods: by_strategy("prefix-aware", *pods), lambda *pods: always(*pods)])
def test_flow_control_has_a_request_wait_for_the_stages_it_needs(made: Callable[..., Pool]) -> None:
    pool = made(*two_and_two())
    prefill, decode = ["p1", "p2"], ["d1", "d2"]
    assert needed(pool, LONG) == [decode, prefill]
    assert needed(made(pod("a"), pod("b")), LONG) == [["a", "b"]]
    assert needed(made(pod("p", "prefill")), LONG) == [["p"]], "nobody decodes, which the pick will say"


def test_who_finds_its_prompt_where_it_is_decoded_waits_for_no_prefiller() -> None:
    pool = by_strategy("prefix-aware", *two_and_two())
    assert needed(pool, SHORT) == [["d1", "d2"]]
    pool.scheduler.finished(pool.choose(LONG), Response(status=200))
    assert needed(pool, LONG) == [["d1", "d2"]]


def test_answers_in_flight_speak_for_going_apart() -> None:
    """A medium prompt stays at an idle endpoint, and goes where it stalls nobody from a busy one."""
    medium = "word " * 640
    pool = by_strategy("prefix-aware", pod("p", "prefill"), pod("d", "decode"))
    idle = pool.choose(medium)
    assert idle.parts == ()
    assert idle.ways["here"] < idle.ways["apart"] or not idle.ways
    pool.scheduler.first_token(idle)
    for each in range(10):
        pool.scheduler.first_token(pool.choose(f"{each}" + SHORT))
    busy = pool.choose("another " + medium)
    assert busy.parts
    assert busy.ways["apart"] < busy.ways["here"]


def test_a_busy_prefiller_speaks_against_it() -> None:
    pool = by_strategy("prefix-aware", pod("p", "prefill"), pod("d", "decode"))
    apart = 0
    for number in range(8):
        apart += bool(pool.choose(f"{number} " + LONG).parts)
    assert 0 < apart < 8


def test_prefillers_share_the_work() -> None:
    p1, p2, d1, d2 = two_and_two()
    pool = always(p1, p2, d1, d2)
    first, second = pool.choose("1 " + LONG), pool.choose("2 " + LONG)
    assert {first.parts[0][1], second.parts[0][1]} == {p1, p2}


def test_a_prefiller_that_holds_the_prompt_gets_it() -> None:
    p1, p2, d1, d2 = two_and_two()
    pool = always(p1, p2, d1, d2)
    first = pool.choose(LONG)
    where = first.parts[0][1]
    pool.scheduler.finished(first, Response(status=200))
    (found,) = (
        pool.scheduler.look(asyncio.run(pool.scheduler.prepare(ask(LONG))), [where], {PrefixMatch})
        .signals[PrefixMatch]
        .values()
    )
    assert found.tokens >= 9_900


def test_the_nearer_prefiller_wins() -> None:
    zone = "topology.kubernetes.io/zone"
    far, near = pod("a-far", "prefill", **{zone: "a"}), pod("b-near", "prefill", **{zone: "b"})
    pool = always(far, near, pod("d", "decode", **{zone: "b"}))
    for number in range(3):
        decision = pool.choose(f"{number} " + LONG)
        assert decision.parts[0][1] is near
        pool.scheduler.finished(decision, Response(status=200))


def test_a_large_pool_with_roles_is_divided_too() -> None:
    endpoints = [pod(f"p{n}", "prefill") for n in range(20)] + [pod(f"d{n}", "decode") for n in range(20)]
    decision = always(*endpoints).choose()
    assert decision.endpoint.name.startswith("d")
    assert decision.parts[0][1].name.startswith("p")


# --- accounts -------------------------------------------------------------------------------------------------------


def test_both_are_on_account_until_each_has_ended() -> None:
    pool = always(pod("p", "prefill"), pod("d", "decode"))
    decision = pool.choose()
    assert pool.diary.open == [("decode", "d"), ("prefill", "p")]
    pool.scheduler.forwarded(decision)
    assert all(not part.prompt and not part.body for part, _ in decision.parts)
    pool.scheduler.answered(decision, Response(status=200))
    assert pool.diary.open == [("decode", "d")]
    pool.scheduler.first_token(decision)
    pool.scheduler.finished(decision, Response(status=200))
    pool.scheduler.finished(decision, Response(status=200))
    assert pool.diary.ends == [("prefill", "p", 200), ("decode", "d", 200)]


@pytest.mark.parametrize("status", [0, 200, 503])
def test_an_end_without_headers_ends_both(status: int) -> None:
    pool = always(pod("p", "prefill"), pod("d", "decode"))
    pool.scheduler.finished(pool.choose(), Response(status=status))
    assert pool.diary.ends == [("prefill", "p", status), ("decode", "d", status)]
    assert pool.diary.open == []


def test_a_retry_moves_the_decode_alone() -> None:
    p1, _, d1, d2 = two_and_two()
    pool = always(p1, d1, d2)
    decision = pool.choose()
    first, other = decision.endpoints
    pool.scheduler.moved(decision, other, Response(served=other.address))
    assert sorted(pool.diary.open) == [("decode", other.name), ("prefill", "p1")]
    pool.scheduler.answered(decision, Response(status=200))
    pool.scheduler.finished(decision, Response(status=200))
    assert pool.diary.open == []
    assert ("decode", first.name, 0) in pool.diary.ends


def test_a_retry_goes_to_the_prefiller_last() -> None:
    both = [pod(name, "both") for name in "abc"]
    pool = always(*both)
    pool.scheduler = pool.pipeline.scheduler(wall_clock=Clock(), on_error=_raise, fallbacks=2, others=[pool.diary])
    for _ in range(6):
        decision = pool.choose()
        ((_, prefill),) = decision.parts
        assert len(decision.endpoints) == 3
        assert decision.endpoints[2] is prefill


def test_accounts_return_to_nothing() -> None:
    p1, p2, d1, d2 = two_and_two()
    pool = always(p1, p2, d1, d2)
    decisions = [pool.choose(f"{number} " + LONG) for number in range(12)]
    rooms = pool.in_flight(CacheRoom)
    assert rooms[p1].pinned + rooms[p2].pinned > 0
    assert rooms[d1].pinned + rooms[d2].pinned >= 12 * 10_000
    for number, decision in enumerate(decisions):
        if number % 3:
            pool.scheduler.answered(decision, Response(status=200))
        pool.scheduler.finished(decision, Response(status=200 if number % 3 else 0))
    assert all(room.pinned == 0 for room in pool.in_flight(CacheRoom).values())
    figures = pool.scheduler.statistics()["expected-ttft"]
    assert (figures["pending_seconds"], figures["decodes"]) == (0, 0)


def test_a_decode_has_no_prefill_to_wait_for() -> None:
    pool = by_config(
        "- {type: disagg-profile-handler, parameters: {deciders: {prefill: d}}}\n"
        "- {name: d, type: always-disagg-pd-decider}\n- {type: inflight-load-producer}\n",
        pod("p", "prefill"),
        pod("d", "decode"),
    )
    pool.choose()
    p, d = pool.endpoints
    load = pool.in_flight()
    assert (load[p], load[d]) == (InFlight(1, 10_000), InFlight(1, 0))


def test_a_failure_is_on_both() -> None:
    pool = always(pod("p", "prefill"), pod("d", "decode"))
    for number in range(3):
        decision = pool.choose(f"{number} " + LONG)
        pool.scheduler.answered(decision, Response(status=502))
        pool.scheduler.finished(decision, Response(status=502))
    shares = pool.in_flight(FailureShare)
    assert all(shares[each].share > 0.3 for each in pool.endpoints)


@pytest.mark.parametrize("seen", ["answered", "first_token", "finished"])
def test_that_a_part_has_ended_is_said_once(seen: str) -> None:
    pool = always(pod("p", "prefill"), pod("d", "decode"))
    decision, response = pool.choose(), Response(status=200)
    assert pool.ended == []
    if seen == "answered":
        pool.scheduler.answered(decision, response)
    elif seen == "first_token":
        pool.scheduler.first_token(decision)
    else:
        pool.scheduler.finished(decision, response)
    assert pool.ended == ["p"]
    pool.scheduler.finished(decision, response)
    assert pool.ended == ["p"]


@pytest.mark.parametrize(
    ("labels", "status", "said"),
    [({}, 200, "prefilled where it is decoded: at d"), (SGLANG, 502, "failed, since nobody prefilled it: at d")],
    ids=["vLLM", "SGLang"],
)
def test_what_a_sidecar_says_of_the_prefiller_is_on_it_alone(labels: Mapping[str, str], status: int, said: str) -> None:
    pool = always(pod("p", "prefill", **labels), pod("d", "decode", **labels))
    for number in range(3):
        decision = pool.choose(f"{number} " + LONG)
        pool.scheduler.answered(decision, Response(status=status, prefill_failed=True))
        pool.scheduler.finished(decision, Response(status=status, prefill_failed=True))
    p, d = pool.endpoints
    shares = pool.in_flight(FailureShare)
    assert (shares[p].share > 0.3, d in shares) == (True, False)
    assert pool.diary.ends[:2] == [("prefill", "p", 502), ("decode", "d", status)]
    assert pool.degraded == 3 * [("prefill-failed", f"{said}, as its sidecar says")]
    assert pool.scheduler.statistics()["role-profile-handler"]["prefill-failed"] == 3


def test_a_session_stays_with_who_decodes() -> None:
    pool = by_strategy("session", *two_and_two())
    homes = {pool.choose(f"{turn} " + LONG, headers={"x-session-id": "s"}).endpoint.name for turn in range(6)}
    assert len(homes) == 1


def test_other_replicas_hear_of_both() -> None:
    p1, p2, d1, d2 = two_and_two()
    ours, theirs = (always(p1, p2, d1, d2) for _ in range(2))
    decision = ours.choose()
    told = [(decision.request, decision.endpoint), *decision.parts]
    adopted = []
    for number, (request, where) in enumerate(told):
        sent = wire.decided(number, "pool", request, where, ours.scheduler.to_peers(request, where))
        back = wire.decode_decided(msgspec.Raw(wire.encode(sent)))
        adopted.append(theirs.scheduler.adopt(wire.request_of(back), where, back.states))
    assert theirs.diary.open == ours.diary.open
    assert theirs.in_flight(CacheRoom) == ours.in_flight(CacheRoom)
    assert theirs.scheduler.statistics()["expected-ttft"]["decodes"] == 1
    for each in adopted:
        each.finished(Response(status=200))
    assert theirs.diary.open == []


# --- llm-d's types --------------------------------------------------------------------------------------------------

ALWAYS = "- {type: always-disagg-pd-decider}\n"


@pytest.mark.parametrize(
    "handler",
    [
        "{type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}",
        "{type: disagg-profile-handler, parameters: {profiles: {decode: decode, prefill: prefill},"
        " deciders: {prefill: always-disagg-pd-decider}}}",
        "{type: disagg-profile-handler, parameters: {decodeProfile: decode,"
        " prefillDeciderPluginName: always-disagg-pd-decider}}",
        "{type: pd-profile-handler, parameters: {deciderPluginName: always-disagg-pd-decider}}",
        "{type: disagg-profile-handler, parameters: {stageOrder: prefill-first}}",
    ],
)
def test_llm_d_s_handlers_split(handler: str) -> None:
    pool = by_config(ALWAYS + f"- {{type: prefill-header-handler}}\n- {handler}\n", *two_and_two())
    decision = pool.choose(SHORT)
    assert decision.endpoint.name.startswith("d")
    assert decision.headers == {"x-prefiller-host-port": decision.parts[0][1].address}
    assert decision.parts[0][1].name.startswith("p")


def test_without_a_decider_nothing_is_apart() -> None:
    pool = by_config("- {type: disagg-profile-handler}\n", *two_and_two())
    assert pool.choose().parts == ()
    assert pool.degraded == []


@pytest.mark.parametrize(("parameters", "apart"), [
    ("{}", False),
    ("{nonCachedTokens: 512}", True),
    ("{nonCachedTokens: 10000}", True),
    ("{nonCachedTokens: 10001}", False),
    ("{nonCachedTokens: 512, promptTokens: 10001}", False),
    ("{nonCachedTokens: 512, promptTokens: 10000}", True),
])  # fmt: skip
def test_a_threshold_counts_tokens_not_cached_at_who_decodes(parameters: str, apart: bool) -> None:
    plugins = f"- {{type: prefix-based-pd-decider, parameters: {parameters}}}\n"
    plugins += "- {type: disagg-profile-handler, parameters: {deciders: {prefill: prefix-based-pd-decider}}}\n"
    pool = by_config(plugins, pod("p", "prefill"), pod("d", "decode"))
    decision = pool.choose()
    assert bool(decision.parts) is apart
    pool.scheduler.finished(decision, Response(status=200))
    assert pool.choose().parts == ()


def test_a_profile_that_leaves_no_prefiller_is_said_or_refused() -> None:
    handler = (
        "- {{type: disagg-profile-handler, parameters: {{deciders: {{prefill: always-disagg-pd-decider}}{more}}}}}\n"
    )
    pool = by_config(ALWAYS + handler.format(more=""), pod("d", "decode"))
    assert pool.choose().parts == ()
    assert [reason for reason, _ in pool.degraded] == ["no-prefiller"]
    pool = by_config(ALWAYS + handler.format(more=", whenNoPrefiller: refuse"), pod("d", "decode"))
    with pytest.raises(NoEndpoint, match="filter 'prefill-filter' left none"):
        pool.choose()


def test_images_are_encoded_elsewhere() -> None:
    plugins = "- {type: always-disagg-multimodal-decider}\n- {type: disagg-profile-handler, parameters: "
    plugins += "{deciders: {encode: always-disagg-multimodal-decider}}}\n"
    e, d = pod("e", "encode"), pod("d", "decode")
    pool = by_config(plugins, e, d)
    assert pool.choose().headers == {}
    decision = pool.choose(media_tokens=1)
    assert decision.headers == {"x-encoder-hosts-ports": e.address}
    assert decision.division == "encode-decode"
    assert pool.diary.open == [("", "d"), ("", "d"), ("encode", "e")]
    pool.scheduler.answered(decision, Response(status=200))
    assert pool.diary.open == [("", "d"), ("", "d")]


@pytest.mark.parametrize(
    ("handler", "profiles"),
    [
        ("{type: data-parallel-profile-handler}", ""),
        ("{type: pd-profile-handler, parameters: {primaryPort: 8000}}", STAGES),
    ],
)
def test_a_rank_is_named_in_a_header(handler: str, profiles: str) -> None:
    plugins = f"- {handler}\n" + ("" if profiles else "- {type: queue-scorer}\n")
    rank0, rank1 = (Endpoint(f"default/pod-rank-{n}", f"10.0.0.1:{8000 + n}") for n in range(2))
    pool = by_config(plugins, rank1, rank0, stages=profiles)
    decision = pool.choose(SHORT)
    assert decision.destination == "10.0.0.1:8000,10.0.0.1:8000"
    assert decision.headers["x-data-parallel-host-port"] == decision.endpoint.address
    assert decision.served_by("10.0.0.1:8000") is decision.endpoint
    assert decision.served_by("10.0.0.1:8001") is None


def ranked(name: str, role: str, size: int) -> list[Endpoint]:
    made = pod(name, role)
    made.labels = {**made.labels, "warmpath/data-parallel-size": str(size)}
    found = ranks_of(made)
    for each in found:
        each.load = replace(made.load, at=1.0)
    return found


def test_prefill_has_the_rank_of_the_decode_which_a_header_names() -> None:
    decode, prefillers = ranked("d", "decode", 3)[2], ranked("p", "prefill", 3)
    pool = always(decode, *prefillers)
    assert pool.choose().headers == {"x-prefiller-host-port": prefillers[2].address, "x-data-parallel-rank": "2"}
    assert pool.diary.open == [("decode", "d-rank-2"), ("prefill", "p-rank-2")]


@pytest.mark.parametrize("size", [1, 2])
def test_no_rank_is_named_that_the_prefiller_has_not(size: int) -> None:
    decoders = ranked("d", "decode", 3)[2:]
    pool = always(*decoders, *ranked("p", "prefill", size))
    assert list(pool.choose().headers) == ["x-prefiller-host-port"]


@pytest.mark.parametrize(
    ("plugins", "stages", "message"),
    [
        (
            "- {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disag-pd-decider}}}\n" + ALWAYS,
            STAGES,
            "plugins[0].parameters.deciders.prefill: no plugin is called 'always-disag-pd-decider'; did you mean",
        ),
        (
            "- {type: disagg-profile-handler, parameters: {deciders: {prefill: max-score-picker}}}\n",
            STAGES,
            "expected a decider; 'max-score-picker' is a max-score-picker",
        ),
        (
            "- {type: disagg-profile-handler, parameters: {profiles: {decode: decoding}}}\n",
            STAGES,
            "schedulingProfiles: no profile is called decoding; found prefill, decode, encode",
        ),
        (
            "- {type: disagg-profile-handler, parameters: {stageOrder: encode-first}}\n",
            STAGES,
            "stageOrder: expected decode-first or prefill-first, got 'encode-first'",
        ),
        (
            "- {type: disagg-profile-handler, parameters: {stageOrder: prefill-first, deciders: "
            "{prefill: always-disagg-pd-decider}}}\n" + ALWAYS,
            STAGES,
            "expected none with stageOrder prefill-first",
        ),
        (
            "- {type: disagg-profile-handler, parameters: {profiles: {decode: decode}, prefillProfile: prefill}}\n",
            STAGES,
            "expected profiles and deciders, or the older flat names; got both",
        ),
        ("- {type: role-profile-handler}\n", STAGES, "needs exactly one profile, found prefill, decode, encode"),
        (
            "- {type: data-parallel-profile-handler, parameters: {primaryPort: 0}}\n",
            STAGES,
            "expected 1 to 65535, got 0",
        ),
        (
            "- {type: prefix-based-pd-decider, parameters: {nonCachedTokens: -1}}\n",
            STAGES,
            "expected 0 or more, got -1",
        ),
        ("- {type: role-profile-handler, parameters: {whenNoPrefiller: maybe}}\n", "", "whenNoPrefiller"),
    ],
)
def test_what_cannot_work_is_refused(plugins: str, stages: str, message: str) -> None:
    assert message in refusal(plugins, stages=stages)


# --- SLOs -----------------------------------------------------------------------------------------------------------


def cost_of(pool: Pool) -> ExpectedTtft:
    return next(plugin for plugin in pool.pipeline.plugins if isinstance(plugin, ExpectedTtft))


def test_the_first_token_of_a_request_prefilled_elsewhere_is_predicted_by_all_of_its_way() -> None:
    pool = always(*two_and_two())
    cost, (p1, _, d1, _) = cost_of(pool), pool.endpoints
    request = asyncio.run(pool.scheduler.prepare(ask(LONG)))
    looked = pool.scheduler.look(request, pool.endpoints, {PrefixMatch, CacheRoom})
    there, alone = cost.predict(looked, [p1])[p1], cost.predict(looked, [d1])[d1]
    found = pool.choose().predicted
    assert found is not None
    transfer = cost.transfer_seconds + request.tokens / cost.transfer_tokens_per_second
    assert found.ttft == pytest.approx(there.ttft + transfer + cost.step_seconds, rel=0.01)
    assert found.parts is None, "what it takes says nothing of either engine"
    assert found.tpot_after < alone.tpot_after, "its prompt stalls nobody who decodes"
    again = pool.choose(prompt="other " + LONG).predicted
    assert again is not None
    assert again.ttft == pytest.approx(found.ttft, rel=0.01), "the other two"
    third = pool.choose(prompt="third " + LONG).predicted
    assert third is not None
    assert third.ttft > 1.5 * found.ttft, "it waits for one that prefills already"


def ways(pool: Pool, slo: Slo | None) -> Mapping[str, float]:
    p, d = pool.endpoints
    request = asyncio.run(pool.scheduler.prepare(ask(LONG)))
    looked = pool.scheduler.look(msgspec.structs.replace(request, slo=slo), pool.endpoints, {PrefixMatch, CacheRoom})
    return cost_of(pool).ways(looked, d, p)


def test_a_way_that_would_miss_an_slo_is_left_where_the_other_keeps_it() -> None:
    pool = by_strategy("prefix-aware", pod("p", "prefill"), pod("d", "decode"))
    cost = cost_of(pool)
    waiting = msgspec.structs.replace(ask(LONG, id="before"), stage="prefill", tokens=20_000)
    cost.on_picked(waiting, pool.endpoints[0])
    plain = ways(pool, None)
    first = ways(pool, Slo(ttft=1.0))
    assert first["here"] == plain["here"]
    assert first["apart"] == pytest.approx(plain["apart"] + cost.slo_seconds), "it would wait at the one that prefills"
    cost.on_finished(waiting, pool.endpoints[0], Response(status=200))
    both = ways(pool, Slo(ttft=0.001))
    assert both["here"] == pytest.approx(plain["here"] + cost.slo_seconds), "where neither keeps it seconds decide"
    assert min(both.values()) > cost.slo_seconds


def test_who_is_shed_for_an_slo_is_shed_where_prefill_is_apart_too() -> None:
    plugins = "- {type: role-profile-handler}\n- {type: expected-ttft, parameters: {slo: shed}}\n"
    pool = by_config(plugins, *two_and_two(), stages="")
    with pytest.raises(SloUnmet, match="no endpoint would keep the SLO"):
        pool.choose(slo=Slo(ttft=0.05))


def test_what_was_promised_where_it_is_decoded_is_kept_by_a_prefill_elsewhere() -> None:
    plugins = "- {type: role-profile-handler}\n- {type: expected-ttft, parameters: {slo: shed}}\n"
    pool = by_config(plugins, pod("p", "prefill"), pod("d", "decode"), stages="")
    cost, (p, d) = cost_of(pool), pool.endpoints
    request = asyncio.run(pool.scheduler.prepare(ask(LONG)))
    looked = pool.scheduler.look(request, pool.endpoints, {PrefixMatch, CacheRoom})
    first = pool.choose(SHORT, slo=Slo(tpot=1.0))
    pool.scheduler.first_token(first)
    local, split = cost.predict(looked, [d])[d], cost._split(looked, d, p)
    assert split.tpot_after < local.tpot_after
    pool.scheduler.finished(first, Response(status=200))
    pool.scheduler.first_token(pool.choose(SHORT, slo=Slo(tpot=(split.tpot_after + local.tpot_after) / 2)))
    made = pool.choose(LONG, slo=Slo(ttft=5.0))
    assert [endpoint for _, endpoint in made.parts] == [p]
    plain = cost.ways(looked, d, p)
    assert made.ways["here"] - made.ways["apart"] > plain["here"] - plain["apart"]


def test_of_those_that_prefill_one_that_keeps_the_slo_is_chosen() -> None:
    pool = always(*two_and_two())
    cost, (p1, p2, _, _) = cost_of(pool), pool.endpoints
    held = pool.choose()
    ((_, holder),) = held.parts
    pool.scheduler.finished(held, Response(status=200))
    before = msgspec.structs.replace(ask(SHORT, id="before"), stage="prefill", tokens=12_000)
    cost.on_picked(before, holder)
    plain = pool.choose()
    assert plain.parts[0][1] is holder, "it costs less to wait there than to compute it again"
    pool.scheduler.finished(plain, Response())
    ((_, chosen),) = pool.choose(slo=Slo(ttft=0.72)).parts
    assert {holder, chosen} == {p1, p2}
