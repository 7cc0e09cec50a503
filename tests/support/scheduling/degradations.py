"""Metrics that remember what was degraded, for assertions."""

from epp.telemetry.metrics import Metrics


class RecordedMetrics(Metrics):
    """Real metrics; `degradations` lists (reason, detail) in order."""

    def __init__(self) -> None:
        super().__init__()
        self.degradations: list[tuple[str, str]] = []

    def degraded(self, reason: str, detail: str = "", *, lasting: bool = False) -> None:
        self.degradations.append((reason, detail))
        super().degraded(reason, detail, lasting=lasting)

    def going_on(self) -> set[str]:
        """Lasting degradations that are not over."""
        return {labels[0] for labels, on in self.rows("warmpath_degraded_now") if on}

    def reasons(self) -> list[str]:
        return [reason for reason, _ in self.degradations]
