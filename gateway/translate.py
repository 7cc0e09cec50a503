"""Resources to Envoy configuration: pure, typed on the way, plain JSON objects at the end.

One listener and one route table for each port, two clusters for each pool (see `clusters`), all membership in endpoint
lists of its own: what changes most touches least.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol

import betterproto2
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation
from envoy_data_plane.envoy.config.core.v3 import Address, SocketAddress, TypedExtensionConfig
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.config.route.v3 import RouteConfiguration, VirtualHost
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpConnectionManagerServerHeaderTransformation,
    HttpConnectionManagerUpgradeConfig,
    HttpFilter,
    Rds,
)
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import (
    HeaderMutation as EarlyHeaderMutation,
)
from envoy_data_plane.google.protobuf import Any as Packed

from epp import protocol
from gateway import matching, xds
from gateway.clusters import assignment, picker_cluster, picker_name, pool_cluster, pool_name, watched
from gateway.errors import GatewayError
from gateway.load import Resources
from gateway.replies import local_replies
from gateway.resources import InferencePool
from gateway.routes import route
from gateway.wiring import Wiring, picker_filter
from gateway.xds import Json, Rendering

FORGED: Final = (protocol.DESTINATION, protocol.SUBSET, protocol.SERVED, protocol.PREFILLER)
"""Where a request goes is not for clients to say: these of theirs are removed before anything else happens."""

STREAM_IDLE: Final = timedelta(hours=1)
"""An answer that is not streamed sends nothing until it is whole, after minutes."""
HEADERS_TIMEOUT: Final = timedelta(seconds=10)


@dataclass(frozen=True)
class TranslateOptions:
    """What no Gateway resource says."""

    bind: str = "127.0.0.1"
    """Address the listeners listen on."""
    wiring: Wiring = "lean"
    body_limit: int = 8 << 20
    """Bytes of a request kept for a retry, and the largest body where the wiring is not full duplex."""


def translate(
    resources: Resources, pickers: Mapping[str, Sequence[str]], options: TranslateOptions | None = None
) -> Rendering:
    """The Envoy configuration of `resources`.

    `pickers`: `ip:port` of each pool's endpoint picker replicas, by `namespace/name` of the pool. GatewayError if a
    pool has none there, or there is nothing to listen on or nowhere to go.
    """
    options = options or TranslateOptions()
    if not resources.gateways:
        raise GatewayError("there is no Gateway, so nothing to listen on; expected a document of kind Gateway")
    if not resources.routes:
        raise GatewayError("there is no HTTPRoute, so every request would be answered 404; expected one to a pool")
    pools = {pool.metadata.id: pool for pool in resources.pools}
    if lacking := [pool_id for pool_id in pools if not pickers.get(pool_id)]:
        name = pools[lacking[0]].spec.endpoint_picker_ref.name
        raise GatewayError(f"InferencePool {lacking[0]}: no address is known for its endpoint picker {name}")
    ports = matching.ports(resources.gateways)
    clusters, endpoints = {}, {}
    for pool_id, pool in pools.items():
        clusters[pool_name(pool_id)] = _json(pool_cluster(pool))
        clusters[picker_name(pool_id)] = _json(picker_cluster(pool))
        for name, addresses in (
            (pool_name(pool_id), resources.endpoints.get(pool_id, ())),
            (picker_name(pool_id), pickers[pool_id]),
        ):
            endpoints[name] = _json(assignment(name, addresses))
    return Rendering(
        listeners=tuple(_json(_listener(port, options)) for port in ports),
        routes={
            table_name(port): _json(_table(port, matching.domains(listeners, resources.routes), pools))
            for port, listeners in ports.items()
        },
        clusters=clusters,
        endpoints=endpoints,
    )


def table_name(port: int) -> str:
    """Name of a port's listener, route table and statistics."""
    return f"port-{port}"


class _Message(Protocol):
    def to_dict(self, *, casing: betterproto2.Casing) -> dict[str, Any]: ...


def _json(message: _Message) -> Json:
    return message.to_dict(casing=betterproto2.Casing.SNAKE)


def _table(
    port: int, domains: Mapping[str, Sequence[matching.Entry]], pools: Mapping[str, InferencePool]
) -> RouteConfiguration:
    hosts = [
        VirtualHost(name=domain, domains=[domain], routes=[route(entry, pools, port) for entry in entries])
        for domain, entries in domains.items()
    ]
    return RouteConfiguration(name=table_name(port), virtual_hosts=hosts, ignore_port_in_host_matching=True)


def _listener(port: int, options: TranslateOptions) -> Listener:
    manager = Filter(
        name="envoy.filters.network.http_connection_manager", typed_config=Packed.pack(_manager(port, options))
    )
    return Listener(
        name=table_name(port),
        address=Address(socket_address=SocketAddress(address=options.bind, port_value=port)),
        filter_chains=[FilterChain(filters=[manager])],
        per_connection_buffer_limit_bytes=options.body_limit,
        enable_reuse_port=False,  # with it, a second gateway on the port would get half of the traffic unnoticed
    )


def _manager(port: int, options: TranslateOptions) -> HttpConnectionManager:
    name = table_name(port)
    forged = EarlyHeaderMutation(mutations=[HeaderMutation(remove=header) for header in FORGED])
    router = Packed.pack(Router(suppress_envoy_headers=True))
    return HttpConnectionManager(
        stat_prefix=name,
        rds=Rds(config_source=watched(xds.rds(name)), route_config_name=name),
        early_header_mutation_extensions=[
            TypedExtensionConfig(
                name="envoy.http.early_header_mutation.header_mutation", typed_config=Packed.pack(forged)
            )
        ],
        http_filters=[
            picker_filter(options.wiring),
            HttpFilter(name="envoy.filters.http.router", typed_config=router),
        ],
        local_reply_config=local_replies(),
        server_header_transformation=HttpConnectionManagerServerHeaderTransformation.PASS_THROUGH,
        stream_idle_timeout=STREAM_IDLE,
        request_headers_timeout=HEADERS_TIMEOUT,
        upgrade_configs=[HttpConnectionManagerUpgradeConfig(upgrade_type="websocket")],
        use_remote_address=True,
        preserve_external_request_id=True,
        normalize_path=True,
        merge_slashes=True,
    )
