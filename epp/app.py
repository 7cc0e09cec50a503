"""The table of contents of the process: every object is built here, once, in order, and runs in one TaskGroup."""

import asyncio
import logging
import random
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import uvloop

from epp import protocol
from epp.admin.access import Access
from epp.admin.certificate import Certificate
from epp.admin.recorder import Decisions, Recorder
from epp.admin.server import AdminServer, AdminSettings
from epp.admin.traces import Traces, Tracing
from epp.configuration.describe import describe
from epp.configuration.lifecycle import Lasting, Lifecycle, Reports
from epp.configuration.loader import Pipeline, load_strategy, load_text, read_file
from epp.configuration.reload import ConfigFile
from epp.configuration.schema import parse
from epp.errors import BadRequest, ConfigError
from epp.extproc.conformance_routing import ConformanceRouter
from epp.extproc.server import AGE, AnyServer, ExtProcServer
from epp.extproc.server import Settings as ServerSettings
from epp.extproc.stream import Memory
from epp.extproc.tls import Certificate as GatewayCertificate
from epp.flow.control import REFUSED, FlowControl, Outcome
from epp.flow.guards import Guards
from epp.flow.limits import Limits
from epp.parsing.parser import Parser
from epp.parsing.request import RawRequest
from epp.plugin import Endpoint, Plugin, Services
from epp.pool.apiserver import ApiServer
from epp.pool.kubernetes import KubePools, Labelled, Named, Selected, labelled
from epp.pool.models import ModelReader
from epp.pool.roles import unknown_role
from epp.pool.scrape import Scraper, samples_at
from epp.pool.slices import ServiceAddresses
from epp.pool.static import StaticPools
from epp.pool.store import Pool, PoolState
from epp.prefix.token_ratio import TokenRatio
from epp.prefix.tokens.cache import TokenCache
from epp.prefix.tokens.remote import Remote
from epp.prefix.tokens.source import Tokens, load_tokenizers, tokenizer_files
from epp.process.memory import keep_freed, rarely_collect
from epp.process.watchdog import watch
from epp.replicas.exchange import SharedPool
from epp.replicas.group import ReplicaGroup, ReplicaSettings
from epp.route import Admission, Policy, RequestObserver, Router
from epp.scheduling.scheduler import Scheduler
from epp.scheduling.timed import TimedScheduler
from epp.telemetry import log as logs
from epp.telemetry.audit import AuditLog
from epp.telemetry.metrics import Metrics
from epp.telemetry.text import printable

log = logging.getLogger("warmpath")

_NAMED, _LONGEST_NAME = 4, 64
"""Models that a log line names, and characters of each."""
_LAST = 1.0
"""Seconds before the drain timeout is over."""
_TOKEN_CACHE = 256 << 20
"""Bytes for the tokens of texts seen before."""


@dataclass(frozen=True)
class Settings:
    """What the flags of `warmpath serve` say. Times in seconds, sizes in bytes."""

    endpoints: Sequence[Path] = ()
    """Files that say what the pools are; without any, Kubernetes does."""
    strategy: str = "prefix-aware"
    config: Path | None = None
    config_text: str | None = None
    """The configuration itself, instead of a file or a strategy."""
    flow_control: bool = False
    """Let requests wait here while the pool is full, also where the configuration does not say so."""
    plugins_from: Sequence[str] | None = None
    """Modules whose classes the configuration may name, besides our own; None: any."""
    pool_name: Sequence[str] = ()
    pool_selector: str | None = None
    """Kubernetes: serve the InferencePools with these labels instead of named ones."""
    pool_namespace: str = "default"
    endpoint_selector: str | None = None
    """Kubernetes without InferencePools: the Pods of the one pool."""
    endpoint_target_ports: Sequence[int] = ()
    kubeconfig: Path | None = None
    """Where the API server is and who we are, if not as `ApiServer` finds out."""
    disable_endpoint_subset_filter: bool = False
    """Pick from the whole pool, whatever the gateway allows."""
    fallbacks: int = 0
    host: str = "127.0.0.1"
    metrics_endpoint_auth: bool | None = None
    """Whether readers of the second server need a token; None: with pools of Kubernetes, as at the reference picker."""
    metrics_allowed_host: Sequence[str] = ()
    """Names by which readers without a token may call it, beside IP addresses and those of loopback."""
    metrics_cert_dir: Path | None = None
    """TLS on the second server: directory of tls.crt and tls.key."""
    metrics_client_ca_file: Path | None = None
    """Whose certificates its readers must have."""
    tracing: bool = False
    """Spans of requests, for the collector that the environment names."""
    enable_pprof: bool = True
    """Serve profiles of this process there."""
    secure_serving: bool | None = None
    """TLS on the ext_proc ports; None: in Kubernetes, as the reference picker does, not with files."""
    cert_path: Path | None = None
    """Directory of tls.crt and tls.key; None: self-signed."""
    tls_cipher_suites: str | None = None
    """For TLS 1.2 on the ext_proc ports, in OpenSSL's names, separated by colons."""
    ext_proc_server: Literal["http2", "grpc"] = "http2"
    """`grpc`: the reference on grpc.aio, which costs more."""
    grpc_port: Sequence[int] = ()
    grpc_health_port: int = protocol.HEALTH_PORT
    metrics_port: int = protocol.METRICS_PORT
    refresh_metrics_interval: float = 1.0
    list_models: bool = True
    """Read each endpoint's /v1/models, and answer GET /v1/models with all of them."""
    decision_deadline: float = 5.0
    tokenizer: Sequence[str] = ()
    """`MODEL=DIRECTORY` each; of other models' prompts, the pods are asked for the tokens."""
    tokenizer_args: Sequence[str] = ()
    """`MODEL=FLAGS` each: the engine's own that change what a prompt becomes."""
    tokenizer_timeout: float = 0.5
    """Seconds that reading a prompt's tokens may take, if that is no more than half of `decision_deadline`."""
    replica_port: int | None = None
    """Where other replicas connect to; None: the usual port where there are peers, else nowhere."""
    peer: Sequence[str] = ()
    """Other replicas, `host:port` each."""
    peers_dns: str | None = None
    """`name:port`: all addresses of the name are replicas."""
    peers_service: tuple[str, str] | None = None
    """Namespace and name of a Service of Kubernetes: all its addresses are replicas."""
    replica_secret_file: Path | None = None
    """What all replicas know and nobody else."""
    max_body: int = 16 << 20
    max_streams: int = 16_384
    request_timeout: float = 30.0
    watch_answers: float = 0.02
    first_endpoint_delay: float = 0.0
    """Seconds that pass, with flow control, before requests go to what came into a pool that had no endpoint."""
    stall_limit: float = 5.0
    """Seconds without a turn of the event loop after which the process ends itself; 0: never."""
    drain_timeout: float = 30.0
    drain_linger: float = 5.0
    trust_client_headers: bool = False
    conformance_testing: bool = False
    """Clients say where their requests go, as GIE's Gateway conformance suite wants it."""
    audit_log: Path | None = None
    log_format: logs.Format = "text"
    log_level: logs.Level = "info"
    idle_flags: Sequence[str] = ()
    """Flags that were given and do nothing, and why, to be logged once."""


class Shared:
    """What all pools of the process use together."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.clock = time.monotonic
        self.random = random.Random()
        self.metrics = Metrics(self.clock)
        self.decisions = Decisions()
        self.audit = _audit(settings.audit_log, self.metrics)
        self.gateway_certificate = _gateway_certificate(settings, self.metrics)
        self.certificate = _certificate(settings, self.metrics)
        self.tracing = _tracing(self.metrics) if settings.tracing else None
        self.lasting: Lasting = {}
        self.replicas = _replicas(settings, self)
        if self.replicas is not None:
            self.metrics.add_replicas(self.replicas.exchange.figures)
        self.hash_seed = secrets.randbits(64) if self.replicas is None else self.replicas.hash_seed
        self.tokens = TokenRatio()
        self.token_cache = TokenCache(_TOKEN_CACHE)
        self.tokenizers = load_tokenizers(
            tokenizer_files(settings.tokenizer, settings.tokenizer_args), self.token_cache
        )

    @cached_property
    def api(self) -> ApiServer:
        """The Kubernetes API server, made when it is first needed. ConfigError without credentials."""
        return ApiServer(self.settings.kubeconfig)

    async def close(self) -> None:
        """End what is open, once nothing uses it any more."""
        if "api" in self.__dict__:
            await self.api.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.flush)


class ServedPool:
    """One pool with everything that picks from it."""

    def __init__(self, pool: Pool, port: int, shared: Shared) -> None:
        settings = shared.settings
        self.pool = pool
        self._shared = shared
        self._learner = shared.tokens.learner()
        self._announcer = self._announced_by(shared.replicas)
        self.config: ConfigFile | None = None
        if settings.config is not None:
            self.config = ConfigFile(
                settings.config,
                clock=shared.clock,
                random=shared.random,
                metrics=shared.metrics,
                plugins_from=settings.plugins_from,
                flow_control=settings.flow_control,
            )
            self.pipeline = self.config.pipeline
        elif settings.config_text is not None:
            text = settings.config_text
            self.pipeline = load_text(
                text,
                clock=shared.clock,
                random=shared.random,
                where="--config-text",
                plugins_from=settings.plugins_from,
                flow_control=settings.flow_control,
            )
        else:
            self.pipeline = load_strategy(
                settings.strategy, clock=shared.clock, random=shared.random, flow_control=settings.flow_control
            )
        self._limits: Limits | None = None
        self._limit_series = shared.metrics.add_limits(pool.name)
        self._flow: FlowControl | None = None
        self._waits = shared.metrics.add_flow(pool.name, lambda: self._flow.figures() if self._flow else None)
        self._recorder = Recorder(
            pool.name,
            shared.metrics,
            shared.decisions,
            shared.audit,
            namespace=pool.namespace,
            clock=shared.clock,
            wall_clock=wall_clock,
        )
        observer: RequestObserver = self._recorder
        if shared.tracing is not None:
            observer = Traces(observer, shared.tracing, shared.clock, wall_clock)
        parser = Parser(pool, shared.tokens.tokens, trusted=settings.trust_client_headers)
        parser.use(self.pipeline.parsers)
        listed = settings.list_models and not settings.conformance_testing
        self.models = ModelReader(pool, shared.random, self._models_differ) if listed else None
        self.router = Router(
            pool,
            parser,
            self._policy(),
            observer,
            shared.clock,
            honour_subset=not settings.disable_endpoint_subset_filter,
            explains=settings.trust_client_headers,
            models=None if self.models is None else self.models.answer,
        )
        self.scraper = Scraper(
            pool, shared.metrics, shared.clock, shared.random, interval=settings.refresh_metrics_interval
        )
        self.scraper.engines = self.pipeline.engines
        self._prompts = Tokens(
            shared.tokenizers,
            shared.token_cache,
            remote=Remote(lambda: pool.endpoints),
            deadline=min(settings.tokenizer_timeout, settings.decision_deadline / 2),
        )
        services = self._services()
        self._reports = Reports(services, shared.lasting)
        self.lifecycle = Lifecycle(services, shared.lasting, self._plugin_failed)
        self.lifecycle.use((*self.pipeline.plugins, self._learner))
        self.port = port
        """The ext_proc port asked for; 0: any."""
        pool.on_added.append(self._check_role)
        for endpoint in pool.endpoints:
            self._check_role(endpoint)
        pool.on_removed.append(lambda endpoint: self.router.policy.scheduler.removed(endpoint))
        pool.on_scraped.append(lambda endpoint: self.router.policy.scheduler.scraped(endpoint))
        pool.on_scraped.append(lambda endpoint: self._flow.changed() if self._flow else None)
        if delay := shared.settings.first_endpoint_delay:
            pool.on_filled.append(lambda: self._flow.filled(delay) if self._flow else None)
        for listeners in (pool.on_added, pool.on_removed):
            listeners.append(lambda endpoint: self._flow.endpoints_changed() if self._flow else None)
        shared.metrics.add_pool(pool)
        shared.metrics.add_handler(pool.name, self._handler)
        shared.metrics.add_source(lambda: self.router.policy.scheduler.statistics(), pool.name)
        shared.metrics.add_source(lambda: {"tokens": self._prompts.statistics()}, pool.name)
        shared.metrics.add_endpoint_source(lambda: self.router.policy.scheduler.endpoint_statistics(), pool.name)
        shared.metrics.add_kv_events(pool.name, lambda: self.router.policy.scheduler.kv_events(pool.endpoints))

    def _handler(self) -> tuple[str, str]:
        """Name and type of the profile handler."""
        name = self.router.policy.scheduler.handler.name
        entry = self.pipeline.registry.get(name)
        return name, entry.type if entry is not None else ""

    def _check_role(self, endpoint: Endpoint) -> None:
        if wrong := unknown_role(endpoint):
            self._shared.metrics.degraded("role-unknown", wrong)

    def _announced_by(self, replicas: ReplicaGroup | None) -> Plugin | None:
        """What tells other replicas of this pool's requests, and takes part in what they tell."""
        if replicas is None:
            return None
        pool, name = self.pool, f"{self.pool.namespace}/{self.pool.name}"

        def accounts() -> Scheduler:
            return self.router.policy.scheduler

        replicas.add_pool(SharedPool(name, lambda: pool.ready, lambda: pool.by_name, accounts))
        return replicas.announcer(name, lambda request, endpoint: accounts().to_peers(request, endpoint))

    async def follow(self) -> None:
        """Take each good change of the configuration between two requests, for ever."""
        if self.config is not None:
            await self.config.watch(self._changed)

    def shut(self) -> None:
        """The process ends: nothing waits any more."""
        if self._flow is not None:
            self._flow.shut()

    def describe(self) -> str:
        return f"pool {self.pool.namespace}/{self.pool.name}\n{describe(self.pipeline)}"

    def _changed(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.router.parser.use(pipeline.parsers)
        self.router.policy = self._policy()
        self.scraper.engines = pipeline.engines
        self.lifecycle.use((*pipeline.plugins, self._learner))
        log.info("pool %s: new configuration from %s", self.pool.name, self._shared.settings.config)
        _log_idle(pipeline)

    def _models_differ(self, names: Sequence[str] | None) -> None:
        reason = "models-differ"
        if names is None:
            self._reports.recovered(reason)
            return
        some = ", ".join(printable(name, _LONGEST_NAME) for name in names[:_NAMED]) + (", …" if names[_NAMED:] else "")
        detail = f"no model is served by all endpoints, and requests go to any: {some}; give each a pool of its own"
        self._reports.degraded(reason, detail, lasting=True)

    def _services(self) -> Services:
        metrics, pool, group = self._shared.metrics, self.pool, self._shared.replicas

        def degraded(reason: str, detail: str = "", *, lasting: bool = False) -> None:
            metrics.degraded(reason, f"{pool.name}: {detail}", lasting=lasting)

        given = Services(
            endpoints=lambda: pool.endpoints,
            for_each_endpoint=pool.run_for_each,
            tokens=self._prompts.of,
            samples=samples_at,
            degraded=degraded,
            recovered=metrics.recovered,
            wall_clock=wall_clock,
            hash_seed=self._shared.hash_seed,
            engine_of=lambda endpoint: self.pipeline.engines.of(endpoint),
        )
        if group is None:
            return given
        return replace(given, replicas=partial(group.exchange.replicas, f"{pool.namespace}/{pool.name}"))

    def _policy(self) -> Policy:
        flow, limits = self._flow_control(), self._tenants_limits()
        guards = self.pipeline.guards
        beside = (self._learner, self._announcer, flow, limits)
        scheduler = self.pipeline.scheduler(
            wall_clock=wall_clock,
            on_error=self._plugin_failed,
            fallbacks=self._shared.settings.fallbacks,
            others=[each for each in beside if each is not None],
            shadow_random=self._shared.random,
            on_parts_ended=self._recorder.parts_ended,
            made=Scheduler if self._shared.tracing is None else partial(TimedScheduler, self._shared.clock),
        )
        admission = Admission(self.pipeline.detector)
        return Policy(admission, scheduler, flow, Guards(guards, self._plugin_failed) if guards else None, limits)

    def _tenants_limits(self) -> Limits | None:
        """What the pipeline says, with what tenants have used already."""
        settings, metrics, replicas = self.pipeline.limits, self._shared.metrics, self._shared.replicas
        if settings is None:
            return None
        if self._limits is not None:
            self._limits.configure(settings)
            return self._limits
        name = f"{self.pool.namespace}/{self.pool.name}"
        self._limits = Limits(
            settings,
            self._shared.clock,
            self._limit_series.refused,
            lambda: metrics.degraded("limits-too-many-tenants", self.pool.name),
            instance=self._shared.random.getrandbits(63),
            tell=None if replicas is None else lambda piece: replicas.tell(name, "limits", piece),
            later=lambda seconds, call: asyncio.get_running_loop().call_later(seconds, call),
        )
        return self._limits

    def _flow_control(self) -> FlowControl | None:
        """What the pipeline says, with the requests that wait already."""
        settings, pool = self.pipeline.flow, self.pool
        if settings is None:
            if self._flow is not None:
                self._flow.close()
            self._flow = None
        elif self._flow is not None:
            self._flow.configure(settings)
        else:
            self._flow = FlowControl(
                settings,
                pool.candidates,
                pool.why_empty,
                lambda seconds, call: asyncio.get_running_loop().call_later(seconds, call),
                self._waited,
                self._plugin_failed,
                clock=self._shared.clock,
                trusted=self._shared.settings.trust_client_headers,
                replicas=lambda: 1 if self._shared.replicas is None else self._shared.replicas.live,
            )
        return self._flow

    def _waited(self, fairness_id: str, priority: int, outcome: Outcome, seconds: float, model: str) -> None:
        self._waits.ended(fairness_id, priority, outcome, seconds, model)
        if outcome in REFUSED:
            self._shared.metrics.degraded(
                "flow-control-refused", f"{self.pool.name}: priority {priority}, {outcome} after {seconds:.1f} s"
            )

    def _plugin_failed(self, plugin: str, error: Exception) -> None:
        self._shared.metrics.degraded("plugin-failed", f"{plugin}: {type(error).__name__}: {error}")


def _replicas(settings: Settings, shared: Shared) -> ReplicaGroup | None:
    """This replica among others; None: it is alone."""
    named = settings.peer or settings.peers_dns is not None or settings.peers_service is not None
    if settings.replica_port is None and not named:
        if settings.replica_secret_file is not None:
            expected = "expected with --peer, --peers-dns, --peers-service or --replica-port only"
            raise ConfigError("--replica-secret-file", expected)
        return None
    return ReplicaGroup(
        ReplicaSettings(
            settings.host,
            protocol.REPLICA_PORT if settings.replica_port is None else settings.replica_port,
            settings.peer,
            settings.peers_dns,
            _replica_service(settings, shared),
            settings.replica_secret_file,
        ),
        shared.clock,
        shared.random,
        shared.metrics.degraded,
        shared.metrics.recovered,
    )


def _replica_service(settings: Settings, shared: Shared) -> ServiceAddresses | None:
    """The Service behind which the replicas are. Its port is named as in our manifests, or the only one."""
    if settings.peers_service is None:
        return None
    namespace, name = settings.peers_service
    chance = random.Random(shared.random.getrandbits(64))
    return ServiceAddresses(namespace, name, "replicas", shared.api, shared.metrics, "replicas-service", chance)


def _gateway_certificate(settings: Settings, metrics: Metrics) -> GatewayCertificate | None:
    secure = not settings.endpoints if settings.secure_serving is None else settings.secure_serving
    if settings.cert_path is not None and not secure:
        raise ConfigError("--cert-path", "expected with --secure-serving=true only")
    return GatewayCertificate(settings.cert_path, metrics, settings.tls_cipher_suites) if secure else None


def _tracing(metrics: Metrics) -> Tracing:
    loop = asyncio.get_running_loop()

    def lost() -> None:
        with suppress(RuntimeError):  # the loop is gone, and who would want to know with it
            loop.call_soon_threadsafe(metrics.degraded, "traces-lost", "the collector of OTEL_EXPORTER_OTLP_ENDPOINT")

    return Tracing(lost)


def _certificate(settings: Settings, metrics: Metrics) -> Certificate | None:
    directory, client_ca = settings.metrics_cert_dir, settings.metrics_client_ca_file
    if directory is not None:
        return Certificate(directory, client_ca, metrics)
    if client_ca is not None:
        raise ConfigError("--metrics-client-ca-file", "expected with --metrics-cert-dir only")
    return None


def _audit(path: Path | None, metrics: Metrics) -> AuditLog | None:
    try:
        return None if path is None else AuditLog(path, metrics)
    except OSError as error:
        raise ConfigError("--audit-log", f"cannot write {path}: {error.strerror}") from error


def _log_idle(pipeline: Pipeline) -> None:
    if pipeline.idle:
        log.info("accepted, without effect: %s", "; ".join(pipeline.idle))


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
    if settings.idle_flags:
        log.info("given and without effect: %s", "; ".join(settings.idle_flags))
    if settings.conformance_testing:
        log.warning("--conformance-testing: clients choose their endpoints; not for production")
    settings = discovered(settings)
    shared = Shared(settings)
    try:
        await _serve(settings, shared, stop, stop_now)
    finally:
        await shared.close()
    return 0


async def _serve(settings: Settings, shared: Shared, stop: asyncio.Event, stop_now: asyncio.Event) -> None:
    pools = await _pools(settings, shared)
    ports = _ports(pools.states, settings.grpc_port)
    served = [ServedPool(pool, port, shared) for pool, port in zip(pools.pools, ports, strict=True)]
    _log_idle(served[0].pipeline)  # all have the same
    memory = Memory(ServerSettings.max_held, settings.max_streams)
    servers = [_server(one, settings, shared, memory, first=one is served[0]) for one in served]

    def loading() -> list[str]:
        reasons = [f"pool {one.pool.name} is not loaded" for one in served if not one.pool.ready]
        if shared.replicas is not None and not shared.replicas.joined:
            reasons.append("its peers' knowledge is not there yet")
        return reasons

    def unready() -> list[str]:
        return ["draining", *loading()] if stop.is_set() else loading()

    admin = AdminServer(
        shared.metrics,
        pools.pools,
        shared.decisions,
        unready,
        lambda: "\n\n".join(one.describe() for one in served),
        AdminSettings(
            host=settings.host,
            port=settings.metrics_port,
            access=_access(settings, shared),
            names=settings.metrics_allowed_host,
            profiles=settings.enable_pprof,
            tls=None if shared.certificate is None else shared.certificate.context,
        ),
        clock=shared.clock,
    )
    admin.explain_by(partial(_explain, served))
    if shared.replicas is not None:
        admin.show_replicas(shared.replicas.as_dict)
    # Outside of the group, which would wrap the error of a port in use.
    async with _open(servers), _open_to(shared.replicas), admin:
        async with asyncio.TaskGroup() as tasks:
            work = [
                watch(settings.stall_limit),
                pools.watch(),
                _report_health(servers, lambda: not loading()),
                *([shared.replicas.run()] if shared.replicas else []),
                *(one.follow() for one in served),
                *(one.scraper.run() for one in served),
                *(one.models.run() for one in served if one.models is not None),
                *(one.lifecycle.run() for one in served),
                *([shared.audit.run()] if shared.audit else []),
                *([shared.certificate.watch()] if shared.certificate else []),
            ]
            running = [tasks.create_task(each) for each in work]
            addresses = (_at(settings.host, server.ports[0]) for server in servers)
            served_on = zip(served, addresses, strict=True)
            log.info("serving %s", "; ".join(f"pool {one.pool.name} on {address}" for one, address in served_on))
            await stop.wait()
            log.info("draining, for at most %g s; another signal ends it at once", settings.drain_timeout)
            await _drain(servers, settings, stop_now, [one.shut for one in served])
            for task in running:
                task.cancel()


async def _explain(served: Sequence[ServedPool], name: str, raw: RawRequest) -> dict[str, Any]:
    """What the pool of this name (NAME or NAMESPACE/NAME; empty: the first) would decide. Raises EppError."""
    known = [f"{one.pool.namespace}/{one.pool.name}" for one in served]
    found = [one for one, full in zip(served, known, strict=True) if name in ("", one.pool.name, full)]
    if not found:
        raise BadRequest(f"pool: got {name[:100]!r}; expected one of {', '.join(known)}", param="pool")
    pool = found[0]
    decision = await pool.router.explain(raw)
    flow = pool.router.policy.flow
    return {
        "pool": f"{pool.pool.namespace}/{pool.pool.name}",
        "waiting": None if flow is None else sum(row.requests for row in flow.figures().waiting),
        "decision": decision.as_dict(),
    }


@asynccontextmanager
async def _open(servers: Sequence[AnyServer]) -> AsyncIterator[None]:
    """All servers listen, not ready yet; they are shut when the block ends, however it ends."""
    try:
        for server in servers:
            await server.start()
        yield
    finally:
        await asyncio.gather(*(server.drain(0) for server in servers))


@asynccontextmanager
async def _open_to(replicas: ReplicaGroup | None) -> AsyncIterator[None]:
    """Other replicas can connect, until the block ends."""
    if replicas is None:
        yield
        return
    try:
        replicas.open()
        yield
    finally:
        replicas.close()


async def _drain(
    servers: Sequence[AnyServer], settings: Settings, stop_now: asyncio.Event, shut: Sequence[Callable[[], None]]
) -> None:
    """Let open streams end, within the drain timeout; or not, once `stop_now` is set.

    What waits in flow control until `_LAST` seconds before is refused by `shut`, which it would not hear of later.
    """
    linger = min(settings.drain_linger, settings.drain_timeout)
    grace = settings.drain_timeout - linger
    async with asyncio.TaskGroup() as tasks:
        drains = [tasks.create_task(server.drain(grace, linger)) for server in servers]
        hurry = tasks.create_task(stop_now.wait())
        hurry.add_done_callback(lambda _: [drain.cancel() for drain in drains])
        loop = asyncio.get_running_loop()
        last = loop.call_later(max(0.0, linger + grace - _LAST), lambda: [refuse() for refuse in shut])
        await asyncio.wait(drains)
        last.cancel()
        hurry.cancel()


def _access(settings: Settings, shared: Shared) -> Access | None:
    """Who may read the second server; None: anyone who reaches it."""
    asked = not settings.endpoints if settings.metrics_endpoint_auth is None else settings.metrics_endpoint_auth
    return Access(shared.api, shared.metrics, shared.clock) if asked else None


def discovered(settings: Settings) -> Settings:
    """With the endpoints file that the configuration names, where the flags name none."""
    text = settings.config_text if settings.config is None else read_file(settings.config)
    if settings.endpoints or text is None:
        return settings
    try:
        found = parse(text).endpoints_file
    except ConfigError:  # the pool's own start says all that is wrong with it
        return settings
    return settings if found is None else replace(settings, endpoints=(found,))


async def _pools(settings: Settings, shared: Shared) -> StaticPools | KubePools:
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
        wanted = await labelled(settings.pool_selector, settings.pool_namespace, shared.api)
    elif settings.endpoint_selector:
        name = settings.pool_name[0] if settings.pool_name else "default"
        wanted = Selected(name, settings.endpoint_selector, tuple(settings.endpoint_target_ports))
    return KubePools(wanted, settings.pool_namespace, shared.api, shared.metrics, shared.random)


async def _report_health(servers: Sequence[AnyServer], is_ready: Callable[[], bool]) -> None:
    """gRPC health says SERVING while every pool is loaded, and once peers have said what they know; the reference
    picker looks as often.
    """
    while True:
        ready = is_ready()
        for server in servers:
            server.set_ready(ready)
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


def _at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _server(one: ServedPool, settings: Settings, shared: Shared, memory: Memory, *, first: bool) -> AnyServer:
    """The pool's ext_proc port. Health has one port for the process, at the first server."""
    kind: Callable[..., AnyServer] = ExtProcServer
    if settings.ext_proc_server == "grpc":
        from epp.extproc.grpc_server import GrpcServer  # grpc takes 10 MB, which only this needs

        kind = GrpcServer
    return kind(
        ConformanceRouter(one.router).route if settings.conformance_testing else one.router.route,
        shared.metrics,
        ServerSettings(
            listen=(_at(settings.host, one.port),),
            certificate=shared.gateway_certificate,
            health=(_at(settings.host, settings.grpc_health_port),) if first else (),
            deadline=settings.decision_deadline,
            incomplete=settings.request_timeout,
            connection_age=AGE * settings.drain_linger,
            max_body=settings.max_body,
            watch_answers=settings.watch_answers,
        ),
        memory,
    )
