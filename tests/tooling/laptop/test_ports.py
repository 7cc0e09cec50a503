import socket
import subprocess
import sys
from contextlib import ExitStack
from subprocess import PIPE

import pytest

from tooling.laptop import ports
from tooling.laptop.ports import HIGHEST, LOWEST, free_ports, is_free, this_or_free


def test_ports_are_different_free_and_out_of_the_way_of_outgoing_connections() -> None:
    found = free_ports(20)
    assert len(set(found)) == 20
    assert all(LOWEST <= port < HIGHEST and is_free(port) for port in found)


def test_a_port_somebody_listens_on_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not is_free(server.getsockname()[1])


def test_a_port_that_is_wanted_is_given_where_it_is_free_and_nobody_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert LOWEST <= this_or_free(server.getsockname()[1]) < HIGHEST
    monkeypatch.setattr(ports, "is_free", lambda port, host="127.0.0.1": True)
    wanted = 65_001  # that nothing else is given
    assert this_or_free(wanted) == wanted
    assert LOWEST <= this_or_free(wanted) < HIGHEST


def test_asking_for_more_than_there_are_is_an_error() -> None:
    with pytest.raises(OSError, match="no 99999 free ports"):
        free_ports(99_999)


ANOTHER = f"""
import sys
from tooling.laptop import ports
ports.LOWEST, ports.HIGHEST = {LOWEST}, {LOWEST + 60}
print(*(port for count in sys.argv[1:] for port in ports.free_ports(int(count))), flush=True)
input()
"""


def test_no_two_processes_are_given_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "HIGHEST", LOWEST + 60)
    given = [set(free_ports(7))]
    command = [sys.executable, "-c", ANOTHER, "7"]
    with ExitStack() as running:
        for _ in range(3):
            other = running.enter_context(subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True))
            running.callback(other.kill)
            assert other.stdout is not None
            given.append(set(map(int, other.stdout.readline().split())))
    assert len(set[int]().union(*given)) == 28


def test_nobody_in_a_process_is_given_what_another_was() -> None:
    command = [sys.executable, "-c", ANOTHER, *["2"] * 12]  # not this process, which would keep them from the next test
    said = subprocess.run(command, input="\n", capture_output=True, text=True, check=True)
    assert len(set(said.stdout.split())) == 24


def test_what_was_given_before_others_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "HIGHEST", LOWEST + 60)
    monkeypatch.setattr(ports, "_KEPT", 3)
    for _ in range(20):
        free_ports(2)
    command = [sys.executable, "-c", ANOTHER, "40"]
    said = subprocess.run(command, input="\n", capture_output=True, text=True, check=True)
    assert len(set(said.stdout.split())) == 40
