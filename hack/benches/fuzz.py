"""Mutated input for everything that is read from outside: what is not an error of ours, or takes long, is a finding.

    hack/fuzz                                  every target, 20,000 inputs each
    hack/fuzz bodies answers --inputs 1000000  some of them
    hack/fuzz --seconds 60 --seed 7

A target takes bytes and may raise the errors that its reader promises. Anything else, and any input that takes longer
than a second, is written to build/fuzz and shown with its traceback. HTTP/2 has `hack/bench http2_fuzz` besides, which
compares with another implementation.
"""

import argparse
import asyncio
import atexit
import functools
import hashlib
import json
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple
from unittest.mock import patch

import msgspec
from jinja2 import TemplateError

from epp.configuration.loader import load_text, strategy_text
from epp.errors import BadRequest, ConfigError, EppError
from epp.extproc.http2 import PREFACE, Broken, Connection
from epp.extproc.stream import Memory, Stream
from epp.flow.tenants import LONGEST, TenantSource
from epp.parsing.parser import PARSERS, Parser
from epp.parsing.request import RawRequest, UsageReader
from epp.parsing.rewrite import rewrite_model
from epp.plugin import Endpoint
from epp.pool import static
from epp.pool.answers import EngineAnswers
from epp.pool.apiserver import Kind
from epp.pool.engines import ENGINES, Places, page_of_each, parse
from epp.pool.http import AnswerReader, BadAnswer
from epp.pool.kubernetes import POOLS, KubePools, Named
from epp.pool.models import models_of
from epp.pool.scrape import PageReader
from epp.pool.slices import ServiceAddresses
from epp.pool.store import Pool
from epp.prefix.events.engine_cache import EngineCache, KvEventIndex
from epp.prefix.events.sources import named_in, sources_on
from epp.prefix.events.wire import MalformedBatch, parts, rank_of
from epp.prefix.lmcache.coordinator import Away, Page
from epp.prefix.lmcache.directory import Directory
from epp.prefix.tokens.cache import TokenCache
from epp.prefix.tokens.remote import ids_in
from epp.prefix.tokens.sandbox import TemplateTooLong
from epp.prefix.tokens.template import ChatTemplate
from epp.prefix.tokens.tokenizer import ModelTokenizer
from epp.replicas import wire as replicas
from epp.telemetry.metrics import Metrics
from tests.support.engines.kv_events import batch, names_of, removed, stored
from tests.support.engines.metrics_pages import vllm_page
from tests.support.ext_proc.hostile import CORPUS
from tooling.replay.trace import read_mooncake

ROOT: Final = Path(__file__).parents[2]
FOUND: Final = ROOT / "build" / "fuzz"
SLOW: Final = 1.0
"""Seconds."""
LOOP: Final = asyncio.Runner()
POOL: Final = (
    b'{"metadata":{"name":"p"},"spec":{"selector":{"matchLabels":{"app":"x"}},"targetPorts":[{"number":8000}],'
    b'"endpointPickerRef":{"name":"e","port":{"number":9002}}}}'
)
PIECES: Final = [
    *(b'"', b"'", b"{", b"}", b"[", b"]", b":", b",", b"\\", b"\\u0000", b"\\ud800", b"\n", b"\r\n", b"\0", b"\xff"),
    *(b"null", b"true", b"-1", b"0", b"1e309", b"18446744073709551616", b"9" * 40, b"NaN"),
    *(b"0.1", b"{{", b"}}", b"{%", b"%}", b"\xef\xbb\xbf"),
    *(b"*a", b"&a ", b"!!", b"? ", b"- ", b"---\n", b"<<: ", b"..", b"/", b"%63", b"[" * 300, b"{" * 300, b"(" * 300),
    *(b"\x80", b"\x90", b"\xc0", b"\xcf" + b"\xff" * 8, b"\xdd\xff\xff\xff\xff", b"data: ", b"model", b"a" * 300),
]  # fmt: skip


class Target(NamedTuple):
    """`seeds`: good input. `promises`: errors that its reader says it raises."""

    read: Callable[[bytes], object]
    seeds: Sequence[bytes]
    promises: tuple[type[Exception], ...] = ()


class Report(NamedTuple):
    name: str
    inputs: int
    refused: int
    seconds: float
    slowest: float
    grown_kb: int
    findings: int
    stopped: bool = False
    """By Ctrl-C."""


def mutated(chance: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A seed with a few things wrong: bytes changed, cut out, doubled, moved; pieces of other seeds and of formats."""
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.choice((1, 1, 2, 3, 5, 9))):
        at = chance.randrange(len(data) + 1)
        length = chance.choice((0, 1, 1, 2, 4, 8, 30))
        match chance.randrange(8):
            case 0 if at < len(data):
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                del data[at : at + length]
            case 2:
                data[at : at + length] = chance.choice(PIECES)
            case 3:
                data[at:at] = chance.choice(PIECES) * chance.choice((1, 1, 2, 50))
            case 4:
                other = chance.choice(seeds)
                start = chance.randrange(len(other) + 1)
                data[at : at + length] = other[start : start + chance.choice((3, 10, 60, 300))]
            case 5:
                data[at:at] = data[at : at + length] * chance.choice((1, 2, 9))
            case 6:
                data[at:at] = chance.randbytes(length)
            case 7 if chance.random() < 0.2:
                del data[at:]
    return bytes(data)


def fuzz(name: str, target: Target, inputs: int, seconds: float, seed: int) -> Report:
    """So many inputs, or for so long. Findings are printed and kept."""
    chance = random.Random(f"{name} {seed}")
    refused = done = findings = 0
    slowest, seen = 0.0, set[str]()
    for each in target.seeds:  # caches and imports are no growth
        _tried(target, each)
    before, start = _rss_kb(), time.monotonic()
    stopped = False
    while done < inputs and time.monotonic() - start < seconds:
        try:
            data = mutated(chance, target.seeds)
            began = time.process_time()  # others may have the processor
            error = _tried(target, data)
            took = time.process_time() - began
        except KeyboardInterrupt:
            stopped = True
            break
        done += 1
        slowest = max(slowest, took)
        if isinstance(error, target.promises):
            refused += 1
        elif error is not None or took > SLOW:
            what = f"{took:.1f} s" if error is None else "".join(traceback.format_exception(error)[-3:])
            kind = "slow" if error is None else f"{type(error).__name__}{_where(error)}"
            if kind not in seen:
                seen.add(kind)
                print(f"{name}: {kind}: {_keep(name, data)}\n{what}", flush=True)
            findings += 1
    return Report(name, done, refused, time.monotonic() - start, slowest, _rss_kb() - before, findings, stopped)


def _tried(target: Target, data: bytes) -> BaseException | None:
    try:
        target.read(data)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        return error
    return None


def _where(error: BaseException) -> str:
    return str([f"{frame.filename[-30:]}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-1:]])


def _keep(name: str, data: bytes) -> Path:
    FOUND.mkdir(parents=True, exist_ok=True)
    file = FOUND / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
    file.write_bytes(data)
    return file


def _rss_kb() -> int:
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])


# --- targets ---------------------------------------------------------------------------------------------------------


def ext_proc(data: bytes) -> None:
    """Messages of one stream, each after its length in two bytes."""
    memory = Memory(1 << 24, 100)
    stream = Stream(1 << 20, memory)
    at = 0
    while at + 2 <= len(data) and not stream.finished:
        size = int.from_bytes(data[at : at + 2], "big")
        for action in stream.receive(data[at + 2 : at + 2 + size]):
            if isinstance(action, RawRequest):
                stream.routed("10.0.0.1:8000", {}, None)
                stream.sent()
        at += 2 + size
    stream.release()
    if memory.held:
        raise AssertionError(f"{memory.held} bytes stay held")


def http2(data: bytes) -> None:
    """Frames, after a good preface. The connection never raises: why it broke counts as a refusal."""
    connection = Connection()
    connection.receive(PREFACE)
    connection.receive(data)
    connection.take()
    if connection.broken is not None:
        raise connection.broken


def _parser() -> Parser:
    made = Parser(Pool("p", random=random.Random(1)), lambda model, size: size // 4, lambda: "id", trusted=True)
    made.use(list(PARSERS))
    return made


PARSER: Final = _parser()
PATHS: Final = ("chat/completions", "completions", "responses", "embeddings", "messages")
OTHERS: Final = ("/inference/v1/generate", "/generate", "/rerank", "/score", "/classify", "/pooling")


def bodies(data: bytes) -> None:
    refused = 0
    for path in (*(f"/v1/{path}" for path in PATHS), *OTHERS):
        try:
            PARSER.parse(RawRequest("POST", path, {"content-type": "application/json"}, data))
        except EppError:
            refused += 1
    if refused == len(PATHS) + len(OTHERS):
        raise BadRequest("of no format")


HEADERS: Final = ("x-request-id", "content-encoding", "x-llm-d-slo-ttft-ms", "x-session-id", "content-type")
SOURCES: Final = (TenantSource("x-t"), TenantSource("x-t", "org.team"))


def paths_and_headers(data: bytes) -> None:
    """As a path, and as the value of each header that is read."""
    text = data.decode("utf-8", "replace")
    request, _ = PARSER.parse(RawRequest("POST", "/x" + text, {}, b"{}"))
    for source in SOURCES:
        if len(source.name_of(msgspec.structs.replace(request, headers={"x-t": text}))) > LONGEST:
            raise AssertionError("a tenant's name is too long")
    for header in HEADERS:
        with suppress(EppError):
            PARSER.parse(RawRequest("POST", "/v1/chat/completions", {header: text}, b'{"model":"m","messages":[]}'))
    PARSER.parse(RawRequest("POST", text, {}, b'{"model":"m","messages":[]}'))


def rewrites(data: bytes) -> None:
    request, _ = PARSER.parse(RawRequest("POST", "/v1/chat/completions", {}, data))
    made = rewrite_model(data, "new")
    read = json.loads(made.decode("utf-8", "replace"))  # as the usual reader does: of several, the last
    if read["model"] != "new" or request.model == "":
        raise AssertionError(f"rewritten to {made[:100]!r}")


def answers(data: bytes) -> None:
    reader = UsageReader("text/event-stream")
    for at in range(0, len(data), 17):
        reader.feed(data[at : at + 17])
    reader.finish()


def kv_events(data: bytes) -> None:
    cache = EngineCache(Endpoint("a", "10.0.0.1:8000"), index := KvEventIndex(10_000))
    try:
        rank_of(data)
        for part in parts(data):
            cache.apply(part)
    finally:
        cache.leave()
        if index.budget.used:
            raise AssertionError(f"{index.budget.used} blocks stay on account")


METRICS: Final = Metrics()
VLLM_PAGE: Final = vllm_page()


def metrics_pages(data: bytes) -> None:
    for engine in ENGINES.values():
        parse(data, engine, 1.0, Places())
    told = EngineAnswers(Endpoint("a", "10.0.0.1:8000"), ENGINES["vllm"], METRICS)
    told.look(data, Places(), 0.0)
    told.look(data + data, Places(), 100.0)
    reader = PageReader(Endpoint("a", "10.0.0.1:8000"), ENGINES["vllm"], METRICS)
    for page in (VLLM_PAGE, data, *page_of_each(data, 2).values()):
        reader.read(page, 1.0)
        reader.read(page, 2.0)


def endpoints_answers(data: bytes) -> None:
    """What endpoints answer beside metrics: HTTP itself, their models, where they publish, tokens."""
    models_of(data)
    named_in(data, {"10.0.0.1:8000": "a"})
    for read in (lambda: sources_on(data, "10.0.0.1:8000"), lambda: ids_in(data)):
        with suppress(ValueError, BadAnswer):
            read()
    reader = AnswerReader()
    for at in range(0, len(data), 50):
        if reader.feed(data[at : at + 50]) is not None:
            return
    reader.eof()


PAGE: Final = msgspec.json.Decoder(Page)


def coordinator(data: bytes) -> None:
    page, directory = PAGE.decode(data), Directory(1000)
    directory.put(page.chunks(directory, ""))


def templates(data: bytes) -> None:
    template = ChatTemplate(data.decode("utf-8", "replace"))
    template.render(
        {"messages": [{"role": "user", "content": "x" * 50}], "bos_token": "<s>", "tools": None}, 0.2, 10_000
    )


@functools.cache
def _folder() -> Path:
    """Of this process, in memory where that can be had; gone with it."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="warmpath-fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _file(name: str, data: bytes) -> Path:
    """A file of that name with that content. The one folder serves all inputs, each of which writes it anew."""
    path = _folder() / name
    path.write_bytes(data)
    return path


@functools.cache
def _corpus(name: str) -> Sequence[bytes]:
    return [file.read_bytes() for file in sorted((Path(__file__).parent / "fuzz_corpus" / name).iterdir())]


def tokenizer_files(data: bytes) -> None:
    """Either file of the two, as it begins."""
    tokenizer, settings, *_ = _corpus("tokenizer_files")
    is_settings = b"chat_template" in data[:60]
    path = _file("tokenizer_config.json", data if is_settings else settings)
    _file("tokenizer.json", tokenizer if is_settings else data)
    ModelTokenizer.load(path.parent, TokenCache(1 << 20))


INSTALLED: Final = functools.cache(metadata.entry_points)
"""What is installed does not change here, and looking takes as long as reading a configuration."""


def configurations(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    with patch.object(metadata, "entry_points", INSTALLED):
        load_text(text, clock=lambda: 0.0, random=random.Random(1), plugins_from=())


def pool_files(data: bytes) -> None:
    static.load([_file("pools.yaml", data)])


class _Answering:
    """An API server whose lists hold one object besides the pool that is followed, and whose watches add it, and take
    it for an event.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def page(self, kind: Kind, namespace: str, selector: str, continuation: str) -> bytes:
        items = [POOL, self._data] if kind == POOLS else [self._data]
        return b'{"metadata":{"resourceVersion":"1"},"items":[%s]}' % b",".join(items)

    @asynccontextmanager
    async def stream(
        self, kind: Kind, namespace: str, selector: str, version: str, seconds: int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        async def lines() -> AsyncIterator[bytes]:
            yield b'{"type":"MODIFIED","object":%s}' % self._data
            yield self._data

        yield lines()


class _Degrading(Metrics):
    """What no reader promised to raise ends a round of a watch, which says so."""

    def degraded(self, reason: str, detail: str = "", *, lasting: bool = False) -> None:
        if reason == "kubernetes-watch-failed":
            raise AssertionError(detail)


DEGRADING: Final = _Degrading()


def kubernetes_objects(data: bytes) -> None:
    """As the API server sends them, JSON, in lists and events of each kind that is followed."""

    async def follow() -> None:
        source, chance = _Answering(data), random.Random(1)
        pools = KubePools(Named(("p",)), "d", source, DEGRADING, chance)
        slices = ServiceAddresses("d", "s", "http", source, DEGRADING, "lmcache-not-followed", chance)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(pools.watch()), tasks.create_task(slices.follow(lambda addresses: None))]
            for _ in range(40):  # turns of the loop: all lists are read, the pool is made, its Pods are read
                await asyncio.sleep(0)
            for each in running:
                each.cancel()

    with patch("epp.pool.kubernetes._QUIET", 0.0):
        LOOP.run(follow())


def traces(data: bytes) -> None:
    read_mooncake(_file("t.jsonl", data), limit=50)


def replica_frames(data: bytes) -> None:
    replicas.decode(data, 1)


IDS: Final = list(range(64))
FRAMES: Final = [
    bytes.fromhex(each)
    for each in (
        "00000004000000000000000408000000000000ffffff",
        "0000000400000000000000030104000000018286840000050001000000010000000000",
        "000000040000000000"
        "000004030000000001"
        "00000008"
        "000008060000000000"
        "0001020304050607"
        "000008070000000000"
        "0000000000000000",
    )
]
NOT_OURS: Final = (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError)
"""Of JSON that is none, where those who decode it catch them all."""
EVENTS: Final = (
    batch(stored(IDS), stored(IDS, 4), removed(IDS, 2)),
    batch({"type": "AllBlocksCleared"}, ["BlockStored", names_of(IDS), None, IDS, 4, None, "GPU"]),
)
ADAPTERS: Final = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters=""} 1.0'
STREAMS: Final = [
    b"".join(len(message).to_bytes(2, "big") + message for message in each)
    for each in CORPUS
    if sum(map(len, each)) < 9000
]
STRATEGIES: Final = [strategy_text(name).encode() for name in ("prefix-aware", "kv-aware", "session", "least-load")]
CONFIGS: Final = [file.read_bytes() for file in sorted((ROOT / "manifests" / "configs").glob("*.yaml"))]
BEAT: Final = replicas.Beat(2.0, {3: (4.0, 5.0)}, ready=True, open=6)
MESSAGES: Final = (BEAT, replicas.Begin(7), replicas.Leaving())
FRAME: Final = replicas.frame(b"l", 1, 2, [replicas.encode(message) for message in MESSAGES])
TARGETS: Final = {
    "ext_proc": Target(ext_proc, STREAMS, (EppError,)),
    "http2": Target(http2, FRAMES, (Broken,)),
    "bodies": Target(bodies, _corpus("bodies"), (EppError,)),
    "paths_and_headers": Target(paths_and_headers, _corpus("paths_and_headers"), (EppError,)),
    "rewrites": Target(rewrites, _corpus("bodies"), (EppError,)),
    "answers": Target(answers, _corpus("answers")),
    "kv_events": Target(kv_events, EVENTS, (MalformedBatch,)),
    "metrics_pages": Target(
        metrics_pages,
        [vllm_page(), vllm_page(engines=2), vllm_page(lora=ADAPTERS, buckets=3), *_corpus("metrics_pages")],
    ),
    "endpoints_answers": Target(endpoints_answers, _corpus("endpoints_answers"), (BadAnswer,)),
    "coordinator": Target(coordinator, _corpus("coordinator"), (Away, *NOT_OURS)),
    "templates": Target(templates, _corpus("templates"), (TemplateError, TemplateTooLong, RecursionError)),
    "tokenizer_files": Target(tokenizer_files, _corpus("tokenizer_files"), (ConfigError,)),
    "configurations": Target(configurations, [*STRATEGIES, *CONFIGS, *_corpus("configurations")], (ConfigError,)),
    "pool_files": Target(pool_files, _corpus("pool_files"), (ConfigError,)),
    "kubernetes_objects": Target(kubernetes_objects, _corpus("kubernetes_objects"), NOT_OURS),
    "traces": Target(traces, _corpus("traces"), (ConfigError,)),
    "replica_frames": Target(replica_frames, [FRAME], (replicas.MalformedFrame,)),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="hack/fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--inputs", type=int, default=20_000, help="of each target")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most, of each target")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if unknown := [name for name in options.targets if name not in TARGETS]:
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    # What eats memory is a finding too, and shall not take the machine along.
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    print(
        f"{'target':20}{'inputs':>10}{'refused':>9}{'a second':>10}{'slowest ms':>12}{'grown KB':>10}{'findings':>10}"
    )
    found = 0
    for name in options.targets or TARGETS:
        one = fuzz(name, TARGETS[name], options.inputs, options.seconds, options.seed)
        rate = one.inputs / one.seconds
        share = f"{one.refused / max(one.inputs, 1):.0%}"
        costs = f"{rate:10,.0f}{one.slowest * 1e3:12.1f}{one.grown_kb:10,}"
        print(f"{name:20}{one.inputs:10,}{share:>9}{costs}{one.findings:10,}", flush=True)
        found += one.findings
        if one.stopped:
            return 130
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
