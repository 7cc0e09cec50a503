"""A caller's trace through a real Envoy and the picker to a collector, and on to the endpoint."""

from pathlib import Path

import pytest

from tests.support.gateway.chain import eventually, laptop
from tests.support.process.otlp import Collector, attributes

pytestmark = pytest.mark.envoy

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = f"00-{TRACE}-b7ad6b7169203331-01"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"


async def test_a_trace_goes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with Collector().running() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        async with laptop(tmp_path, flags=("--tracing",)) as chain:
            chain.raw.answer = ANSWER
            answer = await chain.chat("hello", headers={"x-pool": "raw", "traceparent": CALLER})
            assert answer.status == 200

            async def spans() -> int:
                return len(collector.named("gateway.request"))

            await eventually(spans, lambda count: count == 1)
            (span,) = collector.named("gateway.request")
            assert span.trace_id.hex() == TRACE
            assert attributes(span)["http.response.status_code"] == "200"
            (asked,) = [each for each in chain.raw.asked if each.startswith(b"POST ")]  # its models are asked for too
            assert f"traceparent: 00-{TRACE}-{span.span_id.hex()}-01".encode() in asked.lower()
            refused = await chain.chat("hello", headers={"x-pool": "nobody", "traceparent": CALLER})
            assert refused.status == 503
            await eventually(spans, lambda count: count == 2)
