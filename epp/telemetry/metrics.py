"""Prometheus metrics, one object per process. Names: `warmpath_*` for ours, GIE's and llm-d's where dashboards use them."""

import logging

from prometheus_client import CollectorRegistry, Counter

log = logging.getLogger("warmpath")


class Metrics:
    """Every metric of the EPP, in a registry of its own, so that two EPPs in one process (tests) do not meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._degraded = Counter(
            "warmpath_degraded",
            "Times something worked less well than it should, by reason",
            ["reason"],
            registry=self.registry,
        )

    def degraded(self, reason: str, detail: str = "") -> None:
        """Count a degradation and log it. `reason` is a fixed word; `detail` goes to the log only."""
        self._degraded.labels(reason).inc()
        log.warning("degraded: %s%s", reason, f": {detail}" if detail else "")
