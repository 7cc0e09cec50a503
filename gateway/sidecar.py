"""An Envoy in the pod of the endpoint picker, from the same resources as any: `python -m gateway.sidecar FILES`.

What differs from a machine of our own: it cannot get each pool's endpoints in files, so it asks DNS for them, where
a headless Service of the pool's name has their addresses. The picker's word decides among these; a name that DNS does
not have yet is passed over, which costs a second or so after a pod has come.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import click

from epp import protocol
from gateway.clusters import pool_name
from gateway.load import Resources, load
from gateway.resources import InferencePool
from gateway.translate import TranslateOptions, translate
from gateway.xds import Json

ADMIN_PORT: Final = 9901
"""On loopback. `gateway.drain` speaks to it."""
_EVERYWHERE: Final = "0.0.0.0"
_DNS_REFRESH: Final = "1s"


def sidecar(resources: Resources) -> Json:
    """The bootstrap of an Envoy whose picker listens on loopback, at the port its pool's endpointPickerRef says."""
    pickers = {pool.metadata.id: [f"127.0.0.1:{_port(pool)}"] for pool in resources.pools}
    rendering = translate(resources, pickers, TranslateOptions(bind=_EVERYWHERE))
    clusters, endpoints = dict(rendering.clusters), dict(rendering.endpoints)
    for pool in resources.pools:
        name = pool_name(pool.metadata.id)
        del endpoints[name]
        clusters[name] = _by_dns(clusters[name], pool)
    bootstrap = replace(rendering, clusters=clusters, endpoints=endpoints).static()
    address = {"socket_address": {"address": "127.0.0.1", "port_value": ADMIN_PORT}}
    return {"node": {"id": "sidecar", "cluster": "warmpath"}, "admin": {"address": address}, **bootstrap}


def _port(pool: InferencePool) -> int:
    port = pool.spec.endpoint_picker_ref.port
    return port.number if port else protocol.GRPC_PORT


def _by_dns(cluster: Json, pool: InferencePool) -> Json:
    """The cluster with all addresses of the pool's name, on each target port."""
    places = [{"address": pool.metadata.name, "port_value": port.number} for port in pool.spec.target_ports]
    endpoints = [{"endpoint": {"address": {"socket_address": place}}} for place in places]
    return {
        **{key: value for key, value in cluster.items() if key != "eds_cluster_config"},
        "type": "STRICT_DNS",
        "dns_lookup_family": "ALL",
        "dns_refresh_rate": _DNS_REFRESH,
        "load_assignment": {"cluster_name": cluster["name"], "endpoints": [{"lb_endpoints": endpoints}]},
    }


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def main(files: Sequence[Path]) -> None:
    """Print the bootstrap for the Gateway, HTTPRoute and InferencePool documents in FILES."""
    click.echo(json.dumps(sidecar(load(files)), indent=1))


if __name__ == "__main__":
    main()
