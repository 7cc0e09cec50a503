"""`Trust`: how far an endpoint keeps what is predicted of its cache, 0..1.

A prediction fails where knowledge does: blocks evicted by traffic past us, a restart not noticed yet, tokens that are
not the engine's. What it costs to believe too much is a prompt computed at a busy endpoint, so who keeps half of what
was predicted is credited with half of it.
"""

from typing import Final

from epp.plugin import Load

_BELIEF: Final = 16_384.0
"""Tokens of kept promises that an unknown endpoint is credited with: a few long prompts."""
_MEMORY: Final = 0.98
"""What is kept of the past at each observation: the last fifty or so count."""
_KEPT: Final = 0.95
"""From here on an endpoint counts as one that keeps its promises: what is missing is at the edges of blocks."""


class Trust:
    """One endpoint's record. Answers say it exactly; where they do not, the engine's counters between two scrapes
    do.
    """

    def __init__(self, load: Load) -> None:
        self._predicted = self._found = _BELIEF
        self._answers = False
        self._load = self._began = load
        """The last scrape looked at, and the one at which the window began."""
        self._promised = 0
        """Tokens predicted for what was sent in the window."""
        self._alone = True
        """All that ran in the window was ours, as far as its scrapes show."""
        self._open = self._peak = 0
        """Our requests in flight: now, and most since the last scrape."""

    @property
    def value(self) -> float:
        """0..1; 1 for who keeps nearly all."""
        share = self._found / self._predicted
        return share if share < _KEPT else 1.0

    def sent(self, predicted: int, load: Load) -> None:
        """A request was sent of which `predicted` tokens are predicted to be cached."""
        self._look(load)
        self._promised += predicted
        self._open += 1
        self._peak = max(self._peak, self._open)

    def ended(self, predicted: int, cached: int, load: Load, *, computed: bool = True) -> None:
        """It ended; its answer said that `cached` tokens were, -1: it did not say.

        Without having been `computed` it was not looked up either, so nothing was promised.
        """
        self._look(load)
        self._open -= 1
        if not computed:
            self._promised = max(0, self._promised - predicted)
        if cached >= 0:
            self._answers = True
            self._observe(predicted, cached)

    def _look(self, load: Load) -> None:
        """A new scrape closes a window, if by then the engine has looked up all that was promised in it.

        Engines count hits when a request's turn comes, which may be seconds after it was sent: so not while something
        waits or is on its way. With requests running that are not ours the counters say nothing of ours.
        """
        if load is self._load:
            return
        self._alone = self._alone and load.running + load.waiting <= self._peak
        self._load, self._peak = load, self._open
        if load.waiting or load.running != self._open:
            return
        hits = load.prefix_hits - self._began.prefix_hits
        if not self._answers and self._began.at is not None and self._alone and hits >= 0:
            self._observe(self._promised, hits)
        self._began, self._promised, self._alone = load, 0, True

    def _observe(self, predicted: int, found: int) -> None:
        if predicted <= 0:
            return
        self._predicted = _MEMORY * self._predicted + predicted
        self._found = _MEMORY * self._found + min(found, predicted)
