from collections.abc import Iterable

import pytest

from epp import protocol
from tests.support.ext_proc.faulty_pickers import Bend, Broken, Reply, Request, failing, set_header


class IgnoresModes(Bend):
    def asked(self, message: Request) -> Iterable[Request]:
        message.ClearField("protocol_config")
        yield message


class WantsModes(Bend):
    known = False

    def asked(self, message: Request) -> Iterable[Request]:
        self.known = self.known or message.HasField("protocol_config")
        if not self.known and message.HasField("request_headers"):
            raise Broken
        yield message


class WantsMethod(Bend):
    def asked(self, message: Request) -> Iterable[Request]:
        names = {entry.key for entry in message.request_headers.headers.headers}
        if message.HasField("request_headers") and b":method" not in names:
            raise Broken
        yield message


class ReadsRawValuesOnly(Bend):
    def asked(self, message: Request) -> Iterable[Request]:
        if any(entry.value and not entry.raw_value for entry in message.request_headers.headers.headers):
            raise Broken
        yield message


class NamesFallbacks(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if (option := set_header(reply, protocol.DESTINATION)) is not None:
            option.header.raw_value += b"," + option.header.raw_value
            reply.dynamic_metadata.fields[0].value.struct_value.fields[0].value.string_value = option.header.raw_value
        yield reply


class SmallMessages(Bend):
    server_options = (("grpc.max_receive_message_length", 4 << 20),)


class RefusesRepeats(Bend):
    def asked(self, message: Request) -> Iterable[Request]:
        for entry in message.request_headers.headers.headers:
            if entry.key == protocol.REQUEST_ID.encode():
                if entry.raw_value in SEEN:
                    raise Broken
                SEEN.add(entry.raw_value)
        yield message


SEEN: set[bytes] = set()


class KnowsEveryField(Bend):
    def asked(self, message: Request) -> Iterable[Request]:
        size = message.ByteSize()
        message.DiscardUnknownFields()
        if message.ByteSize() != size:
            raise Broken
        yield message


class WaitsForBodies(Bend):
    """Holds back headers until something follows them."""

    held: Request | None = None

    def asked(self, message: Request) -> Iterable[Request]:
        if message.HasField("request_headers") and not message.request_headers.end_of_stream:
            self.held = message
            return
        if self.held is not None:
            yield self.held
            self.held = None
        yield message


class SwallowsFrames(Bend):
    """Passes on nothing that a client sends by a WebSocket."""

    def said(self, reply: Reply) -> Iterable[Reply]:
        if reply.request_body.response.body_mutation.streamed_response.body != b"from the client":
            yield reply


@pytest.mark.parametrize(
    ("bend", "fail"),
    [
        (IgnoresModes, {"6.5"}),
        (WantsModes, {"6.1", "6.7"}),
        (WantsMethod, {"6.1"}),
        (ReadsRawValuesOnly, {"6.1"}),
        (NamesFallbacks, {"6.4"}),
        (KnowsEveryField, {"6.8"}),
    ],
)
async def test_a_bent_gateway_shape_is_noticed(bend: type[Bend], fail: set[str]) -> None:
    assert await failing(bend) == fail


async def test_a_repeated_request_id_that_is_refused_is_noticed() -> None:
    SEEN.clear()
    assert await failing(RefusesRepeats, frozenset({"1.1", "2.2", "6.9"})) == {"6.9"}


@pytest.mark.parametrize("bend", [WaitsForBodies, SwallowsFrames])
async def test_who_keeps_a_websocket_waiting_is_noticed(bend: type[Bend]) -> None:
    assert await failing(bend, frozenset({"1.1", "2.2", "6.10"})) == {"6.10"}


async def test_a_limit_on_messages_is_noticed_by_one_large_message_only() -> None:
    assert await failing(SmallMessages, frozenset({"2.11", "6.1", "6.2"})) == {"6.2"}
