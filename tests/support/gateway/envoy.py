"""A real Envoy on loopback with one listener per ext_proc wiring, in front of one ext_proc server and some
upstreams.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from epp import protocol
from gateway.envoy import Envoy, running_envoy

TYPE = "type.googleapis.com/envoy."
FDS, STREAMED, BUFFERED, NONE = "FULL_DUPLEX_STREAMED", "STREAMED", "BUFFERED", "NONE"
BODY_LIMIT = 8 << 20


def mode(request: str, response: str, **more: object) -> dict[str, Any]:
    trailers = "SEND" if request == FDS or more.get("allow_mode_override") else "SKIP"
    return {
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": request,
            "request_trailer_mode": trailers,
            "response_header_mode": "SEND",
            "response_body_mode": response,
            "response_trailer_mode": "SEND",
        },
        **more,
    }


WIRINGS: Mapping[str, dict[str, Any]] = {
    "full-duplex": mode(FDS, FDS),
    "lean": mode(FDS, NONE),
    "buffered": mode(BUFFERED, BUFFERED),
    "buffered-lean": mode(BUFFERED, NONE),
    "buffered, then streamed": mode(BUFFERED, BUFFERED, allow_mode_override=True),
    "streamed": mode(STREAMED, STREAMED, send_body_without_waiting_for_header_response=True),
    "overridden": mode(STREAMED, NONE, allow_mode_override=True),
}
WATCHED: Mapping[str, dict[str, Any]] = {
    "overridden, watched": WIRINGS["overridden"],
    "buffered-lean, watched": mode(BUFFERED, NONE, allow_mode_override=True),
    "no override, watched": mode(BUFFERED, NONE),
}
"""Those of a second picker, which asks for answers."""


@asynccontextmanager
async def running(
    epp_port: int, endpoints: Sequence[str], folder: Path, watching: int | None = None
) -> AsyncIterator[Mapping[str, int]]:
    """Ports by wiring. `endpoints`: every `ip:port` that may be named as a destination; `watching`: a second picker."""
    async with running_envoy(config(epp_port, endpoints, watching), directory=folder) as envoy:
        yield await ports(envoy)


async def ports(envoy: Envoy) -> Mapping[str, int]:
    """Those it listens on, by wiring."""
    listeners = json.loads(await envoy.admin("/listeners?format=json"))["listener_statuses"]
    return {one["name"]: one["local_address"]["socket_address"]["port_value"] for one in listeners}


def config(epp_port: int, endpoints: Sequence[str], watching: int | None = None) -> dict[str, Any]:
    listeners = [_listener(name, wiring) for name, wiring in WIRINGS.items()]
    clusters = [_epp("epp", epp_port), _pods(endpoints)]
    if watching is not None:
        listeners += [_listener(name, wiring, "watching") for name, wiring in WATCHED.items()]
        clusters.append(_epp("watching", watching))
    return {
        "admin": {"address": _address("127.0.0.1:0")},
        "static_resources": {"listeners": listeners, "clusters": clusters},
    }


def _address(text: str) -> dict[str, Any]:
    host, _, port = text.rpartition(":")
    return {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}


def _listener(name: str, wiring: dict[str, Any], epp: str = "epp") -> dict[str, Any]:
    ext_proc = {
        "@type": TYPE + "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": epp, "authority": "epp"}},
        "message_timeout": "10s",
        "metadata_options": {
            "forwarding_namespaces": {"untyped": [protocol.LB_NAMESPACE]},
            "receiving_namespaces": {"untyped": [protocol.LB_NAMESPACE]},
        },
        **wiring,
    }
    retries = {
        "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes",
        "retriable_status_codes": [503],
        "num_retries": 3,
        "retry_back_off": {"base_interval": "0.001s", "max_interval": "0.01s"},
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": "pods", "timeout": "0s", "retry_policy": retries}}
    hcm = {
        "@type": TYPE + "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {"name": "ext_proc", "typed_config": ext_proc},
            {"name": "router", "typed_config": {"@type": TYPE + "extensions.filters.http.router.v3.Router"}},
        ],
    }
    return {
        "name": name,
        "address": _address("127.0.0.1:0"),
        "per_connection_buffer_limit_bytes": BODY_LIMIT,
        "filter_chains": [{"filters": [{"name": "http", "typed_config": hcm}]}],
    }


def _epp(name: str, port: int) -> dict[str, Any]:
    options = TYPE + "extensions.upstreams.http.v3.HttpProtocolOptions"
    http2 = {"@type": options, "explicit_http_config": {"http2_protocol_options": {}}}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        "load_assignment": _assignment(name, [f"127.0.0.1:{port}"]),
    }


def _pods(endpoints: Sequence[str]) -> dict[str, Any]:
    policies = "extensions.load_balancing_policies."
    robin = {"@type": TYPE + policies + "round_robin.v3.RoundRobin"}

    def key(name: str) -> dict[str, Any]:
        return {"key": protocol.LB_NAMESPACE, "path": [{"key": name}]}

    override = {
        "@type": TYPE + policies + "override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": key(protocol.DESTINATION)}],
        "selected_host_key": key(protocol.SERVED),
        "fallback_policy": {"policies": [{"typed_extension_config": {"name": "robin", "typed_config": robin}}]},
    }
    return {
        "name": "pods",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_balancing_policy": {
            "policies": [{"typed_extension_config": {"name": "override", "typed_config": override}}]
        },
        "load_assignment": _assignment("pods", endpoints),
    }


def _assignment(name: str, endpoints: Sequence[str]) -> dict[str, Any]:
    hosts = [{"endpoint": {"address": _address(address)}} for address in endpoints]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]}
