"""`ConfigFile`: a configuration file and the pipeline it makes, followed as the file changes."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random

from epp.configuration.loader import Pipeline, load_text, read_file
from epp.errors import ConfigError
from epp.process.follow import INTERVAL, changes, stamp
from epp.telemetry.metrics import Metrics


class ConfigFile:
    """Loads `path` at once (raises ConfigError), and again whenever it changes.

    A file that is wrong or gone is refused: the pipeline stays, and `metrics.degraded("config-refused")` says why, once
    for each state of the file, and lasts until the file is right.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float],
        random: Random,
        metrics: Metrics,
        interval: float = INTERVAL,
        plugins_from: Sequence[str] | None = None,
        flow_control: bool = False,
    ) -> None:
        self._flow_control = flow_control
        self.path = path
        self._clock = clock
        self._random = random
        self._metrics = metrics
        self._interval = interval
        self._plugins_from = plugins_from
        self._seen = stamp(path)
        self._text = read_file(self.path)
        self.pipeline = self._load(self._text, None)

    async def watch(self, changed: Callable[[Pipeline], None]) -> None:
        """Follow the file, for ever; `changed` is called with each new pipeline, on the event loop."""
        async for _ in changes(partial(stamp, self.path), self._seen, self._interval):
            try:
                fresh = await asyncio.to_thread(self._changed)
            except ConfigError as error:
                self._metrics.degraded("config-refused", str(error), lasting=True)
                continue
            except Exception as error:  # a bug, ours or of a plugin: the pipeline as it is serves on
                self._metrics.degraded("config-refused", f"not loaded: {type(error).__name__}: {error}", lasting=True)
                continue
            self._metrics.recovered("config-refused")
            if fresh is not None:
                self.pipeline = fresh
                changed(fresh)

    def _changed(self) -> Pipeline | None:
        """A new pipeline, or None where the file was touched and says the same."""
        text = read_file(self.path)
        if text == self._text:
            return None
        pipeline = self._load(text, self.pipeline)
        self._text = text
        return pipeline

    def _load(self, text: bytes, previous: Pipeline | None) -> Pipeline:
        return load_text(
            text,
            clock=self._clock,
            random=self._random,
            where=str(self.path),
            previous=previous,
            plugins_from=self._plugins_from,
            flow_control=self._flow_control,
        )
