"""What LMCache holds in L1 and L2: a mirror of its coordinator's directory, never asked for on a request's way.

The directory is listed, since the coordinator's API has no event stream: what is new stands at its end, so the end is
read each second; what moved or went is found by reading it all, each time while that is one page, else now and then. In
between entries may be stale, which costs a wrong hint and nothing else. Of a directory that is larger than we remember,
prompts are looked up after they were sent, for the sake of those that begin alike. While the coordinator is away
nothing counts as held.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Final, Protocol

from epp.plugin import Endpoint
from epp.prefix.lmcache.chunk_keys import Algorithm, chunks_of, salted
from epp.prefix.lmcache.coordinator import PAGE, Away, Coordinator
from epp.prefix.lmcache.directory import ENTRY_BYTES, Directory, Held, loads

_INLINE: Final = 1024
"""Tokens named on the event loop; more take a thread: some 10 us a chunk."""
_WANTED: Final = 64
"""Prefetches, and prompts to look up, that wait to be asked for; beyond, the oldest are dropped."""
_JOBS: Final = 1024
"""Prefetches that are asked after until they ended; of more the oldest are given up."""
_REST: Final = 10
"""How many times as long as a reading of everything took nothing else of the kind is done."""

Tell = Callable[[str, str], None]
"""`Services.degraded`."""


class Listed(Protocol):
    """Some of a directory's keys, in the order in which they came: `epp.prefix.lmcache.coordinator.Page`."""

    @property
    def total(self) -> int:
        """Keys there are."""

    @property
    def keys(self) -> Sized:
        """Those reported here."""

    @property
    def chunk(self) -> int:
        """Tokens of a chunk; 0 where it does not say."""

    @property
    def models(self) -> set[str]:
        """Whose they are."""

    def chunks(self, directory: Directory, model: str) -> Iterable[tuple[int, int]]:
        """(name, mask) for `directory`; only of `model`, unless that is empty. Raises Away."""


class Lister(Protocol):
    """The source of the directory: `epp.prefix.lmcache.coordinator.Coordinator`."""

    async def keys(self, offset: int) -> Listed:
        """Some keys, from that place on. Raises Away."""


@dataclass(frozen=True)
class Lmcache:
    """LMCache behind the engines, as seen by its coordinator. llm-d has nothing like it."""

    coordinator: str = ""
    """`http://HOST:PORT`; "" = there is none."""
    hash_algorithm: Algorithm = "blake3"
    """Its `--hash-algorithm`, everywhere the same."""
    model: str = ""
    """The engines' `--model`, where the coordinator serves other models too; "" = all it has is ours."""
    max_chunks: int = 500_000
    """Bound on memory: chunks known, at 120 bytes. Where there are more, prompts are looked up one by one."""
    prefetch: bool = False
    """Have LMCache load what lies in L2 into the L1 of the chosen endpoint's node while the request waits there."""

    def __post_init__(self) -> None:
        if self.coordinator:
            Coordinator(self.coordinator)
        if self.max_chunks < 1:
            raise ValueError(f"maxChunks: {self.max_chunks}, expected at least 1")
        if self.prefetch and not self.coordinator:
            raise ValueError("prefetch: expected with a coordinator only")


class Tiers:
    """The tiers of one pool. An endpoint's L1 is that of the LMCache instance which is called like its node.

    `clock` in seconds, monotonic. Times in seconds: `interval` between readings, `sweep` at least between readings of
    all of it where it is more than a page. `lister`: who is read, if not the coordinator that `config` names.
    """

    def __init__(
        self,
        config: Lmcache,
        clock: Callable[[], float],
        *,
        interval: float = 1.0,
        sweep: float = 15.0,
        lister: Lister | None = None,
    ) -> None:
        self.directory = Directory(config.max_chunks)
        self.chunk = 0
        """Tokens of a chunk, as the directory says; 0 until it does."""
        self.reached = False
        """Whether the last reading succeeded."""
        self.total = 0
        """Keys the coordinator has, those we leave out among them."""
        self.sweeps = 0
        self.prefetched = 0
        """Prefetches that were begun."""
        self.prefetched_chunks = 0
        """Chunks that those which ended had loaded from L2."""
        self.looked_up = 0
        self._config = config
        self._coordinator = Coordinator(config.coordinator)
        self._lister: Lister = lister or self._coordinator
        self._clock = clock
        self.interval = interval
        self._sweep = sweep
        self._due = 0.0
        self._models: set[str] = set()
        self._wanted: deque[tuple[str, Sequence[int], str]] = deque(maxlen=_WANTED)
        """Instance to fetch a prompt to, or "" to look it up; its tokens and salt."""
        self._asked = asyncio.Event()
        self._jobs: deque[tuple[str, str]] = deque(maxlen=_JOBS)
        """Prefetches that may not have ended: instance, name."""

    async def names(self, ids: Sequence[int], salt: str) -> Sequence[int]:
        """The chunks of a prompt, by name; () while no tier holds anything."""
        if not self.chunk or not len(self.directory):
            return ()
        named = chunks_of
        if len(ids) > _INLINE:
            chain = await asyncio.to_thread(named, ids, self.chunk, self._config.hash_algorithm)
        else:
            chain = named(ids, self.chunk, self._config.hash_algorithm)
        return [salted(name, salt) for name in chain] if salt else chain

    def held(self, names: Sequence[int]) -> list[Held]:
        """Who holds these chunks now."""
        return self.directory.held(names) if names else []

    def loads(self, runs: Sequence[Held], endpoint: Endpoint, held: int, length: int) -> tuple[int, int]:
        """Tokens that an endpoint which holds the first `held` on its device would load from L1, and from L2.

        `length`: of the prompt, whose last token is always computed.
        """
        bit = self.directory.bit_if_any(endpoint.node) if endpoint.node else 0
        l1, l2 = loads(runs, bit, held, self.chunk)
        over = max(0, held + l1 + l2 - max(held, length - 1))
        return max(0, l1 - max(0, over - l2)), max(0, l2 - over)

    def picked(self, endpoint: Endpoint, l2: int, ids: Sequence[int], salt: str) -> None:
        """A request was given to an endpoint that would load `l2` tokens of it from L2."""
        # Where no request waits the engine looks the request up before a prefetch ends: that would load everything
        # twice, and LMCache 0.5.6 finds nothing at all if the prefetch ends between its looks at L1 and at L2.
        if self._config.prefetch and l2 > 0 and endpoint.node and endpoint.load.waiting > 0:
            self._want(endpoint.node, ids, salt)
        if self.total > self.directory.limit and len(ids) >= self.chunk > 0:
            self._want("", ids, salt)

    def _want(self, instance: str, ids: Sequence[int], salt: str) -> None:
        self._wanted.append((instance, ids, salt))
        self._asked.set()

    def statistics(self) -> Mapping[str, float]:
        return {
            "tier_chunks": len(self.directory),
            "tier_bytes": len(self.directory) * ENTRY_BYTES,
            "tier_chunks_left_out": max(0, self.total - self.directory.limit),
            "tier_sweeps": self.sweeps,
            "tier_reached": float(self.reached),
            "tier_prefetches": self.prefetched,
            "tier_prefetched_chunks": self.prefetched_chunks,
            "tier_lookups": self.looked_up,
        }

    async def run(self, degraded: Tell) -> None:
        """Follow the coordinator for ever."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow(degraded))
                group.create_task(self._ask(degraded))
        finally:
            self._forget()
            self._coordinator.close()

    async def _follow(self, degraded: Tell) -> None:
        reported = False
        while True:
            try:
                await self.read()
                await self._ask_after()
                reported = False
            except Away as error:
                self._forget()
                if not reported:
                    reported = True
                    degraded("tiers-away", f"LMCache's coordinator at {self._config.coordinator}: {error}")
            await asyncio.sleep(self.interval)

    async def _ask(self, degraded: Tell) -> None:
        """Ask for what is wanted, one after the other."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            while self._wanted:
                instance, ids, salt = self._wanted.popleft()
                if not self.reached:
                    continue
                model = self._config.model or (next(iter(self._models)) if len(self._models) == 1 else "")
                if not model:
                    said = "more than one model is in LMCache's directory: `model` has to say which is ours"
                    degraded("tier-request-failed", said)
                    continue
                try:
                    if instance:
                        if job := await self._coordinator.prefetch(instance, model, ids, salt):
                            self._jobs.append((instance, job))
                        self.prefetched += 1
                    else:
                        rows = await self._coordinator.find(model, ids, salt)
                        self.directory.put(rows.chunks(self.directory, model))
                        self.looked_up += 1
                except Away as error:
                    degraded("tier-request-failed", f"{'prefetch to ' if instance else 'lookup'}{instance}: {error}")

    async def _ask_after(self) -> None:
        """Ask after prefetches: LMCache remembers each until it was asked for after its end."""
        for _ in range(min(len(self._jobs), _WANTED)):
            instance, job = self._jobs.popleft()
            try:
                chunks = await self._coordinator.prefetched(instance, job)
            except Away:  # its server was started anew, or is gone
                continue
            if chunks is None:
                self._jobs.append((instance, job))
            else:
                self.prefetched_chunks += chunks

    async def read(self) -> None:
        """Read what is new, or all of it when that is due. Raises Away."""
        if self.total <= PAGE or self._clock() >= self._due or not await self._read_end():
            await self._read_all()
        self.reached = True

    def _forget(self) -> None:
        self.reached = False
        self.directory.clear()
        self.total = 0

    async def _read_all(self) -> None:
        start = self._clock()
        self.directory.begin()
        models: set[str] = set()
        offset, total = 0, 1
        while offset < min(total, self.directory.limit):
            page = await self._lister.keys(offset)
            self.chunk = page.chunk or self.chunk
            if len(models) < 2:  # of more than one none is ours by itself
                models |= page.models
            self.directory.stage(page.chunks(self.directory, self._config.model))
            total = page.total
            offset += len(page.keys)
            if not page.keys:
                break
        self.directory.finish()
        self._models, self.total = models, total
        self.sweeps += 1
        # The coordinator walks all it has for each page: it is given time for other things.
        self._due = self._clock() + max(self._sweep, _REST * (self._clock() - start))

    async def _read_end(self) -> bool:
        """Whether keys were only added since the last time; they are known now."""
        offset = self.total
        while True:
            page = await self._lister.keys(offset)
            if page.total < self.total:
                return False
            self.directory.add(page.chunks(self.directory, self._config.model))
            offset += len(page.keys)
            self.total = page.total
            if not page.keys or offset >= min(page.total, self.directory.limit):
                return True
