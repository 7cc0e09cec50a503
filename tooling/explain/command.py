"""Ask a running picker, or a configuration that nothing was sent through yet."""

import asyncio
import io
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
from rich.console import Console

from epp.admin.asked import Asked, from_curl, from_text
from epp.configuration.loader import DEFAULT_STRATEGY, load_file, load_strategy
from epp.errors import ConfigError, EppError
from epp.flow.guards import Guards
from epp.parsing.parser import Parser
from epp.parsing.request import RawRequest
from epp.pool.static import load
from epp.pool.store import Pool
from epp.prefix.token_ratio import TokenRatio
from epp.protocol import EXPLAINED_AUTHORIZATION
from epp.route import Admission, Policy, RequestObserver, Router
from epp.testing import services
from tooling.explain.report import report

_SECONDS = 30.0


@dataclass(frozen=True)
class ExplainOptions:
    """What the flags of `warmpath explain` say."""

    file: Path | None = None
    """None: standard input."""
    curl: str | None = None
    url: str = "http://127.0.0.1:9090"
    pool: str = ""
    path: str = ""
    model: str = ""
    header: Sequence[str] = ()
    token_file: Path | None = None
    insecure: bool = False
    endpoints: Sequence[Path] = ()
    config: Path | None = None
    strategy: str | None = None


def main(options: ExplainOptions, *, as_json: bool) -> int:
    """Print the explanation. Returns 1 where the request would be refused. Raises ConfigError."""
    asked = _asked(options)
    if options.endpoints:
        status, said = asyncio.run(_cold(options, asked))
    elif options.config is not None or options.strategy is not None:
        raise ConfigError("--endpoints", "missing; a configuration without a picker needs the pool's endpoints")
    else:
        status, said = asyncio.run(_ask(options, asked))
    if as_json:
        print(json.dumps(said, indent=2))
    else:
        Console().print(report(status, said))
    return 0 if status == 200 else 1


def _asked(options: ExplainOptions) -> Asked:
    if options.curl is not None:
        return from_curl(options.curl, options.path, options.header, _content)
    try:
        text = sys.stdin.buffer.read() if options.file is None else options.file.read_bytes()
    except OSError as error:
        raise ConfigError(str(options.file), f"cannot be read: {error.strerror}") from None
    return from_text(text, options.path, options.header, options.model)


def _content(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError("--curl", f"{file} cannot be read: {error.strerror}") from None


async def _ask(options: ExplainOptions, asked: Asked) -> tuple[int, dict[str, Any]]:
    """The picker at `options.url`. What it answers to a wrong request is an answer too."""
    headers = {"content-type": "application/json"} | {
        EXPLAINED_AUTHORIZATION if name == "authorization" else name: value
        for name, value in asked.headers.items()
        if name not in ("host", "content-length")
    }
    if options.token_file is not None:
        try:
            headers["authorization"] = f"Bearer {options.token_file.read_text().strip()}"
        except OSError as error:
            raise ConfigError("--token-file", f"{options.token_file} cannot be read: {error.strerror}") from None
    url, query = f"{options.url.rstrip('/')}/explain{asked.path}", {"pool": options.pool} if options.pool else {}
    timeout = aiohttp.ClientTimeout(total=_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(
                url, data=io.BytesIO(asked.body), headers=headers, params=query, ssl=not options.insecure
            ) as answer,
        ):
            status, page = answer.status, await answer.read()
    except TimeoutError:
        raise ConfigError("--url", f"{options.url} did not answer within {_SECONDS:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        what = "expected the metrics port of a running picker (--metrics-port), or --endpoints and a configuration"
        raise ConfigError("--url", f"{options.url}: {error}; {what}") from None
    if status in (401, 403):
        raise ConfigError("--token-file", f"{options.url} answers {status}: expected a token of who may read it")
    try:
        said = msgspec.json.decode(page, type=dict[str, Any])
    except msgspec.MsgspecError:
        said = {}
    if ("decision" if status == 200 else "error") not in said or status in (404, 405, 421):
        raise ConfigError(
            "--url", f"{options.url} answers {status} and explains nothing: is it a picker's metrics port?"
        )
    return status, said


async def _cold(options: ExplainOptions, asked: Asked) -> tuple[int, dict[str, Any]]:
    """A picker with this configuration to which nothing was sent yet, and endpoints of which nothing is known."""
    states = load(options.endpoints, None)
    named = [state for state in states if options.pool in ("", state.name, f"{state.namespace}/{state.name}")]
    if not named:
        known = ", ".join(f"{state.namespace}/{state.name}" for state in states)
        raise ConfigError("--pool", f"got {options.pool!r}; expected one of {known}")
    rng = random.Random(0)
    pool = Pool(named[0].name, named[0].namespace, random=rng)
    pool.apply(named[0])
    if options.config is not None:
        pipeline = load_file(options.config, clock=time.monotonic, random=rng)
    else:
        pipeline = load_strategy(options.strategy or DEFAULT_STRATEGY, clock=time.monotonic, random=rng)
    for plugin in pipeline.plugins:
        plugin.start(services(pool.endpoints))
    parser = Parser(pool, TokenRatio().tokens, trusted=True)
    parser.use(pipeline.parsers)
    scheduler = pipeline.scheduler(wall_clock=lambda: 0.0, on_error=_raise)
    policy = Policy(Admission(pipeline.detector), scheduler, guards=Guards(pipeline.guards, _raise))
    router = Router(pool, parser, policy, cast("RequestObserver", None), time.monotonic)
    try:
        decision = await router.explain(RawRequest("POST", asked.path, asked.headers, asked.body))
    except EppError as error:
        said: Mapping[str, Any] = {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
        return error.status, {"error": said}
    name = f"{pool.namespace}/{pool.name}"
    return 200, {"pool": name, "waiting": None, "decision": decision.as_dict()}


def _raise(plugin: str, error: Exception) -> None:
    raise ConfigError(plugin, f"{type(error).__name__}: {error}") from error
