"""A page of `/metrics` to `Load`, by finding the few lines that matter in the bytes.

A Prometheus parser takes ten milliseconds for a page of vLLM's; this takes some ten microseconds: where a metric has
one sample, as it has in a server of one engine, all of its line but the value is known from the page before. Names:
vLLM 0.33, SGLang 0.5.23, and for the other engines, as for older SGLang, GIE v1.5 `datalayer/extractor/metrics`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import inf
from typing import Final, NamedTuple, TypeVar, TypeVarTuple, cast

from xxhash import xxh3_128_intdigest

from epp import protocol
from epp.pool.store import Endpoint, Load

_SAMPLE: Final = re.compile(rb'(?:\{((?:[^"{}\n]++|"(?:[^"\\\n]++|\\.)*+")*+)\})?[ \t]++([^ \t\r\n]++)', re.DOTALL)
_LABEL: Final = re.compile(
    rb'(?<![a-zA-Z0-9_])([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+"((?:[^"\\]++|\\.)*+)"', re.DOTALL
)
"""Only where a name begins: a long one without a value would else be read from each of its letters on."""
_ESCAPED: Final = re.compile(rb"\\(.)", re.DOTALL)
_ENGINE: Final = re.compile(rb'[{,]engine="(\d{1,4})"')
_MOST_LINES: Final = 4096
"""Of an engine, where several share a page; vLLM has some 700."""
_LONGEST_LINE: Final = 64 * 1024
_MOST_SERIES: Final = 1024
"""Lines read of one metric: more would be a page gone wrong."""
_MOST_BYTES: Final = 32 * 1024
"""Read of one metric, for the same reason."""
_MOST_LABELS: Final = 128 * 1024
"""Read of one whose labels are looked into: `cache_config_info` of each of 64 data-parallel engines."""
_MOST_LORA: Final = 256 * 1024
"""Read of the adapters: vLLM adds a line for each combination that ever ran."""
_ALIKE: Final = 64
"""Longer names that begin like a metric's, looked at before its own."""
_MOST_ADAPTERS: Final = 1024
_LARGEST: Final = 1e15
_NEAR: Final = 2048
"""How far, in bytes, a metric is expected to move between two pages at most; farther costs a search."""
_LONGEST_VALUE: Final = 64
MOST_KEPT: Final = 1024
"""Texts of labels, of which it is remembered what they say: those of a pool's servers are mostly the same."""
_LONGEST_KEPT: Final = 512

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Figure(NamedTuple):
    """Where an engine reports a figure: a metric, perhaps only where labels have values, perhaps in a label."""

    metric: bytes
    where: tuple[tuple[bytes, bytes], ...] = ()
    """Labels and the values they must have; one that a sample has not is empty."""
    label: bytes = b""
    """The label that holds the figure; empty: the sample's value does."""
    part: bytes = b""
    """Of a histogram: `_count`."""
    older: "Figure | None" = None
    """Where older versions of the engine report it."""


class Engine(NamedTuple):
    """How one engine names what we want to know. None = it does not report it."""

    waiting: Figure | None
    running: Figure | None
    also_waiting: Sequence[Figure] = ()
    """Queues of requests that are in neither of the two."""
    kv_usage: Figure | None = None
    block_size: Figure | None = None
    blocks: Figure | None = None
    lora: bytes = b""
    prefix_queries: Figure | None = None
    prefix_hits: Figure | None = None
    prompt_tokens: Figure | None = None
    first_tokens: Figure | None = None
    computed_tokens: Figure | None = None
    generated_tokens: Figure | None = None
    steps: Figure | None = None
    answers: Mapping[str, bytes] = {}
    """Histograms of its answers: what each is of -> its metric. `ttft`, `tpot`, `duration` in seconds; `prompt`,
    `completion` in tokens."""
    cached_tokens: bytes | None = None
    """Prompt tokens found in a cache."""
    unstreamed: tuple[bytes, bytes] | None = None
    """Label and value of those samples of `ttft` and `tpot` that are of answers which were not streamed, where they say
    nothing of a first token; `cached_tokens` are counted when an answer ends then."""
    first_rank: Figure | None = None
    """`running` of those tensor-parallel ranks alone that `blocks` and `steps` are read of; None: of all that there
    are. The others report those as well, so each stands for as many as have requests of their own."""
    custom: Mapping[str, Figure] = {}
    """Others that a configuration names, by name."""


def _triton(metric: bytes, label: bytes, value: bytes) -> Figure:
    return Figure(b"nv_trt_llm_" + metric, where=((label, value),))


DEFAULT_ENGINE: Final = "vllm"

ENGINES: Final[Mapping[str, Engine]] = {
    "vllm": Engine(
        waiting=Figure(b"vllm:num_requests_waiting"),
        running=Figure(b"vllm:num_requests_running"),
        kv_usage=Figure(b"vllm:kv_cache_usage_perc"),
        block_size=Figure(b"vllm:cache_config_info", label=b"block_size"),
        blocks=Figure(b"vllm:cache_config_info", label=b"num_gpu_blocks"),
        lora=b"vllm:lora_requests_info",
        prefix_queries=Figure(b"vllm:prefix_cache_queries_total"),
        prefix_hits=Figure(b"vllm:prefix_cache_hits_total"),
        prompt_tokens=Figure(b"vllm:prompt_tokens_total"),
        first_tokens=Figure(b"vllm:time_to_first_token_seconds", part=b"_count"),
        computed_tokens=Figure(b"vllm:prompt_tokens_by_source_total", where=((b"source", b"local_compute"),)),
        generated_tokens=Figure(b"vllm:generation_tokens_total"),
        steps=Figure(b"vllm:iteration_tokens_total", part=b"_count"),
        answers={
            "ttft": b"vllm:time_to_first_token_seconds",
            "tpot": b"vllm:request_time_per_output_token_seconds",
            "duration": b"vllm:e2e_request_latency_seconds",
            "prompt": b"vllm:request_prompt_tokens",
            "completion": b"vllm:request_generation_tokens",
        },
        cached_tokens=b"vllm:prompt_tokens_cached_total",
    ),
    "sglang": Engine(
        # With --enable-priority-scheduling there is a sample for each priority beside that of all.
        waiting=Figure(b"sglang:num_queue_reqs", where=((b"priority", b""),)),
        running=Figure(b"sglang:num_running_reqs", where=((b"priority", b""),)),
        # Of servers that only prefill or decode: to be met by the other, to get memory there, to get the KV.
        also_waiting=(
            Figure(b"sglang:num_prefill_bootstrap_queue_reqs", where=((b"priority", b""),)),
            Figure(b"sglang:num_decode_prealloc_queue_reqs", where=((b"priority", b""),)),
            Figure(b"sglang:num_decode_transfer_queue_reqs", where=((b"priority", b""),)),
        ),
        first_rank=Figure(b"sglang:num_running_reqs", where=((b"priority", b""), (b"tp_rank", b"0"))),
        kv_usage=Figure(b"sglang:token_usage"),
        block_size=Figure(b"sglang:page_size", older=Figure(b"sglang:cache_config_info", label=b"page_size")),
        blocks=Figure(
            b"sglang:num_pages",
            where=((b"tp_rank", b"0"),),
            older=Figure(b"sglang:cache_config_info", label=b"num_pages"),
        ),
        prefix_queries=Figure(b"sglang:prefill_effective_tokens_total"),
        prefix_hits=Figure(b"sglang:prefill_effective_tokens_total", where=((b"mode", b"device_hit"),)),
        prompt_tokens=Figure(b"sglang:prefill_effective_tokens_total"),
        # No first tokens: of an answer that is not streamed it counts one when 50 tokens are done, or all.
        computed_tokens=Figure(b"sglang:realtime_tokens_total", where=((b"mode", b"prefill_compute"),)),
        generated_tokens=Figure(b"sglang:realtime_tokens_total", where=((b"mode", b"decode"),)),
        steps=Figure(b"sglang:cuda_graph_passes_total", where=((b"tp_rank", b"0"),)),
        answers={
            "ttft": b"sglang:time_to_first_token_seconds",
            "tpot": b"sglang:request_time_per_output_token_seconds",
            "duration": b"sglang:e2e_request_latency_seconds",
            "prompt": b"sglang:prompt_tokens_histogram",
            "completion": b"sglang:generation_tokens_histogram",
        },
        cached_tokens=b"sglang:cached_tokens_total",
        unstreamed=(b"is_streaming", b"false"),
    ),
    "trtllm-serve": Engine(
        waiting=Figure(b"trtllm_num_requests_waiting"),
        running=Figure(b"trtllm_num_requests_running"),
        kv_usage=Figure(b"trtllm_kv_cache_utilization"),
        block_size=Figure(b"trtllm_kv_cache_tokens_per_block"),
        blocks=Figure(b"trtllm_kv_cache_max_blocks"),
    ),
    "triton-tensorrt-llm": Engine(
        waiting=_triton(b"request_metrics", b"request_type", b"waiting"),
        running=_triton(b"request_metrics", b"request_type", b"scheduled"),
        kv_usage=_triton(b"kv_cache_block_metrics", b"kv_cache_block_type", b"fraction"),
        block_size=_triton(b"kv_cache_block_metrics", b"kv_cache_block_type", b"tokens_per"),
        blocks=_triton(b"kv_cache_block_metrics", b"kv_cache_block_type", b"max"),
    ),
    "triton": Engine(
        waiting=Figure(b"nv_inference_pending_request_count"),
        running=Figure(b"nv_inference_exec_count"),
    ),
}


class Engines(NamedTuple):
    """The engines there are, and how to know which one an endpoint runs."""

    known: Mapping[str, Engine] = ENGINES
    default: str = DEFAULT_ENGINE
    """Of an endpoint whose labels name none."""
    labels: Sequence[str] = protocol.ENGINE_LABELS

    def of(self, endpoint: Endpoint) -> str:
        """The engine its labels name, known or not."""
        for label in self.labels:
            if name := endpoint.labels.get(label):
                return name
        return self.default


ALL_ENGINES: Final = Engines()

_ABSENT: Final = -1


class Places:
    """Where an endpoint's last page that was read had what was looked for in it."""

    __slots__ = ("at", "only")

    def __init__(self) -> None:
        self.at: dict[bytes, int] = {}
        """Metric -> its first sample; `_ABSENT`: it was looked for, and not there."""
        self.only: dict[Figure, _Only] = {}
        """Figures whose metric has one sample."""


class _Only:
    """The one sample of a figure's metric."""

    __slots__ = ("_fixed", "_head", "_key", "at")

    def __init__(self, at: int, name: int, head: bytes, fixed: float | None) -> None:
        """`at`: the end of the line before it, with which `head` begins, that ends before the value; `name`: how long
        the name is. `fixed`: the figure, where a label holds it.
        """
        self.at = at
        self._key = head[: name + 2]
        self._head = head
        self._fixed = fixed

    def read(self, page: bytes) -> float | None:
        """The figure in the next page; None: it may have other samples there, or no figure."""
        at = page.find(self._key, max(0, self.at - _NEAR), self.at + _NEAR)
        if at < 0 or not page.startswith(self._head, at):
            return None
        start = at + len(self._head)
        end = page.find(b"\n", start, start + _LONGEST_VALUE)
        if end < 0:
            return None
        if end + 1 < len(page):
            stop = page.find(b"\n#", end, end + _NEAR)  # the comment before the next metric
            if stop < 0 or page.find(self._key, end, stop) >= 0:
                return None
        self.at = at
        return _number(page[start:end]) if self._fixed is None else self._fixed


class Same:
    """Tells of an endpoint's pages whether they say what the last that was read says: an idle engine's do.

    What stands before and behind all that is read may differ: Python's own figures do each time. No page is kept, only
    its hash, and where things stood.
    """

    def __init__(self, places: Places) -> None:
        """`places`: as those who read the pages keep them."""
        self._places = places
        self._absent: list[bytes] = []
        self._opening = b""
        """How what is read begins, with the line end before it; empty: nothing was read yet."""
        self._window = 0, 0
        """Where in a page to look for that."""
        self._size = self._hash = 0
        self._to_end = False

    def remember(self, page: bytes) -> None:
        """This page was read."""
        found = [(at, metric) for metric, at in self._places.at.items() if at != _ABSENT]
        if not found:
            self._opening = b""
            return
        self._absent = [metric for metric, at in self._places.at.items() if at == _ABSENT]
        (start, first), (last, _) = min(found), max(found)
        stop = page.find(b"\n#", last)  # the comment before the next metric
        self._to_end = stop < 0
        stop = len(page) if self._to_end else stop
        self._opening = page[max(0, start - 1) : start + len(first) + 1]
        self._window = (max(0, start - _NEAR), start + _NEAR) if start else (0, len(self._opening))
        self._size = stop - start
        self._hash = xxh3_128_intdigest(memoryview(page)[start:stop])

    def says(self, page: bytes) -> bool:
        """Whether reading it would find what was found in the one that is remembered."""
        start = page.find(self._opening, *self._window) if self._opening else -1
        if start < 0:
            return False
        start += self._opening.startswith(b"\n")
        stop = start + self._size
        if not (stop == len(page) if self._to_end else page.startswith(b"\n#", stop)):
            return False
        if xxh3_128_intdigest(memoryview(page)[start:stop]) != self._hash:
            return False
        return not any(
            page.startswith(metric) or page.find(b"\n" + metric, 0, start) >= 0 or page.find(b"\n" + metric, stop) >= 0
            for metric in self._absent
        )


def parse(page: bytes, engine: Engine, at: float, places: Places) -> Load | None:
    """What the page says at time `at`; None where it has neither queue, batch nor KV memory, so is not this engine's.

    SGLang (0.5.23) says nothing of requests until it has served some: nobody waits there then, and none runs.
    Data-parallel engines behind one address report a series each: counts are added up, shares averaged. A sample that
    is no finite number of at least 0 is as good as absent. `places` is kept from page to page, empty at first.
    """
    waiting, running = _numbers(page, places, engine.waiting), _numbers(page, places, engine.running)
    blocks = _numbers(page, places, engine.blocks)
    if not waiting and not running and not blocks:
        return None
    ranks = 1.0
    if engine.first_rank is not None and len(running) > 1 and (first := _numbers(page, places, engine.first_rank)):
        ranks = len(running) / len(first)
    usage = _numbers(page, places, engine.kv_usage)
    lora_max, lora_running, lora_waiting = _lora(page, places, engine.lora)
    return Load(
        waiting=_total(waiting) + sum(_total(_numbers(page, places, each)) for each in engine.also_waiting),
        running=_total(running),
        kv_usage=min(1.0, sum(usage) / len(usage)) if usage else 0.0,
        block_size=int(max(_numbers(page, places, engine.block_size), default=0.0)),
        blocks=int(ranks * _total(blocks)),
        lora_running=lora_running,
        lora_waiting=lora_waiting,
        lora_max=lora_max,
        prefix_queries=_total(_numbers(page, places, engine.prefix_queries)),
        prefix_hits=_total(_numbers(page, places, engine.prefix_hits)),
        prompt_tokens=_total(_numbers(page, places, engine.prompt_tokens)),
        first_tokens=_total(_numbers(page, places, engine.first_tokens)),
        computed_tokens=_total(_numbers(page, places, engine.computed_tokens)),
        generated_tokens=_total(_numbers(page, places, engine.generated_tokens)),
        steps=int(ranks * _total(_numbers(page, places, engine.steps))),
        custom=_custom(page, places, engine.custom) if engine.custom else {},
        at=at,
    )


def _custom(page: bytes, places: Places, figures: Mapping[str, Figure]) -> Mapping[str, float]:
    """Each figure that the page has; of several series the first, as llm-d takes it."""
    found = {name: _numbers(page, places, figure) for name, figure in figures.items()}
    return {name: numbers[0] for name, numbers in found.items() if numbers}


def page_of_each(page: bytes, most: int) -> Mapping[int, bytes]:
    """A page of up to `most` data-parallel engines as a page of each, in the order of their numbers (vLLM's label
    `engine`); lines without such a number are on all. The pages of more engines are empty, and there are none of a page
    with too many lines.
    """
    if page.count(b"\n") > _MOST_LINES * most:
        return {}
    lines = page.split(b"\n")
    engines = [int(found[1]) if (found := _ENGINE.search(line)) is not None else None for line in lines]
    pages: dict[int, list[bytes]] = {
        engine: [] for engine in sorted({engine for engine in engines if engine is not None})
    }
    if len(pages) > most:
        return dict.fromkeys(pages, b"")
    for line, engine in zip(lines, engines, strict=True):
        if engine is not None:
            pages[engine].append(line)
        else:
            for each in pages.values():
                each.append(line)
    return {engine: b"\n".join(each) for engine, each in pages.items()}


def series(page: bytes, metric: str) -> Sequence[tuple[Mapping[str, str], float]]:
    """(labels, value) of each sample of a metric in any page."""
    found = []
    for text, value in samples(page, metric.encode(), Places(), _MOST_LABELS):
        if (number := _number(value)) is not None:
            found.append(({name.decode(): _text(label) for name, label in _labels(text).items()}, number))
    return found


def samples(
    page: bytes, metric: bytes, places: Places, most: int = _MOST_BYTES, part: bytes = b""
) -> Iterator[tuple[bytes, bytes]]:
    """(labels, value) of each sample of a metric, as bytes. Its lines stand together, as the format demands; what is
    beyond its first `most` bytes is left out. `part` of a histogram: `_bucket`, `_count` or `_sum`, which stand mixed.
    """
    wanted, at = metric + part, _first_sample(page, metric, places, part)
    size, stop = len(wanted), at + most
    for _ in range(_MOST_SERIES):
        end = page.find(b"\n", at, stop)
        # A line without its end is one whose page broke off: half a number is a wrong number.
        if end < 0 or not page.startswith(metric, at):
            return
        fits = end - at <= _LONGEST_LINE and page.startswith(wanted, at)
        if fits and (found := _SAMPLE.match(page, at + size, end)) is not None:
            yield found[1] or b"", found[2]
        at = end + 1


def histogram(
    page: bytes, metric: bytes, places: Places, without: tuple[bytes, bytes] | None = None
) -> Iterator[tuple[str, float | None, float]]:
    """Of a histogram each bucket: (model, upper bound, how many values are not above it), and the sums of its values,
    with None for the bound. `without`: not of samples that have this label with this value.
    """
    for part in (b"_bucket", b"_sum"):
        for text, value in samples(page, metric, places, _MOST_LABELS, part):
            if without is not None and _label(text, without[0]) == without[1]:
                continue
            (model, bound), number = _bucket(text), _number(value)
            if number is not None and (bound is None) == (part == b"_sum"):
                yield model, bound, number


def labelled(page: bytes, metric: bytes, places: Places) -> Iterator[tuple[str, float]]:
    """(model, value) of each sample."""
    for text, value in samples(page, metric, places, _MOST_LABELS):
        if (number := _number(value)) is not None:
            yield _bucket(text)[0], number


def _kept(read: Callable[[bytes, *Ts], T]) -> Callable[[bytes, *Ts], T]:
    """Remembers what it reads in labels, of as many and as long ones as is bounded."""
    kept = cast("Callable[[bytes, *Ts], T]", lru_cache(MOST_KEPT)(read))

    def found(text: bytes, *more: *Ts) -> T:
        return kept(text, *more) if len(text) <= _LONGEST_KEPT else read(text, *more)

    return found


@_kept
def _bucket(text: bytes) -> tuple[str, float | None]:
    """Of the model whose name is in these labels, with the upper bound that they name."""
    labels = _labels(text)
    return _text(labels.get(b"model_name", b"")), _bound(labels.get(b"le", b""))


@_kept
def _label(text: bytes, name: bytes) -> bytes:
    return _labels(text).get(name, b"")


def _text(label: bytes) -> str:
    return _ESCAPED.sub(rb"\1", label).decode("utf-8", "backslashreplace")


def _bound(text: bytes) -> float | None:
    return inf if text == b"+Inf" else _number(text)


def _first_sample(page: bytes, metric: bytes, places: Places, part: bytes) -> int:
    """Where the metric's samples begin; the page's length if it has none. `part`: not empty of a histogram.

    A page differs little from the one before, so the metric's TYPE line is first looked for near its old place.
    """
    first = metric + b"_bucket" if part else metric
    near = places.at.get(first, _ABSENT)
    if near != _ABSENT:
        at = page.find(b"\n# TYPE %b " % metric, max(0, near - _NEAR), near + _NEAR)
        at = page.find(b"\n", at + 1) + 1 if at >= 0 else 0
        if at > 0 and _is_sample(page, first, at):
            places.at[first] = at
            return at
    at = 0
    for _ in range(_ALIKE):
        if _is_sample(page, first, at):
            places.at[first] = at
            return at
        if (at := page.find(b"\n" + first, at) + 1) == 0:  # the name may also be the beginning of a longer one
            break
    places.at[first] = _ABSENT
    return len(page)


def _is_sample(page: bytes, metric: bytes, at: int) -> bool:
    size = len(metric)
    return page.startswith(metric, at) and page[at + size : at + size + 1] in (b"{", b" ", b"\t")


def _numbers(page: bytes, places: Places, figure: Figure | None) -> list[float]:
    if figure is None:
        return []
    if (only := places.only.get(figure)) is not None:
        if (number := only.read(page)) is not None:
            if figure.part:  # which stands behind the first sample, by as much as that has digits
                _first_sample(page, figure.metric, places, figure.part)
            else:
                places.at[figure.metric] = only.at + 1
            return [number]
        del places.only[figure]
    found, there = [], 0
    most = _MOST_LABELS if figure.where or figure.label or figure.part else _MOST_BYTES
    for text, value in samples(page, figure.metric, places, most, figure.part):
        there += 1
        if any(_label(text, label) != wanted for label, wanted in figure.where):
            continue
        number = _number(_label(text, figure.label) if figure.label else value)
        if number is not None:
            found.append(number)
    if found and there == 1:
        _remember(page, places, figure, found[0])
    return found if there else _numbers(page, places, figure.older)


def _remember(page: bytes, places: Places, figure: Figure, number: float) -> None:
    """The figure has one sample in this page, with this number."""
    wanted = figure.metric + figure.part
    at = page.find(b"\n" + wanted, max(0, _first_sample(page, figure.metric, places, figure.part) - 1))
    if at < 0 or not _is_sample(page, wanted, at + 1):  # it is the first line, or a longer name stands before it
        return
    sample = _SAMPLE.match(page, at + 1 + len(wanted))
    if sample is not None:
        only = _Only(at, len(wanted), page[at : sample.start(2)], number if figure.label else None)
        if only.read(page) is not None:  # else nothing says where the metric ends
            places.only[figure] = only


def _number(text: bytes) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0.0 <= number <= _LARGEST else None


def _total(numbers: list[float]) -> int:
    return int(sum(numbers))


def _labels(text: bytes) -> dict[bytes, bytes]:
    return dict(_LABEL.findall(text))


def _lora(page: bytes, places: Places, metric: bytes) -> tuple[int, frozenset[str], frozenset[str]]:
    """(slots, running, waiting) of the newest series: vLLM leaves old ones behind, their value is a time."""
    newest, labels = -1.0, b""
    if metric:
        for text, value in samples(page, metric, places, _MOST_LORA):
            if (stamp := _number(value)) is not None and stamp >= newest:
                newest, labels = stamp, text
    return _adapters_in(labels)


@_kept
def _adapters_in(labels: bytes) -> tuple[int, frozenset[str], frozenset[str]]:
    fields = _labels(labels)
    slots = _number(fields.get(b"max_lora", b""))
    return int(slots or 0), _adapters(fields, b"running_lora_adapters"), _adapters(fields, b"waiting_lora_adapters")


def _adapters(fields: dict[bytes, bytes], label: bytes) -> frozenset[str]:
    names = fields.get(label, b"").decode("utf-8", "backslashreplace").split(",", _MOST_ADAPTERS)[:_MOST_ADAPTERS]
    return frozenset(name.strip() for name in names if name.strip())
