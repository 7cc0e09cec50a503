"""Group 3: the gateway's restriction to some endpoints."""

from epp.extproc.proto import ext_proc_pb2 as pb
from tooling.conformance import wire
from tooling.conformance.case import PROTOCOL, Group
from tooling.conformance.replies import Forwarded, Refused, check_addresses, check_within
from tooling.conformance.talk import asked, routed
from tooling.conformance.target import Target, host_and_port
from tooling.conformance.verdict import Skipped, require

GROUP = Group(3, "subset")
SUBSET = f"{PROTOCOL}, Endpoint Subset"
LIGHTWEIGHT = "GIE lightweight EPP v1.6.0, pkg/lwepp/handlers"
STRANGER = "192.0.2.1:9"
"""TEST-NET-1 (RFC 5737): in no pool."""
TRIES = 4


async def honoured(target: Target, context: pb.Metadata, allowed: tuple[str, ...], tries: int = TRIES) -> None:
    """Different prompts, all within `allowed`. Raises Failed."""
    for number in range(tries):
        forwarded = await routed(target, wire.chat(target.options.model, f"Count to {number}."), context=context)
        check_addresses(forwarded.addresses)
        check_within(forwarded.addresses, allowed)


async def unavailable(target: Target, context: pb.Metadata, *pieces: bytes) -> None:
    """An ImmediateResponse 503. Raises Failed."""
    outcome: Forwarded | Refused = await asked(target, *pieces, context=context)
    expected = "an ImmediateResponse 503"
    require(isinstance(outcome, Refused) and outcome.status == 503, expected, str(outcome))


@GROUP.case("MUST", "a list of one endpoint is kept to", SUBSET)
async def one(target: Target) -> None:
    """Each of the pool's first three endpoints alone, four chat completions each."""
    for endpoint in target.endpoints()[:3]:
        await honoured(target, wire.subset_list([endpoint]), (endpoint,))


@GROUP.case("MUST", "a list of some endpoints is kept to", SUBSET)
async def some(target: Target) -> None:
    """Every second of the pool's endpoints, and one that is in no pool; eight chat completions."""
    allowed = target.endpoints(2)[1::2]
    await honoured(target, wire.subset_list([STRANGER, *allowed]), allowed, 2 * TRIES)


@GROUP.case("MUST", "a list without an endpoint of the pool gives 503", SUBSET)
async def none_eligible(target: Target) -> None:
    """A chat completion restricted to an address of TEST-NET-1."""
    await unavailable(target, wire.subset_list([STRANGER]), wire.chat(target.options.model))


@GROUP.case("MUST", "an empty list gives 503", SUBSET)
async def empty(target: Target) -> None:
    """A chat completion restricted to nobody."""
    await unavailable(target, wire.subset_list([]), wire.chat(target.options.model))


@GROUP.case("MUST", "the port counts: another port of the same address is not in the list", f"{SUBSET}: <ip:port>")
async def ports(target: Target) -> None:
    """A chat completion restricted to an endpoint's address with a port at which the pool has nobody."""
    known = {host_and_port(endpoint) for endpoint in target.endpoints()}
    ip, port = address_of(target.endpoints()[0])
    other = next(free for free in range(port + 1, 65536) if (ip, free) not in known)
    await unavailable(target, wire.subset_list([joined(ip, other)]), wire.chat(target.options.model))


@GROUP.case("MUST", "a request without a body keeps to the list", f"{SUBSET}: for each HTTP request")
async def no_body(target: Target) -> None:
    """GET /v1/files, restricted to each of the pool's first three endpoints, four times each."""
    for endpoint in target.endpoints()[:3]:
        for _ in range(TRIES):
            check_within((await routed(target, context=wire.subset_list([endpoint]))).addresses, (endpoint,))


@GROUP.case(
    "MUST",
    "a request without a body gets 503 when the list names no endpoint of the pool",
    f"{SUBSET}: for each HTTP request",
)
async def no_body_none(target: Target) -> None:
    """GET /v1/files, restricted to an address of TEST-NET-1 and to an empty list."""
    await unavailable(target, wire.subset_list([STRANGER]))
    await unavailable(target, wire.subset_list([]))


@GROUP.case("MUST", "an IPv6 endpoint is found in the list, and named in brackets", SUBSET)
async def ipv6(target: Target) -> None:
    """An IPv6 endpoint alone, with and without a body."""
    endpoint = target.ipv6_endpoint()
    await honoured(target, wire.subset_list([endpoint]), (endpoint,))
    check_within((await routed(target, context=wire.subset_list([endpoint]))).addresses, (endpoint,))


@GROUP.case("SHOULD", "a comma-separated string is read as a list", LIGHTWEIGHT)
async def comma_string(target: Target) -> None:
    """The last of the pool's endpoints and one that is in no pool, in one string; four chat completions."""
    allowed = target.endpoints(2)[-1:]
    await honoured(target, wire.subset_text([STRANGER, *allowed]), allowed)


@GROUP.case("SHOULD", "an address without a port means all its ports", LIGHTWEIGHT)
async def bare_ip(target: Target) -> None:
    """The first endpoint's address without its port, where the pool has other addresses too."""
    known = target.endpoints()
    ip, _ = address_of(known[0])
    allowed = tuple(endpoint for endpoint in known if address_of(endpoint)[0] == ip)
    if len(allowed) == len(known):
        raise Skipped("needs endpoints with different IPs")
    await honoured(target, wire.subset_list([ip]), allowed)


def address_of(endpoint: str) -> tuple[str, int]:
    """Host and port of an endpoint the user named."""
    address = host_and_port(endpoint)
    if address is None:
        raise ValueError(f"--endpoint {endpoint} is not IP:PORT")
    return address


def joined(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
