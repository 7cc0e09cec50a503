"""TLS to certificates that prove nothing."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from grpc import aio

from tests.support.ext_proc.faulty_pickers import Bend, BentDoor, bent
from tests.support.ext_proc.server import Gateway, Route, ext_proc_server
from tooling.conformance import wire
from tooling.conformance.relay import relay
from tooling.conformance.talk import routed
from tooling.conformance.target import ConformanceOptions, reach
from tooling.conformance.verdict import Unreachable


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> grpc.ServerCredentials:
    """Self-signed, with no name in it, as the reference EPP makes its own."""
    folder: Path = tmp_path_factory.mktemp("tls")
    openssl = shutil.which("openssl")
    assert openssl, "openssl makes the certificate"
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "key.pem"]
    subprocess.run(
        [openssl, "req", "-x509", *key, "-subj", "/O=Inference Ext", "-out", "crt.pem"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    pair = ((folder / "key.pem").read_bytes(), (folder / "crt.pem").read_bytes())
    return grpc.ssl_server_credentials([pair])


@asynccontextmanager
async def secured(credentials: grpc.ServerCredentials) -> AsyncIterator[int]:
    """The port of an EPP that speaks TLS alone."""
    async with ext_proc_server(Route("10.0.0.1:80")) as correct, Gateway(correct.ports[0]) as inner:
        process = grpc.stream_stream_rpc_method_handler(BentDoor(Bend, inner.channel).process)
        server = aio.server()
        name = "envoy.service.ext_proc.v3.ExternalProcessor"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Process": process}),))
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        try:
            yield port
        finally:
            await server.stop(0)


async def test_a_certificate_that_nobody_can_verify_is_taken(credentials: grpc.ServerCredentials) -> None:
    body = wire.long_chat("m", 300_000)
    async with secured(credentials) as port, reach(ConformanceOptions(f"127.0.0.1:{port}", tls=True)) as target:
        forwarded = await routed(target, body)
    assert (forwarded.destination, forwarded.body) == ("10.0.0.1:80", body)


async def test_tls_is_asked_for_where_it_is_spoken_and_only_there(credentials: grpc.ServerCredentials) -> None:
    async with secured(credentials) as port:
        with pytest.raises(Unreachable, match=r"in plain text.*with --tls"):
            async with reach(ConformanceOptions(f"127.0.0.1:{port}", reply_timeout=1.5)):
                pass
    async with bent(Bend) as port:
        with pytest.raises(Unreachable, match=r"over TLS.*without --tls"):
            async with reach(ConformanceOptions(f"127.0.0.1:{port}", tls=True, reply_timeout=1.5)):
                pass


async def test_a_relay_to_nobody_takes_and_closes_connections() -> None:
    async with relay("127.0.0.1", 1) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
