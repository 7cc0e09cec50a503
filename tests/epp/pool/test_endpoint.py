"""`Endpoint` and `Load` of `epp.pool.store`."""

from epp.pool.store import Endpoint, Load


def test_an_endpoint_is_itself_and_no_other_of_the_same_name() -> None:
    one, other = Endpoint("a", "10.0.0.1:8000"), Endpoint("a", "10.0.0.1:8000")
    assert one != other
    assert len({one, other}) == 2


def test_load_is_replaced_without_changing_who_the_endpoint_is() -> None:
    endpoint = Endpoint("a", "10.0.0.1:8000")
    known = {endpoint: 1}
    endpoint.load = Load(waiting=3, at=1.0)
    assert known[endpoint] == 1
    assert repr(endpoint) == "<a 10.0.0.1:8000>"


def test_a_load_never_scraped_says_so() -> None:
    assert Endpoint("a", "10.0.0.1:8000").load.at is None
