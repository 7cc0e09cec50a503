"""PUBLIC: what a plugin author needs in tests: an endpoint, a request, and the decision a configuration makes of them.

def test_short_queue_wins() -> None:
    idle, busy = endpoint("a"), endpoint("b", waiting=9)
    assert decide(CONFIG, [idle, busy], request("hello")).endpoint is idle
"""

import asyncio
import random
import zlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from epp.configuration import loader
from epp.flow.guards import Guards
from epp.flow.limits import Limits
from epp.plugin import Endpoint, Load, NoTokens, Request, Services
from epp.pool.engines import ALL_ENGINES
from epp.scheduling.decision import Decision

__all__ = ["decide", "endpoint", "request", "services"]


def endpoint(name: str = "pod", *, address: str = "", labels: Mapping[str, str] | None = None, **load: Any) -> Endpoint:
    """An endpoint; `load` are fields of `Load`. Without an `address` it gets one made of its name, always the same."""
    a, b, c = zlib.crc32(name.encode()).to_bytes(4, "big")[:3]
    return Endpoint(name, address or f"10.{a}.{b}.{c}:8000", labels or {}, Load(**load))


def request(prompt: str | bytes = "hello", model: str = "llama", **fields: Any) -> Request:
    """A request; `fields` are those of `Request`. Without `tokens` it has one for each four bytes of its prompt."""
    raw = prompt.encode() if isinstance(prompt, str) else prompt
    fields.setdefault("tokens", len(raw) // 4)
    return Request(id=fields.pop("id", "test"), model=model, prompt=raw, **fields)


def services(endpoints: Sequence[Endpoint] = (), **given: Any) -> Services:
    """What a plugin of a pool of these endpoints gets; `given` are fields of `Services`.

    Without them its reports are dropped, the wall clock stands at 0, no prompt's tokens are known, and work for each
    endpoint is done for those that are there.
    """

    async def for_each_endpoint(
        what: str, work: Callable[[Endpoint], Coroutine[Any, Any, None]], left: Callable[[Endpoint], None]
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for endpoint in endpoints:
                group.create_task(work(endpoint), name=f"{what} {endpoint.name}")
            await asyncio.Event().wait()

    def degraded(reason: str, detail: str = "", *, lasting: bool = False) -> None:
        pass

    async def tokens(request: Request) -> Sequence[int]:
        raise NoTokens("no-tokenizer", "a test has none")

    async def samples(address: str, path: str, metric: str) -> Sequence[tuple[Mapping[str, str], float]]:
        raise OSError("a test reads no pages")

    defaults: dict[str, Any] = {
        "endpoints": lambda: endpoints,
        "for_each_endpoint": for_each_endpoint,
        "tokens": tokens,
        "samples": samples,
        "degraded": degraded,
        "recovered": lambda reason: None,
        "wall_clock": lambda: 0.0,
        "engine_of": ALL_ENGINES.of,
    }
    return Services(**defaults | given)


def decide(config_text: str, endpoints: Sequence[Endpoint], request: Request) -> Decision:
    """What the configuration (EndpointPickerConfig YAML) decides for `request`, from a cold start, the same each time.

    Guards and limits come first: what they refuse raises the EppError that the client gets. A plugin's exception comes
    through as it is. Raises ConfigError, and EppError as a client would get it. Opens an event loop of its own: call it
    where none runs.
    """
    pipeline = loader.load_text(config_text, clock=lambda: 0.0, random=random.Random(0))
    for plugin in pipeline.plugins:
        plugin.start(services(endpoints, engine_of=pipeline.engines.of))
    scheduler = pipeline.scheduler(wall_clock=lambda: 0.0, on_error=_raise)
    request = Guards(pipeline.guards, _raise).check(request)
    if pipeline.limits is not None:
        request = Limits(pipeline.limits, lambda: 0.0, lambda tenant, limit: None, lambda: None).admit(request)
    return scheduler.choose(asyncio.run(scheduler.prepare(request)), endpoints)


def _raise(plugin: str, error: Exception) -> None:
    raise error
