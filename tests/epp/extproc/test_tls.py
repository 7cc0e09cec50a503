import asyncio
import os
import ssl
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from epp.errors import ConfigError
from epp.extproc.grpc_server import GrpcServer
from epp.extproc.http2 import PREFACE
from epp.extproc.server import ExtProcServer, Settings
from epp.extproc.tls import Certificate, Pair, make_pair, read_pair
from epp.telemetry.metrics import Metrics
from tests.support.ext_proc.server import LOOPBACK, Route, ext_proc_server


@pytest.fixture(autouse=True, params=[ExtProcServer, GrpcServer], ids=["http2", "grpc"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.ext_proc.server.KIND", [request.param])


def write(directory: Path, pair: Pair) -> None:
    for name, content in zip(("tls.key", "tls.crt"), pair, strict=True):
        (directory / f"{name}.new").write_bytes(content)
        os.replace(directory / f"{name}.new", directory / name)


async def seen(port: int) -> str:
    """The certificate a client gets, PEM; checks that HTTP/2 is agreed upon."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    async with asyncio.timeout(10):
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    connection = writer.get_extra_info("ssl_object")
    assert connection.selected_alpn_protocol() == "h2"
    certificate = ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True))
    writer.close()
    return certificate


async def test_self_signed_is_enough_for_a_gateway() -> None:
    settings = Settings(listen=LOOPBACK, health=LOOPBACK, certificate=Certificate(None, Metrics()))
    async with ext_proc_server(Route(), settings) as served:
        assert "BEGIN CERTIFICATE" in await seen(served.ports[0])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a key can be loaded from a file on a disk only")
async def test_no_disk_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")  # as with a root file system that is read-only
    settings = Settings(listen=LOOPBACK, health=LOOPBACK, certificate=Certificate(None, Metrics()))
    async with ext_proc_server(Route(), settings) as served:
        assert "BEGIN CERTIFICATE" in await seen(served.ports[0])


async def test_a_renewed_certificate_is_used_and_a_bad_one_refused(tmp_path: Path) -> None:
    first, second = make_pair(), make_pair()
    write(tmp_path, first)
    metrics = Metrics()
    settings = Settings(listen=LOOPBACK, health=LOOPBACK, certificate=Certificate(tmp_path, metrics))
    async with ext_proc_server(Route(), settings) as served:
        [port] = served.ports
        assert await seen(port) == first[1].decode()
        write(tmp_path, second)
        assert await seen(port) == second[1].decode()
        write(tmp_path, (first[0], second[1]))
        assert await seen(port) == second[1].decode()
    assert dict(metrics.rows("warmpath_degraded_total")) == {("certificate-refused",): 1}


@pytest.mark.parametrize("first", [PREFACE, b"GET / HTTP/1.1\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n"])
async def test_a_gateway_that_speaks_no_tls_is_told_of(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.ext_proc.server.KIND", [ExtProcServer])
    metrics = Metrics()
    settings = Settings(listen=LOOPBACK, health=LOOPBACK, certificate=Certificate(None, metrics))
    async with ext_proc_server(Route(), settings) as served:
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.ports[0])
            writer.write(first)
            with suppress(ConnectionError):
                await reader.read()
            writer.close()
        assert "BEGIN CERTIFICATE" in await seen(served.ports[0]), "others are served"
    assert dict(metrics.rows("warmpath_degraded_total")) == {("gateway-not-tls",): 1}


def test_what_cannot_be_used_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*tls\.key: No such file"):
        read_pair(tmp_path)
    key, certificate = make_pair()
    for pair, reported in (
        ((b"x", certificate), "expected a PEM private key without a password"),
        ((key, b"x"), "expected PEM certificates"),
        ((make_pair()[0], certificate), "tls.key is not the key of the certificate in tls.crt"),
    ):
        write(tmp_path, pair)
        with pytest.raises(ConfigError, match=reported):
            read_pair(tmp_path)
