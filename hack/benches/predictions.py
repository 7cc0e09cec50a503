"""How right predictions are for a real engine: TTFT and TPOT that the picker expects of each request against the
measured.

    hack/bench predictions --longest 300 --rate 2            vLLM on this machine's CPUs, from `hack/install engine`
    hack/bench predictions --engine http://127.0.0.1:8000 --model llama --tokenizer DIRECTORY

The engine stands behind Envoy (full duplex) and a picker whose configuration says that everything takes ten times as
long as one prompt took at the start. Loads follow each other, so what is learned of one is there in the next. Nothing
else may use the engine meanwhile.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final, NamedTuple

import aiohttp

from hack.benches.rig.processes import BenchError
from tooling.laptop.chain import Chain, ChainError, Shape, running_chain
from tooling.laptop.engines import Engine, EngineError, LaptopPod, Layout, Program, Vllm, engine_python

WORDS: Final = ("bade", "fiko", "lumo", "nari", "posu", "tevi", "gona", "ruki")
WRONG: Final = 10.0
SLO: Final = {"x-slo-ttft-ms": "600000"}
"""Of each request: a decision says what it was predicted only where somebody wanted to know."""
CONFIG: Final = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: expected-ttft
  parameters:
    prefillSecondsPerToken: {prefill}
    attentionSecondsPerTokenPair: {pair}
    stepSeconds: {step}
    stepSecondsPerDecode: {decode}
    stepSecondsPerContextToken: {context}
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins: [{{pluginRef: expected-ttft}}, {{pluginRef: max-score-picker}}]
"""


@dataclass(frozen=True)
class Running:
    """An engine that runs already, as a pod of the chain."""

    url: str
    model: str
    tokenizer: str | None
    what = "model server"
    ready_seconds = 30.0
    roles: Sequence[str] = ()

    @property
    def picker_flags(self) -> Sequence[str]:
        return () if self.tokenizer is None else ("--tokenizer", f"{self.model}={self.tokenizer}")

    def lay_out(self, names: Sequence[str]) -> Layout:
        host, _, port = self.url.removeprefix("http://").rstrip("/").partition(":")
        if host not in ("127.0.0.1", "localhost") or not port.isdigit():
            raise EngineError(f"--engine {self.url}: expected http://127.0.0.1:PORT")
        [name] = names
        pod = LaptopPod(name, int(port))
        return Layout([pod], {name: Program(name, ["sleep", "infinity"], f"{pod.url}/health")})


@dataclass
class Seen:
    """A request as its client saw it; seconds."""

    load: str
    ttft: float | None = None
    tpot: float | None = None


class Expected(NamedTuple):
    """What was predicted of a request; seconds."""

    ttft: float
    tpot: float


@dataclass
class Client:
    """Asks through the gateway, and remembers what was predicted and measured of each request, by its id."""

    http: aiohttp.ClientSession
    chain: Chain
    model: str
    random: Random
    seen: dict[str, Seen] = field(default_factory=dict)
    predicted: dict[str, Expected] = field(default_factory=dict)

    def text(self, words: int) -> str:
        return " ".join(self.random.choices(WORDS, k=words))

    async def ask(self, load: str, tokens: int, prompt: str | list[dict[str, str]]) -> str:
        """The answer. `prompt`: a text, or the messages of a chat. Raises BenchError for what is not answered."""
        chat = not isinstance(prompt, str)
        body = {"model": self.model, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        body |= {"messages": prompt} if chat else {"prompt": prompt}
        name = f"{load.replace(' ', '-')}-{len(self.seen)}-{self.random.getrandbits(32):x}"
        seen = self.seen[name] = Seen(load)
        url = f"{self.chain.url}/v1/{'chat/' if chat else ''}completions"
        began, data, last = time.monotonic(), b"", 0.0
        async with self.http.post(url, json=body, headers={**SLO, "x-request-id": name}) as answer:
            async for part in answer.content.iter_any():
                data += part
                if b'"text"' in part or b'"content"' in part:
                    last = time.monotonic() - began
                    seen.ttft = last if seen.ttft is None else seen.ttft
        if seen.ttft is not None and tokens > 1:
            seen.tpot = (last - seen.ttft) / (tokens - 1)
        if answer.status != 200:
            raise BenchError(f"a request was answered {answer.status}: {data[:200].decode(errors='replace')}")
        choices = [choice for line in data.splitlines() if line.startswith(b"data: {") for choice in _choices(line)]
        return "".join((each.get("delta") or {}).get("content") or each.get("text") or "" for each in choices)

    async def collect(self) -> None:
        """Read what was predicted, for ever: the picker remembers its last decisions."""
        url = f"{self.chain.replicas[0].admin}/decisions?limit=100"
        while True:
            await asyncio.sleep(0.5)
            async with self.http.get(url, headers={"accept": "application/json"}) as answer:
                rows = json.loads(await answer.text())["decisions"]
            for row in rows:
                if (predicted := row.get("predicted")) is not None:
                    expected = Expected(predicted["ttft_ms"] / 1000, predicted["tpot_ms"] / 1000)
                    self.predicted[row["request_id"]] = expected


def _choices(line: bytes) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = json.loads(line[6:]).get("choices", ())
    return found


Load = Callable[[Client, str], Awaitable[None]]


def at_a_time(clients: int, seconds: float, words: tuple[int, int], tokens: int) -> Load:
    """So many clients, each of which asks again when it is answered; prompts of their own."""

    async def run(client: Client, load: str) -> None:
        end = time.monotonic() + seconds

        async def work() -> None:
            while time.monotonic() < end:
                await client.ask(load, tokens, client.text(client.random.randrange(*words)))

        await asyncio.gather(*(work() for _ in range(clients)))

    return run


def chats(clients: int, seconds: float, longest: int) -> Load:
    """Conversations of five turns; four system prompts among them."""

    async def run(client: Client, load: str) -> None:
        random, end = client.random, time.monotonic() + seconds
        systems = [client.text(longest // 3) for _ in range(4)]

        async def work() -> None:
            while time.monotonic() < end:
                talk = [{"role": "system", "content": random.choice(systems)}]
                for _ in range(5):
                    if time.monotonic() > end:
                        return
                    talk.append({"role": "user", "content": client.text(random.randrange(30, max(31, longest // 5)))})
                    talk.append({"role": "assistant", "content": await client.ask(load, 100, list(talk))})
                    await asyncio.sleep(random.expovariate(2))

        await asyncio.gather(*(work() for _ in range(clients)))

    return run


def arrivals(rate: float, seconds: float, words: tuple[int, int]) -> Load:
    """`rate` requests a second at random times, whoever is answered; many short prompts and few long ones."""

    async def run(client: Client, load: str) -> None:
        random, end, asked = client.random, time.monotonic() + seconds, []
        while time.monotonic() < end:
            await asyncio.sleep(random.expovariate(rate))
            prompt = client.text(int(words[0] * (words[1] / words[0]) ** random.random()))
            asked.append(asyncio.ensure_future(client.ask(load, random.randrange(20, 200), prompt)))
        await asyncio.gather(*asked)

    return run


def loads(seconds: float, longest: int, rate: float) -> dict[str, Load]:
    """In their order. `longest`: words of a prompt."""
    some = (max(1, longest // 16), longest)
    return {
        "1 at a time": at_a_time(1, seconds, some, 16),
        "8 at a time": at_a_time(8, seconds, some, 64),
        "32 at a time": at_a_time(32, seconds, some, 128),
        "24 chats": chats(24, seconds, longest),
        f"{rate:g} a second": arrivals(rate, seconds, (max(1, longest // 25), longest * 7 // 5)),
        "64 at a time, short": at_a_time(64, seconds, (max(1, longest // 50), max(2, longest // 4)), 200),
    }


class Row(NamedTuple):
    """What came of a load. `errors`: of its first and second half the median of |predicted / measured - 1|."""

    load: str
    requests: int
    ttft: float
    """Median, seconds."""
    errors: Sequence[float]
    milliseconds: float
    """Mean difference between predicted and measured in the second half."""
    tpot: float
    """The same median error of TPOT in the second half."""


def row(load: str, compared: Sequence[tuple[Expected, Seen]]) -> Row:
    """`compared`: in the order of the requests. Raises BenchError where too few are."""
    pairs = [(expected.ttft, seen.ttft or 0.0) for expected, seen in compared]
    if len(pairs) < 4:
        raise BenchError(f"{len(pairs)} requests of {load!r} were answered in time: expected more --seconds")
    half = len(pairs) // 2
    tokens = [(expected.tpot, seen.tpot) for expected, seen in compared[half:] if seen.tpot]
    tpot = median(abs(expected / seen - 1) for expected, seen in tokens) if tokens else 0.0
    errors = [median(abs(expected / seen - 1) for expected, seen in part) for part in (pairs[:half], pairs[half:])]
    apart = sum(abs(expected - seen) for expected, seen in pairs[half:]) / (len(pairs) - half)
    return Row(load, len(pairs), median(seen for _, seen in pairs), errors, 1e3 * apart, tpot)


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    head = "median error, first half"
    lines = [
        f"| load | requests | TTFT p50 | {head} | second half | mean difference then | TPOT, median error then |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        first, second = one.errors
        figures = f"{one.requests} | {1e3 * one.ttft:.0f} ms | {first:.0%} | {second:.0%} | {one.milliseconds:.0f} ms"
        lines.append(f"| {one.load} | {figures} | {one.tpot:.0%} |".replace("%", " %"))
    return "\n".join(lines)


async def prefill_seconds(http: aiohttp.ClientSession, url: str, model: str, text: Callable[[int], str]) -> float:
    """Of a token, from a few prompts that the engine is given alone."""
    found: list[float] = []
    for _ in range(5):
        body = {"model": model, "prompt": text(800), "max_tokens": 1}
        began = time.monotonic()
        async with http.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise BenchError(f"{url} answered {answer.status}: {(await answer.text())[:200]}")
            usage = (await answer.json())["usage"]
        found.append((time.monotonic() - began) / usage["prompt_tokens"])
    return median(found[1:])


def configuration(seconds: float) -> str:
    """That says a token's prefill takes so long, and a step to match."""
    return CONFIG.format(
        prefill=seconds, pair=7e-5 * seconds, step=40 * seconds, decode=4 * seconds, context=4e-3 * seconds
    )


@asynccontextmanager
async def asking(engine: Engine, wrong: float, seed: int) -> AsyncIterator[Client]:
    """A chain of the engine, and who asks it. The configuration says `wrong` times what a token's prefill takes."""
    with tempfile.TemporaryDirectory(prefix="warmpath-") as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(configuration(1.0))
        picking = ("--config", str(config), "--trust-client-headers", "--refresh-metrics-interval", "1")
        shape = Shape(pods=1, port=0, wiring="full-duplex", picking=picking, engine=engine)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=600)
        async with (
            running_chain(shape, Path(folder)) as chain,
            aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
        ):
            client = Client(http, chain, engine.model, Random(seed))
            measured = await prefill_seconds(http, chain.pods[0].url, engine.model, client.text)
            print(
                f"a token's prefill takes about {1e6 * measured:.0f} us; configured: {wrong:g} times that", flush=True
            )
            await chain.reconfigure(config, configuration(wrong * measured))
            collecting = asyncio.ensure_future(client.collect())
            try:
                yield client
            finally:
                collecting.cancel()


async def run(options: argparse.Namespace) -> int:
    engine: Engine
    if options.engine is None:
        engine = Vllm(engine_python(), size="tiny", context=16_384)
    else:
        engine = Running(options.engine, options.model, options.tokenizer)
    rows = []
    async with asking(engine, options.wrong, options.seed) as client:
        for name, load in loads(options.seconds, options.longest, options.rate).items():
            await load(client, name)
            await asyncio.sleep(1.5)  # the last predictions are read
            compared = [
                (client.predicted[key], seen)
                for key, seen in client.seen.items()
                if seen.load == name and seen.ttft is not None and key in client.predicted
            ]
            rows.append(row(name, compared))
            print(f"{name}: done", file=sys.stderr)
    print(table(rows))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hack/bench predictions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", metavar="URL", help="of one that runs on this machine; default: vLLM on CPUs")
    parser.add_argument("--model", default="model", help="what it serves, with --engine")
    parser.add_argument("--tokenizer", metavar="DIRECTORY", help="the model's, with --engine")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load (30)")
    parser.add_argument("--longest", type=int, default=2500, metavar="WORDS", help="of a prompt (2500), of two tokens")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second of the last load (6)")
    parser.add_argument("--wrong", type=float, default=WRONG, help="times that the configuration is wrong (10)")
    parser.add_argument("--seed", type=int, default=1)
    try:
        return asyncio.run(run(parser.parse_args(arguments)))
    except (BenchError, ChainError, EngineError) as error:
        print(f"hack/bench predictions: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
