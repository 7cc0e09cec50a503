"""Gateway, HTTPRoute and InferencePool, as far as we can honour them; a field that is not here is refused.

Sources: Gateway API v1 (standard channel), InferencePool `inference.networking.k8s.io/v1`.
"""

import re
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, field

from epp import protocol
from epp.documents import objects
from epp.documents.objects import Port, Strict

GATEWAY_GROUP: Final = "gateway.networking.k8s.io"
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"

Name = Annotated[str, Meta(min_length=1, max_length=253, pattern=rf"^{_LABEL}(\.{_LABEL})*$")]
Hostname = Annotated[str, Meta(max_length=253, pattern=rf"^(\*\.)?{_LABEL}(\.{_LABEL})*$")]
ExactHostname = Annotated[str, Meta(max_length=253, pattern=rf"^{_LABEL}(\.{_LABEL})*$")]
HeaderName = Annotated[str, Meta(max_length=256, pattern=r"^[A-Za-z0-9!#$%&'*+\-.^_`|~]+$")]
HeaderValue = Annotated[str, Meta(max_length=4096, pattern=r"^[^\x00-\x08\x0a-\x1f\x7f]*$")]
Duration = Annotated[str, Meta(pattern=r"^([0-9]{1,5}(h|m|s|ms)){1,4}$")]
Method = Literal["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"]
FilterType = Literal["RequestHeaderModifier", "ResponseHeaderModifier", "URLRewrite", "RequestRedirect"]


class Metadata(objects.Metadata, frozen=True, forbid_unknown_fields=True):
    """Kubernetes' ObjectMeta; what we do not read is listed so that a misspelled name is found."""

    name: Name
    namespace: Name = "default"
    labels: Any = None
    annotations: Any = None
    deletion_grace_period_seconds: Any = None
    finalizers: Any = None
    generate_name: Any = None
    generation: Any = None
    managed_fields: Any = None
    owner_references: Any = None
    resource_version: Any = None
    self_link: Any = None
    uid: Any = None

    @property
    def age(self) -> str:
        """Time of creation as text that sorts; objects from files, which have none, come last."""
        return objects.created(self) or "~"


# --- Gateway ------------------------------------------------------------------------------------------------------


class AllowedNamespaces(Strict, frozen=True):
    from_: Literal["Same", "All"] = field(default="Same", name="from")


class AllowedKind(Strict, frozen=True):
    kind: Literal["HTTPRoute"]
    group: Literal["gateway.networking.k8s.io"] = GATEWAY_GROUP


class AllowedRoutes(Strict, frozen=True):
    namespaces: AllowedNamespaces = AllowedNamespaces()
    kinds: tuple[AllowedKind, ...] = ()


class Listener(Strict, frozen=True):
    name: Name
    port: Port
    protocol: Literal["HTTP"]
    hostname: Hostname | None = None
    allowed_routes: AllowedRoutes = AllowedRoutes()


class GatewaySpec(Strict, frozen=True):
    gateway_class_name: str
    listeners: Annotated[tuple[Listener, ...], Meta(min_length=1, max_length=64)]


class Gateway(Strict, frozen=True):
    api_version: Literal["gateway.networking.k8s.io/v1"]
    kind: Literal["Gateway"]
    metadata: Metadata
    spec: GatewaySpec
    status: Any = None


# --- HTTPRoute ----------------------------------------------------------------------------------------------------


class ParentRef(Strict, frozen=True):
    name: Name
    group: Literal["gateway.networking.k8s.io"] = GATEWAY_GROUP
    kind: Literal["Gateway"] = "Gateway"
    namespace: Name | None = None
    section_name: Name | None = None
    port: Port | None = None


class PathMatch(Strict, frozen=True):
    type: Literal["Exact", "PathPrefix", "RegularExpression"] = "PathPrefix"
    value: Annotated[str, Meta(min_length=1, max_length=1024)] = "/"

    def __post_init__(self) -> None:
        if self.type == "RegularExpression":
            return
        if not re.fullmatch(r"/[A-Za-z0-9/\-._~%!$&'()*+,;=:@]*", self.value) or re.search(
            r"//|/\.\.?(/|$)|%2[fF]", self.value
        ):
            raise ValueError(f"got {self.value!r}; expected a path from / without //, /./, /../, %2f, ? or #")


class NamedMatch(Strict, frozen=True):
    """How a header or a query parameter has to be."""

    name: HeaderName
    value: Annotated[str, Meta(min_length=1, max_length=4096)]
    type: Literal["Exact", "RegularExpression"] = "Exact"


class Match(Strict, frozen=True):
    path: PathMatch = PathMatch()
    headers: Annotated[tuple[NamedMatch, ...], Meta(max_length=16)] = ()
    query_params: Annotated[tuple[NamedMatch, ...], Meta(max_length=16)] = ()
    method: Method | None = None


class Header(Strict, frozen=True):
    name: HeaderName
    value: HeaderValue


class HeaderModifier(Strict, frozen=True):
    set: Annotated[tuple[Header, ...], Meta(max_length=16)] = ()
    add: Annotated[tuple[Header, ...], Meta(max_length=16)] = ()
    remove: Annotated[tuple[HeaderName, ...], Meta(max_length=16)] = ()

    def __post_init__(self) -> None:
        names = [*(header.name for header in (*self.set, *self.add)), *self.remove]
        if owned := [name for name in names if name.lower() in ("host", *protocol.SYSTEM_OWNED)]:
            raise ValueError(f"{owned[0]} cannot be changed by a route; the gateway and the endpoint picker own it")


class PathModifier(Strict, frozen=True):
    type: Literal["ReplaceFullPath", "ReplacePrefixMatch"]
    replace_full_path: Annotated[str, Meta(max_length=1024, pattern=r"^[!-~]*$")] | None = None
    replace_prefix_match: Annotated[str, Meta(max_length=1024, pattern=r"^[!-~]*$")] | None = None

    def __post_init__(self) -> None:
        _only_of_type(self, {"ReplaceFullPath": "replace_full_path", "ReplacePrefixMatch": "replace_prefix_match"})


class Rewrite(Strict, frozen=True):
    hostname: ExactHostname | None = None
    path: PathModifier | None = None


class Redirect(Strict, frozen=True):
    scheme: Literal["http", "https"] | None = None
    hostname: ExactHostname | None = None
    path: PathModifier | None = None
    port: Port | None = None
    status_code: Literal[301, 302, 303, 307, 308] = 302


class Filter(Strict, frozen=True):
    type: FilterType
    request_header_modifier: HeaderModifier | None = None
    response_header_modifier: HeaderModifier | None = None
    url_rewrite: Rewrite | None = field(default=None, name="urlRewrite")
    request_redirect: Redirect | None = None

    def __post_init__(self) -> None:
        fields = ("request_header_modifier", "response_header_modifier", "url_rewrite", "request_redirect")
        types = ("RequestHeaderModifier", "ResponseHeaderModifier", "URLRewrite", "RequestRedirect")
        _only_of_type(self, dict(zip(types, fields, strict=True)))


class BackendRef(Strict, frozen=True):
    name: Name
    group: str = ""
    kind: str = "Service"
    namespace: Name | None = None
    port: Port | None = None
    """Without meaning for an InferencePool."""
    weight: Annotated[int, Meta(ge=0, le=1_000_000)] = 1

    def __post_init__(self) -> None:
        if (self.group, self.kind) != (protocol.POOL_GROUP, "InferencePool"):
            kind = f"{self.kind} of {self.group}" if self.group else self.kind
            raise ValueError(f"{kind} is not supported; supported: InferencePool of {protocol.POOL_GROUP}")


class Timeouts(Strict, frozen=True):
    request: Duration | None = None
    backend_request: Duration | None = None


class Rule(Strict, frozen=True):
    name: str | None = None
    matches: Annotated[tuple[Match, ...], Meta(max_length=64)] = (Match(),)
    filters: Annotated[tuple[Filter, ...], Meta(max_length=16)] = ()
    backend_refs: Annotated[tuple[BackendRef, ...], Meta(max_length=16)] = ()
    timeouts: Timeouts = Timeouts()

    def __post_init__(self) -> None:
        types = [each.type for each in self.filters]
        if again := [each for each in types if types.count(each) > 1]:
            raise ValueError(f"{again[0]} is given more than once in filters")
        if self.redirect and (self.backend_refs or self.rewrite):
            raise ValueError("RequestRedirect answers by itself; expected neither backendRefs nor URLRewrite beside it")
        if not self.redirect and not self.backend_refs:
            raise ValueError("nothing would answer; expected backendRefs or a RequestRedirect")
        paths = [each.path for each in (self.rewrite, self.redirect) if each]
        replaces = any(path and path.type == "ReplacePrefixMatch" for path in paths)
        if replaces and any(match.path.type != "PathPrefix" for match in self.matches):
            raise ValueError("ReplacePrefixMatch needs PathPrefix in every match")

    def filter(self, type: FilterType) -> Filter | None:
        return next((each for each in self.filters if each.type == type), None)

    @property
    def rewrite(self) -> Rewrite | None:
        found = self.filter("URLRewrite")
        return found.url_rewrite if found else None

    @property
    def redirect(self) -> Redirect | None:
        found = self.filter("RequestRedirect")
        return found.request_redirect if found else None


class HTTPRouteSpec(Strict, frozen=True):
    parent_refs: Annotated[tuple[ParentRef, ...], Meta(min_length=1, max_length=32)]
    rules: Annotated[tuple[Rule, ...], Meta(min_length=1, max_length=16)]
    hostnames: Annotated[tuple[Hostname, ...], Meta(max_length=16)] = ()


class HTTPRoute(Strict, frozen=True):
    api_version: Literal["gateway.networking.k8s.io/v1"]
    kind: Literal["HTTPRoute"]
    metadata: Metadata
    spec: HTTPRouteSpec
    status: Any = None


# --- InferencePool ------------------------------------------------------------------------------------------------


class PickerRef(objects.PickerRef, frozen=True):
    group: Literal[""] = ""
    kind: Literal["Service"] = "Service"
    failure_mode: Literal["FailOpen", "FailClose"] = "FailClose"

    def __post_init__(self) -> None:
        if self.port is None:
            raise ValueError("port is missing; expected `port: {number: 1..65535}` for a Service")


class PoolSpec(objects.PoolSpec, frozen=True, kw_only=True):
    endpoint_picker_ref: PickerRef
    app_protocol: Literal["http", "kubernetes.io/h2c"] = "http"

    def __post_init__(self) -> None:
        objects.target_ports(self, "targetPorts")


class InferencePool(objects.InferencePool, frozen=True, kw_only=True, forbid_unknown_fields=True):
    api_version: Literal["inference.networking.k8s.io/v1"]
    kind: Literal["InferencePool"]
    metadata: Metadata
    spec: PoolSpec
    status: Any = None


def _only_of_type(shape: Any, fields: dict[str, str]) -> None:
    """Exactly the field that belongs to `shape.type` is given. ValueError otherwise."""
    names = {each.name: each.encode_name for each in msgspec.structs.fields(type(shape))}
    for kind, name in fields.items():
        given = getattr(shape, name) is not None
        if given != (shape.type == kind):
            what = "not expected" if given else "missing"
            raise ValueError(f"{names[name]} is {what} with type {shape.type}")
