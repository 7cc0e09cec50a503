"""The files of `epp` that one request touches, found by profiling two requests through everything that serves them."""

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from epp.app import ServedPool, Settings, Shared
from epp.extproc.server import Settings as ServerSettings
from epp.plugin import Endpoint
from epp.pool.store import Pool
from tests.support.ext_proc.messages import DUPLEX, LEAN, answer_body, answer_headers, request_body, request_headers
from tests.support.ext_proc.server import LOOPBACK, Gateway, ext_proc_server

ROOT = Path(__file__).parents[3]
CHAT = b'{"model": "m", "messages": [{"role": "user", "content": "%s"}], "max_tokens": 16}' % (b"why? " * 200)
ANSWER = b'{"usage": {"prompt_tokens": 260, "completion_tokens": 2}}'


async def files_run() -> set[Path]:
    """Files under `epp/` of which code ran while a pool with strategy `prefix-aware`, built as `warmpath serve` builds
    it, served one chat completion in full duplex and one in the lean wiring over real sockets.

    From the stream's start to its end; what made the objects before does not count.
    """
    shared = Shared(Settings(strategy="prefix-aware"))
    pool = Pool("pool", random=shared.random)
    one = ServedPool(pool, 0, shared)
    pool.replace([Endpoint(f"default/pod-{n}", f"10.0.0.{n}:8000") for n in (1, 2)])
    files: set[Path] = set()
    async with ext_proc_server(
        one.router.route, ServerSettings(listen=LOOPBACK, health=LOOPBACK), shared.metrics
    ) as server:
        async with Gateway(server.ports[0]) as gateway:
            with collected(files):
                for config in (DUPLEX, LEAN):
                    call = gateway.stream()
                    await call.write(request_headers(config=config))
                    await call.write(request_body(CHAT, end=True))
                    await call.write(answer_headers())
                    if config is DUPLEX:
                        await call.write(answer_body(ANSWER, end=True))
                    assert await call.rest()
    return files


@contextmanager
def collected(files: set[Path]) -> Iterator[None]:
    names: set[str] = set()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        names.add(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        files |= {path.relative_to(ROOT) for name in names if (path := Path(name)).is_relative_to(ROOT / "epp")}


# --- types and constants ---------------------------------------------------------------------------------------------


def files_named(files: set[Path]) -> set[Path]:
    """Other files of `epp` from which those of `files` import, when they are run, types and constants and nothing else.

    A type is a class without public methods. Files that make a package and files
    that a generator wrote (`proto/`) do not count.
    """
    used: dict[Path, set[str]] = {}
    for path in files:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        for module, name in _imports(tree):
            used.setdefault(Path(*module.split(".")).with_suffix(".py"), set()).add(name)
    return {
        path
        for path, names in used.items()
        if path not in files
        and (ROOT / path).is_file()
        and "proto" not in path.parts
        and not any(_acts(path, name) for name in names)
    }


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of all that is taken from modules of `epp` at run time; of a whole module, the names used."""
    modules: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "epp":
            for alias in node.names:
                if Path(ROOT, *node.module.split("."), f"{alias.name}.py").is_file():
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                else:
                    yield node.module, alias.name
    for used in ast.walk(tree):
        if isinstance(used, ast.Attribute) and isinstance(used.value, ast.Name) and used.value.id in modules:
            yield modules[used.value.id], used.attr


def _acts(path: Path, name: str) -> bool:
    found = getattr(importlib.import_module(".".join(path.with_suffix("").parts)), name)
    if inspect.isclass(found):
        own = {key for key, value in vars(found).items() if inspect.isfunction(value)}
        return any(not key.startswith("_") for key in own)
    return inspect.isroutine(found)
