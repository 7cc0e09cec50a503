from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.plugin import Request
from epp.replicas import wire
from tests.support.scheduling.schedulers import pod


def sent(states: dict[str, object]) -> wire.Decided:
    request = Request(
        id="secret-id", model="llama", prompt=b"secret prompt", tokens=30, salt="secret salt", max_tokens=9, stream=True
    )
    return wire.decided(7, "default/llm", request, pod("default/pod-1"), states)


def test_a_decision_arrives_as_it_was_sent() -> None:
    frame = wire.frame(wire.LIVE, 42, 3, [wire.encode(sent({"plugin": [1.5, b"\1\2"]}))])
    envelope = wire.decode(frame, 1)
    assert (envelope.sender, envelope.sequence) == (42, 3)
    assert envelope.messages == [sent({"plugin": [1.5, b"\1\2"]})]


def test_what_a_request_says_is_not_sent() -> None:
    data = wire.encode(sent({}))
    assert b"secret" not in data
    request = wire.request_of(wire.decode_decided(msgspec.Raw(data)))
    assert (request.model, request.tokens, request.max_tokens, request.stream) == ("llama", 30, 9, True)
    assert (request.prompt, request.elsewhere) == (b"", True)


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    try:
        envelope = wire.decode(wire.LIVE + wire.VERSION + noise, 1)
    except wire.MalformedFrame:
        return
    assert all(isinstance(message, wire.AnyMessage) for message in envelope.messages)


def test_text_that_is_none_is_noise_too() -> None:
    """msgspec says it with an error that is none of its own."""
    for message in (wire.encode(sent({})), wire.encode(wire.Leaving())):
        whole = wire.frame(wire.LIVE, 42, 3, [message])
        for at in range(len(whole)):
            with suppress(wire.MalformedFrame):
                wire.decode(whole[:at] + b"\xa4\xff\xff\xff\xff" + whole[at + 1 :], 1)
    with pytest.raises(wire.MalformedFrame):
        wire.decode_decided(msgspec.Raw(wire.encode(sent({})).replace(b"llama", b"ll\xffma")))


@pytest.mark.parametrize("version", [b"", b"\0", b"\3", b"\5", b"\x93"])
def test_another_version_is_not_read(version: bytes) -> None:
    frame = wire.frame(wire.LIVE, 42, 3, [wire.encode(wire.Leaving())])
    assert frame[1:2] == wire.VERSION
    with pytest.raises(wire.OtherVersion, match=f"version {int.from_bytes(version)}, expected 4"):
        wire.decode(frame[:1] + version + (frame[2:] if version else b""), 1)


def test_a_cut_frame_is_refused() -> None:
    frame = wire.frame(wire.LIVE, 42, 3, [wire.encode(sent({}))])
    for size in range(1, len(frame)):
        with pytest.raises(wire.MalformedFrame):
            wire.decode(frame[:size], 1)


def test_topics_of_snapshots_have_one_length() -> None:
    assert {len(wire.topic_of(kind, 2**63, 9)) for kind in (wire.SNAPSHOT, wire.IN_FLIGHT)} == {wire.TOPIC_BYTES}
