"""The endpoints of a pool: entries of `endpoints:` lists, and the ready Pods its selector matches.

Read exactly as the endpoint picker reads the same documents: an address that only one of the two knows would never be
served, as Envoy passes over what its own cluster does not have. Sources: llm-d's `file-discovery`; Kubernetes core v1.
"""

from collections.abc import Iterator, Mapping, Sequence

from epp.documents.files import Document
from epp.documents.objects import (
    EndpointsFile,
    InferencePool,
    Pod,
    addresses_in,
    check_unique,
    entries_of,
    selects,
    target_ports,
)

Files = Sequence[tuple[Document, EndpointsFile]]
Pods = Sequence[tuple[Document, Pod]]


def selected(pool: InferencePool, files: Files, pods: Pods) -> tuple[str, ...]:
    """`ip:port` of each endpoint of the pool. ConfigError where a name or an address is there twice."""
    found = [*_of_lists(pool, files), *_of_pods(pool, pods)]
    check_unique((where, (f"name {name}", f"address {address}")) for where, name, address in found)
    return tuple(address for _, _, address in found)


def check_members(pools: Sequence[InferencePool], files: Files) -> None:
    """ConfigError for an entry that is in none of the pools, where there are any: its labels must be wrong."""
    for document, file in files:
        for index, entry in enumerate(file.endpoints):
            if pools and not any(selects(pool, entry.namespace, entry.labels) for pool in pools):
                wanted = " or ".join(
                    f"{_labels(pool.spec.selector.match_labels)} in {pool.metadata.namespace}" for pool in pools
                )
                message = f"{entry.name}, {_labels(entry.labels)} in {entry.namespace}, is in no InferencePool"
                raise document.error(f"endpoints[{index}]", f"{message}; expected {wanted}")


def _of_lists(pool: InferencePool, files: Files) -> Iterator[tuple[str, str, str]]:
    """(place, name, address) of each entry."""
    for document, file in files:
        for at, entry, address in entries_of(document, file):
            if selects(pool, entry.namespace, entry.labels):
                yield f"{document.where}: {at}", f"{entry.namespace}/{entry.name}", address


def _of_pods(pool: InferencePool, pods: Pods) -> Iterator[tuple[str, str, str]]:
    ports = target_ports(pool.spec)
    for document, pod in pods:
        if selects(pool, pod.metadata.namespace, pod.metadata.labels or {}):
            yield from ((document.where, *each) for each in addresses_in(document, pod, ports))


def _labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in labels.items()) or "without labels"
