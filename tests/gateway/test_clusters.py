from epp.app import Settings
from gateway.clusters import (
    HEALTH_INTERVAL,
    HEALTH_TIMEOUT,
    PING_INTERVAL,
    PING_TIMEOUT,
    assignment,
    picker_name,
    pool_name,
    socket_address,
)  # fmt: skip


def test_addresses_become_envoys() -> None:
    found = socket_address("[::1]:80").socket_address
    assert found is not None
    assert (found.address, found.port_value) == ("::1", 80)
    [locality] = assignment("c", ["127.0.0.1:1", "[::1]:2"]).endpoints
    assert len(locality.lb_endpoints) == 2


def test_a_picker_that_stands_still_is_left_within_two_seconds_and_ended_with_what_it_was_asked_within_five() -> None:
    assert (HEALTH_INTERVAL + HEALTH_TIMEOUT).total_seconds() < 2
    assert (PING_INTERVAL + PING_TIMEOUT).total_seconds() <= Settings().stall_limit


def test_names_of_different_pools_differ() -> None:
    ids = ["a/b", "a/b.c", "a-b/c", "a/b-c"]
    assert len({name(each) for each in ids for name in (pool_name, picker_name)}) == 8
