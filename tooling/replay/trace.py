"""What is replayed: requests with their times and what their prompts share. Pure data, and the Mooncake reader.

A prompt is a path of pieces. A piece's number stands for its text and everything before it, so prompts share exactly
the pieces that their paths begin with alike; what the text is does not matter.
"""

import gzip
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from epp.documents.strict import short
from epp.errors import ConfigError
from epp.plugin import Slo

MOONCAKE_BLOCK: Final = 512
"""Tokens per hash id of a Mooncake trace."""
MOONCAKE_TICK: Final = 3.0
"""Seconds: the clock of the published Mooncake traces ticks so slowly that requests come in herds."""
BYTES_PER_TOKEN: Final = 4
_BLOCKS: Final = 1 << 24
"""More than the engine blocks of any prompt."""


class Piece(NamedTuple):
    """A entry of a prompt."""

    id: int
    """Unique for its text and all that comes before it."""
    tokens: int


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. Its number is its place in the trace."""

    at: float
    """Seconds from the start of the trace; for one that comes after others, see `pause`."""
    prompt: tuple[Piece, ...]
    output: int
    """Tokens its answer has."""
    answer: int = 0
    """Piece that the answer becomes when a later prompt contains it; 0 = none does."""
    after: tuple[int, ...] = ()
    """Requests that must have ended before this one is sent."""
    pause: float = 0.0
    """Seconds between the end of the last of those and this one."""
    session: str = ""
    """Whose conversation it belongs to (the header `x-session-id`)."""
    tenant: str = ""
    """Whose it is, for flow control (the fairness id)."""
    priority: int = 0
    label: str = ""
    """The class that figures are taken of apart."""
    slo: Slo | None = None
    """Within what it is to be served, where it says so itself."""
    adapter: str = ""
    """The LoRA adapter it asks for; prompts for different adapters have no piece in common."""
    ttl: float | None = None
    """Seconds that it may wait in flow control at most; None: as long as the policy lets it."""

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return sum(piece.tokens for piece in self.prompt)

    def bytes(self) -> bytes:
        """A prompt's text, as long and as much alike as the pieces say, four bytes a token."""
        return b"".join(map(_bytes, self.prompt))

    def ids(self) -> "array[int]":
        """The token ids of its prompt and, where a later prompt contains it, of its answer."""
        answer = _bytes(Piece(self.answer, self.output)) if self.answer else b""
        return array("I", self.bytes() + answer)

    def chain(self, block_size: int) -> list[int]:
        """Hashes of the engine's full blocks of the prompt and of an answer that somebody will build upon."""
        hashes: list[int] = []
        start = 0
        for id, tokens in (*self.prompt, Piece(self.answer, self.output)) if self.answer else self.prompt:
            first, start = start // block_size, start + tokens
            base = id * _BLOCKS
            hashes += range(base + first, base + start // block_size)
        return hashes


def _bytes(piece: Piece) -> bytes:
    return (piece.id.to_bytes(8, "little") * -(-piece.tokens // 2))[: piece.tokens * BYTES_PER_TOKEN]


class Trace(NamedTuple):
    """Requests in the order of their numbers, and what to call them."""

    name: str
    asks: Sequence[TraceRequest]

    def scaled(self, factor: float) -> "Trace":
        """The same requests, new ones coming `factor` times as fast; pauses within a conversation stay."""
        return Trace(self.name, [replace(ask, at=ask.at / factor) for ask in self.asks])

    def only(self, label: str) -> "Trace":
        """The requests of one class, at their times. ConfigError where there are none."""
        kept = [number for number, ask in enumerate(self.asks) if ask.label == label]
        if not kept:
            labels = sorted({ask.label for ask in self.asks} - {""})
            expected = f"expected one of {', '.join(labels)}" if labels else f"{self.name} has no classes"
            raise ConfigError("only", f"no request is of class {label!r}; {expected}")
        place = {number: at for at, number in enumerate(kept)}
        asks = [self.asks[number] for number in kept]
        return Trace(
            self.name,
            [replace(ask, after=tuple(place[one] for one in ask.after if one in place)) for ask in asks],
        )

    def with_slos(self, slos: Mapping[str, Slo]) -> "Trace":
        """The same requests, those of these classes with these SLOs. ConfigError where there is no such class."""
        labels = {ask.label for ask in self.asks} - {""}
        for label in slos:
            if label not in labels:
                expected = f"expected one of {', '.join(sorted(labels))}" if labels else f"{self.name} has no classes"
                raise ConfigError("class-slo", f"no request is of class {label!r}; {expected}")
        return Trace(self.name, [replace(ask, slo=slos.get(ask.label, ask.slo)) for ask in self.asks])

    def without_slos(self) -> "Trace":
        """The same requests, to be served as it comes."""
        return Trace(self.name, [replace(ask, slo=None) for ask in self.asks])

    @property
    def rate(self) -> float:
        """Requests a second, answers to earlier ones counted when their first was sent."""
        last = max((ask.at for ask in self.asks), default=0.0)
        return len(self.asks) / last if last else 0.0

    def cached_bound(self) -> float:
        """Share of prompt tokens that one cache without end would hold: no pool of pods can reach more."""
        seen: set[int] = set()
        held = total = 0
        for ask in self.asks:
            total += ask.tokens
            known = 0
            for piece in ask.prompt:
                if piece.id not in seen:
                    break
                known += piece.tokens
            held += min(known, ask.tokens - 1)
            seen.update(piece.id for piece in ask.prompt)
            seen.add(ask.answer)
        return held / total if total else 0.0


_Milliseconds = Annotated[float, Meta(gt=0)]


_HASH_IDS: Final = range(2**64 - 1)
"""Each and one more fit 64 bits: a piece's number is one more, as 0 stands for no piece."""


class _Line(msgspec.Struct):
    """Mooncake's fields, and ours, which a line may have. Others are passed over: Mooncake's own traces have more."""

    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    hash_ids: list[int]
    tenant: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    """As large as an InferenceObjective's."""
    label: str | None = msgspec.field(name="class", default=None)
    slo_ttft_ms: _Milliseconds | None = None
    slo_tpot_ms: _Milliseconds | None = None
    ttl_ms: _Milliseconds | None = None
    session: str | None = None
    adapter: str | None = None

    @property
    def slo(self) -> Slo | None:
        """None where the line has none."""
        ttft, tpot = _seconds(self.slo_ttft_ms), _seconds(self.slo_tpot_ms)
        return None if ttft is None and tpot is None else Slo(ttft, tpot, self.label or "")


_NUMBER: Final = "a number of milliseconds above 0"
_EXPECTED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("tenant", "class", "session", "adapter"), "text"),
    **dict.fromkeys(("slo_ttft_ms", "slo_tpot_ms", "ttl_ms"), _NUMBER),
    "priority": "a whole number of 32 bits",
}
"""What our fields have to be."""
_WHERE: Final = re.compile(r"at `\$\.(\w+)`$")
"""The field that a msgspec.ValidationError is about, at the end of its text."""


def read_mooncake(path: Path, *, seed: int = 0, limit: int | None = None) -> Trace:
    """A trace in Mooncake's JSON lines, plain or gzipped (github.com/kvcache-ai/Mooncake, FAST25-release/traces).

    A line may also have `tenant`, `priority`, `class`, `slo_ttft_ms`, `slo_tpot_ms`, `ttl_ms`, `session` and `adapter`;
    null is as if it were not there. Requests of one tick are spread over it, in order; a trace whose times are finer is
    taken as it is. `limit` takes only so many. Raises ConfigError with the line.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            lines = list(_lines(file, path, limit))
    except (OSError, EOFError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from error
    if not lines:
        raise ConfigError(str(path), "expected at least one request, got none")
    lines.sort(key=lambda line: line.timestamp)
    times = _spread([line.timestamp / 1000 for line in lines], Random(f"ticks {seed}"))
    start = times[0]
    adapters = any(line.adapter for line in lines)
    known: dict[tuple[str, int], int] = {}
    return Trace(
        path.name.removesuffix(".gz").removesuffix(".jsonl"),
        [
            TraceRequest(
                at - start,
                _pieces(line, known if adapters else None),
                max(1, line.output_length),
                session=line.session or "",
                tenant=line.tenant or "",
                priority=line.priority or 0,
                label=line.label or "",
                slo=line.slo,
                adapter=line.adapter or "",
                ttl=_seconds(line.ttl_ms),
            )
            for at, line in zip(times, lines, strict=True)
        ],
    )


def _lines(file: Iterable[bytes], path: Path, limit: int | None) -> Iterator[_Line]:
    decode = msgspec.json.Decoder(_Line).decode
    for number, raw in enumerate(file, 1):
        if limit is not None and number > limit:
            return
        if not raw.strip():
            continue
        try:
            line = decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}", _wrong(raw, error)) from error
        blocks = -(-line.input_length // MOONCAKE_BLOCK)
        if line.input_length < 1 or len(line.hash_ids) != blocks:
            raise ConfigError(
                f"{path}:{number}",
                f"expected a hash id for each {MOONCAKE_BLOCK} tokens of input_length, {blocks} for "
                f"{line.input_length}, got {len(line.hash_ids)}",
            )
        if (wrong := next((each for each in line.hash_ids if each not in _HASH_IDS), None)) is not None:
            expected = "expected whole numbers from 0 that fit 64 bits"
            raise ConfigError(f"{path}:{number}", f"hash_ids: {expected}, got {wrong}")
        yield line


def _wrong(raw: bytes, error: Exception) -> str:
    """What is wrong with a line."""
    place = _WHERE.search(str(error)) if isinstance(error, msgspec.ValidationError) else None
    if place is None or (field := place[1]) not in _EXPECTED:
        return f"no line of a Mooncake trace: {error}"
    try:
        value = short(msgspec.json.decode(raw)[field])
    except msgspec.DecodeError:  # a number too large for any float
        value = "a huge number"
    return f"{field}: expected {_EXPECTED[field]}, got {value}"


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _pieces(line: _Line, known: dict[tuple[str, int], int] | None) -> tuple[Piece, ...]:
    """Numbered by hash id; with `known`, in the order of first use, each adapter's apart: one prompt has different KV
    under different adapters.
    """
    if known is None:
        numbers = [id + 1 for id in line.hash_ids]  # 0 stands for no piece
    else:
        adapter = line.adapter or ""
        numbers = [known.setdefault((adapter, id), len(known) + 1) for id in line.hash_ids]
    rest = line.input_length - MOONCAKE_BLOCK * (len(numbers) - 1)
    return (*(Piece(number, MOONCAKE_BLOCK) for number in numbers[:-1]), Piece(numbers[-1], rest))


def _spread(times: list[float], chance: Random) -> list[float]:
    """Times of one tick spread over it at random; kept where the clock ticks faster."""
    distinct = sorted(set(times))
    if len(distinct) > 1 and min(b - a for a, b in pairwise(distinct)) < 0.8 * MOONCAKE_TICK:
        return times
    return sorted(at + chance.uniform(0, MOONCAKE_TICK) for at in times)
