"""h2spec, a conformance suite for HTTP/2 servers, against the ext_proc server. In this lane, since Go builds it."""

import asyncio
import shutil

import pytest

from epp import protocol
from epp.extproc.server import ExtProcServer, Settings
from epp.telemetry.metrics import Metrics
from tests.support.ext_proc.server import LOOPBACK, Route

pytestmark = pytest.mark.kubernetes
RPC = f"/{protocol.EXT_PROC_SERVICE}/Process"


@pytest.mark.parametrize("path", ["/", RPC])
async def test_every_case_of_h2spec_passes(path: str) -> None:
    program = shutil.which("h2spec")
    assert program is not None, "h2spec is not there; `hack/test kubernetes` builds it"
    served = ExtProcServer(Route(), Metrics(), Settings(listen=LOOPBACK, health=LOOPBACK))
    await served.start()
    try:
        where = ["-h", "127.0.0.1", "-p", str(served.ports[0]), "-P", path, "-o", "5"]
        run = await asyncio.create_subprocess_exec(program, *where, stdout=asyncio.subprocess.PIPE)
        output, _ = await run.communicate()
    finally:
        await served.drain(0)
    text = output.decode()
    assert run.returncode == 0, text[text.find("Failures") :]
    assert "0 failed" in text
    assert " 0 skipped" in text or path == RPC, text[-300:]
    assert not served.memory.streams
