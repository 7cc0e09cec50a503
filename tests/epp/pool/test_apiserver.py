import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from epp.errors import ConfigError
from epp.pool import apiserver
from epp.pool.apiserver import PODS, ApiError, ApiServer, Kind, Stream, User
from tests.support.kubernetes.api_server import FakeApiServer, pod, use


@pytest.fixture
async def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApiServer]:
    fake = FakeApiServer()
    async with fake.running():
        use(fake.host, tmp_path, monkeypatch)
        yield fake


async def test_a_list_comes_in_pages(fake: FakeApiServer) -> None:
    fake.page_size = 2
    for number in range(3):
        await fake.put("pods", f"p{number}", pod(f"10.0.0.{number}"))
    api = ApiServer()
    assert api.host == fake.host
    first = json.loads(await asyncio.to_thread(api.page, PODS, "ns", "app=x", ""))
    second = json.loads(await asyncio.to_thread(api.page, PODS, "ns", "app=x", first["metadata"]["continue"]))
    assert [each["metadata"]["name"] for each in first["items"] + second["items"]] == ["p0", "p1", "p2"]


async def test_the_selector_is_the_servers_work(fake: FakeApiServer) -> None:
    await fake.put("pods", "other", pod("10.0.0.1", labels={"app": "y"}))
    page = json.loads(await asyncio.to_thread(ApiServer().page, PODS, "ns", "app=x", ""))
    assert page["items"] == []


@pytest.mark.parametrize("status", [401, 403, 404, 410, 429, 500, 503])
async def test_a_refusal_brings_its_status_and_the_servers_words(fake: FakeApiServer, status: int) -> None:
    fake.answers["things.example.org"] = status
    with pytest.raises(ApiError, match=r"things\.example\.org: no") as error:
        await asyncio.to_thread(ApiServer().page, Kind("example.org", "v1", "things"), "ns", "", "")
    assert error.value.status == status


async def test_a_server_that_is_not_there_is_an_error_without_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeApiServer()
    async with fake.running():
        use(fake.host, tmp_path, monkeypatch)
    with pytest.raises(ApiError, match="refused") as error:
        await asyncio.to_thread(ApiServer().page, PODS, "ns", "", "")
    assert error.value.status == 0


async def test_a_list_without_end_is_refused(fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apiserver, "_LARGEST_ANSWER", 10)
    with pytest.raises(ApiError, match="more than 10 bytes"):
        await asyncio.to_thread(ApiServer().page, PODS, "ns", "", "")


async def test_a_watch_can_be_ended_from_another_thread(fake: FakeApiServer) -> None:
    api, opened, lines, ends = ApiServer(), threading.Event(), [], []
    streams: list[Stream] = []

    def read() -> None:
        with api.stream(PODS, "ns", "", "1", 60) as stream:
            streams.append(stream)
            try:
                for line in stream.lines():
                    lines.append(json.loads(line)["object"]["metadata"]["name"])
                    opened.set()
            except ApiError as error:
                ends.append(error.status)

    thread = threading.Thread(target=read)
    thread.start()
    await fake.put("pods", "p", pod("10.0.0.1"))
    assert await asyncio.to_thread(opened.wait, 5)
    streams[0].abort()
    await asyncio.to_thread(thread.join, 5)
    assert not thread.is_alive()
    assert lines == ["p"]
    assert set(ends) <= {0}
    streams[0].abort()


class Chunks:
    def __init__(self, *chunks: bytes) -> None:
        self._chunks = chunks

    def stream(self, amount: int) -> tuple[bytes, ...]:
        return self._chunks


def test_lines_are_put_together_from_whatever_comes() -> None:
    assert list(Stream(Chunks(b"a", b"b\n\nc\nd", b"\n", b"lost")).lines()) == [b"ab", b"c", b"d"]


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apiserver, "_LARGEST_EVENT", 10)
    with pytest.raises(ApiError, match="more than 10 bytes"):
        list(Stream(Chunks(b"x" * 11)).lines())


def test_without_credentials_one_sentence_says_what_is_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no Kubernetes credentials: .*; expected KUBECONFIG, a pod's") as error:
        ApiServer()
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
        ApiServer()


def test_in_a_pod_the_service_account_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(ConfigError, match="the pod's service account: "):
        ApiServer()


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.suppress(KeyError):
        monkeypatch.delitem(sys.modules, "kubernetes")
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ConfigError, match="extra `kube`"):
        ApiServer()


async def test_a_token_is_somebodys_or_nobodys(fake: FakeApiServer) -> None:
    fake.tokens["t"], fake.rights = "ann", {("ann", "/metrics")}
    api = ApiServer()
    user = await asyncio.to_thread(api.authenticate, "t")
    assert user == User("ann", "", ("g",), {"k": ("v",)})
    assert await asyncio.to_thread(api.authenticate, "forged") is None
    assert await asyncio.to_thread(api.authorized, user, "/metrics")
    assert not await asyncio.to_thread(api.authorized, user, "/config")


@pytest.mark.parametrize("status", [401, 403, 500])
async def test_a_review_that_is_refused_lets_nobody_in(fake: FakeApiServer, status: int) -> None:
    fake.answers["tokenreviews"] = status
    with pytest.raises(ApiError, match="tokenreviews: no") as error:
        await asyncio.to_thread(ApiServer().authenticate, "t")
    assert error.value.status == status


async def test_a_kubeconfig_may_be_named(fake: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    assert ApiServer(tmp_path / "kubeconfig").host == fake.host
    with pytest.raises(ConfigError, match="nowhere"):
        ApiServer(tmp_path / "nowhere")
