"""The table of contents of the process: every object is built here, once, in order, and runs in one TaskGroup."""

import asyncio
import logging
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import uvloop

from epp import protocol
from epp.admin.decisions import Decisions
from epp.admin.recorder import Recorder
from epp.admin.server import AdminServer
from epp.describe import describe
from epp.extproc.server import Door
from epp.extproc.server import Settings as DoorSettings
from epp.flow.admission import Admission
from epp.loader import Pipeline, load_text, strategy_text
from epp.parsing.parser import Parser
from epp.parsing.tokens import TokenRatio
from epp.pool.scrape import Scraper
from epp.pool.static import StaticPools
from epp.pool.store import Pool
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


class Shared:
    """What all pools of the process use together."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.clock = time.monotonic
        self.random = random.Random()
        self.metrics = Metrics(self.clock)
        self.decisions = Decisions()
        self.audit = AuditLog(settings.audit_log, self.metrics) if settings.audit_log else None
        self.tokens = TokenRatio()


class Served:
    """One pool with everything that picks from it."""

    def __init__(self, pool: Pool, config: str, shared: Shared) -> None:
        settings, self._shared = shared.settings, shared
        self.pool = pool
        self.pipeline = self._load(config)
        self.recorder = Recorder(
            pool.name, shared.metrics, shared.decisions, shared.audit, clock=shared.clock, wall_clock=wall_clock
        )
        self.router = Router(
            pool,
            Parser(pool if settings.trust_client_headers else Untrusted(pool), shared.tokens.tokens, new_id),
            Admission(self.pipeline.detector),
            self._scheduler(),
            self.recorder,
            shared.clock,
        )
        self.scraper = Scraper(
            pool, shared.metrics, shared.clock, shared.random, interval=settings.refresh_metrics_interval
        )
        pool.on_removed.append(lambda endpoint: self.router.scheduler.removed(endpoint))
        shared.metrics.add_pool(pool)
        shared.metrics.add_source(lambda: self.router.scheduler.statistics())
