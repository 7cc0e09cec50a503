"""NetworkPolicies enforced on the nodes of a kind cluster whose own network enforces none, as a network's agent would.

What the policies and pods at hand come to is a table of nftables on each node, made anew as they change. Only new
connections are judged, and only those between pods: a node itself reaches its pods, as everywhere.
"""

import json
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import yaml

from tests.support.kubectl import Kubectl, KubectlFailed

TABLE = "ip warmpath-policies"
EVERY = 0.5
"""Seconds between looks at the cluster."""
REACH = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"
SOON = 5.0
"""Seconds in which a network enforces a policy that is new, if it does at all."""
Pods = Sequence[Mapping[str, Any]]


def ruleset(policies: Sequence[Mapping[str, Any]], pods: Pods, namespaces: Mapping[str, Mapping[str, str]]) -> str:
    """For `nft -f`. `namespaces`: labels by name."""
    jumps, chains = [], []
    for number, pod in enumerate(pods):
        own = [each for each in policies if each["metadata"]["namespace"] == pod["metadata"]["namespace"]]
        own = [each["spec"] for each in own if selects(each["spec"]["podSelector"], labels(pod))]
        for kind, mine, theirs, side in (("Ingress", "daddr", "saddr", "from"), ("Egress", "saddr", "daddr", "to")):
            fences = [each for each in own if kind in each["policyTypes"]]
            if not fences:
                continue
            name = f"{kind.lower()}-{number}"
            rules = [rule for each in fences for rule in each.get(kind.lower(), ())]
            lines = [line for rule in rules for line in let_in(rule, side, theirs, pod, pods, namespaces)]
            jumps.append(f"ip {mine} {pod['status']['podIP']} jump {name}")
            chains.append(f"chain {name} {{\n" + "\n".join([*lines, "drop"]) + "\n}")
    hook = "type filter hook forward priority 10; policy accept;\nct state established,related accept"
    body = "\n".join([*chains, "chain forward {", hook, *jumps, "}"])
    return f"table {TABLE} {{}}\ndelete table {TABLE}\ntable {TABLE} {{\n{body}\n}}\n"


def let_in(
    rule: Mapping[str, Any],
    side: str,
    theirs: str,
    pod: Mapping[str, Any],
    pods: Pods,
    namespaces: Mapping[str, Mapping[str, str]],
) -> list[str]:
    """The lines that end a chain early for what a rule allows."""
    who = ""
    if side in rule:
        peers = [each for each in pods if any(is_peer(peer, each, pod, namespaces) for peer in rule[side])]
        if not peers:
            return []
        who = f"ip {theirs} {{ {', '.join(sorted({each['status']['podIP'] for each in peers}))} }} "
    if "ports" not in rule:
        return [f"{who}return"]
    return [f"{who}{each.get('protocol', 'TCP').lower()} dport {int(each['port'])} return" for each in rule["ports"]]


def is_peer(
    peer: Mapping[str, Any],
    pod: Mapping[str, Any],
    fenced: Mapping[str, Any],
    namespaces: Mapping[str, Mapping[str, str]],
) -> bool:
    assert "ipBlock" not in peer, "of policies with addresses nothing is known here"
    namespace = pod["metadata"]["namespace"]
    if "namespaceSelector" in peer:
        if not selects(peer["namespaceSelector"], namespaces[namespace]):
            return False
    elif namespace != fenced["metadata"]["namespace"]:
        return False
    return selects(peer.get("podSelector", {}), labels(pod))


def labels(pod: Mapping[str, Any]) -> Mapping[str, str]:
    return pod["metadata"].get("labels", {})  # type: ignore[no-any-return]


def selects(selector: Mapping[str, Any], has: Mapping[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items() <= has.items()
    return wanted and all(holds(each, has) for each in selector.get("matchExpressions", ()))


def holds(expression: Mapping[str, Any], has: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values", ())
    found: dict[str, bool] = {
        "In": has.get(key) in values,
        "NotIn": has.get(key) not in values,
        "Exists": key in has,
        "DoesNotExist": key not in has,
    }
    return found[expression["operator"]]


class Enforced:
    """`with Enforced(kind_nodes()):` policies count a second after they change. Leaving raises what went wrong."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes

    def __enter__(self) -> Self:
        self._last = ""
        self._end = threading.Event()
        self._error: Exception | None = None
        self._look()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        self._apply(f"table {TABLE} {{}}\ndelete table {TABLE}\n")
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._end.wait(EVERY):
                self._look()
        except Exception as error:
            self._error = error

    def _look(self) -> None:
        found = _get("pods,namespaces,networkpolicies")
        kinds = {
            kind: [each for each in found if each["kind"] == kind] for kind in ("Pod", "Namespace", "NetworkPolicy")
        }
        pods = [each for each in kinds["Pod"] if "podIP" in each["status"] and not each["spec"].get("hostNetwork")]
        pods = [each for each in pods if each["status"]["phase"] in ("Pending", "Running")]
        namespaces = {each["metadata"]["name"]: labels(each) for each in kinds["Namespace"]}
        self._apply(ruleset(kinds["NetworkPolicy"], pods, namespaces))

    def _apply(self, text: str) -> None:
        if text == self._last:
            return
        for node in self._nodes:
            command = ["docker", "exec", "-i", node, "nft", "-f", "-"]
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
            assert not done.returncode, f"{text}\n{done.stderr}"
        self._last = text


def _get(what: str) -> list[Any]:
    command = ["kubectl", "get", "-A", what, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found: list[Any] = json.loads(done.stdout)["items"]
    return found


def reaches(clients: Kubectl, address: str, port: int) -> bool:
    """Whether the pod `client` is let in there."""
    try:
        clients("exec", "client", "--", "python", "-c", REACH, address, str(port))
    except KubectlFailed:
        return False
    return True


def enforced(clients: Kubectl, within: float = SOON) -> bool:
    """Whether a policy that lets the pod `client` reach nothing does so; the cluster's DNS is what it tries."""
    dns = Kubectl("kube-system").get("service", "kube-dns")["spec"]["clusterIP"]
    assert reaches(clients, dns, 53)
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "client"},
        "spec": {"podSelector": {"matchLabels": {"app": "client"}}, "policyTypes": ["Egress"]},
    }
    clients("apply", "-f", "-", stdin=yaml.safe_dump(policy))
    try:
        end = time.monotonic() + within
        while reaches(clients, dns, 53):
            if time.monotonic() > end:
                return False
        return True
    finally:
        clients("delete", "networkpolicy", "client")


def kind_nodes() -> list[str]:
    """The nodes of the cluster that are containers here."""
    names = [each["metadata"]["name"] for each in _get("nodes")]
    command = ["docker", "inspect", *names]
    try:
        return [] if subprocess.run(command, capture_output=True, timeout=60, check=False).returncode else names
    except FileNotFoundError:
        return []
