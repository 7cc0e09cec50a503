"""Group 7: grpc.health.v1, by which gateways and probes decide whether to ask this EPP at all."""

from typing import Final

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epp import protocol
from tooling.conformance.case import PROTOCOL, Group
from tooling.conformance.target import Target
from tooling.conformance.verdict import Failed, require

GROUP = Group(7, "health")
HEALTH: Final = f"{PROTOCOL}, Health Checking"
SERVING: Final = health_pb2.HealthCheckResponse.SERVING


async def serving(target: Target, channel: aio.Channel, service: str) -> None:
    """Check says SERVING for this name. Raises Failed."""
    expected = f"SERVING for {service!r}"
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=target.options.reply_timeout)
    except aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            raise Failed(expected, "nobody there") from None
        raise Failed(expected, f"the gRPC error {error.code().name}") from None
    got = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    require(answer.status == SERVING, expected, got)


@GROUP.case("MUST", "the health port is SERVING under the reference charts' name", "GIE v1.5.0 charts; lightweight EPP")
async def charts(target: Target) -> None:
    """Check of `inference-extension` on --health."""
    async with target.health_channel() as channel:
        await serving(target, channel, protocol.HEALTH_SERVICE)


@GROUP.case("MUST", "liveness, readiness and the service's name are SERVING", HEALTH)
async def names(target: Target) -> None:
    """Check of each on --health."""
    async with target.health_channel() as channel:
        for name in ("liveness", "readiness", protocol.EXT_PROC_SERVICE):
            await serving(target, channel, name)


@GROUP.case(
    "SHOULD", "the health port is SERVING under no name", "gRPC Health Checking Protocol: the server as a whole"
)
async def unnamed(target: Target) -> None:
    """Check of the empty name on --health."""
    async with target.health_channel() as channel:
        await serving(target, channel, "")


@GROUP.case(
    "SHOULD", "the ext_proc port answers health too", "GIE v1.5.0, Envoy's grpc_health_check of the EPP's cluster"
)
async def on_ext_proc(target: Target) -> None:
    """Check of envoy.service.ext_proc.v3.ExternalProcessor and of no name on the ext_proc port."""
    for name in (protocol.EXT_PROC_SERVICE, ""):
        await serving(target, target.channel, name)
