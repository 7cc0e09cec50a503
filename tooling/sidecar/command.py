"""`warmpath sidecar`: flags to settings; serves until SIGTERM or Ctrl-C, then lets answers under way end."""

import asyncio
import logging
import os
import signal
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from epp.errors import ConfigError
from epp.extproc.tls import load_pair, make_pair
from epp.telemetry import log as logs
from tooling.sidecar.proxy import Sidecar, SidecarSettings

log = logging.getLogger("warmpath")


def main(*, cert_path: Path | None, secure_proxy: bool | None, idle_flags: Sequence[str], **flags: Any) -> int:
    """Raises ConfigError."""
    logs.set_up()
    if idle_flags:
        log.info("given and without effect: %s", "; ".join(idle_flags))
    secure = cert_path is not None if secure_proxy is None else secure_proxy
    settings = SidecarSettings(**flags, tls=tls_of(cert_path) if secure else None)
    uvloop.run(_serve(settings))
    return 0


def tls_of(directory: Path | None) -> ssl.SSLContext:
    """From tls.crt and tls.key, as cert-manager writes them; None: from a pair made here. Raises ConfigError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    if directory is None:
        load_pair(context, make_pair())
        return context
    try:
        context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(str(directory), f"expected tls.crt and tls.key: {error}") from error
    return context


async def _serve(settings: SidecarSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with Sidecar(settings) as sidecar:
            print(f"sidecar: port {sidecar.port}, engine on port {settings.model_server_port}", flush=True)
            await stop.wait()
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        raise ConfigError(where, f"cannot be listened on: {os.strerror(error.errno or 0)}") from error
