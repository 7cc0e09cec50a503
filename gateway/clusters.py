"""A pool as two Envoy clusters: its endpoints, among which the endpoint picker's word decides, and its pickers."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Final

from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    Cluster,
    ClusterCommonLbConfig,
    ClusterDiscoveryType,
    ClusterEdsClusterConfig,
    LoadBalancingPolicy,
    LoadBalancingPolicyPolicy,
    OutlierDetection,
)
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    ApiVersion,
    ConfigSource,
    HealthCheck,
    HealthCheckGrpcHealthCheck,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    HttpProtocolOptions,
    KeepaliveSettings,
    PathConfigSource,
    SocketAddress,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import (
    OverrideHost,
    OverrideHostOverrideHostSource,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.round_robin.v3 import RoundRobin
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptions as UpstreamOptions
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptionsExplicitHttpConfig as Explicit
from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any as Packed

from epp import protocol
from gateway import xds
from gateway.resources import InferencePool

HEALTH_INTERVAL: Final = timedelta(milliseconds=250)
"""How often Envoy asks a picker for its health: as long as it may take to see that one drains, is gone or is back."""
HEALTH_TIMEOUT: Final = timedelta(seconds=1)
"""One that does not answer is left: with the interval, less than two seconds after it stood still."""
PING_INTERVAL: Final = timedelta(seconds=1)
PING_TIMEOUT: Final = timedelta(seconds=4)
"""What a process that stands still was asked before it was left is asked again elsewhere then: in full duplex Envoy has
no other time limit for it. Together as long as `warmpath serve --stall-limit`."""
KEEP_ALIVE: Final = timedelta(seconds=4)
"""Unused connections to endpoints close before the 5 s after which uvicorn, vLLM's server, closes its side."""
_UNBOUNDED: Final = 100_000
_OPTIONS: Final = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def pool_name(pool_id: str) -> str:
    """Name of the cluster of a pool's endpoints; `pool_id` is `namespace/name`."""
    return "pool." + pool_id.replace("/", ".")


def picker_name(pool_id: str) -> str:
    """Name of the cluster of a pool's endpoint pickers."""
    return "epp." + pool_id.replace("/", ".")


def pool_cluster(pool: InferencePool) -> Cluster:
    """Endpoints in the order the picker names them, then round robin; the response says which one served."""
    name = pool_name(pool.metadata.id)
    h2c = pool.spec.app_protocol == "kubernetes.io/h2c"
    protocol_config = Explicit(http2_protocol_options=Http2ProtocolOptions()) if h2c else None
    override = OverrideHost(
        override_host_sources=[OverrideHostOverrideHostSource(metadata=_metadata(protocol.DESTINATION))],
        selected_host_key=_metadata(protocol.SERVED),
        fallback_policy=_policy("envoy.load_balancing_policies.round_robin", Packed.pack(RoundRobin())),
    )
    return Cluster(
        name=name,
        type=ClusterDiscoveryType.EDS,
        eds_cluster_config=_watched(name),
        connect_timeout=timedelta(seconds=2),
        circuit_breakers=_open_breakers(),
        outlier_detection=_ejection(),
        load_balancing_policy=_policy("envoy.load_balancing_policies.override_host", Packed.pack(override)),
        typed_extension_protocol_options=_protocol(
            protocol_config or Explicit(http_protocol_options=Http1ProtocolOptions()), idle=KEEP_ALIVE
        ),
    )


def picker_cluster(pool: InferencePool) -> Cluster:
    """The replicas of the pool's endpoint picker; while one of them is healthy the others get no new request.

    Health is checked, so that a picker that hangs or drains is left at once. The first connection that fails tells
    too: a request of more than 64 KB cannot be retried, so every one that meets a dead picker is lost.

    Without any healthy one `FailClose` tries them all, for one may just be back or still drain; `FailOpen` must fail
    before the request's body is on the way, for only then may the request pass.
    """
    name = picker_name(pool.metadata.id)
    panic = 0.0 if pool.spec.endpoint_picker_ref.failure_mode == "FailOpen" else 1.0
    return Cluster(
        name=name,
        type=ClusterDiscoveryType.EDS,
        eds_cluster_config=_watched(name),
        connect_timeout=timedelta(seconds=1),
        circuit_breakers=_open_breakers(),
        typed_extension_protocol_options=_protocol(Explicit(http2_protocol_options=_pinged())),
        common_lb_config=ClusterCommonLbConfig(
            healthy_panic_threshold=Percent(value=panic),
            # Envoy keeps a change of health back for a second if another came just before it.
            update_merge_window=timedelta(0),
        ),
        outlier_detection=OutlierDetection(
            split_external_local_origin_errors=True, consecutive_local_origin_failure=1, max_ejection_percent=100
        ),
        health_checks=[
            HealthCheck(
                timeout=HEALTH_TIMEOUT,
                interval=HEALTH_INTERVAL,
                no_traffic_interval=HEALTH_INTERVAL,
                unhealthy_threshold=1,
                healthy_threshold=1,
                grpc_health_check=HealthCheckGrpcHealthCheck(service_name=protocol.EXT_PROC_SERVICE),
            )
        ],
    )


def assignment(cluster: str, addresses: Iterable[str]) -> ClusterLoadAssignment:
    """The endpoints (`ip:port`) of a cluster."""
    endpoints = [LbEndpoint(endpoint=Endpoint(address=socket_address(each))) for each in addresses]
    return ClusterLoadAssignment(cluster_name=cluster, endpoints=[LocalityLbEndpoints(lb_endpoints=endpoints)])


def socket_address(address: str) -> Address:
    """`ip:port` or `[ip]:port` as Envoy's type."""
    host, _, port = address.rpartition(":")
    return Address(socket_address=SocketAddress(address=host.strip("[]"), port_value=int(port)))


def watched(file: str) -> ConfigSource:
    """A file in Envoy's working directory."""
    return ConfigSource(path_config_source=PathConfigSource(path=file), resource_api_version=ApiVersion.V3)


def _watched(name: str) -> ClusterEdsClusterConfig:
    return ClusterEdsClusterConfig(eds_config=watched(xds.eds(name)))


def _metadata(key: str) -> MetadataKey:
    return MetadataKey(key=protocol.LB_NAMESPACE, path=[MetadataKeyPathSegment(key=key)])


def _policy(name: str, config: Packed) -> LoadBalancingPolicy:
    extension = TypedExtensionConfig(name=name, typed_config=config)
    return LoadBalancingPolicy(policies=[LoadBalancingPolicyPolicy(typed_extension_config=extension)])


def _pinged() -> Http2ProtocolOptions:
    return Http2ProtocolOptions(connection_keepalive=KeepaliveSettings(interval=PING_INTERVAL, timeout=PING_TIMEOUT))


def _open_breakers() -> CircuitBreakers:
    """Envoy's own limit of 1024 requests would shed answers that stream for minutes; admission is the picker's work."""
    return CircuitBreakers(
        thresholds=[
            CircuitBreakersThresholds(
                max_connections=_UNBOUNDED,
                max_pending_requests=_UNBOUNDED,
                max_requests=_UNBOUNDED,
                max_retries=1000,
            )
        ]
    )


def _ejection() -> OutlierDetection:
    """An endpoint with five errors in a row (5xx, refused, reset) is left out where Envoy chooses by itself.

    That is on the last retries, and where there is no picker (`FailOpen`). What the picker names is used, ejected or
    not: it knows more of an endpoint's failures, and its trials find out when they end. At most half are ejected, and
    below half that are left Envoy asks all of them (its panic threshold), so a pool is never emptied. Rates of success
    are for the picker to weigh: Envoy would eject who is a little worse than others.
    """
    return OutlierDetection(
        interval=timedelta(seconds=1),
        base_ejection_time=timedelta(seconds=5),
        max_ejection_time=timedelta(seconds=15),
        max_ejection_percent=50,
        enforcing_success_rate=0,
    )


def _protocol(explicit: Explicit, idle: timedelta | None = None) -> dict[str, Packed]:
    common = HttpProtocolOptions(idle_timeout=idle) if idle else None
    options = UpstreamOptions(explicit_http_config=explicit, common_http_protocol_options=common)
    return {_OPTIONS: Packed.pack(options)}
