import pytest

from epp.pool.ranks import ranks_of
from epp.pool.store import Endpoint

SIZE = "warmpath/data-parallel-size"


def test_each_rank_behind_a_port_is_an_endpoint() -> None:
    pod = Endpoint("ns/pod", "[::1]:8000", {SIZE: "3"}, node="n", node_address="10.0.0.1")
    found = ranks_of(pod)
    assert [each.name for each in found] == ["ns/pod-rank-0", "ns/pod-rank-1", "ns/pod-rank-2"]
    assert [each.rank for each in found] == [0, 1, 2]
    assert {(each.address, each.node, each.node_address) for each in found} == {("[::1]:8000", "n", "10.0.0.1")}
    assert all(each.labels == pod.labels for each in found)


@pytest.mark.parametrize("labels", [{}, {"other": "2"}, {SIZE: "1"}, {SIZE: "01"}])
def test_an_endpoint_without_ranks_is_itself(labels: dict[str, str]) -> None:
    pod = Endpoint("ns/pod", "10.0.0.1:8000", labels)
    assert ranks_of(pod) == [pod]
    assert pod.rank is None


def test_ranks_count_on_from_port_to_port() -> None:
    ports = [Endpoint(f"ns/pod-rank-{port}", f"10.0.0.1:800{port}", {SIZE: "2"}) for port in range(2)]
    found = [rank for port in ports for rank in ranks_of(port)]
    assert [(each.name[-6:], each.address[-1], each.rank) for each in found] == [
        ("rank-0", "0", 0),
        ("rank-1", "0", 1),
        ("rank-2", "1", 0),
        ("rank-3", "1", 1),
    ]


@pytest.mark.parametrize("size", ["", "0", "65", "-1", "+2", "2.0", "two", "\u0662", "9" * 5000])
def test_a_label_that_is_no_such_number_is_refused(size: str) -> None:
    expected = r"^warmpath/data-parallel-size: got '.{0,40}'; expected the ranks behind one port, 1 to 64$"
    with pytest.raises(ValueError, match=expected):
        ranks_of(Endpoint("ns/pod", "10.0.0.1:8000", {SIZE: size}))
