"""Spans through OpenTelemetry's own collector: a request's stages and its bill, as it takes them and hands them on.

In this lane, since the collector is built from Go modules.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from tests.support.gateway.chain import eventually, laptop
from tests.support.process.otlp import Collector, attributes
from tooling.laptop.ports import free_ports, is_free

pytestmark = pytest.mark.envoy

TRACE = "0af7651916cd43dd8448eb211c80319c"


@asynccontextmanager
async def collector(folder: Path, to: str) -> AsyncIterator[str]:
    """Where it takes spans, which it sends to `to`."""
    program = shutil.which("otel-collector")
    assert program is not None, "otel-collector is not there; `hack/test kubernetes` builds it"
    [port] = free_ports(1)
    config = {
        "receivers": {"otlp": {"protocols": {"grpc": {"endpoint": f"127.0.0.1:{port}"}}}},
        "exporters": {"otlp_grpc": {"endpoint": to, "tls": {"insecure": True}}},
        "service": {
            "telemetry": {"metrics": {"level": "none"}, "logs": {"level": "error"}},
            "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["otlp_grpc"]}},
        },
    }
    (folder / "collector.yaml").write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(program, "--config", str(folder / "collector.yaml"))

    async def listens() -> bool:
        return not is_free(port)

    try:
        await eventually(listens, bool)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


async def test_a_request_is_a_trace_of_its_stages_with_the_bill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    (tmp_path / "chain").mkdir()
    with Collector().running() as kept:
        async with collector(tmp_path, kept.url) as url:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
            async with laptop(tmp_path / "chain", pods=2, wiring="full-duplex", flags=("--tracing=true",)) as chain:
                answer = await chain.chat("say it " * 200, headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"})
                assert answer.status == 200

                async def ended() -> bool:
                    return bool(kept.named("gateway.request"))

                await eventually(ended, bool)
    (whole,), (outer,) = kept.named("gateway.request"), kept.named("gateway.request_orchestration")
    assert {span.trace_id.hex() for span in kept.spans} == {TRACE}
    stages = {span.name: span for span in kept.spans if span.parent_span_id == outer.span_id}
    assert stages.keys() == {"warmpath.parse", "warmpath.prepare", "warmpath.choose"}
    times = [(span.start_time_unix_nano, span.end_time_unix_nano) for span in (whole, *stages.values())]
    assert all(times[0][0] <= begin <= end <= times[0][1] for begin, end in times)
    said = attributes(stages["warmpath.choose"])
    bill = [float(value) for name, value in said.items() if name.startswith("warmpath.bill.")]
    assert len(bill) > 5
    assert sum(bill) == pytest.approx(float(said["warmpath.cost_ms"]), abs=0.01)
    assert said["warmpath.next.endpoint"] != said["warmpath.endpoint"] == attributes(whole)["warmpath.endpoint"]
    assert [event.name for event in whole.events] == ["first token"]
    assert {resource["service.name"] for resource in kept.resources} == {"warmpath"}
