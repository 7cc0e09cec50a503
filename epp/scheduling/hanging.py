"""`Contact`: whether an endpoint that owes answers shows any sign of life.

An endpoint that computes long answers and one that hangs look alike by their answers: neither gives any. They differ by
what else is seen. An endpoint hangs that answered no request of ours for long, although some are there, and

    unread    its metrics were read before, cannot be read any more, and those of others can; or
    still     its metrics are read, and nothing in them moves: no engine step, no token, nobody comes or goes.

One step may take long where a prompt is long and an endpoint slow, and engines tell of a step at its end. So the second
takes what a batch of what is there takes at the endpoint's own measured speed, several times over; and it is not looked
for where a request is divided: who decodes may wait for who computes the prompt, with nothing to do.
"""

from math import inf
from typing import Final, Literal

from epp.plugin import Load

Sign = Literal["unread", "still"]

SILENT: Final = 5.0
"""Seconds without an answer to us, after which metrics that cannot be read mean something."""
_UNREAD: Final = 5.0
"""Seconds without metrics that are long; where they come rarely, so many of their intervals are:"""
_INTERVALS: Final = 3.0
_OVERDUE: Final = 1.5
"""Of such intervals, and of seconds at least, after which the next scrape should have been."""
_IDLE: Final = 10.0
"""Seconds without movement and answer that are long where the metrics know of no request, though ours are there."""
_STEP: Final = 30.0
"""The same where requests run or wait there."""
_MARGIN: Final = 4.0
"""A step takes at most so many times what its tokens take in the mean."""
_BATCH: Final = 16384
"""Tokens of a step that are many, but for a single prompt of more."""
_SLOW: Final = 50.0, 1.0
"""Tokens computed, in seconds: the speed of an endpoint of which nothing is known, and a part of any measured one."""
_RECENT: Final = 600.0
"""Seconds of work that a measured speed is a mean of."""


class Contact:
    """What passed between one endpoint and us. Times are seconds on the plugins' clock.

    `watched` of its methods: since when endpoints' metrics are read without a long pause. What came in a pause, as when
    the picker itself stood still or had no network, is no endpoint's silence.
    """

    __slots__ = (
        "_answered",
        "_busy",
        "_done",
        "_gap",
        "_largest",
        "_load",
        "_moved",
        "_parts",
        "_scraped",
        "_since",
        "_tokens",
        "unanswered",
    )  # fmt: skip

    def __init__(self, now: float) -> None:
        self.unanswered = 0
        """Requests of ours that are there, and of whose answer nothing was seen."""
        self._parts = 0
        """Those of them that are one stage of a request."""
        self._tokens = 0
        """Of their prompts, and of the largest since there was none."""
        self._largest = 0
        self._since = now
        """Since when there are any."""
        self._answered = now
        """When it answered last."""
        self._load: Load | None = None
        self._scraped = now
        self._gap = inf
        """The fewest seconds between two scrapes; inf: there were no two."""
        self._moved = now
        """When its metrics last differed from those before."""
        self._done: float = _SLOW[0]
        self._busy: float = _SLOW[1]
        """Prompt tokens it computed, and seconds in which it had work."""

    @property
    def pause(self) -> float:
        """Seconds without any endpoint's metrics that are a pause of ours."""
        return (self._late if self._gap < inf else _UNREAD) / 2

    @property
    def _late(self) -> float:
        """Seconds after which a scrape is late."""
        return max(_UNREAD, _INTERVALS * self._gap)

    def sent(self, tokens: int, now: float, *, part: bool) -> None:
        """It is sent a request of so many tokens."""
        if not self.unanswered:
            self._since, self._largest = now, 0
        self.unanswered += 1
        self._parts += part
        self._tokens += tokens
        self._largest = max(self._largest, tokens)

    def ended(self, tokens: int, *, part: bool) -> None:
        """That request is answered, or left it otherwise."""
        self.unanswered -= 1
        self._parts -= part
        self._tokens -= tokens

    def answered(self, now: float) -> None:
        """It answered one."""
        self._answered = now

    def scraped(self, load: Load, now: float) -> bool:
        """Its metrics were read; whether anything in them moved."""
        before, self._load = self._load, load
        if before is None:
            self._scraped = self._moved = now
            return True
        gap, self._scraped = now - self._scraped, now
        self._gap = min(self._gap, gap)
        if _computed(load) and (before.running or load.running):
            self._done += max(0, _computed(load) - _computed(before))
            self._busy += gap
            if self._busy > _RECENT:
                self._done, self._busy = self._done / 2, self._busy / 2
        moved = _figures(load) != _figures(before)
        if moved:
            self._moved = now
        return moved

    def silence(self, now: float, watched: float) -> float:
        """Seconds for which it owes us an answer and gives none."""
        return now - max(self._since, self._answered, watched) if self.unanswered else 0.0

    def is_gone(self, now: float) -> bool:
        """Its metrics should have been read again by now, and since they should it has answered nothing."""
        due = self._scraped + _OVERDUE * max(1.0, self._gap)
        return self._answered <= due < now

    def is_unread(self, now: float, watched: float) -> bool:
        """It hangs, by metrics that cannot be read. Not if it answered without them: they may be what is wrong."""
        late = self._scraped + self._late
        return now > late >= self._answered and self.silence(now, watched) > SILENT

    def is_still(self, now: float, watched: float) -> bool:
        """It hangs, by metrics that can be read."""
        load, quiet = self._load, min(now - self._moved, self.silence(now, watched))
        if load is None or self._parts or quiet <= _IDLE:
            return False
        works = bool(load.running or load.waiting)
        if works and not (load.steps or load.generated_tokens):
            return False  # this engine does not count what would move
        tokens = max(self._largest, min(self._tokens, _BATCH))
        return quiet > (_STEP if works else _IDLE) + _MARGIN * tokens * self._busy / self._done


def _figures(load: Load) -> tuple[int, ...]:
    """What moves while an engine works."""
    return (
        load.waiting, load.running, load.steps, load.generated_tokens, load.prompt_tokens, load.computed_tokens,
        load.first_tokens,
    )  # fmt: skip


def _computed(load: Load) -> int:
    """Prompt tokens computed since it started, as far as it counts them."""
    return load.computed_tokens or max(0, load.prompt_tokens - load.prefix_hits)
