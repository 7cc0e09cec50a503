"""Decisions as the scheduler makes them, without a scheduler."""

from collections.abc import Sequence

from epp.plugin import Endpoint, Load, PrefixMatch, Request
from epp.scheduling.decision import Decision, ProfileRun, Scored
from tests.support.scheduling.signals import with_signal

SECRET = "a prompt nobody may read"


def endpoint(n: int, load: Load | None = None) -> Endpoint:
    return Endpoint(f"default/pod-{n}", f"10.0.0.{n}:8000", {"zone": "a"}, load or Load())


def decision(
    request_id: str,
    endpoints: Sequence[Endpoint],
    *,
    model: str = "m",
    cached: int | None = None,
    at: float = 0.0,
    headers: dict[str, str] | None = None,
) -> Decision:
    """A request of 100 tokens for the first endpoint, at 12 ms; `cached`: how much of it each is said to hold."""
    body = f'{{"model":"{model}","prompt":"{SECRET}"}}'.encode()
    request = Request(id=request_id, model=model, prompt=SECRET.encode(), tokens=100, body=body, headers=headers or {})
    if cached is not None:
        request = with_signal(request, PrefixMatch, {e: PrefixMatch(cached, 1, 10) for e in endpoints})
    costs = [(0.002 + i, 0.01) for i in range(len(endpoints))]
    scored = Scored("expected-ttft", 1.0, [1.0 / (i + 1) for i in range(len(endpoints))], ("queue", "work"), costs)
    run = ProfileRun("default", [("healthy", [])], endpoints, [scored], [1.0] * len(endpoints), list(endpoints))
    return Decision(request, list(endpoints), {}, [run], at)
