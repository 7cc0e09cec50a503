import socket

import pytest

from tooling.laptop.ports import HIGHEST, LOWEST, free_ports, is_free


def test_ports_are_different_free_and_out_of_the_way_of_outgoing_connections() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(LOWEST <= port < HIGHEST and is_free(port) for port in ports)


def test_a_port_somebody_listens_on_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not is_free(server.getsockname()[1])


def test_asking_for_more_than_there_are_is_an_error() -> None:
    with pytest.raises(OSError, match="no 99999 free ports"):
        free_ports(99_999)
