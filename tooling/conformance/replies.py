"""What an EPP says, read as a gateway does that keeps to Envoy's rules."""

from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from epp import protocol
from epp.extproc.proto import ext_proc_pb2 as pb
from tooling.conformance.target import host_and_port
from tooling.conformance.verdict import Failed, require

Reply = pb.ProcessingResponse
SHOWN = 80
"""Bytes of a body or of an error that a report quotes."""


@dataclass
class Refused:
    """An ImmediateResponse: the client's answer instead of an endpoint's."""

    status: int
    body: bytes

    def __str__(self) -> str:
        return f"an ImmediateResponse {self.status} {quoted(self.body)}"


@dataclass
class Forwarded:
    """A request on its way: the reply to its headers, and its body as the EPP hands it back."""

    headers: Reply
    chunks: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def common(self) -> pb.CommonResponse:
        return common(self.headers)

    @property
    def destination(self) -> str:
        """Of the header. Raises Failed where there is none."""
        return destination_header(self.common)

    @property
    def addresses(self) -> list[str]:
        """The destination's list, in order."""
        return [address.strip() for address in self.destination.split(",")]

    def __str__(self) -> str:
        return f"the request routed to {self.destination}"


def decoded(data: bytes) -> Reply:
    """Raises Failed for what is no reply at all."""
    try:
        return Reply.FromString(data)
    except DecodeError:
        raise Failed("a ProcessingResponse", f"bytes that are none: {quoted(data)}") from None


def kind(reply: Reply) -> str:
    """In words, for a report."""
    which = reply.WhichOneof("response")
    if which is None:
        return "a message without a reply"
    if which == "immediate_response":
        return str(refused(reply))
    side, part = which.split("_")
    return f"a reply to the {'request' if side == 'request' else 'answer'}'s {part}"


def refused(reply: Reply) -> Refused:
    return Refused(reply.immediate_response.status.code, reply.immediate_response.body)


def common(reply: Reply) -> pb.CommonResponse:
    """Of a reply to headers or to a body."""
    found: pb.CommonResponse = getattr(reply, reply.WhichOneof("response") or "request_headers").response
    return found


def set_headers(common: pb.CommonResponse) -> dict[str, list[pb.HeaderValueOption]]:
    """By lower-case name."""
    found: dict[str, list[pb.HeaderValueOption]] = {}
    for option in common.header_mutation.set_headers:
        found.setdefault(text(option.header.key).lower(), []).append(option)
    return found


def destination_option(common: pb.CommonResponse) -> pb.HeaderValueOption:
    """What sets the destination header. Raises Failed unless there is one such."""
    options = set_headers(common).get(protocol.DESTINATION, [])
    require(bool(options), f"the header {protocol.DESTINATION}", "a reply without it")
    require(len(options) == 1, f"{protocol.DESTINATION} set once", f"{len(options)} times")
    return options[0]


def destination_header(common: pb.CommonResponse) -> str:
    """Its value. Raises Failed where there is none."""
    header = destination_option(common).header
    value = text(header.raw_value or header.value)
    require(bool(value), f"a value in {protocol.DESTINATION}", "an empty one")
    return value


def destination_metadata(reply: Reply) -> str | None:
    """What dynamic metadata names; None if nothing."""
    for outer in reply.dynamic_metadata.fields:
        if outer.key == protocol.LB_NAMESPACE.encode():
            for inner in outer.value.struct_value.fields:
                if inner.key == protocol.DESTINATION.encode():
                    return text(inner.value.string_value)
    return None


def check_addresses(addresses: list[str]) -> None:
    """Raises Failed unless each is `ip:port`."""
    wrong = [address for address in addresses if host_and_port(address) is None]
    require(not wrong, "ip:port, IPv6 in brackets", ", ".join(wrong))


def check_within(addresses: list[str], allowed: tuple[str, ...]) -> None:
    """Raises Failed if one is none of `allowed`."""
    known = {host_and_port(address) for address in allowed}
    outside = [address for address in addresses if host_and_port(address) not in known]
    require(not outside, f"one of {', '.join(allowed)}", ", ".join(outside))


def streamed(reply: Reply, which: str) -> pb.StreamedBodyResponse:
    """The piece of a body that a reply hands on, in full duplex. Raises Failed for any other reply."""
    said = reply.WhichOneof("response")
    expected = f"a piece of the {'request' if which == 'request_body' else 'answer'}'s body"
    require(said == which, expected, kind(reply))
    mutation = common(reply).body_mutation
    have = mutation.WhichOneof("mutation")
    if have != "streamed_response":
        raise Failed(
            f"{expected} as a streamed_response (any other is a spurious message in full duplex)",
            f"body_mutation {have}" if have else "a reply without body_mutation",
        )
    return mutation.streamed_response


def check_same(body: bytes, want: bytes, what: str) -> None:
    """Raises Failed, saying where, unless they are the same bytes."""
    if body == want:
        return
    at = next((at for at, (a, b) in enumerate(zip(body, want, strict=False)) if a != b), min(len(body), len(want)))
    near = slice(max(0, at - 10), at + 30)
    raise Failed(
        f"{what} of {len(want)} bytes unchanged, at byte {at} {quoted(want[near])}",
        f"{len(body)} bytes, there {quoted(body[near])}",
    )


def text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def quoted(raw: bytes) -> str:
    return repr(text(raw[:SHOWN])) + ("…" if len(raw) > SHOWN else "")
