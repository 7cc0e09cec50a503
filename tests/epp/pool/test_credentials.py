import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epp.errors import ConfigError
from epp.pool.apiserver import PODS, ApiServer
from epp.pool.credentials import Credentials
from tests.support.kubernetes.api_server import FakeApiServer, use


def test_without_credentials_one_sentence_says_what_is_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no Kubernetes credentials: .*; expected KUBECONFIG, a pod's") as error:
        Credentials(None)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, "", "[", "{}", "contexts: 7", "current-context: x"])
def test_a_kubeconfig_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    path = tmp_path / "its-name"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(ConfigError, match="its-name"):
        Credentials(None)


def test_in_a_pod_the_service_account_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(ConfigError, match="the pod's service account: "):
        Credentials(None)


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.suppress(KeyError):
        monkeypatch.delitem(sys.modules, "kubernetes")
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ConfigError, match="extra `kube`"):
        Credentials(None)


def test_a_process_that_needs_no_kubernetes_does_not_import_the_client() -> None:
    program = "import sys, epp.app; print([name for name in sys.modules if name.partition('.')[0] == 'kubernetes'])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


def test_a_kubeconfig_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use("http://127.0.0.1:1", tmp_path, monkeypatch)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    assert Credentials(tmp_path / "kubeconfig").host == "http://127.0.0.1:1"
    with pytest.raises(ConfigError, match="nowhere"):
        Credentials(tmp_path / "nowhere")


Change = Callable[[dict[str, Any]], None]


def rewrite(path: Path, change: Change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("proxy", "passed", "used"),
    [
        ("http://proxy.example:3128", "", "http://proxy.example:3128"),
        ("http://proxy.example:3128", "10.0.0.0/8,.example.org,127.0.0.1", None),
        ("", "", None),
    ],
)
def test_a_proxy_is_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: str, passed: str, used: str | None
) -> None:
    use("https://127.0.0.1:1", tmp_path, monkeypatch)
    for name, value in (("HTTPS_PROXY", proxy), ("NO_PROXY", passed)):
        monkeypatch.delenv(name.lower(), raising=False)
        monkeypatch.setenv(name, value)
    found = Credentials(None)
    assert (found.proxy, found.configuration().proxy) == (used, used)


def test_a_proxy_of_the_kubeconfig_counts_and_socks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use("https://192.0.2.1:1", tmp_path, monkeypatch)
    path = tmp_path / "kubeconfig"
    rewrite(path, lambda content: content["clusters"][0]["cluster"].update({"proxy-url": "http://192.0.2.2:1"}))
    assert Credentials(None).proxy == "http://192.0.2.2:1"
    rewrite(path, lambda content: content["clusters"][0]["cluster"].update({"proxy-url": "socks5://192.0.2.2:1"}))
    with pytest.raises(ConfigError, match="has scheme 'socks5'; expected http or https"):
        Credentials(None)


EXEC = """#!/bin/sh
printf x >> {count}
[ -e {broken} ] && exit 1
token=token-$(wc -c < {count} | tr -d ' ')
echo '{{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status":' \\
  '{{"token": "'$token'", "expirationTimestamp": "2020-01-01T00:00:00Z"}}}}'
"""


async def test_a_token_of_an_exec_plugin_is_renewed_when_it_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, broken, program = tmp_path / "count", tmp_path / "broken", tmp_path / "plugin"
    program.write_text(EXEC.format(count=count, broken=broken))
    program.chmod(0o755)
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(program), "interactiveMode": "Never"}
    fake = FakeApiServer()
    async with fake.running():
        use(fake.host, tmp_path, monkeypatch)
        rewrite(tmp_path / "kubeconfig", lambda content: content["users"][0].update({"user": {"exec": plugin}}))
        async with ApiServer() as api:
            await api.page(PODS, "ns", "", "")
            await api.page(PODS, "ns", "", "")
            assert fake.authorizations == ["Bearer token-2", "Bearer token-3"]
            broken.touch()  # the last token is sent, and the API server says whether it is still good
            await api.page(PODS, "ns", "", "")
            assert fake.authorizations[2] == "Bearer token-3"


async def test_a_service_accounts_token_is_read_again_each_minute_whatever_the_time_of_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kubernetes.config import incluster_config

    token, authority = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("one")
    authority.write_text("a certificate")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    now = 1000.0
    credentials = Credentials(None, lambda: now)
    configuration = credentials.configuration()
    assert (credentials.host, configuration.ssl_ca_cert) == ("https://10.96.0.1:443", str(authority))

    async def sent() -> str:
        return str((await configuration.auth_settings())["BearerToken"]["value"])

    token.write_text("two")
    now += 59
    assert await sent() == "bearer one"
    now += 1
    assert await sent() == "bearer two"
    token.write_text("three")
    assert await sent() == "bearer two"
    token.unlink()
    now += 60
    with pytest.raises(ConfigError, match=r"the Kubernetes credentials cannot be renewed: .*token"):
        await sent()
    token.write_text("four")  # written anew by the kubelet
    assert await sent() == "bearer four"
