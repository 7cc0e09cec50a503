"""The table of contents of the process: every object built once, in order, and run in one TaskGroup."""

import asyncio
import logging
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from epp import loader, protocol
from epp.admin.decisions import Decisions
from epp.admin.recorder import Recorder
from epp.admin.server import AdminServer
from epp.errors import ConfigError
from epp.extproc.server import Door
from epp.extproc.server import Settings as DoorSettings
from epp.flow.admission import Admission
from epp.parsing.parser import Parser
from epp.parsing.tokens import TokenRatio
from epp.pool.scrape import Scraper
from epp.pool.static import StaticPools
from epp.pool.store import Pool, PoolState
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

    endpoints: Sequence[Path]
    strategy: str = "prefix-aware"
    config: Path | None = None
    pool_name: str | None = None
    fallbacks: int = 0
    host: str = "127.0.0.1"
    grpc_port: int | None = None
    grpc_health_port: int = protocol.HEALTH_PORT
    metrics_port: int = protocol.METRICS_PORT
    refresh_metrics_interval: float = 1.0
    decision_deadline: float = 5.0
    max_body: int = 64 << 20
    drain_timeout: float = 30.0
    trust_client_headers: bool = False
    audit_log: Path | None = None
    log_format: logs.Format = "text"
    log_level: logs.Level = "info"


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit status. Raises ConfigError for what is wrong."""
    logs.set_up(settings.log_level, settings.log_format)
    return uvloop.run(_serve(settings))


async def _serve(settings: Settings) -> int:
    clock, chance = time.monotonic, random.Random()
    metrics = Metrics(clock)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    pools = StaticPools(settings.endpoints, settings.pool_name, metrics, chance)
    policy = loader.Policy(settings.strategy, settings.config, settings.fallbacks, clock, chance)
    decisions = Decisions()
    audit = AuditLog(settings.audit_log, metrics) if settings.audit_log else None
    served = [
        Served(pool, state, policy, settings, metrics, decisions, audit, clock, chance, first=pool is pools.pools[0])
        for pool, state in zip(pools.pools, pools.states, strict=True)
    ]

    def unready() -> list[str]:
        reasons = [f"pool {one.pool.name} is not loaded" for one in served if not one.pool.ready]
        return ["draining", *reasons] if stop.is_set() else reasons

    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        ...
    return 0
