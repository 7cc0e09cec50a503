"""Group 1: how the EPP says where a request goes."""

from epp import protocol
from epp.extproc.proto import ext_proc_pb2 as pb
from tooling.conformance import wire
from tooling.conformance.case import ENVOY_API, PROTOCOL, REFERENCE, Group
from tooling.conformance.replies import (
    check_addresses,
    check_within,
    destination_metadata,
    destination_option,
    set_headers,
    text,
)  # fmt: skip
from tooling.conformance.talk import routed, talk
from tooling.conformance.target import Target
from tooling.conformance.verdict import require

GROUP = Group(1, "destination")
FORGED = "192.0.2.66:6666"
OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


@GROUP.case("MUST", "the reply to the request's headers sets the destination header", f"{PROTOCOL}, Destination 1")
async def header(target: Target) -> None:
    """A chat completion in full duplex."""
    require(bool((await routed(target, wire.chat(target.options.model))).destination), "a destination", "none")


@GROUP.case("MUST", "the same reply's dynamic metadata names the same", f"{PROTOCOL}, Destination 2 and Constraints")
async def metadata(target: Target) -> None:
    """A chat completion; header and metadata `envoy.lb` are compared."""
    forwarded = await routed(target, wire.chat(target.options.model))
    metadata = destination_metadata(forwarded.headers)
    require(metadata is not None, f"{protocol.LB_NAMESPACE}/{protocol.DESTINATION} in dynamic metadata", "none")
    require(metadata == forwarded.destination, f"{forwarded.destination} in dynamic metadata too", str(metadata))


@GROUP.case("MUST", "the destination is ip:port, or a comma list of them", f"{PROTOCOL}, Destination")
async def form(target: Target) -> None:
    """A chat completion."""
    check_addresses((await routed(target, wire.chat(target.options.model))).addresses)


@GROUP.case("MUST", "the destination is one of the pool's endpoints", f"{PROTOCOL}, Subset: key not set")
async def pool(target: Target) -> None:
    """Eight chat completions, with a metadata context that holds other keys than the subset's."""
    known = target.endpoints()
    other = wire.metadata("envoy.filters.http.other", "key", pb.Value(string_value=b"value"))
    for number in range(8):
        body = wire.chat(target.options.model, f"Say {number}.")
        check_within((await routed(target, body, context=other)).addresses, known)


@GROUP.case(
    "MUST", "the destination is in raw_value, and not in value too", f"{ENVOY_API}; NGINX Gateway Fabric's shim"
)
async def raw_value(target: Target) -> None:
    """A chat completion. Envoy refuses a header with both; the shim reads raw_value alone."""
    forwarded = await routed(target, wire.chat(target.options.model))
    header = destination_option(forwarded.common).header
    require(bool(header.raw_value), "raw_value", "value")
    require(not header.value, "raw_value alone", "both")


@GROUP.case("SHOULD", "the route is chosen again: clear_route_cache", REFERENCE)
async def route_cache(target: Target) -> None:
    """A chat completion. Routes that match on the destination need it."""
    require((await routed(target, wire.chat(target.options.model))).common.clear_route_cache, "it set", "it unset")


@GROUP.case("SHOULD", "a destination that the client sent does not survive", f"{ENVOY_API}, HeaderAppendAction")
async def forged(target: Target) -> None:
    """A chat completion whose client sets the destination header; the EPP's has to replace it, not to join it."""
    async with talk(target) as one:
        body = wire.chat(target.options.model)
        await one.ask(body, headers={**one.headers(length=len(body)), protocol.DESTINATION: FORGED})
        forwarded = await one.forwarded()
    require(FORGED not in forwarded.destination, "the EPP's own choice", forwarded.destination)
    action = destination_option(forwarded.common).append_action
    gone = protocol.DESTINATION in {name.lower() for name in forwarded.common.header_mutation.remove_headers}
    require(action == OVERWRITE or gone, "OVERWRITE_IF_EXISTS_OR_ADD", f"append_action {action}")


@GROUP.case("SHOULD", "control headers of the client's do not reach the endpoint", f"{REFERENCE}, system-owned headers")
async def control_headers(target: Target) -> None:
    """A chat completion with an objective, a fairness id and a subset among its headers."""
    control = [protocol.OBJECTIVE[1], protocol.FAIRNESS_ID[1], protocol.SUBSET]
    async with talk(target) as one:
        body = wire.chat(target.options.model)
        headers = {**one.headers(length=len(body)), **dict.fromkeys(control, "conformance")}
        await one.ask(body, headers=headers)
        forwarded = await one.forwarded()
    removed = {name.lower() for name in forwarded.common.header_mutation.remove_headers}
    left = [name for name in control if name not in removed and name not in set_headers(forwarded.common)]
    require(not left, "them in remove_headers", f"{', '.join(left)} left as they came")


@GROUP.case("SHOULD", "the client's x-request-id stays as it is", "Envoy, x-request-id")
async def request_id(target: Target) -> None:
    """A chat completion with a request id of its own."""
    async with talk(target) as one:
        body = wire.chat(target.options.model)
        headers = {**one.headers(length=len(body)), protocol.REQUEST_ID: "conformance-1"}
        await one.ask(body, headers=headers)
        forwarded = await one.forwarded()
    options = set_headers(forwarded.common).get(protocol.REQUEST_ID, [])
    values = [text(option.header.raw_value or option.header.value) for option in options]
    require(all(value == "conformance-1" for value in values), "conformance-1", ", ".join(values))
    require(protocol.REQUEST_ID not in forwarded.common.header_mutation.remove_headers, "it kept", "it removed")
