from collections.abc import Iterable

import pytest

from epp import protocol
from tests.support.ext_proc.faulty_pickers import Bend, Reply, failing, set_header


class NoMetadata(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        reply.ClearField("dynamic_metadata")
        yield reply


class OtherMetadata(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        for outer in reply.dynamic_metadata.fields:
            outer.value.struct_value.fields[0].value.string_value = b"127.0.0.99:1"
        yield reply


class NoPort(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if (option := set_header(reply, protocol.DESTINATION)) is not None:
            option.header.raw_value = option.header.raw_value.rpartition(b":")[0]
            reply.dynamic_metadata.fields[0].value.struct_value.fields[0].value.string_value = option.header.raw_value
        yield reply


class Elsewhere(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if (option := set_header(reply, protocol.DESTINATION)) is not None:
            option.header.raw_value = b"127.0.0.99:1"
            reply.dynamic_metadata.fields[0].value.struct_value.fields[0].value.string_value = b"127.0.0.99:1"
        yield reply


class TextValue(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if (option := set_header(reply, protocol.DESTINATION)) is not None:
            option.header.value = option.header.raw_value
            option.header.raw_value = b""
        yield reply


class BothValues(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if (option := set_header(reply, protocol.DESTINATION)) is not None:
            option.header.value = option.header.raw_value
        yield reply


class OldRoute(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if reply.HasField("request_headers"):
            reply.request_headers.response.clear_route_cache = False
        yield reply


class Appends(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if (option := set_header(reply, protocol.DESTINATION)) is not None:
            option.append_action = option.APPEND_IF_EXISTS_OR_ADD
        yield reply


class LetsControlHeadersThrough(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if reply.HasField("request_headers"):
            del reply.request_headers.response.header_mutation.remove_headers[:]
        yield reply


class RenamesRequests(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if reply.HasField("request_headers"):
            option = reply.request_headers.response.header_mutation.set_headers.add()
            option.header.key, option.header.raw_value = protocol.REQUEST_ID.encode(), b"mine"
        yield reply


class TwoDestinations(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if (option := set_header(reply, protocol.DESTINATION)) is not None:
            reply.request_headers.response.header_mutation.set_headers.append(option)
        yield reply


LISTS = {"3.1", "3.2", "3.6", "3.8", "3.9", "3.10"}


@pytest.mark.parametrize(
    ("bend", "fail"),
    [
        (Bend, set()),
        (NoMetadata, {"1.2", "6.5"}),
        (OtherMetadata, {"1.2"}),
        (NoPort, {"1.3", "1.4", "6.1"} | LISTS),
        (Elsewhere, {"1.4"} | LISTS),
        (TextValue, {"1.5"}),
        (BothValues, {"1.5"}),
        (OldRoute, {"1.6"}),
        (Appends, {"1.7"}),
        (LetsControlHeadersThrough, {"1.8"}),
        (RenamesRequests, {"1.9"}),
        (TwoDestinations, {"1.1", "1.2", "1.3", "1.4", "1.5", "1.7", "2.8", "4.2", "4.3", "6.1", "6.3", "6.4"} | LISTS),
    ],
)
async def test_a_bent_destination_is_noticed(bend: type[Bend], fail: set[str]) -> None:
    assert await failing(bend) == fail
