"""How many requests an endpoint runs at once, for flow control."""

from dataclasses import dataclass
from math import inf

from epp.plugin import Load


@dataclass(slots=True)
class Seats:
    """How many requests an endpoint runs at once, as its metrics show it where some had to wait.

    Engines do not say how many they take (vLLM's `--max-num-seqs`). But of one that has as many running at two scrapes
    on end, with others waiting at both, no more fit.
    """

    most: float = inf
    """inf: not known."""
    load: Load | None = None

    def look(self, load: Load) -> None:
        """The last scrape."""
        before = self.load
        if load is before or load.at is None:
            return
        self.load = load
        if load.running > self.most:
            self.most = inf
        if before is not None and load.waiting and before.waiting and 0 < load.running == before.running:
            self.most = load.running
