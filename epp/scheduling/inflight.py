"""`InFlightLoad`: our own accounts of what each endpoint is working on, exact and instant."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from epp.plugin import Endpoint, InFlight, Producer, ReadsPrefixMatch, Request, Response, Slot

_IDLE = InFlight(0, 0)


@dataclass(eq=False)
class InFlightLoad(ReadsPrefixMatch, Producer[InFlight]):
    """`inflight-load-producer`: requests and uncached prompt tokens in flight, by endpoint.

    A request counts from the pick to its end. Its prompt tokens, less those the endpoint holds where a `PrefixMatch`
    producer ran, count until its first token is seen (prefill is done then), or else until its end.

    `add_estimated_output_tokens` (false): also count tokens to be generated, until the end: prompt tokens (cached or
    not) times `output_ratio` (1.5), at most the request's own `max_tokens` and `max_estimated_output_tokens` (tokens,
    no bound). `prefix_match_info_producer_name`: see `ReadsPrefixMatch`. Source: llm-d-router.

    An endpoint is remembered while it has requests, so there is nothing to forget when it leaves the pool.
    """

    produces = InFlight
    needs: ClassVar[tuple[type[Any], ...]] = ()  # where nobody finds out what is held, all tokens count

    add_estimated_output_tokens: bool = False
    output_ratio: float = 1.5
    max_estimated_output_tokens: int | None = None
    _load: dict[Endpoint, InFlight] = field(default_factory=dict, init=False, repr=False)
    _counted: Slot[tuple[int, int]] = field(default_factory=Slot, init=False, repr=False)
    """Tokens of its prompt and of its answer that a request counts for."""

    def __post_init__(self) -> None:
        if not self.output_ratio >= 0.0:
            raise ValueError(f"outputRatio: expected 0 or more, got {self.output_ratio}")
        if self.max_estimated_output_tokens is not None and self.max_estimated_output_tokens < 0:
            raise ValueError(f"maxEstimatedOutputTokens: expected 0 or more, got {self.max_estimated_output_tokens}")

    def produce(self, request: Request, endpoints: Sequence[Endpoint]) -> Mapping[Endpoint, InFlight]:
        load = self._load
        return {endpoint: load.get(endpoint, _IDLE) for endpoint in endpoints}

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        match = self.matches(request).get(endpoint)
        prompt = max(0, request.tokens - match.tokens) if match is not None else request.tokens
        if request.stage == "decode":  # it comes computed
            prompt = 0
        output = self._output(request) if self.add_estimated_output_tokens else 0
        self._count(request, endpoint, prompt, output)

    def to_peers(self, request: Request, endpoint: Endpoint) -> Any:
        """The tokens that it counts for, of its prompt and of its answer."""
        return self._counted.get(request)

    def from_peer(self, request: Request, endpoint: Endpoint, state: Any) -> None:
        prompt, output = state or (request.tokens, 0)
        self._count(request, endpoint, int(prompt), int(output))

    def _count(self, request: Request, endpoint: Endpoint, prompt: int, output: int) -> None:
        self._counted.set(request, (prompt, output))
        requests, tokens = self._load.get(endpoint, _IDLE)
        self._load[endpoint] = InFlight(requests + 1, tokens + prompt + output)

    def on_first_token(self, request: Request, endpoint: Endpoint) -> None:
        prompt, output = self._counted.get(request) or (0, 0)
        self._counted.set(request, (0, output))
        requests, tokens = self._load[endpoint]
        self._load[endpoint] = InFlight(requests, tokens - prompt)

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        prompt, output = self._counted.take(request) or (0, 0)
        requests, tokens = self._load[endpoint]
        if requests == 1:
            del self._load[endpoint]
        else:
            self._load[endpoint] = InFlight(requests - 1, tokens - prompt - output)

    def statistics(self) -> Mapping[str, float]:
        """`requests` and `uncached_tokens` in flight to all endpoints together."""
        return {
            "requests": sum(load.requests for load in self._load.values()),
            "uncached_tokens": sum(load.uncached_tokens for load in self._load.values()),
        }

    def _output(self, request: Request) -> int:
        estimate = int(request.tokens * self.output_ratio)
        bounds = (request.max_tokens, self.max_estimated_output_tokens)
        return min(estimate, *(bound for bound in bounds if bound is not None), estimate)
