"""The suite against our own EPP, as users run both."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from tests.support.ext_proc.faulty_pickers import ENDPOINTS, Bend, bent
from tooling.conformance.case import Case
from tooling.conformance.suite import CASES, Result, outcome, run
from tooling.conformance.target import ConformanceOptions, Target, reach
from tooling.laptop.ports import free_ports

ROOT = Path(__file__).parents[3]


def test_our_own_epp_breaks_nothing(tmp_path: Path) -> None:
    hosts = [endpoint.rpartition(":") for endpoint in ENDPOINTS]
    pool = {"endpoints": [{"name": h + p, "address": h.strip("[]"), "port": int(p)} for h, _, p in hosts]}
    (tmp_path / "pool.yaml").write_text(json.dumps(pool))
    grpc, health, metrics = map(str, free_ports(3))
    serve = ["serve", "--endpoints", str(tmp_path / "pool.yaml"), "--grpc-port", grpc]
    serve += ["--grpc-health-port", health, "--metrics-port", metrics, "--drain-timeout", "0"]
    with (tmp_path / "log").open("wb") as log:
        epp = subprocess.Popen([sys.executable, "-m", "epp.cli", *serve], cwd=ROOT, stdout=log, stderr=log)
    try:
        at = ["--target", f"127.0.0.1:{grpc}", "--health", f"127.0.0.1:{health}", "--timeout", "20", "--json"]
        command = [sys.executable, "-m", "epp.cli", "conformance", *at]
        for endpoint in ENDPOINTS:
            command += ["--endpoint", endpoint]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    finally:
        epp.terminate()
        epp.wait(20)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "log").read_text()
    said = json.loads(done.stdout)
    assert [case for case in said["cases"] if case["result"] != "pass"] == []
    assert len(said["cases"]) == len(CASES)


async def test_a_case_that_never_ends_is_ended() -> None:
    async def waits(target: Target) -> None:
        await asyncio.Event().wait()

    endless = Case("9.1", "none", "waits", "MUST", "here", "by waiting", waits)
    async with bent(Bend) as port, reach(ConformanceOptions(f"127.0.0.1:{port}")) as target:
        target.options = ConformanceOptions("", reply_timeout=0.01)
        assert await outcome(endless, target) == Result(
            endless, "fail", "expected an end of the case; got none within 0.06 s"
        )


async def test_results_are_shown_as_they_come() -> None:
    seen: list[Result] = []
    async with bent(Bend) as port:
        results = await run(ConformanceOptions(f"127.0.0.1:{port}"), CASES[:3], seen.append)
    assert [result.case for result in results] == list(CASES[:3])
    assert seen == results
