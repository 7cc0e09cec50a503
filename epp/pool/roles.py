"""Roles: which stages of a request an endpoint serves, by its label `llm-d.ai/role`; and how far two are from another.

The label's values are llm-d's: stages joined by hyphens, `both` for prefill and decode, as its older releases have it.
An endpoint without the label prefills and decodes what it gets, and prefills for nobody else: that needs a sidecar.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from epp import protocol
from epp.documents.strict import nearest, short
from epp.parsing.request import Stage
from epp.pool.store import Endpoint

_STAGES: Final[Mapping[Stage, frozenset[str]]] = {
    "decode": frozenset({"decode", "prefill-decode", "encode-prefill-decode", "both"}),
    "prefill": frozenset({"prefill", "encode-prefill", "prefill-decode", "encode-prefill-decode", "both"}),
    "encode": frozenset({"encode", "encode-prefill", "encode-prefill-decode"}),
}
ROLES: Final = tuple(sorted(frozenset[str]().union(*_STAGES.values())))
"""All values that mean something."""
_LEVELS: Final = ("kubernetes.io/hostname", "topology.kubernetes.io/rack", *protocol.TOPOLOGY_LABELS)
"""Labels that say where an endpoint is, from the nearest on."""
FARTHEST: Final = len(_LEVELS)


class Roles(NamedTuple):
    """The endpoints that serve each stage, in the order given."""

    decode: Sequence[Endpoint]
    prefill: Sequence[Endpoint]
    encode: Sequence[Endpoint]
    apart: bool
    """Some endpoint does not serve every request as a whole, or serves a stage for others."""


def serves(endpoint: Endpoint, stage: Stage) -> bool:
    """Whether the endpoint's role has this stage."""
    role = endpoint.labels.get(protocol.ROLE_LABEL)
    return stage == "decode" if role is None else role in _STAGES[stage]


def computes_prompts(endpoint: Endpoint, engine: str) -> bool:
    """Whether one that decodes can compute prompts. SGLang's cannot (0.5.23, `--disaggregation-mode decode`)."""
    return engine != "sglang" or protocol.ROLE_LABEL not in endpoint.labels or serves(endpoint, "prefill")


def unknown_role(endpoint: Endpoint) -> str:
    """A sentence about an endpoint whose role means nothing, so that it serves nobody; "": it has no such role."""
    role = endpoint.labels.get(protocol.ROLE_LABEL)
    if role is None or role in ROLES:
        return ""
    expected = f"expected {', '.join(ROLES)}, or no such label{nearest(role, ROLES)}"
    return f"{endpoint.name} has the label {protocol.ROLE_LABEL}: {short(role)}, so it gets no request; {expected}"


def roles_of(endpoints: Sequence[Endpoint]) -> Roles:
    """Who serves what. Where nobody has a role, `decode` is `endpoints` itself."""
    if not any(protocol.ROLE_LABEL in endpoint.labels for endpoint in endpoints):
        return Roles(endpoints, (), (), False)
    decode, prefill, encode = (tuple(e for e in endpoints if serves(e, stage)) for stage in _STAGES)
    return Roles(decode, prefill, encode, True)


class RoleView:
    """`roles_of`, asked once for each state of a pool: a pool's endpoints are one tuple until some come or go."""

    __slots__ = ("_endpoints", "_roles")

    def __init__(self) -> None:
        self._endpoints: Sequence[Endpoint] = ()
        self._roles = roles_of(())

    def of(self, endpoints: Sequence[Endpoint]) -> Roles:
        if endpoints is not self._endpoints:
            self._endpoints, self._roles = endpoints, roles_of(endpoints)
        return self._roles


def stages_of(endpoints: Sequence[Endpoint]) -> Iterable[Sequence[Endpoint]]:
    """Groups of endpoints of which a request needs one each: one group where nobody has a role."""
    roles = roles_of(endpoints)
    if not roles.apart:
        return [endpoints]
    decode = set(roles.decode)
    prefill = () if all(endpoint in decode for endpoint in roles.prefill) else roles.prefill
    return [group for group in (roles.decode, prefill) if group]


def apart(one: Endpoint, other: Endpoint) -> int | None:
    """How far two endpoints are from another: 0 on one host, 1 in one rack, 2 in one zone, 3 in one region, 4 farther.

    None where their labels do not say. `Endpoint.node` is a host too.
    """
    if one.node and one.node == other.node:
        return 0
    known = False
    for level, label in enumerate(_LEVELS):
        here, there = one.labels.get(label), other.labels.get(label)
        if here and there:
            if here == there:
                return level
            known = True
    return FARTHEST if known else None
