import os
import socket
import sys
import time
from pathlib import Path

import pytest

from hack.benches.rig.processes import BenchError, cores, cpu_seconds, need_programs, pinned, running
from tooling.laptop.ports import free_ports


def test_cpu_time_is_that_of_the_process() -> None:
    before = time.process_time()
    measured = cpu_seconds(os.getpid())
    assert before <= measured <= time.process_time()


def test_a_process_that_ended_is_said(tmp_path: Path) -> None:
    with running("short", [sys.executable, "-c", "raise SystemExit('my last words')"], tmp_path) as program:
        with pytest.raises(BenchError, match="short ended with status 1: my last words"):
            program.wait_for_port(1)
    with pytest.raises(BenchError, match="has ended"):
        cpu_seconds(program.pid)


def test_a_program_ends_with_its_block(tmp_path: Path) -> None:
    with running("long", [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path) as program:
        assert cpu_seconds(program.pid) >= 0
    with pytest.raises(ProcessLookupError):
        os.kill(program.pid, 0)


def test_a_program_that_does_not_exist_is_said(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot start ghost"), running("ghost", ["no-such-program"], tmp_path):
        pass


def test_a_port_that_listens_is_waited_for(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    serve = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(600)"
    with running("server", [sys.executable, "-c", serve], tmp_path) as program:
        program.wait_for_port(port)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            assert connection.getpeername() == ("127.0.0.1", port)


def test_ports_are_different_and_not_those_of_outgoing_connections() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert max(ports) < 32_000


def test_what_is_missing_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nobody = tmp_path / "id"
    nobody.write_text("#!/bin/sh\necho 1000\n")
    nobody.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")  # restored with what is appended to it
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(BenchError, match="needs what Debian has as wrk and nginx-light"):
        need_programs()


def test_pinning_is_left_out_without_a_core() -> None:
    assert pinned(["a", "b"], None) == ["a", "b"]
    assert pinned(["a", "b"], "0,1") == ["taskset", "--cpu-list", "0,1", "a", "b"]


@pytest.mark.parametrize(
    ("usable", "measured", "others", "own"),
    [
        ({0, 1}, 1, "0", ["1"]),
        ({0, 1}, 2, "0,1", ["0", "1"]),
        ({0, 1}, 3, "0", ["1", "1", "1"]),
        ({4, 5, 6, 7}, 2, "4,5", ["6", "7"]),
        ({4, 5, 6, 7}, 3, "4,5,6,7", ["5", "6", "7"]),
        ({3}, 2, None, [None, None]),
    ],
)
def test_who_is_measured_has_a_core_of_its_own_where_there_are_enough(
    monkeypatch: pytest.MonkeyPatch, usable: set[int], measured: int, others: str | None, own: list[str | None]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: usable)
    split = cores(measured)
    assert (split.others, split.own) == (others, own)
    assert split.shared == (measured > 1 and len({*own}) == 1)
