from gateway.clusters import assignment, picker_name, pool_name, socket_address


def test_addresses_become_envoys() -> None:
    found = socket_address("[::1]:80").socket_address
    assert found is not None
    assert (found.address, found.port_value) == ("::1", 80)
    [locality] = assignment("c", ["127.0.0.1:1", "[::1]:2"]).endpoints
    assert len(locality.lb_endpoints) == 2


def test_names_of_different_pools_differ() -> None:
    ids = ["a/b", "a/b.c", "a-b/c", "a/b-c"]
    assert len({name(each) for each in ids for name in (pool_name, picker_name)}) == 8
