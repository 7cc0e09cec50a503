import asyncio
import json
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from epp.admin.decisions import Decisions
from epp.admin.recorder import Recorder
from epp.admin.server import MOST, AdminServer
from epp.errors import ConfigError
from epp.plugin import Endpoint, Response
from epp.telemetry.metrics import Metrics
from tests.support.decisions import SECRET, decision, endpoint


@dataclass
class APool:
    name: str
    endpoints: tuple[Endpoint, ...]


class House:
    """An admin server on a free port, and what it shows."""

    def __init__(self) -> None:
        self.pool = APool("p", (endpoint(1), endpoint(2)))
        self.metrics = Metrics()
        self.metrics.add_pool(self.pool)
        self.decisions = Decisions()
        self.recorder = Recorder("p", self.metrics, self.decisions, wall_clock=lambda: 1.0)
        self.reasons: list[str] = []
        self.server = AdminServer(
            self.metrics, [self.pool], self.decisions, lambda: self.reasons, lambda: "pipeline: <default>\n", port=0
        )

    def request(self, request_id: str) -> None:
        made = decision(request_id, self.pool.endpoints, cached=50)
        self.recorder.decided(made, 0.0)
        self.recorder.finished(made, Response(status=200))

    async def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{self.server.port}") as session:
            async with session.request(method, path, headers=headers) as answer:
                return answer.status, answer.content_type, await answer.text()

    async def json(self, path: str, status: int = 200) -> Any:
        got, content_type, text = await self.get(path)
        assert (got, content_type) == (status, "application/json")
        return json.loads(text)


async def test_metrics_come_in_the_format_asked_for() -> None:
    house = House()
    async with house.server:
        house.request("r1")
        status, content_type, text = await house.get("/metrics")
        assert (status, content_type) == (200, "text/plain")
        assert 'warmpath_requests_total{model="m",status="200"} 1.0' in text
        status, content_type, text = await house.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert (status, content_type) == (200, "application/openmetrics-text")
        assert text.endswith("# EOF\n")


async def test_ready_tells_why_not() -> None:
    house = House()
    async with house.server:
        assert await house.json("/ready") == {"ready": True, "reasons": []}
        house.reasons = ["pool p is not synced", "draining"]
        assert (await house.json("/ready", 503))["reasons"] == ["pool p is not synced", "draining"]
        assert (await house.get("/healthz"))[0] == 200


async def test_endpoints_and_decisions_are_shown() -> None:
    house = House()
    async with house.server:
        for n in range(5):
            house.request(f"r/{n}")
        pool = (await house.json("/endpoints"))["pools"][0]
        assert [(e["name"], e["share"]) for e in pool["endpoints"]] == [("default/pod-1", 1.0), ("default/pod-2", 0.0)]
        shown = (await house.json("/decisions?limit=2"))["decisions"]
        assert [one["request_id"] for one in shown] == ["r/4", "r/3"]
        assert shown[0]["profiles"][0]["endpoints"][0]["bill_ms"] == {"queue": 2.0, "work": 10.0}
        assert (await house.json("/decisions/r%2F3"))["request_id"] == "r/3"
        assert (await house.json("/decisions/r/3"))["outcome"]["status"] == 200
        missing = (await house.json("/decisions/none", 404))["error"]
        assert (missing["type"], missing["param"]) == ("not_found_error", "request_id")


async def test_the_page_shows_them_and_loads_nothing() -> None:
    house = House()
    async with house.server:
        house.request("r1")
        status, content_type, text = await house.get("/")
        assert (status, content_type) == (200, "text/html")
        assert "default/pod-2" in text
        assert "default: 1 of 2, 12.0 ms" in text
        assert SECRET not in text
        assert "://" not in text
        status, content_type, text = await house.get("/config")
        assert (status, content_type, text) == (200, "text/plain", "pipeline: <default>\n")


@pytest.mark.parametrize("limit", ["0", "-1", "x", "", "1.5", str(MOST + 1), "9" * 5000, "%C2%B2", "1e3"])
async def test_a_wrong_limit_is_refused_by_name(limit: str) -> None:
    house = House()
    async with house.server:
        error = (await house.json(f"/decisions?limit={limit}", 400))["error"]
        assert error["param"] == "limit"
        assert len(error["message"]) < 200


async def test_unknown_paths_and_methods_get_json_errors() -> None:
    house = House()
    async with house.server:
        assert (await house.json("/nothing", 404))["error"]["type"] == "invalid_request_error"
        status, _, text = await house.get("/metrics", "POST")
        assert status == 405
        assert "POST /metrics" in text


async def test_a_port_in_use_is_one_clear_sentence() -> None:
    house, other = House(), House()
    async with house.server:
        other.server.port = house.server.port
        with pytest.raises(ConfigError, match=rf"^--metrics-port: 127.0.0.1:{house.server.port} is in use by another"):
            await other.server.__aenter__()


async def test_leaving_closes_the_door_though_a_client_stays() -> None:
    house = House()
    async with house.server:
        reader, writer = await asyncio.open_connection("127.0.0.1", house.server.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"200" in await reader.readline()
    assert (await reader.read()).endswith(b"ok\n")  # and then the end
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", house.server.port)
    writer.close()
