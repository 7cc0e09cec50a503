"""One endpoint: what it says of itself, and what it does when it is tried.

It is sent four small requests (two prompts, one of them twice, of one token's answer each): a pod in use does not
notice. Names and flags are vLLM 0.32's.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from epp import protocol
from epp.pool.engines import DEFAULT_ENGINE, ENGINES, Places, page_of_each, parse
from epp.pool.ranks import MOST
from epp.prefix.events.sources import sources_of, sources_on
from epp.prefix.events.wire import BlockStored, key_of
from tooling.doctor.finding import Finding, hint, problem
from tooling.doctor.http import HttpClient, Trouble
from tooling.doctor.kv_events import hear

_INFO: Final = re.compile(rb"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_LABEL: Final = re.compile(rb'([a-z_]+)="([^"]*)"')
_EVENTS_FLAG: Final = (
    '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:5657", "topic": "kv@<pod ip>:<port>@<model>"}\''
)
_REFUSED: Final = "start it, or take it out of the pool; is its port another (the pool's target port, vLLM's --port)?"
_DROPPED: Final = "let the picker reach it: is a NetworkPolicy or a firewall between, is the address another?"
_OTHER_PORT: Final = "is it an OpenAI-compatible server, or another port than vLLM's --port?"
_WILD: Final = ("*", "::")
_WORDS: Final = 200
"""Of a probe, at least: more tokens than a chunk of LMCache's default has."""

TRIALS: Final[Mapping[str, Mapping[str, Any]]] = {
    "text": {"prompt": " The  Größe of 你好 is 12345\n\n\tand e\u0301 <|im_start|></s><eos> so on. "},
    "chat": {
        "messages": [
            {"role": "system", "content": "Be brief. "},
            {"role": "user", "content": "Grüße,\n 👋 how are you?"},
            {"role": "assistant", "content": " Fine. "},
            {"role": "user", "content": "And 1+1?"},
        ]
    },
}
"""Prompts whose tokens are compared."""


@dataclass
class ProbedEndpoint:
    """An endpoint, and what was learned of it. None = not known."""

    name: str
    url: str
    address: str
    rank: int | None = None
    """Which of the data-parallel ranks behind its address it is, as its label has it; None: the label is not there."""
    ranks: int = 1
    """How many there are, by that label."""
    labelled: str = DEFAULT_ENGINE
    """The engine it counts as, by its label."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """With which it is asked."""
    reachable: bool = False
    models: Sequence[str] = ()
    """All it serves, LoRA adapters too."""
    bases: Sequence[str] = ()
    """Those that are no adapters."""
    block_size: int | None = None
    algorithm: str | None = None
    caching: bool | None = None
    tokens: dict[str, Sequence[int]] = field(default_factory=dict)
    """Trial -> ids, of those that answered."""
    hashes: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Tokens of a prompt's first block -> the hash its events gave it."""
    engine: str = "vllm"
    """Of another one nothing more is examined."""


def probe(words: int, seed: int | str) -> str:
    """A text that was never sent before, of some two tokens a word."""
    draw = random.Random(seed)
    return " ".join(f"{draw.getrandbits(20):05x}" for _ in range(words))


async def examine(
    pod: ProbedEndpoint, ask: HttpClient, *, model: str | None, seed: int, event_timeout: float
) -> list[Finding]:
    """All that can be seen at one endpoint alone. Fills in what it learns of `pod`.

    `seed`: of the probes, the same for all endpoints, so that their KV events tell of the same blocks. `event_timeout`:
    seconds to wait for KV events.
    """
    findings = await _metrics(pod, ask)
    if pod.engine != "vllm" or any((each.check, each.level) == ("data-parallel", "problem") for each in findings):
        return findings
    findings += await _models(pod, ask, model)
    if not pod.reachable:
        return findings[-1:]
    if [each.check for each in findings] == ["metrics", "model"] and not pod.models:
        return findings  # another server
    served = model if model in pod.models or not pod.models else pod.models[0]
    findings += await _tokenizes(pod, ask, served)
    findings += await _caches(pod, ask, served, seed)
    findings += await _announces(pod, ask, served, seed, event_timeout)
    return findings


async def _metrics(pod: ProbedEndpoint, ask: HttpClient) -> list[Finding]:
    try:
        page = await ask.bytes(f"{pod.url}/metrics")
    except Trouble as trouble:
        pod.reachable = trouble.status > 0
        return [
            problem(
                pod.name, "metrics", f"/metrics: {trouble}", "leave out --disable-log-stats; let the picker reach it"
            )
        ]
    pod.reachable = True
    if parse(page, ENGINES["vllm"], 0.0, Places()) is None:
        if other := next(
            (name for name, engine in ENGINES.items() if parse(page, engine, 0.0, Places()) is not None), ""
        ):
            pod.engine = other
            found = f"its metrics are those of {other}; caches and events are examined of vLLM alone"
            label = f"its pod's label llm-d.ai/engine-type: {other}, or defaultEngine of core-metrics-extractor"
            return [hint(pod.name, "metrics", found, "nothing, it has that label" if pod.labelled == other else label)]
        found = f"/metrics has {len(page)} bytes and none of vLLM's metrics"
        return [problem(pod.name, "metrics", found, "is it a vLLM server? leave out --disable-log-stats")]
    info = _INFO.search(page)
    labels = {key.decode(): value.decode() for key, value in _LABEL.findall(info[1])} if info else {}
    size = labels.get("block_size", "")
    pod.block_size = int(size) if size.isdigit() and int(size) else None
    pod.algorithm = labels.get("prefix_caching_hash_algo")
    pod.caching = {"True": True, "False": False}.get(labels.get("enable_prefix_caching", ""))
    if pod.caching is False:
        return [problem(pod.name, "prefix-caching", "it is switched off", "--enable-prefix-caching")]
    return _ranks(pod, len(page_of_each(page, MOST)))


def _ranks(pod: ProbedEndpoint, engines: int) -> list[Finding]:
    """Whether its label says how many data-parallel engines its metrics show."""
    fix = f"its label {protocol.DATA_PARALLEL_SIZE_LABEL}: {engines}"
    if pod.rank is not None and engines != pod.ranks:
        found = f"its label says {pod.ranks} ranks, its metrics show {engines}; so none is named, and no more examined"
        return [problem(pod.name, "data-parallel", found, fix)]
    if engines > 1:  # each has a cache of its own, so what is asked twice must be asked of one
        pod.headers = {protocol.DATA_PARALLEL_RANK: str(pod.rank or 0)}
    if pod.rank is None and engines > 1:
        found = f"{engines} data-parallel ranks behind one port, which are one endpoint; vLLM chooses between them"
        return [hint(pod.name, "data-parallel", found, f"{fix}, and the picker does, by what each holds")]
    return []


async def _models(pod: ProbedEndpoint, ask: HttpClient, model: str | None) -> list[Finding]:
    try:
        page = await ask.json(f"{pod.url}/v1/models")
    except Trouble as trouble:
        pod.reachable = pod.reachable or trouble.status > 0
        if pod.reachable:
            return [problem(pod.name, "model", f"/v1/models: {trouble}", _OTHER_PORT)]
        return [problem(pod.name, "unreachable", f"/v1/models: {trouble}", _DROPPED if trouble.dropped else _REFUSED)]
    pod.reachable = True
    data = page.get("data")
    listed = [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []
    pod.models = [each["id"] for each in listed if isinstance(each.get("id"), str)]
    pod.bases = [each["id"] for each in listed if each.get("id") in pod.models and not each.get("parent")]
    if model is not None and model not in pod.models:
        found = f"it serves {', '.join(pod.models) or 'nothing'}; asked for {model}"
        return [problem(pod.name, "model", found, f"--served-model-name {model}")]
    return []


async def _tokenizes(pod: ProbedEndpoint, ask: HttpClient, model: str | None) -> list[Finding]:
    for name, trial in TRIALS.items():
        try:
            page = await ask.json(f"{pod.url}/tokenize", {"model": model, **trial})
        except Trouble as trouble:
            if trouble.status == 400 and name == "chat":  # a base model has no chat template
                continue
            found = f"/tokenize of a {name}: {trouble}"
            return [hint(pod.name, "tokenize", found, "mount the tokenizer for the picker: warmpath serve --tokenizer")]
        tokens = page.get("tokens")
        if isinstance(tokens, list):
            pod.tokens[name] = tokens
    return []


async def _complete(pod: ProbedEndpoint, ask: HttpClient, model: str | None, text: str) -> Mapping[str, Any]:
    body = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0}
    usage = (await ask.json(f"{pod.url}/v1/completions", body, pod.headers)).get("usage")
    return usage if isinstance(usage, dict) else {}


async def _caches(pod: ProbedEndpoint, ask: HttpClient, model: str | None, seed: int) -> list[Finding]:
    """The same prompt twice: the second is a hit, and the answer says so."""
    # No other endpoint is sent it: LMCache 0.5.6 fails to store what another node writes to the same L2 directory at
    # that moment, which looks as if nothing could be stored there.
    text = probe(max(_WORDS, 2 * (pod.block_size or 0)), f"{seed} {pod.name}")
    try:
        await _complete(pod, ask, model, text)
        usage = await _complete(pod, ask, model, text)
    except Trouble as trouble:
        return [problem(pod.name, "prefix-caching", f"/v1/completions: {trouble}", "see its log")]
    details = usage.get("prompt_tokens_details")
    if not isinstance(details, dict) or details.get("cached_tokens") is None:
        found = "its usage does not report cached tokens"
        return [hint(pod.name, "prompt-token-details", found, "--enable-prompt-tokens-details")]
    if not details["cached_tokens"] and pod.caching is not False:
        found = f"the same {usage.get('prompt_tokens')} tokens twice, and none were cached"
        return [problem(pod.name, "prefix-caching", found, "--enable-prefix-caching")]
    return []


async def _announces(
    pod: ProbedEndpoint, ask: HttpClient, model: str | None, seed: int, event_timeout: float
) -> list[Finding]:
    """Whether its KV events can be received, and say what was sent."""
    try:
        page = await ask.bytes(f"{pod.url}/kv_event_sources")
    except Trouble as trouble:
        found = f"it does not say where: /kv_event_sources: {trouble}"
        return [problem(pod.name, "kv-events", found, f"{_EVENTS_FLAG} (vLLM 0.32 or later)")]
    try:
        sources, said = sources_of(pod.rank, sources_on(page, pod.address)), _endpoints(page)
    except ValueError as error:
        return [problem(pod.name, "kv-events", f"/kv_event_sources: {error}", _EVENTS_FLAG)]
    if not said:
        return [problem(pod.name, "kv-events", "it publishes none", _EVENTS_FLAG)]
    shown = ", ".join(said)
    fix = 'in --kv-events-config: "endpoint": "tcp://*:5557"; vLLM binds with *, :: or ipc:// only, else it connects'
    if not sources:
        return [problem(pod.name, "kv-events-endpoint", f"{shown}: it connects to another host", fix)]

    async def provoke(attempt: int) -> None:
        await _complete(pod, ask, model, probe(max(_WORDS, 2 * (pod.block_size or 0)), seed + 1 + attempt))

    try:
        received = await hear([source.publisher for source in sources], provoke, event_timeout)
    except Trouble as trouble:
        return [
            problem(pod.name, "kv-events-silent", f"nothing to announce: /v1/completions: {trouble}", "see its log")
        ]
    if received is None:
        if all(any(wild in each.rpartition(":")[0] for wild in _WILD) for each in said):
            return [problem(pod.name, "kv-events-endpoint", f"{shown}: no connection", "open the port to the picker")]
        return [
            problem(
                pod.name,
                "kv-events-endpoint",
                f"{shown}: nothing listens there, it connects itself",
                fix,
            )
        ]
    if not received:
        found = f"{shown}: connected, and nothing within {event_timeout:g} s of a new prompt"
        return [problem(pod.name, "kv-events-silent", found, "look for KV events in its log; is the port its own?")]
    return _block_findings(pod, received)


def _block_findings(pod: ProbedEndpoint, received: Sequence[BlockStored]) -> list[Finding]:
    for event in received:
        if event.parent_block_hash is None and event.token_ids and event.block_hashes:
            pod.hashes[tuple(event.token_ids[: event.block_size])] = key_of(event.block_hashes[0])
    sizes = {event.block_size for event in received}
    if pod.block_size is not None and sizes != {pod.block_size}:
        found = f"its events have blocks of {', '.join(map(str, sorted(sizes)))} tokens, its metrics {pod.block_size}"
        return [problem(pod.name, "block-size", found, f"--block-size {pod.block_size}")]
    return []


def _endpoints(page: bytes) -> list[str]:
    """The publishers' addresses as the engine has them, from a page that `told` could read."""
    ranks = msgspec.json.decode(page, type=dict[str, dict[str, Any]])
    return [str(each["endpoint"]) for each in ranks.values() if each.get("endpoint")]
