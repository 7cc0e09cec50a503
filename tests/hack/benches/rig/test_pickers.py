import pytest

from hack.benches.rig.pickers import places


@pytest.mark.parametrize(("endpoints", "pods", "ports"), [(1, 1, 1), (4, 1, 4), (100, 20, 5), (512, 64, 8)])
def test_endpoints_are_pods_with_the_same_ports_as_those_of_an_inferencepool(
    endpoints: int, pods: int, ports: int
) -> None:
    found = places(endpoints)
    assert len(set(found)) == len(found) == endpoints
    hosts = {each.host: {other.port for other in found if other.host == each.host} for each in found}
    assert len(hosts) == pods
    assert {len(each) for each in hosts.values()} == {ports}
    assert len(set.union(*hosts.values())) == ports
