"""Which rule answers which request: hostnames and the precedence of matches, as Gateway API defines them.

Source: Gateway API v1, HTTPRouteSpec.hostnames and HTTPRouteRule.matches. Envoy takes the first route that matches in
the one virtual host whose domain fits best; so each domain gets all rules that may answer it, in order of precedence.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.resources import Gateway, HTTPRoute, Listener, Match, ParentRef, Rule

ANY = "*"


@dataclass(frozen=True)
class Entry:
    """One match of one rule: what becomes one route of Envoy."""

    route: HTTPRoute
    number: int
    """Of the rule in its route, from 0."""
    match: Match

    @property
    def rule(self) -> Rule:
        return self.route.spec.rules[self.number]

    @property
    def name(self) -> str:
        """`namespace/name/rule number`, for Envoy's logs and statistics."""
        return f"{self.route.metadata.id}/{self.number}"


def intersect(listener: str | None, route: Sequence[str]) -> list[str]:
    """The hostnames a route answers on a listener; `ANY` where both leave it open."""
    if not route:
        return [listener or ANY]
    wide = listener or ANY
    both = (host if covers(wide, host) else wide if covers(host, wide) else None for host in route)
    return list(dict.fromkeys(host for host in both if host))


def covers(wide: str, narrow: str) -> bool:
    """Whether every host that `narrow` names is also named by `wide`. `*.a.b` names x.a.b and x.y.a.b, not a.b."""
    return wide in (ANY, narrow) or (wide.startswith("*.") and narrow.endswith(wide[1:]) and narrow != wide[1:])


def parent_id(route: HTTPRoute, parent: ParentRef) -> str:
    """`namespace/name` of the Gateway a route names."""
    return f"{parent.namespace or route.metadata.namespace}/{parent.name}"


def refers(parent: ParentRef, listener: Listener) -> bool:
    return parent.section_name in (None, listener.name) and parent.port in (None, listener.port)


def allows(gateway: Gateway, listener: Listener, route: HTTPRoute) -> bool:
    """Whether the listener takes routes of this route's namespace."""
    return listener.allowed_routes.namespaces.from_ == "All" or gateway.metadata.namespace == route.metadata.namespace


def ports(gateways: Iterable[Gateway]) -> dict[int, list[tuple[Gateway, Listener]]]:
    """The listeners of each port: Gateway API has one for each hostname, Envoy one for all."""
    found: dict[int, list[tuple[Gateway, Listener]]] = {}
    for gateway in gateways:
        for listener in gateway.spec.listeners:
            found.setdefault(listener.port, []).append((gateway, listener))
    return dict(sorted(found.items()))


def domains(
    listeners: Sequence[tuple[Gateway, Listener]], routes: Sequence[HTTPRoute]
) -> Mapping[str, Sequence[Entry]]:
    """The entries of each domain of one port, first match first. A domain without routes has none: not found.

    A host belongs to the listener that names it most closely; the routes of the others do not see it.
    """
    found: dict[str, list[Entry]] = {}
    for gateway, listener in listeners:
        own = listener.hostname or ANY
        closer = [other.hostname or ANY for _, other in listeners if covers(own, other.hostname or ANY)]
        hosts = [(host, route) for route in attached(gateway, listener, routes) for host in _hosts(listener, route)]
        for domain in dict.fromkeys([own, *(host for host, _ in hosts)]):
            if any(other != own and covers(other, domain) for other in closer):
                continue
            answering = [(host, entry) for host, route in hosts if covers(host, domain) for entry in entries(route)]
            answering.sort(key=lambda pair: _precedence(*pair))
            found[domain] = _first([entry for _, entry in answering])
    return dict(sorted(found.items()))


def attached(gateway: Gateway, listener: Listener, routes: Sequence[HTTPRoute]) -> list[HTTPRoute]:
    """The routes that name this listener and that it allows."""
    return [
        route
        for route in routes
        if allows(gateway, listener, route)
        and any(
            parent_id(route, each) == gateway.metadata.id and refers(each, listener) for each in route.spec.parent_refs
        )
    ]


def entries(route: HTTPRoute) -> list[Entry]:
    return [Entry(route, number, match) for number, rule in enumerate(route.spec.rules) for match in rule.matches]


def _hosts(listener: Listener, route: HTTPRoute) -> list[str]:
    return intersect(listener.hostname, route.spec.hostnames)


def _first(sorted_entries: list[Entry]) -> list[Entry]:
    """Without what is there twice because two of a route's hostnames cover the domain."""
    seen: set[tuple[str, int]] = set()
    kept = []
    for entry in sorted_entries:
        key = (entry.name, id(entry.match))
        if key not in seen:
            seen.add(key)
            kept.append(entry)
    return kept


def _precedence(host: str, entry: Entry) -> tuple[Any, ...]:
    """Sorts what wins first. Where a regular expression stands is ours to say: after exact paths, before prefixes."""
    match, route = entry.match, entry.route
    kind = ("Exact", "RegularExpression", "PathPrefix").index(match.path.type)
    return (
        host.startswith("*"),
        -len(host),
        kind,
        -len(match.path.value.rstrip("/") if kind else match.path.value),
        match.method is None,
        -len(match.headers),
        -len(match.query_params),
        route.metadata.age,
        route.metadata.id,
    )
