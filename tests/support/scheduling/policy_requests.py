"""Requests to endpoints in a given state, for policies that are other projects'."""

from collections.abc import Mapping, Sequence
from typing import Any

from epp.plugin import Endpoint, InFlight, PrefixMatch, Request, Scorer
from tests.support.scheduling.signals import with_signal


def pods(count: int) -> list[Endpoint]:
    return [Endpoint(f"pod-{i}", f"10.0.0.{i}:8000") for i in range(count)]


def ask(
    endpoints: Sequence[Endpoint],
    prompt: bytes = b"",
    *,
    in_flight: Sequence[tuple[int, int]] = (),
    held: Sequence[int] = (),
    **fields: Any,
) -> Request:
    """`in_flight`: (requests, uncached tokens) and `held`: tokens, endpoint by endpoint, none where not said."""
    fields.setdefault("tokens", len(prompt) // 4)
    request = Request(id="r", model=fields.pop("model", "m"), prompt=prompt, **fields)
    loads = [*in_flight, *[(0, 0)] * (len(endpoints) - len(in_flight))]
    tokens = [*held, *[0] * (len(endpoints) - len(held))]
    request = with_signal(request, InFlight, {e: InFlight(*load) for e, load in zip(endpoints, loads, strict=True)})
    request = with_signal(
        request, PrefixMatch, {e: PrefixMatch(n, 0, 0) for e, n in zip(endpoints, tokens, strict=True)}
    )
    return request


def winners(scorer: Scorer, request: Request, endpoints: Sequence[Endpoint]) -> set[int]:
    """Numbers of the endpoints with the best score."""
    scores = scorer.score(request, endpoints)
    assert len(scores) == len(endpoints)
    return {i for i, score in enumerate(scores) if score == max(scores)}


def send(scorer: Scorer, request: Request, *to: Endpoint) -> None:
    for endpoint in to:
        scorer.on_picked(request, endpoint)


def text(of: Mapping[int, int] | int, size: int = 128) -> bytes:
    """Distinct pieces of `size` bytes: `text(3)` is pieces 0, 1, 2."""
    pieces = range(of) if isinstance(of, int) else [piece for piece, count in of.items() for _ in range(count)]
    return b"".join(f"{piece:0{size}d}".encode() for piece in pieces)
