"""Every query of the dashboard and of the ScaledObject, on a real Prometheus beside a picker whose pool is full.

In this lane, since it installs Prometheus.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.gateway.chain import Laptop, eventually, laptop
from tooling.laptop.ports import free_ports

MANIFESTS = Path(__file__).parents[2] / "manifests"
CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
- job_name: warmpath
  static_configs: [{{targets: ['{target}']}}]
"""
ONE_EACH = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- type: expected-ttft
- type: max-score-picker
- type: concurrency-detector
  parameters: {maxConcurrency: 1}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: expected-ttft}, {pluginRef: max-score-picker}]
flowControl:
  saturationDetector: {pluginRef: concurrency-detector}
  defaultPriorityBand: {maxRequests: 2}
"""
SILENT = "warmpath_endpoint_checked_cached_tokens_total"
"""In so short a time nothing comes of it."""


def queries() -> list[str]:
    """All of them as for this pool, over a few seconds."""
    dashboard = json.loads((MANIFESTS / "components" / "monitoring" / "warmpath.json").read_text(encoding="utf-8"))
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    text = (MANIFESTS / "components" / "autoscaling" / "scaledobject.yaml").read_text(encoding="utf-8")
    found += [trigger["metadata"]["query"] for trigger in yaml.safe_load(text)["spec"]["triggers"]]
    return [each.replace("$__rate_interval", "10s").replace("$pool", "sim").replace('"llm"', '"sim"') for each in found]


@asynccontextmanager
async def prometheus(folder: Path, target: str) -> AsyncIterator[str]:
    """Its URL."""
    program = shutil.which("prometheus")
    assert program is not None, "prometheus is not there; `hack/test kubernetes` installs it"
    [port] = free_ports(1)
    (folder / "prometheus.yaml").write_text(CONFIG.format(target=target))
    flags = [f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    flags += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    process = await asyncio.create_subprocess_exec(program, *flags)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def more_than_it_takes(chain: Laptop) -> AsyncIterator[None]:
    """Requests all the time, of which some wait in the picker and some are refused."""

    async def ask(number: int) -> None:
        for turn in range(10_000):
            await chain.chat(f"{number} {turn} " + "word " * 400)
            await asyncio.sleep(0.02)  # what is refused is so at once

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(number)) for number in range(8)]
        yield
        for task in tasks:
            task.cancel()


@pytest.mark.envoy
async def test_every_query_is_answered_with_what_the_picker_does(tmp_path: Path) -> None:
    (tmp_path / "chain").mkdir()
    async with laptop(tmp_path / "chain", pods=2) as chain:
        await chain.chain.reconfigure(chain.config, ONE_EACH)
        target = chain.chain.replicas[0].admin.removeprefix("http://")
        async with prometheus(tmp_path, target) as url, more_than_it_takes(chain):

            async def answers(query: str) -> list[Any]:
                async with chain.http.get(f"{url}/api/v1/query", params={"query": query}) as answer:
                    found = await answer.json()
                    assert found["status"] == "success", (query, found)
                    return [each for each in found["data"]["result"] if each["value"][1] != "NaN"]

            await eventually(lambda: answers("up"), bool, seconds=30)
            async with asyncio.timeout(60):
                for query in queries():
                    while SILENT not in query and not await answers(query):
                        print("nothing yet of", query)  # shown where it never comes
                        await asyncio.sleep(0.1)
            for name, labels in (("queue_size", '{inference_pool="sim"}'), ("pool_saturation", '{stage="effective"}')):
                for family in ("llm_d_epp", "inference_extension"):
                    query = f"max({family}_flow_control_{name}{labels}) > 0"
                    await eventually(lambda query=query: answers(query), bool, seconds=30)  # type: ignore[misc]
            shed = 'llm_d_epp_flow_control_requests_total{outcome="RejectedCapacity"} > 0'
            assert await eventually(lambda: answers(shed), bool, seconds=30)
