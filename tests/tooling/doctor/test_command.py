"""The command over simulated pods: whom it examines, what it prints, how it ends."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from epp.cli import warmpath
from epp.errors import ConfigError
from tests.support.prompts.tokenizers import make
from tooling.doctor.command import DoctorOptions, diagnose
from tooling.simulator.engine import LAPTOP
from tooling.simulator.publisher import KvEventsConfig
from tooling.simulator.server import SimulatedPod

FREE = KvEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0")


def pod(**settings: Any) -> SimulatedPod:
    return SimulatedPod(**{"kv_events": FREE, "time_scale": 100.0, **settings})


async def doctor(*arguments: str) -> tuple[int, str]:
    """Exit status and what it printed, of the command itself."""
    done = await asyncio.to_thread(CliRunner().invoke, warmpath, ["doctor", *arguments])
    return done.exit_code, done.output


async def test_pods_that_are_well_end_it_with_0() -> None:
    async with pod() as one, pod() as two:
        status, printed = await doctor("--endpoint", one.url, "--endpoint", two.address, "--model", "sim")
    assert status == 0, printed
    assert "2 examined: 0 problems, 0 hints" in printed


async def test_a_problem_ends_it_with_1_and_names_the_flag() -> None:
    async with pod() as one, pod(kv_events=None) as two:
        status, printed = await doctor("--endpoint", one.url, "--endpoint", two.url, "--json")
    said = json.loads(printed)
    assert (status, said["ok"], said["examined"]) == (1, False, [one.address, two.address])
    (finding,) = said["findings"]
    assert (finding["subject"], finding["check"]) == (two.address, "kv-events")
    assert finding["fix"].startswith("--kv-events-config")


async def test_hints_alone_end_it_with_0() -> None:
    async with pod() as one, pod(parameters=replace(LAPTOP, block_size=64)) as two:
        options = ("--endpoint", one.url, "--endpoint", two.url)
        status, printed = await doctor(*options, "--json")
        assert (status, [each["check"] for each in json.loads(printed)["findings"]]) == (0, ["block-size"])
        status, printed = await doctor(*options, "--coordinator", "http://127.0.0.1:1", "--json")
    found = [(each["check"], each["level"]) for each in json.loads(printed)["findings"]]
    assert (status, found) == (1, [("block-size", "problem"), ("coordinator-unreachable", "problem")])


async def test_files_say_what_a_pool_is(tmp_path: Path) -> None:
    async with pod() as one:
        host, port = one.address.split(":")
        file = tmp_path / "pool.yaml"
        file.write_text(f"endpoints:\n- {{name: pod-a, address: {host}, port: {port}}}\n")
        examined, findings = await diagnose(DoctorOptions(endpoints=[file]))
    assert (examined, findings) == (["default/pod-a"], [])


async def test_files_of_another_tokenizer_are_reported(tmp_path: Path) -> None:
    files = f"sim={make('llama', tmp_path / 'm')}"
    async with pod() as one:
        _, findings = await diagnose(DoctorOptions(endpoint=[one.url], tokenizer=[files]))
        assert [(finding.subject, finding.check) for finding in findings] == [(one.address, "tokenizer")]
        assert (await diagnose(DoctorOptions(endpoint=[one.url], tokenizer=[files.replace("sim", "other", 1)])))[
            1
        ] == []


async def test_servers_that_are_not_there_are_reported() -> None:
    _, findings = await diagnose(DoctorOptions(lmcache=["127.0.0.1:1"], coordinator="http://127.0.0.1:1"))
    assert [finding.check for finding in findings] == ["lmcache-unreachable", "coordinator-unreachable"]


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ((), "examine what? expected --endpoint"),
        (("--endpoint", "nonsense"), "expected http://HOST:PORT, got 'nonsense'"),
        (("--endpoint", "http://x:99999"), "expected http://HOST:PORT"),
        (("--endpoint", "ftp://x:1"), "expected http://HOST:PORT"),
        (("--endpoint", "127.0.0.1:1", "--tokenizer", "m=/nowhere"), "--tokenizer m: /nowhere: expected a directory"),
    ],
)
async def test_what_cannot_be_examined_is_refused(arguments: tuple[str, ...], reported: str) -> None:
    status, printed = await doctor(*arguments)
    assert (status, reported in printed) == (2, True), printed


async def test_kubernetes_needs_credentials(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        await diagnose(DoctorOptions(pool_name="p", kubeconfig=tmp_path / "nowhere"))
