from collections.abc import Sequence

import pytest

from epp.plugin import Endpoint, InFlight, PrefixMatch, Request, Response, Scorer
from epp.protocol import SESSION_ID
from epp.scheduling.scorers import (
    ActiveRequestScorer,
    HeaderLabelAffinityScorer,
    KvCacheUtilizationScorer,
    LoadAwareScorer,
    LoraAffinityScorer,
    NoHitLruScorer,
    PrefixCacheScorer,
    QueueScorer,
    RunningRequestsSizeScorer,
    SessionAffinityScorer,
    TokenLoadScorer,
)
from tests.support.scheduling.schedulers import Held, ask, pod, pods, scheduler
from tests.support.scheduling.signals import with_signal


def scores(scorer: Scorer, endpoints: Sequence[Endpoint], request: Request | None = None) -> list[float]:
    return [round(score, 9) for score in scorer.score(request or ask(), endpoints)]


@pytest.mark.parametrize(
    ("waiting", "expected"), [([0, 5, 10], [1, 0.5, 0]), ([3, 3], [1, 1]), ([7], [1]), ([2, 6, 3], [1, 0, 0.75])]
)
def test_queue_and_running_are_scaled_over_the_candidates(waiting: list[int], expected: list[float]) -> None:
    assert scores(QueueScorer(), [pod("x", waiting=n) for n in waiting]) == expected
    assert scores(RunningRequestsSizeScorer(), [pod("x", running=n) for n in waiting]) == expected


def test_kv_usage_is_what_is_free() -> None:
    assert scores(KvCacheUtilizationScorer(), [pod("a", kv_usage=0.25), pod("b"), pod("c", kv_usage=1.0)]) == [
        0.75,
        1,
        0,
    ]


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (0.0, [0.5, 1.0, 0.0]),
        # w * min(1, tokens/8192)^2 + (1 - w) * blocks/10
        (1.0, [0.25, 1.0, 0.0]),
        (0.4, [0.4 * 0.25 + 0.6 * 0.5, 1.0, 0.0]),
    ],
)
def test_prefix_blends_share_and_length(weight: float, expected: list[float]) -> None:
    endpoints = pods("abc")
    request = ask()
    request = with_signal(request, PrefixMatch, Held(a=(4096, 5), b=(10_000, 10)).produce(request, endpoints))
    assert scores(PrefixCacheScorer(match_length_weight=weight), endpoints, request) == expected


def test_an_empty_prompt_matches_nothing() -> None:
    (a,) = pods("a")
    request = ask()
    request = with_signal(request, PrefixMatch, {a: PrefixMatch(0, 0, 0)})
    assert scores(PrefixCacheScorer(), [a], request) == [0.0]


@pytest.mark.parametrize(
    ("scorer", "requests", "expected"),
    [
        (ActiveRequestScorer(), [0, 2, 4], [1, 0.5, 0]),
        (ActiveRequestScorer(), [0, 0], [1, 1]),
        (ActiveRequestScorer(), [3, 3], [0, 0]),
        (ActiveRequestScorer(idle_threshold=2, max_busy_score=0.5), [2, 3, 6], [1, 0.25, 0]),
    ],
)
def test_active_requests(scorer: ActiveRequestScorer, requests: list[int], expected: list[float]) -> None:
    endpoints = pods("abc"[: len(requests)])
    request = ask()
    request = with_signal(request, InFlight, {e: InFlight(n, 0) for e, n in zip(endpoints, requests, strict=True)})
    assert scores(scorer, endpoints, request) == expected


def test_load_aware_is_at_most_a_half() -> None:
    endpoints = [pod("x", waiting=n) for n in (0, 32, 128, 500)]
    assert scores(LoadAwareScorer(), endpoints) == [0.5, 0.375, 0.0, 0.0]
    assert scores(LoadAwareScorer(threshold=64), endpoints) == [0.5, 0.25, 0.0, 0.0]


def test_token_load_falls_with_tokens_in_flight() -> None:
    endpoints = pods("abc")
    request = ask()
    request = with_signal(
        request,
        InFlight,
        {e: InFlight(1, tokens) for e, tokens in zip(endpoints, (0, 1_048_576, 9_999_999), strict=True)},
    )
    assert scores(TokenLoadScorer(), endpoints, request) == [1.0, 0.75, 0.0]
    assert scores(TokenLoadScorer(queue_threshold_tokens=2_097_152), endpoints, request) == [1.0, 0.5, 0.0]


def test_lora_tiers() -> None:
    request = ask(model="mine")
    others = frozenset({"x", "y"})
    endpoints = [
        pod("active", lora_running=others | {"mine"}, lora_max=2),
        pod("room", lora_running=frozenset({"x"}), lora_max=2),
        pod("waiting", lora_running=others, lora_waiting=frozenset({"mine"}), lora_max=2),
        pod("full", lora_running=others, lora_max=2),
        pod("no lora"),
        pod("runs and waits", lora_running=frozenset({"x"}), lora_waiting=frozenset({"x"}), lora_max=2),
    ]
    assert scores(LoraAffinityScorer(), endpoints, request) == [1.0, 0.8, 0.6, 0.0, 0.0, 0.8]


def test_session_affinity_scores_the_session_s_endpoint() -> None:
    a, b, c = pods("abc")
    scorer = SessionAffinityScorer(strategy="session_id")
    request = ask(headers={SESSION_ID: "x"})
    assert scores(scorer, [a, b, c], request) == [0, 0, 0]
    scorer.on_picked(request, b)
    assert scores(scorer, [a, b, c], request) == [0, 1, 0]
    assert scores(scorer, [a, c], request) == [0, 0]


class TestNoHitLru:
    def cold(self, *_: object) -> Request:
        request = ask()
        request = with_signal(request, PrefixMatch, Held().produce(request, self.endpoints))
        return request

    def setup_method(self) -> None:
        self.endpoints = pods("abcde")

    def test_never_used_first_then_longest_ago(self) -> None:
        a, b, c, d, e = self.endpoints
        scorer = NoHitLruScorer()
        for endpoint in (d, b, d, a):
            request = self.cold()
            scorer.score(request, self.endpoints)
            scorer.on_picked(request, endpoint)
        # never: c, e; then b, d, a
        assert scores(scorer, [a, b, c, d, e], self.cold()) == [0.0, 0.5, 1.0, 0.25, 0.75]
        assert scores(scorer, [a, d], self.cold()) == [0.0, 1.0]
        assert scores(scorer, [a], self.cold()) == [1.0]

    def test_a_warm_prompt_is_neutral_and_moves_nobody(self) -> None:
        a, b, *_ = self.endpoints
        scorer = NoHitLruScorer()
        request = ask()
        request = with_signal(request, PrefixMatch, Held(b=(1, 1)).produce(request, self.endpoints))
        assert scores(scorer, [a, b], request) == [0.5, 0.5]
        scorer.on_picked(request, a)
        assert scores(scorer, [a, b], self.cold()) == [1.0, 0.0]

    def test_cold_prompts_go_round(self) -> None:
        s = scheduler(NoHitLruScorer(), producers=[Held()])
        names = []
        for _ in range(10):
            decision = s.choose(ask(), self.endpoints)
            s.finished(decision, Response())
            names.append(decision.endpoint.name)
        assert names == list("abcdeabcde")

    def test_it_is_bounded_and_forgets_what_is_removed(self) -> None:
        scorer = NoHitLruScorer(lru_size=3)
        a, b, c, d, _ = self.endpoints
        for endpoint in (a, b, c, a, d):
            request = self.cold()
            scorer.score(request, self.endpoints)
            scorer.on_picked(request, endpoint)
        assert list(scorer._last) == [c, a, d]
        scorer.on_removed(a)
        scorer.on_removed(b)
        assert list(scorer._last) == [c, d]


def test_llm_d_s_usual_blend() -> None:
    """Prefix 3, queue 2, KV 2: a half-held prompt wins over an idle endpoint, and loses to it under load."""
    blend = [(PrefixCacheScorer(), 3.0), (QueueScorer(), 2.0), (KvCacheUtilizationScorer(), 2.0)]
    s = scheduler(*blend, producers=[Held(a=(64, 5))])
    light = [pod("a", kv_usage=0.2), pod("b", kv_usage=0.1)]
    decision = s.choose(ask(), light)
    assert [round(total, 9) for total in decision.runs[0].totals] == [1.5 + 2.0 + 1.6, 0.0 + 2.0 + 1.8]
    assert decision.endpoint.name == "a"
    heavy = [pod("a", kv_usage=0.2, waiting=1), pod("b", kv_usage=0.1)]
    assert s.choose(ask(), heavy).endpoint.name == "b"


@pytest.mark.parametrize(
    ("kind", "wrong", "names"),
    [
        (PrefixCacheScorer, {"match_length_weight": 2}, "matchLengthWeight"),
        (PrefixCacheScorer, {"match_length_scale_tokens": 0}, "matchLengthScaleTokens"),
        (HeaderLabelAffinityScorer, {"header_name": "", "label_key": "zone"}, "headerName"),
        (HeaderLabelAffinityScorer, {"header_name": "x-zone", "label_key": ""}, "labelKey"),
        (ActiveRequestScorer, {"idle_threshold": -1}, "idleThreshold"),
        (ActiveRequestScorer, {"max_busy_score": 1.5}, "maxBusyScore"),
        (LoadAwareScorer, {"threshold": 0}, "threshold"),
        (TokenLoadScorer, {"queue_threshold_tokens": 0}, "queueThresholdTokens"),
        (NoHitLruScorer, {"lru_size": 0}, "lruSize"),
    ],
)
def test_nonsense_is_refused(kind: type[Scorer], wrong: dict[str, object], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        kind(**wrong)


def test_a_header_prefers_the_endpoints_with_its_value_as_a_label() -> None:
    endpoints = [pod("a", labels={"zone": "x"}), pod("b", labels={"zone": "y"}), pod("c")]
    plugin = HeaderLabelAffinityScorer("X-Preferred-Zone", "zone")
    assert scores(plugin, endpoints, ask(headers={"x-preferred-zone": "y"})) == [0, 1, 0]
    assert scores(plugin, endpoints, ask(headers={"x-preferred-zone": ""})) == [0, 0, 0]
    assert scores(plugin, endpoints) == [0, 0, 0]
