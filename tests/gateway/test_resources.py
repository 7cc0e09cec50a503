"""What is refused, and in which words: each line is a change to a good HTTPRoute, Gateway or InferencePool."""

from typing import Any

import pytest
import yaml

from epp.documents.files import Document
from epp.errors import ConfigError
from gateway.load import KINDS

GOOD = """
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: chat}
spec:
  parentRefs: [{name: gate}]
  rules:
  - matches: [{path: {type: PathPrefix, value: /v1}, headers: [{name: x-a, value: b}]}]
    filters: [{type: URLRewrite, urlRewrite: {path: {type: ReplacePrefixMatch, replacePrefixMatch: /}}}]
    backendRefs: [{group: inference.networking.k8s.io, kind: InferencePool, name: sim}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: gate}
spec: {gatewayClassName: warmpath, listeners: [{name: http, port: 80, protocol: HTTP}]}
---
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: sim}
spec:
  selector: {matchLabels: {app: sim}}
  targetPorts: [{number: 8000}]
  endpointPickerRef: {name: epp, port: {number: 9002}}
"""
HEADER = {"type": "RequestHeaderModifier", "requestHeaderModifier": {"remove": ["x-a"]}}

REFUSED: list[tuple[str, str, Any, str]] = [
    ("HTTPRoute", "spec.rules.0.filters", [{"type": "RequestMirror"}], "spec.rules[0].filters[0].type: RequestMirror is"
     " not supported; supported: RequestHeaderModifier, ResponseHeaderModifier, URLRewrite, RequestRedirect"),
    ("HTTPRoute", "spec.rules.0.retry", {}, "spec.rules[0].retry: not supported; supported: name, matches, filters,"
     " backendRefs, timeouts"),
    ("HTTPRoute", "spec.rules.0.backendRef", [], "did you mean 'backendRefs'?"),
    ("HTTPRoute", "spec.rules.0.matches.0.path.typ", "Exact", "spec.rules[0].matches[0].path.typ: not supported;"
     " supported: type, value; did you mean 'type'?"),
    ("HTTPRoute", "spec.rules.0.matches.0.path.type", "prefix", "path.type: prefix is not supported"),
    ("HTTPRoute", "spec.rules.0.matches.0.path.value", "v1", "matches[0].path: got 'v1'; expected a path"),
    ("HTTPRoute", "spec.rules.0.matches.0.path.value", "/a/../b", "expected a path"),
    ("HTTPRoute", "spec.rules.0.matches.0.headers.0.name", "a b", "headers[0].name: got 'a b'"),
    ("HTTPRoute", "spec.rules.0.matches.0.method", "GTE", "did you mean 'GET'?"),
    ("HTTPRoute", "spec.rules.0.matches.0.path.type", "Exact", "ReplacePrefixMatch needs PathPrefix in every match"),
    ("HTTPRoute", "spec.rules.0.filters.0.requestRedirect", {}, "requestRedirect is not expected with type URLRewrite"),
    ("HTTPRoute", "spec.rules.0.filters", [HEADER, HEADER], "RequestHeaderModifier is given more than once"),
    ("HTTPRoute", "spec.rules.0.filters", [{"type": "RequestHeaderModifier", "requestHeaderModifier": {"remove":
     ["X-Gateway-Destination-Endpoint"]}}], "cannot be changed by a route"),
    ("HTTPRoute", "spec.rules.0.filters", [{"type": "RequestRedirect", "requestRedirect": {}}], "answers by itself"),
    ("HTTPRoute", "spec.rules.0.backendRefs", [], "nothing would answer"),
    ("HTTPRoute", "spec.rules.0.backendRefs", [{"name": "chat"}], "spec.rules[0].backendRefs[0]: Service is not"
     " supported; supported: InferencePool of inference.networking.k8s.io"),
    ("HTTPRoute", "spec.rules.0.backendRefs.0.weight", -1, "backendRefs[0].weight: got -1; expected"),
    ("HTTPRoute", "spec.rules.0.backendRefs.0.filters", [], "backendRefs[0].filters: not supported"),
    ("HTTPRoute", "spec.rules.0.timeouts", {"request": "1.5s"}, "timeouts.request: got '1.5s'"),
    ("HTTPRoute", "spec.hostnames", ["a.*.b"], "spec.hostnames[0]: got 'a.*.b'"),
    ("HTTPRoute", "spec.parentRefs", [], "spec.parentRefs: got []"),
    ("HTTPRoute", "apiVersion", "gateway.networking.k8s.io/v1beta1", "networking.k8s.io/v1beta1 is"),
    ("HTTPRoute", "metadata.nmae", "x", "metadata.nmae: not supported"),
    ("HTTPRoute", "metadata.name", 7, "metadata.name: got 7; expected text"),
    ("Gateway", "spec.listeners.0.protocol", "HTTPS", "spec.listeners[0].protocol: HTTPS is not supported"),
    ("Gateway", "spec.listeners.0.tls", {}, "spec.listeners[0].tls: not supported"),
    ("Gateway", "spec.listeners.0.port", 70000, "spec.listeners[0].port: got 70000"),
    ("Gateway", "spec.listeners.0.allowedRoutes", {"namespaces": {"from": "Selector"}}, "Selector is not"),
    ("Gateway", "spec.infrastructure", {}, "spec.infrastructure: not supported"),
    ("InferencePool", "spec.endpointPickerRef.failureMode", "FailClosed", "FailClosed is not supported; supported:"
     " FailOpen, FailClose; did you mean 'FailClose'?"),
    ("InferencePool", "spec.endpointPickerRef.port", None, "spec.endpointPickerRef: port is missing"),
    ("InferencePool", "spec.appProtocol", "grpc", "spec.appProtocol: grpc is not supported"),
    ("InferencePool", "spec.targetPorts", [{"number": 1}, {"number": 1}], "spec: got targetPorts [1, 1]"),
    ("InferencePool", "spec.selector.matchLabels", {}, "spec.selector.matchLabels: got {}"),
    ("InferencePool", "spec.selector.matchLabels", {"app": 1}, "spec.selector.matchLabels.app: got 1"),
    ("InferencePool", "spec.endpointPickerRef", {}, "spec.endpointPickerRef.name: missing, but required"),
]  # fmt: skip


def documents() -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all(GOOD)}


def test_the_good_ones_are_good() -> None:
    for kind, content in documents().items():
        assert Document("x.yaml#1", content).shape(KINDS[kind]).kind == kind


@pytest.mark.parametrize(("kind", "path", "value", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(kind: str, path: str, value: Any, message: str) -> None:
    content = documents()[kind]
    target: Any = content
    *steps, last = (int(step) if step.isdigit() else step for step in path.split("."))
    for step in steps:
        target = target[step]
    target[last] = value
    with pytest.raises(ConfigError) as caught:
        Document("x.yaml#1", content).shape(KINDS[kind])
    assert message in str(caught.value)
    assert str(caught.value).startswith("x.yaml#1: ")
