"""Configuration of the one Envoy of the bench: a listener for each variant, all to the same pods."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from epp import protocol

Wiring = Literal["full-duplex", "lean", "buffered"]
"""How the body of a request is shown; that of an answer is shown in full duplex alone."""

_TYPE = "type.googleapis.com/envoy.extensions"
_MANY = {"thresholds": [{"max_connections": 100_000, "max_pending_requests": 100_000, "max_requests": 100_000}]}


LOOPBACK: Final = "127.0.0.1"


class Pod(NamedTuple):
    """Where one listens."""

    port: int
    host: str = LOOPBACK


class Listener(NamedTuple):
    """A way through Envoy. `epp`: port of the ext_proc server; None = Envoy alone. `replicas`: ports of the others
    that are asked in turns with it. `answers_after`: seconds from a pick until a pod is asked.
    """

    port: int
    epp: int | None = None
    wiring: Wiring = "lean"
    replicas: tuple[int, ...] = ()
    answers_after: float = 0.0


def config(listeners: Mapping[str, Listener], pods: Sequence[Pod]) -> dict[str, Any]:
    """Bootstrap for `envoy --config-path` (JSON)."""
    servers = {each.epp: [each.epp, *each.replicas] for each in listeners.values() if each.epp is not None}
    return {
        "static_resources": {
            "listeners": [_listener(name, listener) for name, listener in listeners.items()],
            "clusters": [_pods(pods), *(_server(name, ports) for name, ports in sorted(servers.items()))],
        }
    }


def _listener(name: str, listener: Listener) -> dict[str, Any]:
    filters = [] if listener.epp is None else [_ext_proc(listener.epp, listener.wiring)]
    if listener.answers_after:
        delay = {"fixed_delay": f"{listener.answers_after:g}s", "percentage": {"numerator": 100}}
        filters.append(_named("envoy.filters.http.fault", "filters.http.fault.v3.HTTPFault", delay=delay))
    filters.append(_named("envoy.filters.http.router", "filters.http.router.v3.Router"))
    manager = _named(
        "envoy.filters.network.http_connection_manager",
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=name,
        generate_request_id=True,
        http_filters=filters,
        route_config={
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "pods", "timeout": "0s"}}],
                }
            ]
        },
    )
    return {
        "name": name,
        "address": _address(listener.port),
        "per_connection_buffer_limit_bytes": 4 << 20,
        "filter_chains": [{"filters": [manager]}],
    }


def _ext_proc(port: int, wiring: Wiring) -> dict[str, Any]:
    return _named(
        "envoy.filters.http.ext_proc",
        "filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": f"epp-{port}", "authority": "epp"}},
        message_timeout="10s",
        processing_mode={
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED" if wiring == "buffered" else "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": "FULL_DUPLEX_STREAMED" if wiring == "full-duplex" else "NONE",
            "response_trailer_mode": "SEND",
        },
        metadata_options={
            "forwarding_namespaces": {"untyped": [protocol.LB_NAMESPACE]},
            "receiving_namespaces": {"untyped": [protocol.LB_NAMESPACE]},
        },
    )


def _pods(pods: Sequence[Pod]) -> dict[str, Any]:
    def key(name: str) -> dict[str, Any]:
        return {"key": protocol.LB_NAMESPACE, "path": [{"key": name}]}

    otherwise = _named("envoy.load_balancing_policies.round_robin", "load_balancing_policies.round_robin.v3.RoundRobin")
    policy = _named(
        "envoy.load_balancing_policies.override_host",
        "load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"metadata": key(protocol.DESTINATION)}],
        selected_host_key=key(protocol.SERVED),
        fallback_policy={"policies": [{"typed_extension_config": otherwise}]},
    )
    return _cluster("pods", pods, load_balancing_policy={"policies": [{"typed_extension_config": policy}]})


def _server(name: int, ports: Sequence[int]) -> dict[str, Any]:
    http2 = {
        "@type": f"{_TYPE}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    options = {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2}
    return _cluster(f"epp-{name}", [*map(Pod, ports)], typed_extension_protocol_options=options)


def _cluster(name: str, places: Sequence[Pod], **more: Any) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(*place)}} for place in places]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "circuit_breakers": _MANY,
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        **more,
    }


def _named(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"{_TYPE}.{kind}", **fields}}


def _address(port: int, host: str = LOOPBACK) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
