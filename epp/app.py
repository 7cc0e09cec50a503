"""The table of contents of the process: every object is built here, once, in order, and runs in one TaskGroup."""

import asyncio
import logging
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import grpc
import uvloop

from epp import protocol
from epp.admin.decisions import Decisions
from epp.admin.recorder import Recorder
from epp.admin.server import AdminServer
from epp.describe import describe
from epp.errors import ConfigError
from epp.extproc.server import Door
from epp.extproc.server import Settings as DoorSettings
from epp.extproc.tls import from_directory, self_signed
from epp.flow.admission import Admission
from epp.loader import Pipeline, load_strategy
from epp.memory import keep_freed, rarely_collect
from epp.parsing.parser import Parser
from epp.parsing.tokens import TokenRatio
from epp.pool.apiserver import ApiServer
from epp.pool.kube import KubePools, Labelled, Named, Selected
from epp.pool.scrape import Scraper
from epp.pool.static import StaticPools
from epp.pool.store import Pool, PoolState
from epp.prefix.ratio import LearnTokens
from epp.reload import ConfigFile
from epp.route import Router
from epp.scheduling.chain import Chain
from epp.scheduling.scheduler import Scheduler
from epp.telemetry import log as logs
from epp.telemetry.audit import AuditLog
from epp.telemetry.metrics import Metrics

log = logging.getLogger("warmpath")


@dataclass(frozen=True)
class Settings:
    """What the flags of `warmpath serve` say. Times in seconds, sizes in bytes."""

    endpoints: Sequence[Path] = ()
    """Files that say what the pools are; without any, Kubernetes does."""
    strategy: str = "prefix-aware"
    config: Path | None = None
    pool_name: Sequence[str] = ()
    pool_selector: str | None = None
    """Kubernetes: serve the InferencePools with these labels instead of named ones."""
    pool_namespace: str = "default"
    endpoint_selector: str | None = None
    """Kubernetes without InferencePools: the Pods of the one pool."""
    endpoint_target_ports: Sequence[int] = ()
    fallbacks: int = 0
    host: str = "127.0.0.1"
    secure_serving: bool | None = None
    """TLS on the ext_proc ports; None: in Kubernetes, as the reference picker does, not with files."""
    cert_path: Path | None = None
    """Directory of tls.crt and tls.key; None: self-signed."""
    grpc_port: Sequence[int] = ()
    grpc_health_port: int = protocol.HEALTH_PORT
    metrics_port: int = protocol.METRICS_PORT
    refresh_metrics_interval: float = 1.0
    decision_deadline: float = 5.0
    max_body: int = 64 << 20
    drain_timeout: float = 30.0
    drain_linger: float = 5.0
    trust_client_headers: bool = False
    audit_log: Path | None = None
    log_format: logs.Format = "text"
    log_level: logs.Level = "info"


class Shared:
    """What all pools of the process use together."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.clock = time.monotonic
        self.random = random.Random()
        self.metrics = Metrics(self.clock)
        self.decisions = Decisions()
        self.audit = _audit(settings.audit_log, self.metrics)
        self.credentials = _credentials(settings, self.metrics)
        self.tokens = TokenRatio()


class NoObjectives:
    """A pool's rules for requests whose control headers nobody vouches for: no objective, so priority 0."""

    def __init__(self, pool: Pool) -> None:
        self.rewrite = pool.rewrite

    def priority(self, objective: str | None) -> int:
        return 0


class Served:
    """One pool with everything that picks from it."""

    def __init__(self, pool: Pool, port: int, shared: Shared) -> None:
        settings = shared.settings
        self.pool = pool
        self._shared = shared
        self._learner = LearnTokens(shared.tokens.observe)
        self.config: ConfigFile | None = None
        if settings.config is not None:
            self.config = ConfigFile(settings.config, clock=shared.clock, random=shared.random, metrics=shared.metrics)
            self.pipeline = self.config.pipeline
        else:
            self.pipeline = load_strategy(settings.strategy, clock=shared.clock, random=shared.random)
        recorder = Recorder(
            pool.name, shared.metrics, shared.decisions, shared.audit, clock=shared.clock, wall_clock=wall_clock
        )
        rules = pool if settings.trust_client_headers else NoObjectives(pool)
        self.router = Router(
            pool,
            Parser(rules, shared.tokens.tokens, lambda: uuid4().hex),
            Admission(self.pipeline.detector),
            self._scheduler(),
            recorder,
            shared.clock,
        )
        self.scraper = Scraper(
            pool, shared.metrics, shared.clock, shared.random, interval=settings.refresh_metrics_interval
        )
        self.port = port
        """The ext_proc port asked for; 0: any."""
        pool.on_removed.append(lambda endpoint: self.router.scheduler.removed(endpoint))
        shared.metrics.add_pool(pool)
        shared.metrics.add_source(lambda: self.router.scheduler.statistics(), pool.name)

    async def follow(self) -> None:
        """Take each good change of the configuration between two requests, for ever."""
        if self.config is not None:
            await self.config.watch(self._changed)

    def describe(self) -> str:
        return f"pool {self.pool.namespace}/{self.pool.name}\n{describe(self.pipeline)}"

    def _changed(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.router.scheduler = self._scheduler()
        self.router.admission.detector = pipeline.detector
        log.info("pool %s: new configuration from %s", self.pool.name, self._shared.settings.config)

    def _scheduler(self) -> Scheduler:
        pipeline = self.pipeline
        return Scheduler(
            pipeline.producers,
            {name: Chain(name, p.filters, p.scorers, p.picker) for name, p in pipeline.profiles.items()},
            pipeline.handler,
            (*pipeline.plugins, self._learner),
            wall_clock=wall_clock,
            on_error=self._plugin_failed,
            fallbacks=self._shared.settings.fallbacks,
        )

    def _plugin_failed(self, plugin: str, error: Exception) -> None:
        self._shared.metrics.degraded("plugin-failed", f"{plugin}: {type(error).__name__}: {error}")


def _credentials(settings: Settings, metrics: Metrics) -> grpc.ServerCredentials | None:
    secure = not settings.endpoints if settings.secure_serving is None else settings.secure_serving
    if settings.cert_path is not None:
        if not secure:
            raise ConfigError("--cert-path", "expected with --secure-serving=true only")
        return from_directory(settings.cert_path, metrics)
    return self_signed() if secure else None


def _audit(path: Path | None, metrics: Metrics) -> AuditLog | None:
    try:
        return None if path is None else AuditLog(path, metrics)
    except OSError as error:
        raise ConfigError("--audit-log", f"cannot write {path}: {error.strerror}") from error


wall_clock = time.time  # noqa: TID251
"""Seconds since the epoch: for people, never for a decision."""


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT, then drain, but only until the next of them.

    Returns the exit status. Raises ConfigError for what is wrong.
    """
    logs.set_up(settings.log_level, settings.log_format)
    keep_freed()
    rarely_collect()
    return uvloop.run(serve(settings))


async def serve(settings: Settings) -> int:
    """The same on a running loop; logs as they are set up."""
    stop, stop_now = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: (stop_now if stop.is_set() else stop).set())
    shared = Shared(settings)
    pools = _pools(settings, shared)
    ports = _ports(pools.states, settings.grpc_port)
    served = [Served(pool, port, shared) for pool, port in zip(pools.pools, ports, strict=True)]
    doors = [_door(one, settings, shared, first=one is served[0]) for one in served]

    def unready() -> list[str]:
        reasons = [f"pool {one.pool.name} is not loaded" for one in served if not one.pool.ready]
        return ["draining", *reasons] if stop.is_set() else reasons

    admin = AdminServer(
        shared.metrics,
        pools.pools,
        shared.decisions,
        unready,
        lambda: "\n\n".join(one.describe() for one in served),
        settings.host,
        settings.metrics_port,
        clock=shared.clock,
    )
    async with _open(doors), admin:  # outside of the group, which would wrap the error of a port in use
        async with asyncio.TaskGroup() as tasks:
            work = [
                pools.watch(),
                _tell_health(doors, served),
                *(one.follow() for one in served),
                *(one.scraper.run() for one in served),
            ]
            running = [tasks.create_task(each) for each in (*work, *([shared.audit.run()] if shared.audit else []))]
            addresses = (f"{settings.host}:{door.ports[0]}" for door in doors)
            told = zip(served, addresses, strict=True)
            log.info("serving %s", "; ".join(f"pool {one.pool.name} on {address}" for one, address in told))
            await stop.wait()
            log.info("draining, for at most %g s; another signal ends it at once", settings.drain_timeout)
            await _drain(doors, settings, stop_now)
            for task in running:
                task.cancel()
    return 0


@asynccontextmanager
async def _open(doors: Sequence[Door]) -> AsyncIterator[None]:
    """All doors listen, not ready yet; they are shut when the block ends, however it ends."""
    try:
        for door in doors:
            await door.start()
        yield
    finally:
        await asyncio.gather(*(door.drain(0) for door in doors))


async def _drain(doors: Sequence[Door], settings: Settings, stop_now: asyncio.Event) -> None:
    """Let open streams end, within the drain timeout; or not, once `stop_now` is set."""
    linger = min(settings.drain_linger, settings.drain_timeout)
    grace = settings.drain_timeout - linger
    async with asyncio.TaskGroup() as tasks:
        drains = [tasks.create_task(door.drain(grace, linger)) for door in doors]
        hurry = tasks.create_task(stop_now.wait())
        hurry.add_done_callback(lambda _: [drain.cancel() for drain in drains])
        await asyncio.wait(drains)
        hurry.cancel()


def _pools(settings: Settings, shared: Shared) -> StaticPools | KubePools:
    """The pools of files where there are any, else those of Kubernetes."""
    if settings.endpoints:
        if len(settings.pool_name) > 1:
            raise ConfigError("--pool-name", "given several times; of files all pools are served, or one")
        name = settings.pool_name[0] if settings.pool_name else None
        return StaticPools(settings.endpoints, name, shared.metrics, shared.random)
    given = [bool(settings.pool_name), bool(settings.pool_selector), bool(settings.endpoint_selector)]
    if settings.endpoint_selector and len(settings.pool_name) == 1:  # then it only names the pool
        given[0] = False
    if sum(given) != 1:
        ways = "--endpoints (files), --pool-name, --pool-selector or --endpoint-selector (Kubernetes)"
        raise ConfigError("", f"which pools? expected one of {ways}")
    if settings.endpoint_selector and not settings.endpoint_target_ports:
        raise ConfigError("--endpoint-target-ports", "expected with --endpoint-selector: the ports its Pods serve on")
    wanted: Named | Labelled | Selected = Named(tuple(settings.pool_name))
    if settings.pool_selector:
        wanted = Labelled(settings.pool_selector)
    elif settings.endpoint_selector:
        name = settings.pool_name[0] if settings.pool_name else "default"
        wanted = Selected(name, settings.endpoint_selector, tuple(settings.endpoint_target_ports))
    return KubePools(wanted, settings.pool_namespace, ApiServer(), shared.metrics, shared.random)


async def _tell_health(doors: Sequence[Door], served: Sequence[Served]) -> None:
    """gRPC health says SERVING while every pool is loaded; the reference picker looks as often."""
    while True:
        ready = all(one.pool.ready for one in served)
        for door in doors:
            door.set_ready(ready)
        await asyncio.sleep(0.1)


def _ports(states: Sequence[PoolState], given: Sequence[int]) -> list[int]:
    """The ext_proc port of each pool: as given, in order; else its endpointPickerRef's; else the usual one.

    In a cluster the endpointPickerRef's port is a Service's, unknown at the start and not ours: there the usual one.
    """
    ports = [*given[: len(states)], *(state.grpc_port or protocol.GRPC_PORT for state in states[len(given) :])]
    if len(given) > len(states):
        raise ConfigError("--grpc-port", f"given {len(given)} times for {len(states)} pools")
    for state, port in zip(states, ports, strict=True):
        if port and ports.count(port) > 1:
            raise ConfigError(
                f"pool {state.namespace}/{state.name}", f"port {port} is another pool's too; use --grpc-port"
            )
    return ports


def _door(one: Served, settings: Settings, shared: Shared, *, first: bool) -> Door:
    """The pool's ext_proc port. Health has one port for the process, at the first door."""
    return Door(
        one.router.route,
        shared.metrics,
        DoorSettings(
            listen=(f"{settings.host}:{one.port}",),
            credentials=shared.credentials,
            health=(f"{settings.host}:{settings.grpc_health_port}",) if first else (),
            deadline=settings.decision_deadline,
            max_body=settings.max_body,
        ),
    )
