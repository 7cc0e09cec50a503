"""Everything that clients and endpoints can name is named anew by each request: tables and labels stay within bounds.

A whole picker in this process, on real sockets. Its tables are found by looking at every object of its classes, so that
one that is added tomorrow is looked at too. `pytest -s` prints them.
"""

import asyncio
import functools
import gc
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence, Sized
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import aiohttp
import pytest
import zmq
import zmq.asyncio
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from epp.admin.recorder import KEPT
from epp.app import Settings, serve
from epp.extproc.http2 import CLOSED_KEPT
from epp.flow import limits, policies
from epp.pool.engines import MOST_KEPT
from epp.scheduling import adapters
from epp.telemetry import metrics_table, series
from tests.support.engines.kv_events import batch, stored
from tests.support.ext_proc.made_up import made_up
from tests.support.ext_proc.server import Gateway
from tests.support.gateway.chain import eventually
from tests.support.process.waiting import beside
from tests.support.process.web_server import serving
from tooling.laptop.ports import free_ports

pytestmark = pytest.mark.long

FLOOD = 1500
"""Requests of a flood; more than any bound that is set here."""
BOUND = 300
"""Of tables whose bounds can be set, or are constants that are made small for this."""
NAMES = 400
"""Adapters and models that an endpoint's pages name anew each time."""

REACHED = {
    "Limits._tenants": BOUND,
    "Bindings._bound": BOUND,
    "Models._candidates": BOUND,
    "Models._labelled": metrics_table.MAX_MODELS,
    "FlowSeries._ids": metrics_table.MAX_FLOWS,
    "LimitSeries._tenants": metrics_table.MAX_FLOWS,
    "Adapters.known": BOUND,
}
"""Tables that a flood fills, and their bounds."""
LABELS = {
    "model": metrics_table.MAX_MODELS + 1,
    "fairness_id": metrics_table.MAX_FLOWS + 1,
    "tenant": metrics_table.MAX_FLOWS + 1,
}

CONFIG = f"""
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- type: agent-identity
- type: precise-prefix-cache-producer
  parameters:
    maxEventBlocks: {BOUND}
    lruCapacityPerServer: 3000
    kvEventsConfig: {{podDiscoveryConfig: {{socketPort: PORT}}}}
- type: approx-prefix-cache-producer
  parameters: {{lruCapacityPerServer: 3000}}
- type: session-affinity-scorer
  parameters: {{strategy: session_id, maxSessions: {BOUND}}}
- type: expected-ttft
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: session-affinity-scorer
  - pluginRef: expected-ttft
  - pluginRef: max-score-picker
flowControl:
  defaultRequestTTL: 5s
  noEndpointRequestTTL: 50ms
limits:
  tenant: {{header: x-tenant}}
  maxOutputTokens: 100
"""


@dataclass
class HostileEndpoint:
    """Names other adapters and models each time it is asked."""

    address: str = ""
    numbers: Iterator[int] = field(default_factory=count)

    async def metrics(self, request: web.Request) -> web.Response:
        first = next(self.numbers) * NAMES
        names = [f"adapter-{n}" for n in range(first, first + NAMES)]
        lora = f'max_lora="4",running_lora_adapters="{",".join(names)}",waiting_lora_adapters=""'
        lines = [f"vllm:lora_requests_info{{{lora}}} {first}"]
        lines += [f'vllm:num_requests_running{{model_name="{name}"}} 1' for name in names]
        lines += [
            f'vllm:e2e_request_latency_seconds_{part}{{model_name="{name}",le="1"}} {first}'
            for name in names
            for part in ("bucket", "count", "sum")
        ]
        return web.Response(text="\n".join(lines))

    async def models(self, request: web.Request) -> web.Response:
        first = next(self.numbers) * NAMES
        return web.json_response({"data": [{"id": f"lora-{n}", "parent": "m"} for n in range(first, first + NAMES)]})

    @asynccontextmanager
    async def running(self) -> AsyncIterator["HostileEndpoint"]:
        made = web.Application()
        made.router.add_get("/metrics", self.metrics)
        made.router.add_get("/v1/models", self.models)
        async with serving(made) as self.address:
            yield self


async def flood(gateway: Gateway, publisher: zmq.asyncio.Socket, endpoint: str, first: int) -> Counter[str]:
    told: Counter[str] = Counter()
    for start in range(first, first + FLOOD, 30):
        numbers = range(start, start + 30)
        events = [stored([n] * 16, lora_name=f"lora-{n}", lora_id=n, group_idx=n, medium=f"M{n}") for n in numbers]
        events += [stored([n, *range(15)]) for n in numbers] + [stored([n] * 16, start=2) for n in numbers]
        await publisher.send_multipart([b"kv@%d@m" % start, (start).to_bytes(8, "big"), batch(*events)])
        told.update(await asyncio.gather(*(made_up(gateway, n, endpoint) for n in numbers)))
    return told


def tables() -> dict[str, int]:
    """`Class.attribute` of the picker's objects -> the most that one of them holds."""
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        if isinstance(each, functools._lru_cache_wrapper):
            if str(each.__module__).startswith("epp."):
                found[f"{each.__module__}.{each.__name__}"] = each.cache_info().currsize
        elif str(kind.__module__).startswith("epp."):
            slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
            for name in (*slots, *getattr(each, "__dict__", ())):
                value = getattr(each, name, None)
                if (
                    isinstance(value, Sized)
                    and not isinstance(value, str | bytes | type)
                    and hasattr(value, "__iter__")
                ):
                    found[f"{kind.__name__}.{name}"] = max(found[f"{kind.__name__}.{name}"], len(value))
    return dict(found)


async def labels(port: int) -> dict[str, int]:
    """Label -> how many values it has; `series`: how many there are."""
    async with aiohttp.request("GET", f"http://127.0.0.1:{port}/metrics") as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    values: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            for name, value in sample.labels.items():
                values.setdefault(name, set()).add(value)
    return {name: len(found) for name, found in values.items()} | {"series": sum(len(f.samples) for f in families)}


def show(title: str, columns: Sequence[dict[str, int]]) -> None:
    """Those that are not small."""
    print(f"\n{title:48}" + "".join(f"{name:>10}" for name in ("before", "flood 1", "flood 2", "flood 3")))
    for name in sorted(columns[-1], key=lambda name: -columns[-1][name]):
        if columns[-1][name] > 30:
            print(f"{name:48}" + "".join(f"{column.get(name, 0):10}" for column in columns))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds beyond what a test sends, made small."""
    monkeypatch.setattr(limits, "MAX_TENANTS", BOUND)
    monkeypatch.setattr(policies, "_PROGRAMS", BOUND)
    monkeypatch.setattr(adapters, "_MOST", BOUND)
    monkeypatch.setattr(adapters, "_MOST_IDLE", BOUND)
    monkeypatch.setattr(series, "CANDIDATES", BOUND)


async def test_whatever_is_named_anew_tables_and_labels_stay_within_bounds(tmp_path: Path, small: None) -> None:
    events, ext_proc, health, metrics, silent = free_ports(5)
    file = tmp_path / "endpoints.yaml"
    async with HostileEndpoint().running() as endpoint, Gateway(ext_proc) as gateway:
        host, _, port = endpoint.address.rpartition(":")
        file.write_text(
            f"endpoints: [{{name: a, address: {host}, port: {port}}}, {{name: b, address: {host}, port: {silent}}}]"
        )
        settings = Settings(
            endpoints=(file,),
            config_text=CONFIG.replace("PORT", str(events)),
            grpc_port=(ext_proc,),
            grpc_health_port=health,
            metrics_port=metrics,
            refresh_metrics_interval=0.1,
            trust_client_headers=True,
            stall_limit=0,  # this test's own looks hold up the loop for seconds where the machine has much to do
        )

        async def serving() -> None:
            await serve(settings)

        with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as publisher:
            publisher.bind(f"tcp://127.0.0.1:{events}")
            async with beside(serving()):
                await eventually(lambda: labels(metrics), lambda found: "series" in found)
                seen, shown, routed = [tables()], [await labels(metrics)], []
                for number in range(3):
                    told = await flood(gateway, publisher, endpoint.address, 1 + number * FLOOD)
                    routed.append(told["routed"])
                    gc.collect()
                    seen.append(tables())
                    shown.append(await labels(metrics))
    show("tables", seen)
    show("labels", shown)
    assert min(routed) > FLOOD / 2
    reached = {name: seen[-1][name] for name in REACHED}
    assert reached == REACHED
    # Some tables hold what is under way, and a flood ends at another moment than the one before.
    few = FLOOD // 10
    # The first keeps more than all of this, the second begins anew with each connection of the gateway's, and the third
    # grows by a page of each ten seconds, so how full it is depends on how long a flood takes.
    rings = {
        "Decisions._records": min(KEPT, sum(routed)),
        "Connection._closed": CLOSED_KEPT,
        "epp.pool.engines._bucket": MOST_KEPT,
    }
    assert {name: n for name, n in seen[-1].items() if n > rings.get(name, seen[-2].get(name, 0) + few)} == {}
    names = {name for name in shown[-1] if name != "series" and shown[-1][name] > shown[-2].get(name, 0)}
    assert names <= {"reason"}  # of a degradation; ours to name, and of a busy machine one may come late
    assert shown[-1]["series"] <= shown[-2]["series"] * 1.05
    assert {name: shown[-1][name] for name in LABELS} == LABELS
