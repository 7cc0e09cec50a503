"""`ConfigFile`: a configuration file and the pipeline it makes, followed as the file changes."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random

from epp.errors import ConfigError
from epp.loader import Pipeline, load_text, read_file
from epp.telemetry.metrics import Metrics

Stamp = tuple[int, int, int] | None


class ConfigFile:
    """Loads `path` at once (raises ConfigError), and again whenever it changes.

    The path is looked up anew each time, so an editor's rename and Kubernetes' swap of symbolic links are changes like
    any other. A file that is wrong or gone is refused: the pipeline stays, and `metrics.degraded("config-refused")`
    says why, once for each state of the file.
    """

    def __init__(
        self, path: Path, *, clock: Callable[[], float], random: Random, metrics: Metrics, interval: float = 1.0
    ) -> None:
        self.path = path
        self._clock = clock
        self._random = random
        self._metrics = metrics
        self._interval = interval
        self._stamp = self._look()
        self._text = read_file(self.path)
        self.pipeline = self._load(self._text, None)

    async def watch(self, changed: Callable[[Pipeline], None]) -> None:
        """Follow the file, for ever; `changed` is told of each new pipeline, on the event loop.

        A change counts once it has stood for one interval: writers need their time.
        """
        last = self._stamp
        while True:
            await asyncio.sleep(self._interval)
            now = await asyncio.to_thread(self._look)
            if now == last != self._stamp:
                self._stamp = now
                try:
                    fresh = await asyncio.to_thread(self._changed)
                except ConfigError as error:
                    self._metrics.degraded("config-refused", str(error))
                else:
                    if fresh is not None:
                        self.pipeline = fresh
                        changed(fresh)
            last = now

    def _changed(self) -> Pipeline | None:
        """A new pipeline, or None where the file was touched and says the same."""
        text = read_file(self.path)
        if text == self._text:
            return None
        pipeline = self._load(text, self.pipeline)
        self._text = text
        return pipeline

    def _load(self, text: bytes, previous: Pipeline | None) -> Pipeline:
        return load_text(text, clock=self._clock, random=self._random, where=str(self.path), previous=previous)

    def _look(self) -> Stamp:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size
