"""A list of endpoints meets an Envoy whose cluster takes one address: every request fails, and the picker says so."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from epp import protocol
from epp.extproc.server import Settings
from gateway.envoy import running_envoy
from tests.support.ext_proc.server import LOOPBACK, Route, ext_proc_server
from tests.support.gateway import envoy
from tests.support.process.waiting import until
from tests.support.scheduling.degradations import RecordedMetrics

pytestmark = [pytest.mark.envoy]


def original_dst() -> dict[str, Any]:
    """The one address in the header is the endpoint."""
    config = {"use_http_header": True, "http_header_name": protocol.DESTINATION}
    return {
        "name": "pods",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "1s",
        "original_dst_lb_config": config,
    }


async def test_original_dst_takes_one_address(tmp_path: Path) -> None:
    route, metrics = Route("127.0.0.1:1,127.0.0.1:2"), RecordedMetrics()
    async with ext_proc_server(route, Settings(listen=LOOPBACK, health=LOOPBACK), metrics) as served:
        config = envoy.config(served.ports[0], [])
        config["static_resources"]["clusters"][1] = original_dst()
        async with running_envoy(config, directory=tmp_path) as running, aiohttp.ClientSession() as http:
            port = (await envoy.ports(running))["lean"]
            async with http.post(f"http://127.0.0.1:{port}/", data=b"{}") as answer:
                assert (answer.status, await answer.text()) == (503, "no healthy upstream")
            await until(lambda: metrics.reasons() == ["fallbacks-not-taken"], 10)
