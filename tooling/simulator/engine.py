"""One vLLM v1 pod as a pure model: no clock, no sockets, no randomness. Equal calls give equal results.

The scheduler follows vLLM's `v1/core/sched/scheduler.py` (0.32) where it matters for routing: one token budget per
step for decodes and chunked prefill, first come first served, paged KV with a prefix cache
(`tooling.simulator.blocks`), preemption by recompute, last come first. Left out: speculative decoding, sliding windows,
the reserved null block. At most `adapter_slots` LoRA adapters are in a batch; a request whose adapter finds no slot is
passed by, as vLLM does, and one whose adapter is in none has it loaded before the step begins. Below the device there
may be tiers (`tooling.simulator.tiers`). What is loaded from them comes between steps, as with vLLM's LMCache
connector: the request keeps its blocks and waits, others go on. So does what comes from another engine that prefilled,
as with its NixlConnector; that one keeps the blocks until they were fetched.

A prompt is a token count and a chain of block hashes (`tooling.simulator.tokenizer.hash_chain`), so tokens themselves
never get here. The chain may run on into the answer, whose tokens the simulator knows beforehand; full blocks the chain
does not cover are cached as in vLLM, so they take their turn to be evicted, but can never be hit.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from tooling.simulator.blocks import Blocks
from tooling.simulator.tiers import CHUNK, Load, Lower


@dataclass(frozen=True, kw_only=True)
class EngineParameters:
    """Size and speed of one pod. Times are seconds.

    A step takes `base + per_decode * decodes + per_context_token * context of the decodes + linear * prefill tokens
    + attention * sum over prefill tokens of the tokens before them`. The form is a roofline: weights are read once a
    step (`base`), each decode reads its own KV (`per_context_token`), prefill is bound by compute (`linear`, and
    `attention` for the part that grows with context).
    """

    block_size: int = 16
    """Tokens per KV block (vLLM's default on GPUs)."""
    blocks: int
    """KV blocks on the device."""
    max_batched_tokens: int = 8192
    """Tokens one step may process, decodes and prefill together (`--max-num-batched-tokens`)."""
    max_running: int = 256
    """Requests in the running batch (`--max-num-seqs`)."""
    base: float
    """Seconds per step whatever is in it: reading the weights, launching kernels, sampling."""
    per_decode: float
    """Seconds per decoding request in a step."""
    per_context_token: float
    """Seconds per token of context read by a decoding request."""
    linear: float
    """Seconds per prefilled token: the matrix products."""
    attention: float
    """Seconds per pair of a prefilled token and a token before it."""
    adapter_slots: int = 4
    """LoRA adapters on the device (`--max-loras`); vLLM keeps as many in the node's memory, if not told otherwise."""
    adapter_load: float = 0.5
    """Seconds that the step in which an adapter is loaded takes longer. An estimate: 80 MB (rank 16, Llama 8B) read
    from a local disk, unpacked and copied layer by layer."""

    def __post_init__(self) -> None:
        for name in ("block_size", "blocks", "max_batched_tokens", "max_running", "adapter_slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}, expected at least 1")
        if self.base <= 0:
            raise ValueError(f"base: {self.base}, expected more than 0: a step that takes no time never ends")
        for name in ("per_decode", "per_context_token", "linear", "attention", "adapter_load"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)}, expected 0 or more")

    @property
    def capacity(self) -> int:
        """Tokens of KV the pod can hold."""
        return self.blocks * self.block_size


H100_8B = EngineParameters(
    blocks=27_000,
    base=6.5e-3,
    per_decode=15e-6,
    per_context_token=48e-9,
    linear=45e-6,
    attention=1.5e-9,
)
"""Llama-3.1-8B in bf16 on one H100 SXM 80 GB. A roofline estimate, not a measurement; trust ratios more than seconds.

- `base`: 16 GB of weights at 3.35 TB/s are 4.8 ms; at three quarters of that bandwidth, which decode kernels reach,
  6.5 ms. A lone decode is then 6.5 ms, 256 of 500 tokens 16 ms; published decode steps are 7-10 ms at small batches.
- `per_decode`: 2 * 8e9 FLOP are 16 us at the dense peak of 989 TFLOP/s; most of it hides behind the weights' reading,
  sampling adds some back.
- `per_context_token`: KV of a token is 32 layers * 2 * 8 heads * 128 * 2 bytes = 128 KiB; at 80 % of 3.35 TB/s 48 ns.
- `linear`: 22,000 tokens/s, within the published 15-25 thousand (16 GFLOP a token at about 36 % of the peak).
- `attention`: 4 * 4096 * 32 = 524 kFLOP a pair at about 350 TFLOP/s.
- `blocks`: 90 % of 80 GB less weights and activations leaves 56 GB: 432,000 tokens.
"""

LAPTOP = EngineParameters(
    blocks=640,
    max_batched_tokens=1024,
    max_running=32,
    base=8e-3,
    per_decode=0.3e-3,
    per_context_token=0.4e-6,
    linear=0.2e-3,
    attention=4e-9,
)
"""A pod so small that caching decides within seconds: 5,000 prefill tokens/s, a cache of 10,240 tokens.

Its ratios are those of a GPU pod (prefill of a full cache costs some hundred decode steps), its sizes are chosen for
the demo and follow no hardware."""


@dataclass(frozen=True)
class Transfer:
    """How KV comes from another engine."""

    seconds: float = 0.01
    """However little it is: a second request, and asking for the blocks."""
    tokens_per_second: float = 200_000
    """128 KiB of KV each over 400 Gbit/s, of which half is taken to be reached."""


@dataclass(eq=False, slots=True)
class Job:
    """One request inside the engine. Read-only for callers; all times are the caller's clock, None = not yet."""

    id: str
    prompt: int
    """Prompt tokens."""
    output: int
    """Tokens it will generate before it ends."""
    hashes: Sequence[int]
    arrived_at: float
    adapter: str = ""
    admitted_at: float | None = None
    """When it first left the waiting queue."""
    first_token_at: float | None = None
    ended_at: float | None = None
    found: int = 0
    """Of a prompt that comes from another engine: what that one did not have to compute."""
    cached: int = -1
    """Prompt tokens it did not have to compute at its first admission, found in the prefix cache or loaded from lower
    tiers (vLLM's `num_cached_tokens`); -1 before."""
    l1: int = 0
    l2: int = 0
    """Those of them that were loaded from either tier."""
    generated: int = 0
    """Tokens generated so far."""
    preemptions: int = 0
    about: Any = None
    """Whatever the caller wants to find again with it."""
    chunks: Sequence[int] = ()
    """Names of the prompt's full chunks, under which lower tiers know them."""
    kept: int = 0
    """Of those, how many were given to the lower tiers."""
    keeps: bool = False
    """Its blocks stay after its end, for another engine to fetch."""
    transfer: "Transfer | None" = None
    """Its prompt was computed by another engine, and comes from there."""
    ready_at: float = -inf
    """When what is loaded of it is there; blocks up to `loads` tokens are reserved for it."""
    loads: int = 0
    computed: int = 0
    """Tokens whose KV is in `blocks`."""
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Step:
    """What one engine step did. Everything in it happens at `ends_at`."""

    duration: float
    ends_at: float
    tokens: list[Job]
    """Jobs that got one more token each, in running order."""
    first: list[Job]
    """Those of `tokens` that got their first."""
    finished: list[Job]
    """Those of `tokens` that got their last."""
    preempted: list[Job]
    decodes: int
    """Jobs that decoded; the other `tokens` ended a prefill."""
    prefill: int
    """Tokens prefilled."""


class Stored(NamedTuple):
    """Blocks `start` to `end` of a job's chain were cached."""

    job: Job
    start: int
    end: int


class Evicted(NamedTuple):
    """Cached blocks were overwritten: one copy of each of these hashes is gone."""

    hashes: list[int]


class Cleared(NamedTuple):
    """The whole prefix cache was emptied."""


Change = Stored | Evicted | Cleared


class NeverFits(ValueError):
    """Prompt and answer together are larger than the pod's whole KV memory; waiting would not help."""


@dataclass(slots=True)
class Totals:
    """Counters since the engine was made, in the units of the vLLM metrics of the same names."""

    prompt_tokens: int = 0
    """Prompt tokens of admitted requests, cached or computed."""
    generation_tokens: int = 0
    first_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens that were in no cache, counted with the first token, as vLLM does."""
    steps: int = 0
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache, counted when a request is first admitted."""
    prefix_hits: int = 0
    preemptions: int = 0
    prefill_computed: int = 0
    """Tokens prefilled, recomputed ones included."""
    adapters_loaded: int = 0


class Engine:
    """A pod's scheduler and memory. Drive it: `add` requests, call `step` whenever the last step has ended."""

    def __init__(self, parameters: EngineParameters, lower: Lower | None = None) -> None:
        self.parameters = parameters
        self.totals = Totals()
        self._kv = Blocks(parameters.blocks)
        self._jobs: dict[str, Job] = {}
        self._running: list[Job] = []
        self._waiting: deque[Job] = deque()
        self._lower = lower
        self._adapters: OrderedDict[str, int] = OrderedDict()
        """Those in slots -> requests of the batch that use them; unused longest first."""
        self._loading: list[Job] = []
        """Admitted, with blocks, but not in the batch until what they load is there."""
        self._taken = (-inf, -inf)
        """Until when the ways from L1 and from L2 are taken by what is being loaded: one after the other."""
        self._fetching = -inf
        """Until when the way from other engines is taken."""
        self._kept: dict[str, list[int]] = {}
        """Blocks of requests that ended here and are decoded elsewhere, until these were fetched."""
        self._computed: list[tuple[Job, int, int]] = []
        """Chunks of prompts that the step in progress completes."""
        self._changes: list[Change] | None = None

    def watch(self) -> None:
        """Write down from now on what becomes of the prefix cache; `changes` has it."""
        self._changes = []
        self._kv.on_evicted = lambda hashes: self._changed(Evicted(hashes))

    def changes(self) -> list[Change]:
        """What became of the prefix cache since this was asked last, in order; [] where nothing watches."""
        changes = self._changes
        if not changes:
            return []
        self._changes = []
        return changes

    def _changed(self, change: Change) -> None:
        if self._changes is not None:
            self._changes.append(change)

    @property
    def running(self) -> Sequence[Job]:
        """The running batch, oldest admission first."""
        return self._running

    @property
    def waiting(self) -> Sequence[Job]:
        """The queue, next first; before it those that wait for what they load (vLLM counts them as waiting too)."""
        return [*self._loading, *self._waiting] if self._loading else self._waiting

    @property
    def ready_at(self) -> float:
        """When the next load is there; inf while nothing is loaded."""
        return min((job.ready_at for job in self._loading), default=inf)

    @property
    def kept_blocks(self) -> int:
        """Blocks that wait to be fetched: no request here can use them."""
        return len({block for blocks in self._kept.values() for block in blocks})

    def fetched(self, request_id: str) -> bool:
        """Another engine has the blocks of a request that ended here, or they are given up. False: there are none."""
        blocks = self._kept.pop(request_id, None)
        if blocks is None:
            return False
        self._kv.release(blocks)
        return True

    @property
    def free_blocks(self) -> int:
        return self._kv.free

    @property
    def kv_usage(self) -> float:
        """Share of blocks referenced by requests, 0..1 (cached but unreferenced ones are free)."""
        return 1 - self._kv.free / self._kv.count

    def cached_blocks(self, hashes: Sequence[int], limit: int) -> int:
        """How many of the first `limit` blocks of a chain are in the prefix cache."""
        return self._kv.depth(hashes, limit)

    def add(  # noqa: PLR0913
        self,
        request_id: str,
        hashes: Sequence[int],
        *,
        prompt: int,
        output: int,
        now: float,
        adapter: str = "",
        about: Any = None,
        chunks: Sequence[int] = (),
        keeps: bool = False,
        transfer: Transfer | None = None,
    ) -> Job:
        """Queue a request of `prompt` tokens that will generate `output` (at least 1) tokens.

        `hashes` is the chain of the full blocks of prompt and answer (as far as known; what differs by salt or adapter
        must differ in its hashes). `chunks` are the prompt's full chunks, as lower tiers name them. `adapter` is the
        LoRA adapter it needs; `about` is only remembered. `keeps`: its blocks stay until `fetched`. `transfer`: its
        prompt was computed elsewhere and comes so. Raises NeverFits, and ValueError for an id that is live or a length
        under 1.
        """
        if request_id in self._jobs:
            raise ValueError(f"request {request_id!r} is already in the engine")
        if prompt < 1 or output < 1:
            raise ValueError(f"request {request_id!r}: prompt {prompt} and output {output}, expected at least 1 each")
        if prompt + output > self.parameters.capacity:
            raise NeverFits(
                f"{prompt} prompt and {output} generated tokens do not fit in {self.parameters.capacity} tokens of KV"
            )
        job = Job(
            request_id, prompt, output, hashes, now, adapter, about=about, chunks=chunks, keeps=keeps, transfer=transfer
        )
        self._jobs[request_id] = job
        self._waiting.append(job)
        return job

    def abort(self, request_id: str) -> bool:
        """Remove a request wherever it is and free its blocks. False if it has ended or was never here."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return False
        if job.blocks:
            (self._loading if job in self._loading else self._running).remove(job)
            self._release(job)
        else:
            self._waiting.remove(job)
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing done, while any request holds blocks (as in vLLM)."""
        done = self._kv.forget()
        if done:
            self._changed(Cleared())
        return done

    def step(self, now: float) -> Step | None:
        """Run one step that starts at `now`; None if there is nothing to do.

        Jobs that finish free their blocks at once: no job can use them before the next step anyway. While something is
        being loaded there may be nothing to do before `ready_at`.
        """
        if self._loading:
            self._arrive(now)
        batch = _Batch(self.parameters.max_batched_tokens)
        self._schedule_running(batch)
        if not batch.preempted:
            self._admit(batch, now)
        if not batch.jobs:
            return None
        return self._advance(batch, now)

    def leap(self, now: float, limit: int = 512) -> list[float]:
        """When the next steps would end if nothing happened but decoding; empty unless there are at least two of them.

        No request gets its first or last token in them, none is admitted or preempted. Nothing is done yet: `leapt`
        does some of them or all, with results equal to as many calls of `step` with nothing added in between. `limit`
        bounds their number.
        """
        running, parameters = self._running, self.parameters
        decodes, size = len(running), parameters.block_size
        ready_at = self.ready_at if self._loading else inf
        if not decodes or decodes > parameters.max_batched_tokens or ready_at <= now:
            return []
        count, context = limit, 0
        for job in running:
            if not job.generated or job.computed + 1 != job.prompt + job.generated:
                return []
            context += job.computed
            count = min(count, job.output - job.generated - 1)
        free = self._kv.free
        while count > 1 and sum(-(-(job.computed + count) // size) - len(job.blocks) for job in running) > free:
            count //= 2
        if count < 2 or self._might_admit():
            return []
        fixed = parameters.base + parameters.per_decode * decodes
        each, ends = parameters.per_context_token, []
        for read in range(context, context + count * decodes, decodes):
            now += fixed + each * read
            ends.append(now)
            if now >= ready_at:  # the next step has more to do than decoding
                break
        return ends if len(ends) > 1 else []

    def leapt(self, steps: int) -> None:
        """Do the first `steps` of what `leap` returned, nothing having been added or aborted since."""
        size, running = self.parameters.block_size, self._running
        crossings: list[tuple[int, int, bool]] = []
        for index, job in enumerate(running):
            crossings += [(at, index, False) for at in range(len(job.blocks) * size - job.computed, steps, size)]
            left = len(job.hashes) - job.computed // size
            ends = range(size - 1 - job.computed % size, steps, size)
            crossings += [(at, index, True) for at in ends[: max(0, left)]]
        crossings.sort()
        for at, index, full in crossings:
            job = running[index]
            if full:
                block = (job.computed + at) // size
                self._kv.remember(job.blocks[block : block + 1], job.hashes[block : block + 1])
                self._changed(Stored(job, block, block + 1))
            else:
                job.blocks += self._kv.allocate(1)
        for job in running:
            first = max(len(job.hashes), job.computed // size)
            job.computed += steps
            job.generated += steps
            # Nothing is freed meanwhile, so it makes no difference when those that nobody can hit are registered.
            self._kv.remember(job.blocks[first : job.computed // size], ())
        self.totals.steps += steps
        self.totals.generation_tokens += steps * len(running)

    def _might_admit(self) -> bool:
        """Whether the first in line could be admitted in one of the next steps, if all running jobs only decode.

        They only take memory, so what does not fit now will not fit then; unless they compute blocks that it begins
        with.
        """
        size, running = self.parameters.block_size, self._running
        if not self._waiting or len(running) + len(self._loading) >= self.parameters.max_running:
            return False
        job = self._waiting[0]
        if job.adapter and not self._has_slot(job.adapter):
            return True  # others may pass it by
        total, hashes = job.prompt + job.generated, job.hashes
        found = self._kv.match(hashes, (total - 1) // size)
        if self._kv.fits(found, -(-total // size) - len(found)):
            return True
        for other in running:
            full = other.computed // size
            if full < min(len(hashes), len(other.hashes)) and hashes[full] == other.hashes[full]:
                return True
        return False

    def _schedule_running(self, batch: "_Batch") -> None:
        """Give each running job its next tokens in order of admission: decodes one, unfinished prefills a chunk."""
        running, block_size = self._running, self.parameters.block_size
        index = 0
        while index < len(running) and batch.budget:
            job = running[index]
            tokens = min(job.prompt + job.generated - job.computed, batch.budget)
            room = len(job.blocks) * block_size
            if job.computed + tokens > room and not self._make_room(job, tokens, batch):
                return
            batch.add(job, tokens)
            self._compute(job, tokens)
            index += 1

    def _make_room(self, job: Job, tokens: int, batch: "_Batch") -> bool:
        """Allocate blocks for the next `tokens`, preempting from the end of the batch; False if `job` itself had to go.

        The victim is never one already scheduled in this step: those stand before `job`.
        """
        need = -(-(job.computed + tokens) // self.parameters.block_size) - len(job.blocks)
        while need > self._kv.free:
            victim = self._running.pop()
            self._release(victim)
            victim.preemptions += 1
            self.totals.preemptions += 1
            self._waiting.appendleft(victim)
            batch.preempted.append(victim)
            if victim is job:
                return False
        job.blocks += self._kv.allocate(need)
        return True

    def _admit(self, batch: "_Batch", now: float) -> None:
        """Move waiting jobs into the batch while the first in line fits as a whole. No job overtakes."""
        most = self.parameters.max_running - len(self._loading)
        passed: list[Job] = []
        while self._waiting and batch.budget and len(self._running) < most:
            job = self._waiting[0]
            if job.adapter and not self._has_slot(job.adapter):
                passed.append(self._waiting.popleft())
                continue
            if not self._take_in(job, batch, now):
                break
            if job.ready_at >= now:  # it is being loaded
                most -= 1
        self._waiting.extendleft(reversed(passed))

    def _take_in(self, job: Job, batch: "_Batch", now: float) -> bool:
        """Give the first in line its blocks, and what it computes or loads; False if it does not fit."""
        block_size = self.parameters.block_size
        total = job.prompt + job.generated
        found = self._kv.match(job.hashes, (total - 1) // block_size)
        if not self._kv.fits(found, -(-total // block_size) - len(found)):
            return False
        self._waiting.popleft()
        self._kv.take(found)
        if job.adapter:
            self._use_adapter(job.adapter, batch)
        job.blocks, job.computed = found, len(found) * block_size
        load = self._load(job, total, now)
        if job.admitted_at is None:
            job.admitted_at, job.cached, job.l1, job.l2 = now, load.end, load.l1, load.l2
            self.totals.prompt_tokens += job.prompt
            self.totals.prefix_queries += job.prompt
            self.totals.prefix_hits += job.computed
        if load.end > job.computed:
            self._begin_load(job, load, now)
            return True
        self._running.append(job)
        tokens = min(total - job.computed, batch.budget)
        job.blocks += self._kv.allocate(-(-(job.computed + tokens) // block_size) - len(found))
        batch.add(job, tokens)
        self._compute(job, tokens)
        return True

    def _has_slot(self, adapter: str) -> bool:
        """Whether a request for this adapter could join the batch now."""
        if self._adapters.get(adapter):
            return True
        return sum(map(bool, self._adapters.values())) < self.parameters.adapter_slots

    def _use_adapter(self, adapter: str, batch: "_Batch") -> None:
        if adapter not in self._adapters:
            if len(self._adapters) >= self.parameters.adapter_slots:
                del self._adapters[next(each for each, users in self._adapters.items() if not users)]
            self._adapters[adapter] = 0
            self.totals.adapters_loaded += 1
            batch.loads += 1
        self._adapters[adapter] += 1

    def _leave_adapter(self, adapter: str) -> None:
        self._adapters[adapter] -= 1
        self._adapters.move_to_end(adapter)

    def _load(self, job: Job, total: int, now: float) -> Load:
        """What comes from elsewhere before it joins the batch; of a preempted one nothing more."""
        if job.transfer is not None and job.admitted_at is None:
            end = max(job.computed, (job.prompt - 1) // self.parameters.block_size * self.parameters.block_size)
            self._fetching = max(self._fetching, now) + (end - job.computed) / job.transfer.tokens_per_second
            return Load(end, seconds=self._fetching + job.transfer.seconds - now)
        if self._lower is not None:
            return self.load(job.chunks, job.computed, total, now)
        return Load(job.computed)

    def load(self, chunks: Sequence[int], held: int, tokens: int, now: float) -> Load:
        """What it would load from lower tiers `now` of `tokens` tokens, of which its cache holds the first `held`."""
        if self._lower is None:
            return Load(held)
        linear, attention = self.parameters.linear, self.parameters.attention

        def compute(there: int) -> float:
            left = tokens - there
            return linear * left + attention * left * (tokens - left / 2)

        l1, l2 = self._taken
        chunks = chunks[: (tokens - 1) // CHUNK]  # the last token is always computed
        return self._lower.best(chunks, held, compute, (max(0.0, l1 - now), max(0.0, l2 - now)))

    def _begin_load(self, job: Job, load: Load, now: float) -> None:
        job.ready_at, job.loads = now + load.seconds, load.end
        job.blocks += self._kv.allocate(load.end // self.parameters.block_size - len(job.blocks))
        self._loading.append(job)
        if (lower := self._lower) is None:
            return
        l1, l2 = self._taken
        self._taken = (
            max(l1, now) + load.l1 / lower.l1_speed if load.l1 else l1,
            max(l2, now) + load.l2 / lower.l2_speed if load.l2 else l2,
        )

    def _arrive(self, now: float) -> None:
        """What was loaded by now joins the batch, in order of admission."""
        size = self.parameters.block_size
        for job in [job for job in self._loading if job.ready_at <= now]:
            self._loading.remove(job)
            start, end = job.computed // size, job.loads // size
            job.computed = job.loads
            self._kv.remember(job.blocks[start:end], job.hashes[start:end])
            self._changed(Stored(job, start, min(end, len(job.hashes))))
            self._running.append(job)

    def settle(self) -> None:
        """The last step has ended: what it computed of prompts goes down to the lower tiers."""
        for job, start, end in self._computed:
            assert self._lower is not None
            self._lower.keep(job.chunks, start, end, job.about)
        self._computed.clear()

    def _compute(self, job: Job, tokens: int) -> None:
        """Advance `job`; blocks that become full are cached at once, so a later job of the same step can hit them."""
        block_size = self.parameters.block_size
        full = job.computed // block_size
        job.computed += tokens
        now_full = job.computed // block_size
        if now_full > full:
            self._kv.remember(job.blocks[full:now_full], job.hashes[full:now_full])
            if (end := min(now_full, len(job.hashes))) > full:
                self._changed(Stored(job, full, end))
        if job.kept < len(job.chunks) and (done := min(job.computed // CHUNK, len(job.chunks))) > job.kept:
            # When the prompt is complete all of it is used once more: so its tail goes before its head.
            self._computed.append((job, 0 if done == len(job.chunks) else job.kept, done))
            job.kept = done

    def _advance(self, batch: "_Batch", now: float) -> Step:
        duration = batch.seconds(self.parameters)
        ends_at = now + duration
        tokens: list[Job] = []
        first: list[Job] = []
        finished: list[Job] = []
        for job in batch.jobs:
            if job.computed < job.prompt + job.generated:
                continue
            job.generated += 1
            tokens.append(job)
            if job.generated == 1:
                job.first_token_at = ends_at
                self.totals.first_tokens += 1
                self.totals.computed_tokens += job.prompt - job.cached
                first.append(job)
            if job.generated == job.output:
                job.ended_at = ends_at
                finished.append(job)
        for job in finished:
            del self._jobs[job.id]
            if job.keeps:
                self.fetched(job.id)  # an attempt before, which nobody fetched
                self._kept[job.id], job.blocks = job.blocks, []
            self._release(job)
        if finished:
            self._running = [job for job in self._running if job.ended_at is None]
        self.totals.steps += 1
        self.totals.generation_tokens += len(tokens)
        self.totals.prefill_computed += batch.prefill
        return Step(duration, ends_at, tokens, first, finished, batch.preempted, batch.decodes, batch.prefill)

    def _release(self, job: Job) -> None:
        if job.adapter:
            self._leave_adapter(job.adapter)
        self._kv.release(job.blocks)
        job.blocks = []
        job.computed = 0

    def check(self) -> None:
        """Raise AssertionError if memory and queues do not agree. For tests."""
        self._kv.check()
        held = Counter(block for job in (*self._running, *self._loading) for block in job.blocks)
        held.update(block for blocks in self._kept.values() for block in blocks)
        assert self._kv.count - self._kv.free == len(held), "blocks are held by no job, or freed while held"
        assert set(self._jobs) == {job.id for job in (*self._running, *self._loading, *self._waiting)}, (
            "a request is lost"
        )
        assert not any(job.blocks for job in self._waiting), "a waiting request holds blocks"
        used = Counter(job.adapter for job in (*self._running, *self._loading) if job.adapter)
        assert used == +Counter(self._adapters), "adapters are held by no request, or let go while one uses them"
        assert len(self._adapters) <= self.parameters.adapter_slots, "more adapters than slots"


class _Batch:
    """What one step processes, and what that costs."""

    __slots__ = ("budget", "context", "decodes", "jobs", "loads", "pairs", "preempted", "prefill")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.jobs: list[Job] = []
        self.preempted: list[Job] = []
        self.decodes = self.context = self.prefill = self.loads = 0
        self.pairs = 0.0

    def add(self, job: Job, tokens: int) -> None:
        """Schedule the next `tokens` of `job`; called before they are counted as computed."""
        self.budget -= tokens
        self.jobs.append(job)
        if tokens == 1 and job.generated:
            self.decodes += 1
            self.context += job.computed
        else:
            self.prefill += tokens
            self.pairs += tokens * (job.computed + tokens / 2)

    def seconds(self, parameters: EngineParameters) -> float:
        return (
            parameters.base
            + parameters.per_decode * self.decodes
            + parameters.per_context_token * self.context
            + parameters.linear * self.prefill
            + parameters.attention * self.pairs
            + parameters.adapter_load * self.loads
        )
