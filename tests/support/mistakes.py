"""What is said where a mistake is made in a cluster, at the gateway or at an endpoint: text that holds a message."""

import asyncio
import io
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import aiohttp
from aiohttp import web
from click.testing import CliRunner

from epp.cli import warmpath
from epp.extproc.server import Settings
from epp.pool.apiserver import ApiServer
from epp.pool.kubernetes import OBJECTIVES, POOLS, REWRITES, KubePools, Named
from epp.pool.scrape import Scraper
from epp.pool.store import Endpoint, Pool
from epp.telemetry.metrics import Metrics
from tests.support.engines.changed import changed
from tests.support.ext_proc.server import LOOPBACK, Route, ext_proc_server
from tests.support.gateway import envoy
from tests.support.gateway.rig import rig, to
from tests.support.kubernetes.api_server import FakeApiServer, Object, kubeconfig, pod, pool
from tests.support.kubernetes.cluster import followed
from tests.support.process import web_server
from tests.support.process.dropped import dropping
from tests.support.process.waiting import until
from tooling.simulator.publisher import KvEventsConfig
from tooling.simulator.server import SimulatedPod

ROUTES, GATEWAYS = "httproutes.gateway.networking.k8s.io", "gateways.gateway.networking.k8s.io"
KINDS = {"pods", *map(str, (POOLS, *OBJECTIVES, *REWRITES))}
INVALID = (
    "Failed to process route rule 0 backendRef 0: Group is invalid, only the core API group (specified by omitting the "
    "group field or setting it to an empty string), multicluster.x-k8s.io and gateway.envoyproxy.io are supported."
)
"""As Envoy Gateway 1.9 says it of an InferencePool."""


class Said(Metrics):
    """Metrics that keep what is logged of degradations."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def degraded(self, reason: str, detail: str = "", *, lasting: bool = False) -> None:
        self.lines.append(f"degraded: {reason}: {detail}")

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


async def doctor(*arguments: str) -> str:
    """What the command prints; for mistakes, so it must not end well, unless what it finds is a hint."""
    done = await asyncio.to_thread(CliRunner().invoke, warmpath, ["doctor", "--json", *arguments])
    assert done.exit_code != 0 or '"hint"' in done.output, done.output
    return done.output


def examined(*objects: tuple[str, str, Object]) -> str:
    """What the doctor says of the pool `llm` beside these (kind, name, content)."""

    async def ask() -> str:
        fake = FakeApiServer()
        fake.installed |= KINDS
        with TemporaryDirectory() as folder:
            async with fake.running():
                await fake.put(str(POOLS), "llm", pool(8000))
                for kind, name, content in objects:
                    await fake.put(kind, name, content)
                credentials = kubeconfig(fake.host, Path(folder))
                return await doctor("--pool-name=llm", "--pool-namespace=ns", f"--kubeconfig={credentials}")

    return asyncio.run(ask())


def image_that_is_not_there() -> str:
    content = pod("", ready=False)
    waiting = {"reason": "ErrImagePull", "message": "rpc error: code = NotFound"}
    content["status"]["containerStatuses"] = [{"state": {"waiting": waiting}}]
    return examined(("pods", "a", content))


def selector_that_matches_nothing() -> str:
    return examined(("pods", "a", pod("10.0.0.1", labels={"app": "y"})))


def routed(parent: str = "g", backend: str = "llm", **wrong: str) -> str:
    """A route, and a Gateway `g`. `wrong`: the condition of the route that is not true."""
    rules = [{"backendRefs": [{"name": backend, "kind": "InferencePool"}]}]
    parents = [{"parentRef": {"name": "g"}, "conditions": [{"status": "False", **wrong}]}] if wrong else []
    programmed = {"type": "Programmed", "status": "True"}
    return examined(
        ("pods", "a", pod("", ready=False)),
        (ROUTES, "r", {"spec": {"parentRefs": [{"name": parent}], "rules": rules}, "status": {"parents": parents}}),
        (GATEWAYS, "g", {"spec": {"gatewayClassName": "c"}, "status": {"conditions": [programmed]}}),
    )


def without_a_controller() -> str:
    """A Gateway as the API server makes it, of a class that no controller has."""
    rules = [{"backendRefs": [{"name": "llm", "kind": "InferencePool"}]}]
    waits = {"type": "Accepted", "status": "Unknown", "reason": "Pending", "message": "Waiting for controller"}
    return examined(
        ("pods", "a", pod("", ready=False)),
        (ROUTES, "r", {"spec": {"parentRefs": [{"name": "g"}], "rules": rules}}),
        (GATEWAYS, "g", {"spec": {"gatewayClassName": "c"}, "status": {"conditions": [waits]}}),
    )


def followed_pool(*, defined: bool) -> str:
    """What a picker logs of the pool `lm`, where there is a pool `llm`, or no definition of pools."""

    async def follow() -> str:
        said, fake = Said(), FakeApiServer()
        fake.installed |= KINDS
        if defined:
            await fake.put(str(POOLS), "llm", pool(8000))
        else:
            fake.installed.discard(str(POOLS))
        with TemporaryDirectory() as folder:
            async with fake.running():
                api = ApiServer(kubeconfig(fake.host, Path(folder)))
                async with api, followed(KubePools(Named(("lm",)), "ns", api, said, Random(1))):
                    await until(lambda: bool(said.lines))
        return said.text

    return asyncio.run(follow())


@cache
def answered() -> str:
    """What our gateway answers: where no route matches, no endpoint listens, no picker runs."""

    async def ask(folder: Path) -> str:
        rules = [{"matches": [{"path": {"value": "/v1"}}], "backendRefs": to("a")}]
        async with rig(folder, rules) as chain:
            said = [await chain.ask("/metrics")]
            chain.members["a"], chain.upstreams["a-0"].address = ["a-0"], "127.0.0.1:1"
            await chain.use(rules)
            said.append(await chain.ask("/v1"))
            await chain.servers["a"][0].drain(0)
            await chain.healthy("a", 0)
            said.append(await chain.ask("/v1"))
        assert [status for status, _, _ in said] == [404, 503, 503]
        return "\n".join(each["error"]["message"] for _, _, each in said)

    with TemporaryDirectory() as folder:
        return asyncio.run(ask(Path(folder)))


def larger_than_the_gateway_holds() -> str:
    async def ask(folder: Path) -> str:
        settings = Settings(listen=LOOPBACK, health=LOOPBACK)
        async with (
            ext_proc_server(Route(), settings) as picker,
            envoy.running(picker.ports[0], ["127.0.0.1:1"], folder) as ports,
            aiohttp.ClientSession() as session,
            session.post(
                f"http://127.0.0.1:{ports['buffered']}/v1/completions", data=io.BytesIO(bytes(envoy.BODY_LIMIT + 1))
            ) as answer,
        ):
            assert answer.status == 413
            return await answer.text()

    with TemporaryDirectory() as folder:
        return asyncio.run(ask(Path(folder)))


async def _scraped(address: str) -> str:
    """What a picker logs of an endpoint there."""
    said, made = Said(), Pool("llm", random=Random(1))
    made.replace([Endpoint("a", address)])
    scraper = Scraper(made, said, time.monotonic, Random(1), interval=0.01, timeout=0.2, stale_after=0.1)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(scraper.run())
        await until(lambda: bool(said.lines))
        task.cancel()
    return said.text


def dropped() -> str:
    """What picker and doctor say where nothing that is sent to an endpoint arrives."""

    async def ask(address: str) -> str:
        return await _scraped(address) + await doctor("--timeout=0.4", f"--endpoint={address}")

    with dropping() as port:
        return asyncio.run(ask(f"127.0.0.1:{port}"))


def another_server() -> str:
    """What both say of a server that has metrics, and no vLLM's."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text="python_info 1.0\n", status=200 if request.path == "/metrics" else 404)

    async def ask() -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", metrics)
        async with web_server.serving(app) as address:
            return await _scraped(address) + await doctor(f"--endpoint={address}")

    return asyncio.run(ask())


def without_prefix_caching() -> str:
    """Metrics as of vLLM's `--no-enable-prefix-caching`, and a prompt that is never cached, from two pods."""
    events = KvEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0")

    def metrics(page: str) -> str:
        return page.replace('enable_prefix_caching="True"', 'enable_prefix_caching="False"')

    async def ask(path: str, change: Callable[..., object]) -> str:
        async with SimulatedPod(kv_events=events, time_scale=100.0) as made, changed(made, path, change) as address:
            return await doctor(f"--endpoint={address}")

    def never(answer: Object) -> Object:
        answer["usage"]["prompt_tokens_details"] = {"cached_tokens": 0}
        return answer

    async def both() -> str:
        return await ask("/metrics", metrics) + await ask("/v1/completions", never)

    return asyncio.run(both())
