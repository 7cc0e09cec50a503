import pytest

from hack.benches.scale import Cost, lines


def test_a_group_serves_what_its_busiest_replica_allows() -> None:
    ones = [Cost(200e-6, 200e-6, 4_500), Cost(400e-6, 400e-6, 4_400), Cost(100e-6, 100e-6, 4_600)]
    twos = [Cost(125e-6, 250e-6, 4_000), Cost(250e-6, 500e-6, 3_000), Cost(50e-6, 100e-6, 5_000)]
    one, two, target = lines(2, {1: ones, 2: twos})
    assert one.split() == ["2", "KB", "1", "5,000", "5,000", "1.00", "4,500"]
    assert two.split() == ["2", "KB", "2", "8,000", "4,000", "1.60", "+-", "0.17", "4,000", "50", "us", "25%"]
    assert target.split()[-2:] == ["15", "replicas"]


@pytest.mark.parametrize("peer", [60e-6, 90e-6])
def test_a_rate_that_taking_in_alone_forbids_is_said_to_be_too_high(peer: float) -> None:
    costs = {1: [Cost(200e-6, 200e-6, 1)], 2: [Cost(150e-6, 200e-6 + peer, 1)]}
    assert lines(2, costs)[-1].endswith("more than one group can serve")
