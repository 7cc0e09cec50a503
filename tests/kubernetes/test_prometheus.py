"""Dashboards, alerts and the ScaledObject's queries, on a real Prometheus beside a running chain.

Every panel gets data, and every alert fires in a fault that is made. For that, times are shortened: alerts wait
for nothing, rates are those of fifteen seconds, and a picker is busy at half of a core, since it has none of its own.
That each waits as long as is written, and that none fires where all is well, `promtool` shows with series that are made
up. In this lane, since it installs Prometheus.
"""

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from epp.configuration.loader import strategy_text
from epp.protocol import ROLE_LABEL
from tests.support.engines.coordinator import StandIn
from tests.support.gateway.chain import Laptop, eventually, laptop
from tests.support.gateway.roles import ALWAYS
from tests.support.process.waiting import beside
from tooling.laptop.engines import Simulated
from tooling.laptop.ports import free_ports

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

MANIFESTS = Path(__file__).parents[2] / "manifests"
MONITORING = MANIFESTS / "components" / "monitoring"
RULES = (MONITORING / "rules.yaml").read_text(encoding="utf-8")
ALERTS = {rule["alert"]: rule for rule in yaml.safe_load(RULES)["groups"][0]["rules"]}
CONFIG = """
global: {{scrape_interval: 3s, scrape_timeout: 3s, evaluation_interval: 1s}}
rule_files: [rules.yaml]
scrape_configs:
- job_name: warmpath
  static_configs: [{{targets: {targets}}}]
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
limits:
  tenant: {header: x-tenant}
  tenants: {small: {maxOutputTokens: 1}}
"""
TIERS = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: precise-prefix-cache-producer
  parameters:
    lmcache: {coordinator: '%s', hashAlgorithm: sha256_cbor}
- type: expected-ttft
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins: [{pluginRef: expected-ttft}, {pluginRef: max-score-picker}]
"""
AT_MOST = 150.0
"""Seconds until a query has data or an alert fires; never reached where all is well."""
SLOW = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins: [{type: tests.support.plugins.Slow}]
schedulingProfiles: [{name: default, plugins: [{pluginRef: tests.support.plugins.Slow}]}]
"""
BUSY = 'rate(process_cpu_seconds_total{job="warmpath"}[15s]) > 0.8'
RUNAWAY = SLOW.replace("Slow", "Runaway")
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
KINDS: list[dict[str, Any]] = [
    {"headers": {"x-llm-d-inference-objective": "interactive", "x-slo-ttft-ms": "1"}, "max_tokens": 99, **STREAM},
    {"headers": {"x-slo-ttft-ms": "60000", "x-llm-d-inference-fairness-id": "tenant-a"}, "max_tokens": 99, **STREAM},
    {"headers": {"x-llm-d-inference-fairness-id": "tenant-b"}, "max_tokens": 99},
    {"headers": {"x-llm-d-inference-objective": "batch"}},
    {"headers": {"x-tenant": "small"}},
]
"""With SLOs that cannot be kept and that can, of three priorities, of a tenant with a limit."""
NOBODY = {"headers": {"x-pool": "nobody"}}
"""For a pool without endpoints."""


def panels(dashboard: str) -> list[str]:
    """Its queries, over a few seconds."""
    content = json.loads((MONITORING / "dashboards" / f"{dashboard}.json").read_text(encoding="utf-8"))
    return [target["expr"] for panel in content["panels"] for target in panel.get("targets", ())]


def scaled() -> list[str]:
    text = (MANIFESTS / "components" / "autoscaling" / "scaledobject.yaml").read_text(encoding="utf-8")
    return [trigger["metadata"]["query"] for trigger in yaml.safe_load(text)["spec"]["triggers"]]


@dataclass
class Watched:
    """A chain, and the Prometheus that reads its pickers."""

    chain: Laptop
    url: str

    async def answers(self, query: str) -> list[Any]:
        async with self.chain.http.get(f"{self.url}/api/v1/query", params={"query": query}) as answer:
            found = await answer.json()
        assert found["status"] == "success", (query, found)
        return [each for each in found["data"]["result"] if each["value"][1] != "NaN"]

    async def show(self, queries: Sequence[str]) -> None:
        """Return when each has been answered with data."""
        assert queries
        for query in queries:
            asked = query.replace("$__rate_interval", "15s").replace("$pool", "sim").replace('"llm"', '"sim"')
            print("asked", asked)  # the last is the one that got none
            await eventually(lambda asked=asked: self.answers(asked), bool, AT_MOST)  # type: ignore[misc]

    async def fires(self, alert: str, **labels: str) -> Any:
        """What fires of it, as soon as something does."""
        assert alert in ALERTS
        selected = "".join(f', {name}="{value}"' for name, value in labels.items())
        query = f'ALERTS{{alertname="{alert}", alertstate="firing"{selected}}}'
        print("waited for", alert)
        return await eventually(lambda: self.answers(query), bool, AT_MOST)

    @asynccontextmanager
    async def asked(self, *kinds: dict[str, Any], by: int = 10) -> AsyncIterator[None]:
        """Requests of all these kinds, all the time."""

        async def ask(number: int) -> None:
            for turn in range(1_000_000):
                with suppress(TimeoutError, aiohttp.ClientError):
                    await self.chain.chat(f"{number} {turn} " + "word " * 100, **kinds[(turn + number) % len(kinds)])
                await asyncio.sleep(0.2)  # what is refused is so at once

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(number)) for number in range(by)]
            yield
            for task in tasks:
                task.cancel()

    def endpoints(self, roles: Sequence[str] = ("", "", ""), more: Sequence[dict[str, Any]] = ()) -> None:
        """The pods with these roles, and what else is said to be there."""
        found = [
            {"name": pod.name, "address": "127.0.0.1", "port": pod.port, "node": pod.node,
             "labels": {"app": "sim", **({ROLE_LABEL: role} if role else {})}}
            for pod, role in zip(self.chain.chain.pods, roles, strict=True)
        ]  # fmt: skip
        self.chain.chain.endpoints_file.write_text(yaml.safe_dump({"endpoints": [*found, *more]}), encoding="utf-8")

    async def well(self) -> None:
        """No faults at any pod."""
        for pod in self.chain.chain.pods:
            async with self.chain.http.delete(f"{pod.url}/admin/faults") as answer:
                assert answer.status == 200


@asynccontextmanager
async def prometheus(folder: Path, targets: Sequence[str]) -> AsyncIterator[str]:
    """Its URL."""
    program = shutil.which("prometheus")
    assert program is not None, "prometheus is not there; `hack/test kubernetes` installs it"
    [port] = free_ports(1)
    (folder / "prometheus.yaml").write_text(CONFIG.format(targets=json.dumps(targets)))
    rules = re.sub(r"\[\d+m\]", "[15s]", re.sub(r"for: \d+m", "for: 0s", RULES))
    assert BUSY in rules
    (folder / "rules.yaml").write_text(rules.replace(BUSY, BUSY.replace("0.8", "0.1")))
    flags = [f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    flags += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    process = await asyncio.create_subprocess_exec(program, *flags)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "chain").mkdir()
    async with AsyncExitStack() as stack:
        engine = Simulated(flags=("--time-scale", "2"))
        flags = ("--trust-client-headers",)
        running = laptop(folder / "chain", replicas=2, wiring="full-duplex", flags=flags, engine=engine)
        chain = await stack.enter_async_context(running)
        targets = [replica.admin.removeprefix("http://") for replica in chain.chain.replicas]
        made = Watched(chain, await stack.enter_async_context(prometheus(folder, targets)))
        await eventually(lambda: made.answers("up == 1"), lambda found: len(found) == 2)
        yield made


async def test_a_pool_that_has_more_than_it_takes(watched: Watched) -> None:
    chain = watched.chain
    await chain.chain.reconfigure(chain.config, ONE_EACH)
    await chain.faults(chain.pod("pod-c"), metrics="off")
    async with watched.asked(*KINDS):
        for name in ("warmpath", "warmpath-flow-control", "warmpath-latency", "warmpath-replicas"):
            await watched.show(panels(name))
        await watched.show(scaled())
        assert await watched.fires("WarmpathPoolFull", pool="sim")
        for name, labels in (("queue_size", '{inference_pool="sim"}'), ("pool_saturation", '{stage="effective"}')):
            for family in ("llm_d_epp", "inference_extension"):
                await watched.show([f"max({family}_flow_control_{name}{labels}) > 0"])
        await watched.show(['llm_d_epp_flow_control_requests_total{outcome="RejectedCapacity"} > 0'])
        assert await watched.fires("WarmpathShedding", pool="sim", priority="0")
        assert await watched.fires("WarmpathSloMissed", pool="sim")
        assert await watched.fires("WarmpathMetricsStale", endpoint="default/pod-c")
    await watched.well()


async def test_caches_that_hold_less_than_was_believed(watched: Watched) -> None:
    chain = watched.chain
    await chain.chain.reconfigure(chain.config, strategy_text("prefix-aware"))

    async def forgotten() -> None:
        while True:
            with suppress(TimeoutError, aiohttp.ClientError):
                await chain.chat("the same again " * 200)
                await asyncio.gather(*(chain.http.post(f"{pod.url}/reset_prefix_cache") for pod in chain.chain.pods))

    async with beside(forgotten()):
        assert await watched.fires("WarmpathPredictionsWrong", pool="sim")


async def test_kv_events_and_tiers(watched: Watched) -> None:
    chain = watched.chain
    async with StandIn().running() as coordinator:
        coordinator.store(range(64), "l2", model="sim")
        await chain.chain.reconfigure(chain.config, TIERS % coordinator.url)
        async with watched.asked({}, by=2):
            await watched.show(panels("warmpath-tiers"))
    assert await watched.fires("WarmpathTiersAway", pool="sim")
    [nobody] = free_ports(1)
    watched.endpoints(more=[{"name": "gone", "address": "127.0.0.1", "port": nobody, "labels": {"app": "sim"}}])
    assert await watched.fires("WarmpathKvEventsLost", endpoint="default/gone")
    watched.endpoints()


async def test_prefill_and_decode(watched: Watched) -> None:
    chain = watched.chain
    watched.endpoints(("prefill", "decode", "decode"))
    await chain.chain.reconfigure(chain.config, ALWAYS)
    async with watched.asked({}, NOBODY, by=2):
        assert await watched.fires("WarmpathRefusing")
        assert await watched.fires("WarmpathNoEndpoints", pool="nobody")
        apart = [query for query in panels("warmpath-stages") if "no-prefiller" not in query]
        await watched.show(apart)
        watched.endpoints(("decode", "decode", "decode"))
        assert await watched.fires("WarmpathNotPrefilled", pool="sim")
        await watched.show([query for query in panels("warmpath-stages") if query not in apart])
    watched.endpoints()


async def test_pods_that_fail_and_pickers_that_are_slow_or_do_not_answer(watched: Watched) -> None:
    chain = watched.chain
    await chain.chain.reconfigure(chain.config, SLOW)
    async with watched.asked({}, by=4):
        assert await watched.fires("WarmpathSlowDecisions")
        await chain.chain.reconfigure(chain.config, strategy_text("prefix-aware"))
        chain.config.write_text("plugins: [{type: what-is-not-there}]")
        assert await watched.fires("WarmpathDegraded", reason="config-refused")
        for pod in chain.chain.pods:
            await chain.faults(pod, status=500)
        assert await watched.fires("WarmpathRequestsFailing", model="sim")
        assert await watched.fires("WarmpathEndpointFailing", pool="sim")
    await watched.well()
    await chain.chain.reconfigure(chain.config, RUNAWAY)
    other, replica = chain.chain.replicas
    process = chain.chain.processes.pid(replica.name)
    os.kill(process, signal.SIGSTOP)
    try:
        assert await watched.fires("WarmpathDown", instance=replica.admin.removeprefix("http://"))
        assert await watched.fires("WarmpathReplicaSilent")
        assert await watched.fires("WarmpathBusy", instance=other.admin.removeprefix("http://"))
    finally:
        os.kill(process, signal.SIGCONT)


# --- series that are made up ----------------------------------------------------------------------------------------

WELL = {
    'up{job="warmpath", instance="a"}': "1",
    'warmpath_endpoints{pool="p"}': "3",
    'warmpath_refused_total{status="503", reason="x"}': "7",
    'warmpath_decision_seconds_count{instance="a"}': "0+600x60",
    'warmpath_requests_total{model="m", status="200"}': "0+600x60",
    'warmpath_requests_total{model="m", status="500"}': "7",
    'warmpath_endpoint_failures_total{pool="p", endpoint="e"}': "7",
    'warmpath_endpoint_decisions_total{pool="p", endpoint="e"}': "0+600x60",
    'warmpath_endpoint_load_age_seconds{pool="p", endpoint="e"}': "1",
    'warmpath_scrape_failures_total{pool="p"}': "7",
    'warmpath_pool_saturation{pool="p"}': "0.7",
    'warmpath_flow_waiting{pool="p", fairness_id="f", priority="0"}': "3",
    'warmpath_flow_wait_seconds_count{pool="p", priority="0", outcome="Dispatched"}': "0+600x60",
    'warmpath_flow_wait_seconds_count{pool="p", priority="0", outcome="EvictedTTL"}': "7",
    'warmpath_flow_wait_seconds_count{pool="p", priority="-1", outcome="RejectedCapacity"}': "0+600x60",
    'warmpath_slo_requests_total{pool="p", objective="o", outcome="met"}': "0+600x60",
    'warmpath_slo_requests_total{pool="p", objective="o", outcome="missed-ttft"}': "7",
    'warmpath_endpoint_checked_cached_tokens_total{pool="p", endpoint="e"}': "0+600x60",
    'warmpath_endpoint_checked_predicted_tokens_total{pool="p", endpoint="e"}': "0+650x60",
    'warmpath_endpoint_kv_events{pool="p", endpoint="e", state="live"}': "1",
    'warmpath_plugin_statistic{pool="p", plugin="k", statistic="tier_reached"}': "1",
    'warmpath_plugin_statistic{pool="p", plugin="h", statistic="no-prefiller"}': "7",
    'warmpath_replica_peers{instance="a", state="live"}': "2",
    'warmpath_degraded_now{reason="r"}': "0",
    'warmpath_decision_seconds_bucket{instance="a", le="0.001"}': "0+600x60",
    'warmpath_decision_seconds_bucket{instance="a", le="0.1"}': "0+600x60",
    'warmpath_decision_seconds_bucket{instance="a", le="+Inf"}': "0+600x60",
    'process_cpu_seconds_total{job="warmpath", instance="a"}': "0+12x60",
}
"""A sample a minute; counters by what they grow."""
ILL = {
    "WarmpathDown": {'up{job="warmpath", instance="a"}': "0"},
    "WarmpathNoEndpoints": {'warmpath_endpoints{pool="p"}': "0"},
    "WarmpathRefusing": {'warmpath_refused_total{status="503", reason="x"}': "0+60x60"},
    "WarmpathRequestsFailing": {'warmpath_requests_total{model="m", status="500"}': "0+60x60"},
    "WarmpathEndpointFailing": {'warmpath_endpoint_failures_total{pool="p", endpoint="e"}': "0+200x60"},
    "WarmpathMetricsStale": {'warmpath_scrape_failures_total{pool="p"}': "0+100x60"},
    "WarmpathPoolFull": {'warmpath_pool_saturation{pool="p"}': "1.1"},
    "WarmpathShedding": {
        'warmpath_flow_wait_seconds_count{pool="p", priority="0", outcome="EvictedTTL"}': "0+60x60",
    },
    "WarmpathSloMissed": {'warmpath_slo_requests_total{pool="p", objective="o", outcome="missed-ttft"}': "0+100x60"},
    "WarmpathPredictionsWrong": {
        'warmpath_endpoint_checked_predicted_tokens_total{pool="p", endpoint="e"}': "0+1300x60",
    },
    "WarmpathKvEventsLost": {'warmpath_endpoint_kv_events{pool="p", endpoint="e", state="lost"}': "1"},
    "WarmpathTiersAway": {'warmpath_plugin_statistic{pool="p", plugin="k", statistic="tier_reached"}': "0"},
    "WarmpathNotPrefilled": {'warmpath_plugin_statistic{pool="p", plugin="h", statistic="no-prefiller"}': "0+1x60"},
    "WarmpathReplicaSilent": {'warmpath_replica_peers{instance="a", state="silent"}': "1"},
    "WarmpathDegraded": {'warmpath_degraded_now{reason="r"}': "1"},
    "WarmpathSlowDecisions": {'warmpath_decision_seconds_bucket{instance="a", le="0.001"}': "0+500x60"},
    "WarmpathBusy": {'process_cpu_seconds_total{job="warmpath", instance="a"}': "0+55x60"},
}
"""What differs where an alert fires, and it alone."""


async def test_an_alert_waits_as_long_as_is_written_and_none_fires_where_all_is_well(tmp_path: Path) -> None:
    assert ILL.keys() == ALERTS.keys()
    (tmp_path / "rules.yaml").write_text(RULES)
    tests = [{**_series({}), "promql_expr_test": [_firing(each, "", None) for each in (10, 30, 55)]}]
    for alert, changes in ILL.items():
        wait = int(ALERTS[alert]["for"].removesuffix("m"))
        # A rate of five minutes is what it is to be after five minutes.
        looks = [_firing(wait - 1, "", None), _firing(wait + 6, alert, 1), _firing(wait + 6, "", 1)]
        tests.append({**_series(changes), "promql_expr_test": looks})
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    for command in (("check", "rules", "rules.yaml"), ("test", "rules", "test.yaml")):
        promtool = await asyncio.create_subprocess_exec(
            "promtool", *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await promtool.communicate()
        assert promtool.returncode == 0, said.decode()


def _series(changes: dict[str, str]) -> dict[str, Any]:
    made = {name: values if "+" in values else f"{values}x60" for name, values in {**WELL, **changes}.items()}
    return {"interval": "1m", "input_series": [{"series": name, "values": each} for name, each in made.items()]}


def _firing(minute: int, alert: str, count: int | None) -> dict[str, Any]:
    """So many fire then: of one name, or of all."""
    name = f', alertname="{alert}"' if alert else ""
    samples = [{"labels": "{}", "value": count}] if count else []
    return {"expr": f'count(ALERTS{{alertstate="firing"{name}}})', "eval_time": f"{minute}m", "exp_samples": samples}
