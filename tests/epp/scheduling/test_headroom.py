"""llm-d's plugins of predicted latency: their rules by hand, and the chart's configuration as a whole."""

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from epp.errors import SloUnmet
from epp.plugin import Endpoint, LatencyPrediction, PrefixMatch, Request, Response, Slo, Usage
from epp.scheduling.headroom import (
    LatencyHeadroom,
    LatencyScorer,
    LatencySloAdmitter,
    PredictedLatency,
    SloHeadroomTierFilter,
)
from epp.testing import endpoint, services
from tests.support.scheduling.pipelines import loaded
from tests.support.scheduling.schedulers import ask, fail
from tests.support.scheduling.signals import with_signal

A, B, C = endpoint("a"), endpoint("b"), endpoint("c")
ALL = [A, B, C]
CHART = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: predicted-latency-producer
  parameters: {streamingMode: true, samplingMean: 500, contextTTL: 5m}
- name: strict
  type: prefix-cache-affinity-filter
  parameters: {affinityThreshold: 0.99, ttftSource: latencyPredictor}
- name: loose
  type: prefix-cache-affinity-filter
  parameters: {affinityThreshold: 0.8, ttftSource: latencyPredictor}
- type: latency-scorer
  parameters: {compositeKVWeight: 2}
- type: weighted-random-picker
- type: slo-headroom-tier-filter
- type: latency-slo-admitter
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: predicted-latency-producer
  - pluginRef: strict
  - pluginRef: slo-headroom-tier-filter
  - pluginRef: loose
  - pluginRef: latency-scorer
  - pluginRef: weighted-random-picker
  - pluginRef: latency-slo-admitter
"""


def room(ttft: float, tpot: float = 0.01, requests: int = 1) -> LatencyHeadroom:
    return LatencyHeadroom(ttft, tpot, ttft > 0, tpot > 0, 1.0 - ttft, requests)


def with_rooms(rooms: Mapping[Endpoint, LatencyHeadroom], **fields: Any) -> Request:
    made = with_signal(ask(**fields), LatencyHeadroom, rooms)
    return with_signal(made, PrefixMatch, {each: PrefixMatch(0, 0, 10) for each in ALL})


def producer(**parameters: object) -> PredictedLatency:
    made = PredictedLatency(**parameters)  # type: ignore[arg-type]
    made.clock = lambda: 100.0
    made.start(services(ALL))
    return made


# --- the producer


def test_headroom_is_what_is_left_of_the_slo() -> None:
    made = producer(streaming_mode=True)
    seen = made._model.predict(ask(tokens=1000), [A])[A]
    found = made.produce(ask(tokens=1000, slo=Slo(1.0, 0.05)), [A])[A]
    assert found.ttft == pytest.approx(1.0 - seen.ttft)
    assert found.tpot == pytest.approx(0.05 - seen.tpot)
    assert (found.positive, found.ttft_kept, found.tpot_kept, found.requests) == (True, True, True, 0)
    none = made.produce(ask(tokens=1000), [A])[A]
    assert (none.ttft, none.tpot) == (-seen.ttft, -seen.tpot), "without an SLO all are below 0"
    assert not none.positive


def test_the_least_tpot_slo_of_an_endpoint_and_the_buffer_count() -> None:
    made = producer(streaming_mode=True, slo_buffer_factor=0.5)
    other = ask(tokens=10, slo=Slo(tpot=0.03))
    made.on_picked(other, A)
    seen = made._model.predict(ask(tokens=10), [A])[A]
    found = made.produce(ask(tokens=10, slo=Slo(1.0, 0.05)), [A])[A]
    assert found.tpot == pytest.approx(0.5 * 0.03 - seen.tpot)
    assert found.requests == 1
    made.on_finished(other, A, Response(status=200))
    assert made.produce(ask(tokens=10, slo=Slo(1.0, 0.05)), [A])[A].tpot == pytest.approx(0.5 * 0.05, abs=0.01)


def test_without_streaming_mode_the_whole_answer_is_predicted_and_tpot_counts_as_kept() -> None:
    made = producer()
    seen = made._model.predict(ask(tokens=1000), [A])[A]
    found = made.produce(ask(tokens=1000, slo=Slo(1.0, 0.001)), [A])[A]
    assert found.predicted_ttft == pytest.approx(seen.ttft + 199 * seen.tpot)
    assert (found.tpot, found.tpot_kept) == (0.0, True)
    short = made.produce(ask(tokens=1000, max_tokens=11), [A])[A]
    assert short.predicted_ttft == pytest.approx(seen.ttft + 10 * seen.tpot)
    for _ in range(300):
        one = ask(tokens=1000)
        made.on_picked(one, B)
        made.on_finished(one, B, Response(status=200, usage=Usage(1000, 50, 0)))
    assert made.produce(ask(tokens=1000), [A])[A].predicted_ttft == pytest.approx(seen.ttft + 49 * seen.tpot, rel=0.02)


def test_a_prefill_endpoint_generates_no_tokens_and_prediction_can_be_off() -> None:
    prefill = endpoint("p", labels={"role": "prefill"})
    made = producer(streaming_mode=True, endpoint_role_label="role")
    found = made.produce(ask(tokens=1000, slo=Slo(1.0, 0.001)), [prefill, A])
    assert (found[prefill].tpot, found[prefill].tpot_kept) == (0.0, True)
    assert not found[A].tpot_kept
    assert not producer(predict_in_produce=False).produce(ask(), [A])


def test_what_it_learns_and_promises_is_the_cost_models() -> None:
    made, other = producer(), producer()
    sent = ask(tokens=1000, slo=Slo(tpot=0.03))
    made.on_picked(sent, A)
    assert isinstance(made.predictions(sent)[A], LatencyPrediction)
    told = ask(tokens=1000)
    other.from_peer(told, A, made.to_peers(sent, A))
    assert other._model.predict(ask(), [A])[A].promised == 0.03
    made.on_first_token(sent, A)
    assert made.statistics()["decodes"] == 1
    assert A in made.endpoint_statistics()
    for piece in made.snapshot():
        other.restore(piece, {"a": A})
    made.on_removed(A)
    assert A not in made.endpoint_statistics()


# --- the filter


def test_the_tier_with_headroom_is_kept_and_now_and_then_the_other() -> None:
    made = SloHeadroomTierFilter(epsilon_explore_neg=0.5)
    made.random = Random(1)
    request = with_rooms({A: room(0.5), B: room(0.5, -0.01), C: room(-0.5)})
    found = [made.filter(request, ALL) for _ in range(50)]
    assert {len(each) for each in found} == {1, 2}
    assert [A] in found
    assert [B, C] in found
    never = SloHeadroomTierFilter(epsilon_explore_neg=0.0)
    assert never.filter(request, ALL) == [A]
    assert never.filter(with_rooms({each: room(-1.0) for each in ALL}), ALL) == ALL
    assert never.filter(with_rooms({}), ALL) == ALL
    assert never.filter(with_rooms({A: room(1.0)}), ALL) == [A], "who has no prediction has no headroom"


# --- the scorer


@pytest.mark.parametrize(
    ("strategy", "rooms", "scores"),
    [
        ("least", (room(0.1), room(0.6), room(-0.1)), [1.01, 0.01, 0.0]),
        ("most", (room(0.1), room(0.6), room(-0.1)), [0.01, 1.01, 0.0]),
        ("least", (room(0.1, 0.01), room(0.1, 0.02), room(0.1, 0.03)), [1.01, 0.51, 0.01]),
        ("least", (room(0.1, 0.01), room(0.6, 0.02), room(0.6, 0.01)), [1.01, 0.01, 0.21]),
        ("most", (room(-0.5), room(-0.1), room(-0.2, requests=0)), [0.0, 0.0, 0.51]),
        ("most", (room(-0.5), room(-0.1), room(0.2, -0.02)), [0.0, 0.0, 0.51]),
        ("most", (room(-0.5, -0.01), room(-0.1), room(-0.3)), [0.0, 1.01, 0.01]),
        ("most", (room(-0.5, -0.01), room(-0.1, -0.01), room(-0.3, -0.01)), [0.01, 1.01, 0.51]),
    ],
)
def test_scores_by_headroom(strategy: str, rooms: tuple[LatencyHeadroom, ...], scores: list[float]) -> None:
    scorer = LatencyScorer(headroom_selection_strategy=strategy)  # type: ignore[arg-type]
    found = scorer.score(with_rooms(dict(zip(ALL, rooms, strict=True))), ALL)
    assert found == pytest.approx(scores, abs=0.011)


def test_without_predictions_it_is_memory_queue_and_prefix() -> None:
    idle, full = endpoint("i"), endpoint("f", waiting=4, kv_usage=0.5)
    request = with_signal(ask(), PrefixMatch, {idle: PrefixMatch(0, 0, 10), full: PrefixMatch(80, 10, 10)})
    assert LatencyScorer().score(request, [idle, full]) == [0.67, 0.5]
    kv = LatencyScorer(composite_kv_weight=0, composite_queue_weight=0, composite_prefix_weight=0)
    assert kv.score(request, [idle, full]) == [1.0, 0.5]


# --- the admitter


def test_only_requests_that_may_be_shed_are_refused_and_only_where_nothing_speaks_for_them() -> None:
    busy = [endpoint(name, running=3, kv_usage=0.5) for name in "ab"]
    missed = {each: room(-0.1) for each in busy}
    admitter, slo = LatencySloAdmitter(), Slo(1.0)
    assert "priority is -1" in admitter.refusal(with_rooms(missed, priority=-1, slo=slo), busy)
    assert admitter.refusal(with_rooms(missed, priority=0, slo=slo), busy) == ""
    assert admitter.refusal(with_rooms(missed, priority=-1), busy) == ""
    assert admitter.refusal(with_rooms({}, priority=-1, slo=slo), busy) == ""
    kept = missed | {busy[1]: room(0.1)}
    assert admitter.refusal(with_rooms(kept, priority=-1, slo=slo), busy) == ""
    for free in (endpoint("i", kv_usage=0.5), endpoint("c", running=3, kv_usage=0.01)):
        assert admitter.refusal(with_rooms(missed, priority=-1, slo=slo), [*busy, free]) == ""


# --- all of it


def test_the_charts_configuration_picks_and_sheds() -> None:
    pipeline = loaded(CHART)
    for plugin in pipeline.plugins:
        plugin.start(services(ALL))
    scheduler = pipeline.scheduler(wall_clock=lambda: 0.0, on_error=fail)
    busy = [endpoint(name, running=3, kv_usage=0.5) for name in "ab"]
    decision = scheduler.choose(ask(tokens=1000, slo=Slo(1.0, 0.05)), busy)
    assert decision.predicted is not None
    other = scheduler.choose(ask(tokens=1000, slo=Slo(1.0, 0.05)), busy)
    assert {one.endpoint.name for one in (decision, other)} <= {"a", "b"}
    with pytest.raises(SloUnmet, match="priority is -1"):
        scheduler.choose(ask(tokens=30_000, slo=Slo(0.1), priority=-1), busy)
