"""Whether NetworkPolicies count in a cluster, tried from its pod `client`."""

import time

import yaml

from tests.support.kubernetes.kubectl import Kubectl, KubectlFailed

REACH = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"
SOON = 10.0
"""Seconds in which a network enforces a policy that is new, if it does at all."""


def reaches(clients: Kubectl, address: str, port: int) -> bool:
    """Whether the pod `client` is let in there."""
    try:
        clients("exec", "client", "--", "python", "-c", REACH, address, str(port))
    except KubectlFailed:
        return False
    return True


def enforced(clients: Kubectl) -> bool:
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
        end = time.monotonic() + SOON
        while reaches(clients, dns, 53):
            if time.monotonic() > end:
                return False
        return True
    finally:
        clients("delete", "networkpolicy", "client")
