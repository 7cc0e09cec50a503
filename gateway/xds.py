"""A whole Envoy configuration as plain JSON objects, and its two forms: files Envoy watches, or one static bootstrap.

Every listener, route table, cluster and endpoint list is a file of its own kind, so that what changes often (endpoints,
then routes) can be replaced without touching what holds connections (listeners).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

type_url = "type.googleapis.com/envoy.config.{}".format
LISTENER = type_url("listener.v3.Listener")
ROUTES = type_url("route.v3.RouteConfiguration")
CLUSTER = type_url("cluster.v3.Cluster")
ENDPOINTS = type_url("endpoint.v3.ClusterLoadAssignment")

Json = dict[str, Any]

LDS = "listeners.json"
CDS = "clusters.json"


def rds(name: str) -> str:
    """File of the route table `name`, relative to Envoy's working directory."""
    return f"routes-{name}.json"


def eds(cluster: str) -> str:
    """File of the endpoints of `cluster`, relative to Envoy's working directory."""
    return f"endpoints-{cluster}.json"


_MAX_CONNECTIONS: Json = {
    "name": "envoy.resource_monitors.global_downstream_max_connections",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.resource_monitors.downstream_connections.v3"
        ".DownstreamConnectionsConfig",
        "max_active_downstream_connections": 50_000,
    },
}

WATCHING: Json = {
    "node": {"id": "gateway", "cluster": "warmpath"},
    "overload_manager": {"resource_monitors": [_MAX_CONNECTIONS]},
    "dynamic_resources": {
        "lds_config": {"path_config_source": {"path": f"./{LDS}"}, "resource_api_version": "V3"},
        "cds_config": {"path_config_source": {"path": f"./{CDS}"}, "resource_api_version": "V3"},
    },
}
"""Bootstrap of an Envoy that watches the files of a Rendering in its working directory."""


@dataclass(frozen=True)
class File:
    """A file Envoy reads as a DiscoveryResponse."""

    text: str
    version: str
    """Of its content: equal content is never a new version."""
    stat: str
    """Envoy's text readout of the version in use."""


def _file(stat: str, kind: str, resources: Iterable[Json]) -> File:
    typed = [{"@type": kind, **resource} for resource in resources]
    version = hashlib.sha256(json.dumps(typed, sort_keys=True).encode()).hexdigest()[:16]
    return File(json.dumps({"version_info": version, "resources": typed}, indent=1), version, stat)


@dataclass(frozen=True)
class Rendering:
    """Envoy resources in proto3 JSON. Listeners take routes from `rds(name)`, clusters endpoints from `eds(name)`.

    A listener's HTTP connection manager has the name of its route table as `stat_prefix`.
    """

    listeners: tuple[Json, ...] = ()
    routes: dict[str, Json] = field(default_factory=dict)
    """By route table name."""
    clusters: dict[str, Json] = field(default_factory=dict)
    endpoints: dict[str, Json] = field(default_factory=dict)
    """By cluster name; clusters that are not here hold their endpoints themselves."""

    def listener_file(self) -> dict[str, File]:
        return {LDS: _file("listener_manager.lds.version_text", LISTENER, self.listeners)}

    def route_files(self) -> dict[str, File]:
        stat = "http.{0}.rds.{0}.version_text".format
        return {rds(name): _file(stat(name), ROUTES, [table]) for name, table in self.routes.items()}

    def cluster_file(self, *, also: Mapping[str, Json] | None = None) -> dict[str, File]:
        """`also`: clusters to keep where this rendering no longer has them."""
        clusters = {**(also or {}), **self.clusters}
        return {CDS: _file("cluster_manager.cds.version_text", CLUSTER, clusters.values())}

    def endpoint_files(self) -> dict[str, File]:
        stat = "cluster.{}.version_text".format
        return {eds(name): _file(stat(name), ENDPOINTS, [table]) for name, table in self.endpoints.items()}

    def files(self) -> dict[str, File]:
        """All files by name, relative to Envoy's working directory."""
        return self.listener_file() | self.route_files() | self.cluster_file() | self.endpoint_files()

    def static(self) -> Json:
        """The same as one bootstrap with everything inline: for `envoy --mode validate` and for reading."""
        clusters = [self._static_cluster(name, cluster) for name, cluster in self.clusters.items()]
        listeners = [self._static_listener(listener) for listener in self.listeners]
        return {"static_resources": {"listeners": listeners, "clusters": clusters}}

    def _static_cluster(self, name: str, cluster: Json) -> Json:
        if name not in self.endpoints:
            return cluster
        inline = {key: value for key, value in cluster.items() if key != "eds_cluster_config"}
        return {**inline, "type": "STATIC", "load_assignment": self.endpoints[name]}

    def _static_listener(self, listener: Json) -> Json:
        copy: Json = json.loads(json.dumps(listener))
        for chain in copy["filter_chains"]:
            for network_filter in chain["filters"]:
                manager = network_filter["typed_config"]
                manager["route_config"] = self.routes[manager.pop("rds")["route_config_name"]]
        return copy
