from dataclasses import dataclass

import pytest

from epp.admin.views import pools_view
from epp.plugin import Endpoint
from epp.telemetry.metrics import Metrics
from hack.benches.scale import Cost, Kind, decisions, lines
from tests.support.scheduling.decisions import endpoint


@dataclass
class APool:
    name: str
    endpoints: tuple[Endpoint, ...]
    namespace: str = "default"


ONE, APART, TOGETHER = Kind(1), Kind(2, True), Kind(2)


def test_a_group_serves_what_its_busiest_replica_allows() -> None:
    """One request takes 200 us, 210 where two share a core; what two tell each other a fifth more."""
    ones = [Cost(200e-6, 200e-6, 4_500), Cost(400e-6, 400e-6, 4_400), Cost(100e-6, 100e-6, 4_600)]
    strangers = [Cost(105e-6, 210e-6, 4_000), Cost(210e-6, 420e-6, 4_000), Cost(52.5e-6, 105e-6, 4_000)]
    twos = [Cost(126e-6, 252e-6, 4_000), Cost(252e-6, 504e-6, 3_000), Cost(63e-6, 126e-6, 5_000)]
    one, two, target = lines(2, {ONE: ones, APART: strangers, TOGETHER: twos})
    assert one.split() == ["2", "KB", "1", "5,000", "5,000", "1.00", "1.00", "4,500"]
    assert two.split() == ["2", "KB", "2", "8,333", "4,167", "1.67", "+-", "0.00", "1.59", "4,000", "40", "us", "20%"]
    assert target.split()[-2:] == ["8", "replicas"]


@pytest.mark.parametrize("peer", [60e-6, 90e-6])
def test_a_rate_that_taking_in_alone_forbids_is_said_to_be_too_high(peer: float) -> None:
    alone, apart = [Cost(200e-6, 200e-6, 1)], [Cost(100e-6, 200e-6, 1)]
    costs = {ONE: alone, APART: apart, TOGETHER: [Cost(150e-6, 200e-6 + peer, 1)]}
    assert lines(2, costs)[-1].endswith("more than one group can serve")


async def test_requests_are_counted_where_an_endpoint_was_chosen_for_them() -> None:
    pods, metrics = (endpoint(1), endpoint(2)), Metrics()
    for pod in (pods[0], pods[1], pods[1]):
        metrics.request_decided(pod, "m", 0.001, 100, None)
    assert decisions({"pools": await pools_view([APool("p", pods)], metrics, 0.0)}) == 3.0
