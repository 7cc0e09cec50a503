"""The admin server over TLS: renewed pairs are used, bad ones refused, and readers show certificates where asked."""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from epp.admin.certificate import Certificate
from epp.admin.recorder import Decisions
from epp.admin.server import AdminServer, AdminSettings
from epp.errors import ConfigError
from epp.extproc.tls import Pair, make_pair
from tests.support.process.waiting import until
from tests.support.scheduling.degradations import RecordedMetrics


def write(directory: Path, pair: Pair) -> None:
    for name, content in zip(("tls.key", "tls.crt"), pair, strict=True):
        (directory / f"{name}.new").write_bytes(content)
        os.replace(directory / f"{name}.new", directory / name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, make_pair())
    return tmp_path


@asynccontextmanager
async def served(certificate: Certificate, metrics: RecordedMetrics) -> AsyncIterator[int]:
    server = AdminServer(metrics, [], Decisions(), list, str, AdminSettings(port=0, tls=certificate.context))
    async with server, asyncio.TaskGroup() as group:
        task = group.create_task(certificate.watch())
        yield server.port
        task.cancel()


def client(shown: Path | None = None) -> ssl.SSLContext:
    """A client that takes any certificate, and shows the pair in a directory."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if shown is not None:
        context.load_cert_chain(shown / "tls.crt", shown / "tls.key")
    return context


async def status(port: int, context: ssl.SSLContext) -> int:
    async with aiohttp.request("GET", f"https://127.0.0.1:{port}/healthz", ssl=context) as answer:
        return answer.status


async def shown(port: int) -> str:
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client())
    certificate = ssl.DER_cert_to_PEM_cert(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
    writer.transport.abort()
    return certificate


async def test_a_renewed_pair_is_used_and_a_bad_one_refused(folder: Path) -> None:
    metrics, second, third = RecordedMetrics(), make_pair(), make_pair()
    async with served(Certificate(folder, None, metrics, interval=0.005), metrics) as port:
        assert await status(port, client()) == 200
        write(folder, second)
        async with asyncio.timeout(10):
            while await shown(port) != second[1].decode():
                await asyncio.sleep(0.01)
        write(folder, (second[0], third[1]))
        await until(lambda: bool(metrics.degradations))
        assert await shown(port) == second[1].decode()
    assert metrics.reasons() == ["certificate-refused"]
    assert "expected tls.crt and its tls.key, PEM, in" in metrics.degradations[0][1]


async def test_readers_without_the_certificate_asked_for_are_refused(folder: Path, tmp_path: Path) -> None:
    reader, stranger = tmp_path / "reader", tmp_path / "stranger"
    for each in (reader, stranger):
        each.mkdir()
        write(each, make_pair())
    metrics = RecordedMetrics()
    async with served(Certificate(folder, reader / "tls.crt", metrics), metrics) as port:
        assert await status(port, client(reader)) == 200
        for context in (client(), client(stranger)):
            with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                await status(port, context)


def test_what_cannot_be_used_is_reported(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--metrics-client-ca-file: expected PEM certificates in .*nobody"):
        Certificate(folder, tmp_path / "nobody", RecordedMetrics())
    (folder / "tls.key").write_text("x")
    with pytest.raises(ConfigError, match=r"--metrics-cert-dir: expected tls\.crt and its tls\.key"):
        Certificate(folder, None, RecordedMetrics())
    (folder / "tls.key").unlink()
    with pytest.raises(ConfigError, match="No such file"):
        Certificate(folder, None, RecordedMetrics())
