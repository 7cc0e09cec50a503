"""`p2p-source-producer`: who is named as the source of KV, by the rules of llm-d's."""

from collections.abc import Mapping

import pytest

from epp.errors import ConfigError
from epp.plugin import Endpoint, Load, PrefixMatch, Request
from epp.scheduling.kv_source import P2pSource
from tests.support.scheduling.pipelines import loaded

HEADER = "x-kv-cache-source-host-port"
CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: p2p-source-producer, parameters: {minCachedTokenDelta: %s, prefillProfileName: prefill}}
- {type: queue-scorer}
"""


def endpoint(name: str, waiting: int = 0) -> Endpoint:
    return Endpoint(name, f"10.0.0.{name}:8000", load=Load(waiting=waiting))


def named(held: dict[Endpoint, int], computes: Endpoint, delta: int = 1, identity: str = "r") -> str | None:
    plugin = loaded(CONFIG % delta).registry["p2p-source-producer"].plugin
    assert isinstance(plugin, P2pSource)
    matches = {each: PrefixMatch(tokens, tokens // 64, 20) for each, tokens in held.items()}
    request = Request(id=identity, model="m", signals={PrefixMatch: matches})
    return plugin.request_headers(request, computes).get(HEADER)


A, B, C = endpoint("1"), endpoint("2"), endpoint("3", waiting=3)


def test_who_holds_more_than_the_one_that_computes() -> None:
    assert named({A: 64, B: 640, C: 128}, A) == B.address
    assert named({A: 640, B: 640, C: 128}, A) is None
    assert named({A: 64, B: 640}, A, delta=577) is None
    assert named({A: 64, B: 640}, A, delta=576) == B.address
    assert named({A: 0, B: 0}, A) is None
    assert named({B: 640}, A) is None


def test_those_within_a_block_of_the_most_share_by_their_queues() -> None:
    found = [named({A: 0, B: 640, C: 576}, A, identity=str(number)) for number in range(400)]
    assert set(found) == {B.address, C.address}
    assert 260 < found.count(B.address) < 380, "four of five, since three wait at the other"
    assert named({A: 0, B: 640, C: 575}, A, identity="1") == B.address


def test_a_delta_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="minCachedTokenDelta: expected 1 or more, got 0"):
        loaded(CONFIG % 0)


async def test_the_request_goes_with_the_header() -> None:
    pipeline = loaded(CONFIG % 1 + "- {type: random-picker}\n")
    scheduler = pipeline.scheduler(wall_clock=lambda: 0.0, on_error=lambda name, error: pytest.fail(f"{name}: {error}"))

    async def ask(*endpoints: Endpoint) -> Mapping[str, str]:
        request = Request(id="r", model="m", prompt=bytes(range(256)) * 16, tokens=1024)
        return scheduler.choose(await scheduler.prepare(request), endpoints).headers

    assert HEADER not in await ask(A)
    found = {(await ask(A, B)).get(HEADER) for _ in range(40)}
    assert A.address in found
