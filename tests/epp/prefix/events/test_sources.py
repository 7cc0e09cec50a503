"""Where engines publish, and whom we do not let send us elsewhere."""

import json

import pytest

from epp.prefix.events.sources import KvEvents, PodDiscovery, Source, conventional, named_in, sources_in, sources_on


def page(**ranks: tuple[str | None, str | None]) -> bytes:
    return json.dumps(
        {rank[1:]: {"endpoint": at, "replay_endpoint": replay, "topic": "kv@x"} for rank, (at, replay) in ranks.items()}
    ).encode()


def test_each_rank_at_the_endpoints_own_host() -> None:
    told_ = page(_0=("tcp://*:5557", "tcp://0.0.0.0:5657"), _1=("tcp://10.0.0.7:5558", None))
    assert sources_on(told_, "10.0.0.7:8000") == [
        Source(0, "tcp://10.0.0.7:5557", "tcp://10.0.0.7:5657"),
        Source(1, "tcp://10.0.0.7:5558"),
    ]
    assert sources_on(page(_0=("tcp://[::]:1", "tcp://:::2")), "[fd00::1]:8000") == [
        Source(0, "tcp://[fd00::1]:1", "tcp://[fd00::1]:2")
    ]


def test_who_publishes_nothing_says_so() -> None:
    assert sources_on(b"{}", "10.0.0.7:8000") == []


@pytest.mark.parametrize(
    "publisher",
    ["tcp://10.0.0.8:5557", "tcp://metadata.internal:80", "tcp://*:0", "tcp://*:70000", "ipc:///run/x", "http://*:1"],
)
def test_another_host_is_not_believed(publisher: str) -> None:
    assert sources_on(page(_0=(publisher, None)), "10.0.0.7:8000") == []


def test_a_file_is_a_way_only_on_this_machine() -> None:
    assert sources_on(page(_0=("ipc:///run/kv", "tcp://127.0.0.1:9")), "127.0.0.1:8000") == [
        Source(0, "ipc:///run/kv", "tcp://127.0.0.1:9")
    ]


@pytest.mark.parametrize("wrong", [b"", b"[]", b"<html>", b'{"0": 7}', b'{"0": {"endpoint": 7}}', b"\xff"])
def test_what_is_no_such_page_is_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError, match="no list of KV event sources"):
        sources_on(wrong, "10.0.0.7:8000")


def test_ranks_that_are_none_are_left_out() -> None:
    assert (
        sources_on(b'{"all": {"endpoint": "tcp://*:5557"}, "-1": {"endpoint": "tcp://*:5557"}}', "10.0.0.7:8000") == []
    )


# --- as SGLang describes them ---------------------------------------------------------------------------------------


def described(**more: object) -> bytes:
    told = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "", "block_size": 32}
    return json.dumps({"version": "0.5.23", "tp_size": 1, "kv_events": {**told, "dp_size": 1, **more}}).encode()


def test_sglang_says_a_port_of_which_each_rank_has_one() -> None:
    assert sources_in(described(), "10.0.0.7:8000") == [Source(0, "tcp://10.0.0.7:5557")]
    page = described(dp_size=2, replay_endpoint_port_base=6557, endpoint_host="0.0.0.0")
    assert sources_in(page, "[fd00::1]:8000") == [
        Source(0, "tcp://[fd00::1]:5557", "tcp://[fd00::1]:6557"),
        Source(1, "tcp://[fd00::1]:5558", "tcp://[fd00::1]:6558"),
    ]
    assert len(sources_in(described(dp_size=10**9), "10.0.0.7:8000")) == 64


def test_sglang_that_publishes_nothing_or_elsewhere() -> None:
    assert sources_in(b'{"version": "0.5.23", "kv_events": null}', "10.0.0.7:8000") == []
    for host in ("10.0.0.8", "metadata.internal"):
        assert sources_in(described(endpoint_host=host), "10.0.0.7:8000") == []
    for port in (0, -1, 65_536):
        assert sources_in(described(endpoint_port_base=port), "10.0.0.7:8000") == []


@pytest.mark.parametrize(
    "wrong",
    [b"", b"[]", b"<html>", b"\xff", b'{"version": "0.4"}', b'{"kv_events": 7}', b'{"kv_events": {"dp_size": 1}}'],
)
def test_what_describes_no_events_is_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError, match="no description of KV events"):
        sources_in(wrong, "10.0.0.7:8000")


def test_by_convention() -> None:
    assert conventional("ns/pod", "10.0.0.7:8000", PodDiscovery()) == [Source(0, "tcp://10.0.0.7:5557")]
    config = PodDiscovery(socket_port=6000, replay_socket_port=7000)
    assert conventional("ns/pod-rank-3", "[fd00::1]:8003", config) == [
        Source(0, "tcp://[fd00::1]:6003", "tcp://[fd00::1]:7003")
    ]


@pytest.mark.parametrize(
    ("topic", "address"),
    [(b"kv@10.0.0.7:8000@m", "a"), (b"kv@pod@m", "b"), (b"kv@10.0.0.9@m", None), (b"kv", None), (b"\xff@\xff", None)],
)
def test_topics_name_endpoints(topic: bytes, address: str | None) -> None:
    assert named_in(topic, {"10.0.0.7:8000": "a", "pod": "b"}) == address


def test_a_place_to_listen_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="zmqEndpoint: expected tcp://HOST:PORT"):
        KvEvents(zmq_endpoint="5557")
