"""Small good manifests to change in tests."""

from pathlib import Path

GATEWAY = """
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: gate}
spec: {gatewayClassName: warmpath, listeners: [{name: http, port: 80, protocol: HTTP}]}
"""
ROUTE = """
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: route}
spec:
  parentRefs: [{name: gate}]
  rules:
  - backendRefs: [{group: inference.networking.k8s.io, kind: InferencePool, name: sim}]
"""
POOL = """
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: sim}
spec:
  selector: {matchLabels: {app: sim}}
  targetPorts: [{number: 8000}]
  endpointPickerRef: {name: epp, port: {number: 9002}}
"""


def write(folder: Path, *documents: str) -> Path:
    """One file of these documents."""
    file = folder / "manifests.yaml"
    file.write_text("\n---\n".join(documents))
    return file
