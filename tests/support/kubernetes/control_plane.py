"""A real Kubernetes API server on etcd, on loopback: no kubelets, no controllers, RBAC on, every request audited."""

import base64
import hashlib
import json
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import urllib3

from tooling.laptop.ports import free_ports

_START: Final = 60.0
_NAMES: Final = ("kube-apiserver", "etcd", "kubectl")
_AUDIT: Final = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
"""


class ApiFailed(Exception):
    """The API server answered an administrator's request with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status} {message}")
        self.status = status


class ControlPlane:
    """etcd and kube-apiserver, made in a folder of its own. Programs come from KUBEBUILDER_ASSETS.

    `flags`: more for kube-apiserver.
    """

    def __init__(self, folder: Path, flags: Sequence[str] = ()) -> None:
        self.folder = folder
        self._flags = flags
        self.port, self._etcd_port, peer = free_ports(3)
        self.host = f"https://127.0.0.1:{self.port}"
        self.audit = folder / "audit.log"
        self._programs = _programs()
        self._peer = peer
        self._etcd: subprocess.Popen[bytes] | None = None
        self._api: subprocess.Popen[bytes] | None = None
        _make_keys(folder)
        (folder / "audit.yaml").write_text(_AUDIT)
        self._admin = self._client()

    def start(self) -> None:
        etcd, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._peer}"
        flags = ["--data-dir", str(self.folder / "etcd"), "--unsafe-no-fsync", "--log-level", "error"]
        flags += ["--listen-client-urls", etcd, "--advertise-client-urls", etcd]
        flags += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster"]
        self._etcd = self._spawn("etcd", [*flags, f"default={peer}"])
        self.start_api()

    def start_api(self) -> None:
        """Start the API server and wait until it is ready; on what etcd holds, at the address it always has."""
        at = self.folder
        options = {
            "etcd-servers": f"http://127.0.0.1:{self._etcd_port}",
            "bind-address": "127.0.0.1",
            "advertise-address": "127.0.0.1",
            "secure-port": self.port,
            "tls-cert-file": at / "server.crt",
            "tls-private-key-file": at / "server.key",
            "client-ca-file": at / "ca.crt",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": at / "accounts.pub",
            "service-account-signing-key-file": at / "accounts.key",
            "service-cluster-ip-range": "10.0.0.0/24",
            "authorization-mode": "RBAC",
            # Nobody is there to make each namespace's default service account, without which pods are refused.
            "disable-admission-plugins": "ServiceAccount",
            "audit-policy-file": at / "audit.yaml",
            "audit-log-path": self.audit,
            "v": 0,
        }
        self._api = self._spawn(
            "kube-apiserver", [*(f"--{key}={value}" for key, value in options.items()), *self._flags]
        )
        self._wait_ready(self._api)

    def stop_api(self) -> None:
        """Kill the API server: connections break, etcd stays."""
        if self._api is not None:
            self._api.kill()
            self._api.wait()

    def stop(self) -> None:
        self.stop_api()
        if self._etcd is not None:
            self._etcd.kill()
            self._etcd.wait()
        self._admin.clear()

    def compact(self) -> None:
        """Make etcd forget all versions but one newer than any that was seen."""
        etcd, pool = f"http://127.0.0.1:{self._etcd_port}/v3/kv", urllib3.PoolManager()
        one = base64.b64encode(b"test").decode()
        newest = pool.request("POST", f"{etcd}/put", json={"key": one, "value": one}).json()["header"]["revision"]
        done = pool.request("POST", f"{etcd}/compaction", json={"revision": newest, "physical": True})
        pool.clear()
        if done.status != 200:
            raise ApiFailed(done.status, done.data.decode())

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """An administrator's request; PATCH is a JSON merge patch. ApiFailed if the answer is an error."""
        headers = {"Content-Type": "application/merge-patch+json" if method == "PATCH" else "application/json"}
        data = None if body is None else json.dumps(body).encode()
        answer = self._admin.request(method, self.host + path, body=data, headers=headers, timeout=30, retries=False)
        if answer.status >= 300:
            raise ApiFailed(answer.status, answer.data.decode())
        return answer.json()

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """kubectl as the administrator; its output."""
        command = [str(self._programs["kubectl"]), "--kubeconfig", str(self.kubeconfig()), *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ApiFailed(0, done.stderr)
        return done.stdout

    def define(self, *arguments: str, stdin: str = "") -> None:
        """`kubectl apply` of CustomResourceDefinitions; returns when they are served."""
        self.kubectl("apply", *arguments, stdin=stdin)
        self.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")

    def kubeconfig(self, token: str | None = None) -> Path:
        """A kubeconfig with this token, else the administrator's."""
        at = self.folder
        user = {"token": token} if token else {"client-certificate": str(at / "admin.crt")}
        if not token:
            user["client-key"] = str(at / "admin.key")
        cluster = {"server": self.host, "certificate-authority": str(at / "ca.crt")}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "current-context": "test",
        }
        name = f"token-{hashlib.sha256(token.encode()).hexdigest()[:16]}" if token else "admin"
        path = at / f"{name}.kubeconfig"
        path.write_text(json.dumps(config))
        return path

    def requests_of(self, user: str) -> list[tuple[str, str, int]]:
        """(verb, resource with its group, status) of everything a user asked, from the audit log."""
        found = []
        for line in self.audit.read_text().splitlines():
            event = json.loads(line)
            if event["user"].get("username") == user and (what := event.get("objectRef")):
                resource = ".".join(filter(None, (what["resource"], what.get("apiGroup"))))
                found.append((event["verb"], resource, event.get("responseStatus", {}).get("code", 0)))
        return found

    def _client(self) -> urllib3.PoolManager:
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        context.load_cert_chain(self.folder / "admin.crt", self.folder / "admin.key")
        return urllib3.PoolManager(ssl_context=context, maxsize=8)

    def _spawn(self, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen([str(self._programs[name]), *arguments], stdout=log, stderr=log)

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + _START
        while time.monotonic() < end and process.poll() is None:
            try:
                if self._admin.request("GET", f"{self.host}/readyz", timeout=5, retries=False).status == 200:
                    return
            except urllib3.exceptions.HTTPError:
                pass
            time.sleep(0.1)
        tail = (self.folder / "kube-apiserver.log").read_text()[-2000:]
        raise RuntimeError(f"kube-apiserver did not become ready in {_START:.0f} s:\n{tail}")


def _programs() -> dict[str, Path]:
    folder = Path(os.environ.get("KUBEBUILDER_ASSETS", ""))
    programs = {name: folder / name for name in _NAMES}
    if not os.environ.get("KUBEBUILDER_ASSETS") or not all(path.exists() for path in programs.values()):
        raise RuntimeError(
            "KUBEBUILDER_ASSETS names no directory with kube-apiserver, etcd and kubectl: hack/envtest does"
        )
    return programs


def _make_keys(at: Path) -> None:
    """A certificate authority, the server's certificate, an administrator's, and keys to sign accounts' tokens."""
    openssl = shutil.which("openssl")
    if openssl is None:
        raise RuntimeError("openssl is missing; it makes the certificates of the API server")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=at, check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    run("req", "-x509", *key, "-subj", "/CN=test-ca", "-keyout", "ca.key", "-out", "ca.crt")
    signed = ["-CA", "ca.crt", "-CAkey", "ca.key"]
    for name, subject, extension in (
        ("server", "/CN=kube-apiserver", "subjectAltName=IP:127.0.0.1"),
        ("admin", "/O=system:masters/CN=admin", "extendedKeyUsage=clientAuth"),
    ):
        files = ["-keyout", f"{name}.key", "-out", f"{name}.crt"]
        run("req", "-x509", *key, *signed, "-subj", subject, "-addext", extension, *files)
    run("genrsa", "-out", "accounts.key", "2048")
    run("rsa", "-in", "accounts.key", "-pubout", "-out", "accounts.pub")
