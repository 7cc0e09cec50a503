"""llm-d's plugins of predicted latency, on the cost model of this process: no sidecar is trained or asked.

Names, parameters and rules are those of llm-d-router v0.9 and v0.10; they differ from what `expected-ttft` does with
SLOs (docs/slo.md), which needs none of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Final, Literal

import msgspec

from epp.plugin import (
    Admitter,
    Endpoint,
    Filter,
    LatencyPrediction,
    PrefixMatch,
    Producer,
    ReadsPrefixMatch,
    Request,
    Response,
    Scorer,
    Services,
)
from epp.scheduling.cost import ExpectedTtft

_OUTPUT: Final = 200.0
"""Tokens of an answer before any was seen."""
_WEIGHT: Final = 0.02
"""Of one more answer in the mean of their tokens."""
_COLD: Final = 0.02
"""KV usage below which an endpoint is cold: nothing is known of it yet."""
_STEPS: Final = 100
"""Scores are rounded down to so many steps, so that nearly equal ones are equal."""
_EQUAL: Final = 1e-9
"""Seconds. Headrooms that differ by no more are equal."""


class LatencyHeadroom(msgspec.Struct, frozen=True, gc=False):
    """What would be left of a request's SLO at an endpoint. Seconds; below 0: it would be missed."""

    ttft: float
    """0 - predicted, where none is wanted; the same for `tpot`."""
    tpot: float
    ttft_kept: bool
    tpot_kept: bool
    predicted_ttft: float
    requests: int
    """In flight there."""

    @property
    def positive(self) -> bool:
        return self.ttft >= 0 and self.tpot >= 0


@dataclass(eq=False)
class PredictedLatency(Producer[LatencyHeadroom]):
    """`predicted-latency-producer`: SLO less predicted latency, by endpoint.

    `streaming_mode` (false): what is predicted is TTFT and TPOT; without it, the seconds of the whole answer, as long
    as answers are in the mean, stand for TTFT, and TPOT counts as kept. `slo_buffer_factor` (1.0): a TPOT SLO, or the
    least of those in flight at the endpoint if that is less, counts so many times. `endpoint_role_label` (""): where it
    says `prefill`, TPOT counts as kept. `predict_in_produce` (true): without it nothing is predicted. The others are
    those of llm-d's sidecar. Source: llm-d-router.
    """

    needs = ExpectedTtft.needs
    produces = LatencyHeadroom

    slo_buffer_factor: float = 1.0
    streaming_mode: bool = False
    endpoint_role_label: str = ""
    predict_in_produce: bool = True
    context_ttl: timedelta = timedelta(minutes=5)
    sampling_mean: float = 1000.0
    max_decode_token_samples_for_prediction: int = 0
    use_encoder_cache_features: bool = False
    encoder_cache_match_info_producer_name: str = ""
    prefix_match_info_producer_name: str = ""
    in_flight_load_producer_name: str = ""
    _model: ExpectedTtft = field(default_factory=ExpectedTtft, init=False, repr=False)
    _output: float = field(default=_OUTPUT, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.slo_buffer_factor > 0:
            raise ValueError(f"sloBufferFactor: expected more than 0, got {self.slo_buffer_factor:g}")

    def start(self, services: Services) -> None:
        self._model.name, self._model.clock, self._model.random = self.name, self.clock, self.random
        self._model.start(services)

    def produce(self, request: Request, endpoints: Sequence[Endpoint]) -> Mapping[Endpoint, LatencyHeadroom]:
        if not self.predict_in_produce:
            return {}
        seen = self._model.looked(request, endpoints)
        return {endpoint: self._headroom(request, endpoint, seen[endpoint]) for endpoint in endpoints}

    def _headroom(self, request: Request, endpoint: Endpoint, seen: LatencyPrediction) -> LatencyHeadroom:
        slo = request.slo
        ttft, wanted = seen.ttft, 0.0 if slo is None or slo.ttft is None else slo.ttft - request.waited
        tpot, tpot_kept = 0.0, True
        if not self.streaming_mode:
            most = self._output if request.max_tokens is None else min(self._output, request.max_tokens)
            ttft += seen.tpot * max(0.0, most - 1)
        elif not self.endpoint_role_label or endpoint.labels.get(self.endpoint_role_label) != "prefill":
            own = 0.0 if slo is None or slo.tpot is None else slo.tpot
            tpot = min(own, seen.promised) * self.slo_buffer_factor - seen.tpot
            tpot_kept = tpot > 0
        return LatencyHeadroom(wanted - ttft, tpot, ttft < wanted, tpot_kept, ttft, seen.requests)

    def predictions(self, request: Request) -> Mapping[Endpoint, LatencyPrediction]:
        return self._model.predictions(request)

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        self._model.on_picked(request, endpoint)

    def on_first_token(self, request: Request, endpoint: Endpoint) -> None:
        self._model.on_first_token(request, endpoint)

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        if response.usage is not None and response.usage.completion > 0:
            self._output += _WEIGHT * (response.usage.completion - self._output)
        self._model.on_finished(request, endpoint, response)

    def on_removed(self, endpoint: Endpoint) -> None:
        self._model.on_removed(endpoint)

    def to_peers(self, request: Request, endpoint: Endpoint) -> Any:
        return self._model.to_peers(request, endpoint)

    def from_peer(self, request: Request, endpoint: Endpoint, state: Any) -> None:
        self._model.from_peer(request, endpoint, state)

    def snapshot(self) -> Iterator[Any]:
        return self._model.snapshot()

    def restore(self, piece: Any, endpoints: Mapping[str, Endpoint]) -> None:
        self._model.restore(piece, endpoints)

    def statistics(self) -> Mapping[str, float]:
        """Those of `expected-ttft`."""
        return self._model.statistics()

    def endpoint_statistics(self) -> Mapping[Endpoint, Mapping[str, float]]:
        return self._model.endpoint_statistics()


@dataclass(eq=False)
class SloHeadroomTierFilter(Filter):
    """`slo-headroom-tier-filter`: keeps the endpoints with headroom for TTFT and TPOT, if there are any.

    `epsilon_explore_neg` (0..1, 0.01): with this chance the others are kept instead. Without predictions all are kept.
    Source: llm-d-router.
    """

    needs = (LatencyHeadroom,)

    epsilon_explore_neg: float = 0.01
    latency_prediction_info_producer_name: str = ""

    def __post_init__(self) -> None:
        if not 0.0 <= self.epsilon_explore_neg <= 1.0:
            raise ValueError(f"epsilonExploreNeg: expected 0 to 1, got {self.epsilon_explore_neg:g}")

    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        rooms: Mapping[Endpoint, LatencyHeadroom] = request.signals.get(LatencyHeadroom, {})
        positive = [endpoint for endpoint in endpoints if endpoint in rooms and rooms[endpoint].positive]
        if not positive or len(positive) == len(endpoints):
            return endpoints
        if self.random.random() >= self.epsilon_explore_neg:
            return positive
        kept = {*positive}
        return [endpoint for endpoint in endpoints if endpoint not in kept]


@dataclass(eq=False)
class LatencyScorer(ReadsPrefixMatch, Scorer):
    """`latency-scorer`: by headroom, TTFT's and TPOT's scaled to 0..1 and blended by `ttft_weight` and `tpot_weight`.

    Where some have headroom for both, the others score 0, and with `headroom_selection_strategy: least` those that are
    nearest to their SLO score most, with `most` those that are farthest. Where none has, those without a request in
    flight score alone, else those that miss TPOT only, else TTFT only, else all: the least miss scores most. Without
    predictions it is free KV memory, a short queue and the share of the prompt that is held, by the `composite`
    weights. `prefix_match_info_producer_name`: see `ReadsPrefixMatch`. Source: llm-d-router.
    """

    needs: ClassVar[tuple[type[Any], ...]] = (LatencyHeadroom, PrefixMatch)

    ttft_weight: float = 0.8
    tpot_weight: float = 0.2
    headroom_selection_strategy: Literal["least", "most"] = "least"
    composite_kv_weight: float = field(default=1.0, metadata={"alias": "compositeKVWeight"})
    composite_queue_weight: float = 1.0
    composite_prefix_weight: float = 1.0
    latency_prediction_info_producer_name: str = ""

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "composite_kv", "composite_queue", "composite_prefix"):
            if (value := getattr(self, f"{name}_weight")) < 0:
                raise ValueError(f"{name}_weight: expected 0 or more, got {value:g}")

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        rooms: Mapping[Endpoint, LatencyHeadroom] = request.signals.get(LatencyHeadroom, {})
        if not rooms:
            return self._composite(request, endpoints)
        of = [rooms[endpoint] for endpoint in endpoints]
        least, kept = self.headroom_selection_strategy == "least", [room.positive for room in of]
        if not any(kept):
            least, kept = True, self._least_bad(of)
        scores = self._blended([room for room, each in zip(of, kept, strict=True) if each], least)
        return [next(scores) if each else 0.0 for each in kept]

    def _least_bad(self, of: Sequence[LatencyHeadroom]) -> list[bool]:
        tiers: Sequence[Callable[[LatencyHeadroom], bool]] = (
            lambda room: room.requests == 0,
            lambda room: room.ttft >= 0,
            lambda room: room.tpot >= 0,
        )
        for tier in tiers:
            if any(found := [tier(room) for room in of]):
                return found
        return [True] * len(of)

    def _blended(self, of: Sequence[LatencyHeadroom], least: bool) -> Iterator[float]:
        ttfts, tpots = [abs(room.ttft) for room in of], [abs(room.tpot) for room in of]
        both = self.ttft_weight + self.tpot_weight
        weight = self.ttft_weight / both if both else 1.0
        first, last = max(ttfts) - min(ttfts) > _EQUAL, max(tpots) - min(tpots) > _EQUAL
        if first != last:
            weight = 1.0 if first else 0.0
        for ttft, tpot in zip(_scaled(ttfts), _scaled(tpots), strict=True):
            share = weight * ttft + (1 - weight) * tpot
            yield (int((1 - share if least else share) * _STEPS) + 1) / _STEPS

    def _composite(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        weights = self.composite_kv_weight, self.composite_queue_weight, self.composite_prefix_weight
        kv, queue, prefix = weights if sum(weights) else (1.0, 0.0, 0.0)
        longest = max(endpoint.load.waiting for endpoint in endpoints)
        matches = self.matches(request)
        scores = []
        for endpoint in endpoints:
            short = 1 - endpoint.load.waiting / longest if longest else 1.0
            held = matches[endpoint].share if endpoint in matches else 0.0
            score = kv * (1 - endpoint.load.kv_usage) + queue * short + prefix * held
            scores.append(round(score / (kv + queue + prefix) * _STEPS) / _STEPS)
        return scores


def _scaled(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high - low > _EQUAL else 0.5 for value in values]


@dataclass(eq=False)
class LatencySloAdmitter(Admitter):
    """`latency-slo-admitter`: requests of negative priority with an SLO get 429 where no endpoint would keep it, none
    is idle and none is cold (KV usage below 2 %). Source: llm-d-router.
    """

    needs = (LatencyHeadroom,)

    latency_prediction_info_producer_name: str = ""

    def refusal(self, request: Request, endpoints: Sequence[Endpoint]) -> str:
        rooms: Mapping[Endpoint, LatencyHeadroom] = request.signals.get(LatencyHeadroom, {})
        if request.priority >= 0 or request.slo is None or not rooms:
            return ""
        for endpoint in endpoints:
            room, load = rooms.get(endpoint), endpoint.load
            if load.running == 0 or load.kv_usage < _COLD or (room is not None and room.ttft_kept and room.tpot_kept):
                return ""
        return f"no endpoint would keep the SLO of this request, whose priority is {request.priority}; retry later"
