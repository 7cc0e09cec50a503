"""Pools from files: an endpoints file as llm-d's `file-discovery` has it, or the YAML a cluster would get.

Documents read: `endpoints:` lists, InferencePool, Pod, InferenceObjective, InferenceModelRewrite, and a List of them.
Every other kind is skipped, so the files may be a gateway's whole manifests.
"""

import asyncio
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from epp.documents.files import Document, files_in, read_documents, stamp_of
from epp.errors import ConfigError
from epp.pool.manifests import pools_of
from epp.pool.store import Pool, PoolState
from epp.process.follow import INTERVAL, changes
from epp.telemetry.metrics import Metrics


def load(paths: Sequence[Path], pool_name: str | None = None) -> list[PoolState]:
    """The pools that files and directories (their `*.yaml`, `*.yml`, `*.json`) describe.

    Each InferencePool document is a pool; its endpoints are the ready Pods its selector matches, one for each target
    port, and the entries of `endpoints:` lists whose labels it matches. `pool_name` then names the only one wanted.
    Without an InferencePool, all `endpoints:` are one pool called `pool_name` ("default"). ConfigError if wrong.
    """
    documents: list[Document] = []
    for path in files_in(paths):
        documents += read_documents(path)
    if not documents:
        named = ", ".join(str(path) for path in paths)
        raise ConfigError(named, "no YAML document found; expected `endpoints:` or an InferencePool")
    return pools_of(documents, pool_name)


class StaticPools:
    """The pools of files, followed as the files change. Which pools there are is fixed at the start.

    Raises ConfigError from the constructor; later a bad file is refused, the old state stays, and
    `metrics.degraded("pool-file-refused")` says why, once for each content.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        pool_name: str | None,
        metrics: Metrics,
        random: random.Random,
        *,
        interval: float = INTERVAL,
    ) -> None:
        self._paths = tuple(paths)
        self._pool_name = pool_name
        self._metrics = metrics
        self._interval = interval
        self._seen = stamp_of(self._paths)
        self.states = load(self._paths, pool_name)
        self.pools = [Pool(state.name, state.namespace, random=random) for state in self.states]
        """In the order of the files; `states` has the same order."""
        self._apply(self.states)

    async def watch(self) -> None:
        """Follow the files, for ever."""
        async for _ in changes(partial(stamp_of, self._paths), self._seen, self._interval):
            await self._refresh()

    async def _refresh(self) -> None:
        try:
            states = await asyncio.to_thread(load, self._paths, self._pool_name)
            have, found = {_id(state) for state in self.states}, {_id(state) for state in states}
            if have != found:
                changed = ", ".join(sorted(have ^ found))
                raise ConfigError(changed, "InferencePools came or went; expected the same ones until a restart")
        except ConfigError as error:
            self._metrics.degraded("pool-file-refused", str(error))
            return
        except Exception as error:  # a bug of ours: the pool as it is serves on
            self._metrics.degraded("pool-file-refused", f"not read: {type(error).__name__}: {error}")
            return
        order = {_id(state): state for state in states}
        self._apply([order[_id(state)] for state in self.states])

    def _apply(self, states: list[PoolState]) -> None:
        self.states = states
        for pool, state in zip(self.pools, states, strict=True):
            pool.apply(state)


def _id(state: PoolState) -> str:
    return f"{state.namespace}/{state.name}"
