"""`warmpath doctor`: options in, findings and an exit status out."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
from jinja2 import TemplateError
from rich.console import Console

from epp.errors import ConfigError
from epp.plugin import Api, Request
from epp.pool.apiserver import ApiError, ApiServer
from epp.pool.engines import ALL_ENGINES
from epp.pool.kubernetes import KubePools, Named
from epp.pool.static import load
from epp.pool.store import Endpoint
from epp.prefix.tokens.cache import TokenCache
from epp.prefix.tokens.conversation import Unsupported
from epp.prefix.tokens.prompt import prompt_of
from epp.prefix.tokens.sandbox import TemplateTooLong
from epp.prefix.tokens.source import ANY_MODEL, load_tokenizers, tokenizer_files
from epp.prefix.tokens.tokenizer import ModelTokenizer
from epp.telemetry.metrics import Metrics
from tooling.doctor import report
from tooling.doctor.cluster import examine_cluster
from tooling.doctor.engine import TRIALS, ProbedEndpoint, examine
from tooling.doctor.finding import Finding
from tooling.doctor.fleet import against_files, compare
from tooling.doctor.http import HttpClient
from tooling.doctor.lmcache import examine_coordinator, examine_server, stores_of

WELL: Final = 0
ILL: Final = 1
_AT_ONCE: Final = 16
"""Endpoints that are examined at the same time."""
_LOADED: Final = 15.0
"""Seconds for Kubernetes to tell a pool."""


@dataclass(frozen=True)
class DoctorOptions:
    """What to examine. Times in seconds."""

    endpoint: Sequence[str] = ()
    """URLs, or `ip:port`."""
    endpoints: Sequence[Path] = ()
    """Files that say what a pool is."""
    pool_name: str | None = None
    pool_namespace: str = "default"
    kubeconfig: Path | None = None
    model: str | None = None
    """What every endpoint is expected to serve."""
    tokenizer: Sequence[str] = ()
    tokenizer_args: Sequence[str] = ()
    coordinator: str | None = None
    lmcache: Sequence[str] = ()
    timeout: float = 10.0
    event_timeout: float = 3.0


async def diagnose(options: DoctorOptions) -> tuple[list[str], list[Finding]]:
    """Names of all that was examined, and what is wrong. Raises ConfigError for options that name nothing."""
    tokenizers = load_tokenizers(tokenizer_files(options.tokenizer, options.tokenizer_args), TokenCache(1 << 20))
    of_pools, beside, findings = await _of_pools(options)
    pods = [*map(_pod, options.endpoint), *of_pools]
    if not (pods or beside or options.lmcache or options.coordinator):
        raise ConfigError("", "examine what? expected --endpoint, --endpoints, --pool-name, --lmcache or --coordinator")
    seed = random.SystemRandom().getrandbits(60)
    places = asyncio.Semaphore(_AT_ONCE)
    async with HttpClient(options.timeout) as ask:

        async def one(pod: ProbedEndpoint) -> list[Finding]:
            async with places:
                return await examine(pod, ask, model=options.model, seed=seed, event_timeout=options.event_timeout)

        servers = [*map(_base, options.lmcache)]
        before = [await stores_of(url, ask) for url in servers]
        findings += chain.from_iterable(await asyncio.gather(*map(one, pods)))
        shares = bool(options.lmcache or options.coordinator)
        findings += compare([pod for pod in pods if pod.reachable and pod.engine == "vllm"], shares=shares)
        for pod in pods:
            findings += against_files(pod, _ids(pod, options.model, tokenizers))
        for url, stored in zip(servers, before, strict=True):
            findings += await examine_server(url, ask, pods, stored)
        if options.coordinator:
            findings += await examine_coordinator(_base(options.coordinator), ask, servers, pods, options.event_timeout)
    names = [*beside, *(pod.name for pod in pods), *servers]
    return [*names, *([_base(options.coordinator)] if options.coordinator else [])], findings


def main(options: DoctorOptions, *, as_json: bool) -> int:
    """The same on a terminal. The exit status: 1 if there is a problem; hints alone are 0."""
    console = Console()
    examined, findings = asyncio.run(diagnose(options))
    if as_json:
        console.out(report.as_json(examined, findings), highlight=False)
    else:
        console.print(report.table(examined, findings))
    return ILL if any(finding.level == "problem" for finding in findings) else WELL


def _ids(pod: ProbedEndpoint, model: str | None, tokenizers: Mapping[str, ModelTokenizer]) -> dict[str, Sequence[int]]:
    """What the files given make of the trials."""
    asked = model or (pod.models[0] if pod.models else "")
    tokenizer = tokenizers.get(asked) or tokenizers.get(ANY_MODEL)
    if tokenizer is None:
        return {}
    made: dict[str, Sequence[int]] = {}
    for name in pod.tokens:
        api: Api = "chat" if name == "chat" else "completions"
        request = Request(id="", model=asked, api=api, body=msgspec.json.encode(TRIALS[name]))
        with suppress(Unsupported, TemplateError, TemplateTooLong):  # files of a model without chats
            made[name] = tokenizer.ids(prompt_of(request), 60.0)
    return made


def _base(url: str) -> str:
    """A server's URL without a path; `http://` where only an address was given. Raises ConfigError."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        well = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:
        well = False
    if not well:
        raise ConfigError("", f"expected http://HOST:PORT, got {url[:100]!r}")
    return f"{parts.scheme}://{parts.netloc}"


def _pod(url: str) -> ProbedEndpoint:
    base = _base(url)
    address = base.partition("://")[2]
    return ProbedEndpoint(address, base, address)


async def _of_pools(options: DoctorOptions) -> tuple[list[ProbedEndpoint], list[str], list[Finding]]:
    """The endpoints; and of a pool in Kubernetes what else was looked at, and what is wrong there."""
    beside: list[str] = []
    findings: list[Finding] = []
    if options.endpoints:
        states = load(options.endpoints, options.pool_name)
        found = [endpoint for state in states for endpoint in state.endpoints]
    elif options.pool_name:
        found, beside, findings = await _of_kubernetes(options, options.pool_name)
    else:
        return [], [], []
    ranks = Counter(endpoint.address for endpoint in found)
    pods = [
        ProbedEndpoint(
            each.name,
            f"http://{each.address}",
            each.address,
            each.rank,
            ranks[each.address],
            ALL_ENGINES.of(each),
        )
        for each in found
    ]
    return pods, beside, findings


async def _of_kubernetes(options: DoctorOptions, name: str) -> tuple[list[Endpoint], list[str], list[Finding]]:
    api, metrics = ApiServer(options.kubeconfig), Metrics(time.monotonic)
    pools = KubePools(Named((name,)), options.pool_namespace, api, metrics, random.Random())
    async with api:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(pools.watch())
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOADED):
                    while not all(pool.ready for pool in pools.pools):
                        await asyncio.sleep(0.05)
            watching.cancel()
        if not all(pool.ready for pool in pools.pools):
            where = f"{options.pool_namespace}/{name}"
            raise ConfigError("--pool-name", f"{where} was not loaded within {_LOADED:g} s")
        try:
            beside, findings = await examine_cluster(api, options.pool_namespace, name)
        except ApiError as error:
            raise ConfigError("--pool-name", f"the Kubernetes API server: {error}") from None
    return [endpoint for pool in pools.pools for endpoint in pool.endpoints], beside, findings
