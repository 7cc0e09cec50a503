import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from epp.pool import apiserver
from epp.pool.apiserver import PODS, ApiError, ApiServer, Kind, User, lines
from tests.support.kubernetes.api_server import FakeApiServer, pod, use
from tests.support.process.waiting import until


@pytest.fixture
async def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApiServer]:
    fake = FakeApiServer()
    async with fake.running():
        use(fake.host, tmp_path, monkeypatch)
        yield fake


@pytest.fixture
async def api(fake: FakeApiServer) -> AsyncIterator[ApiServer]:
    async with ApiServer() as api:
        yield api


async def test_a_list_comes_in_pages(fake: FakeApiServer, api: ApiServer) -> None:
    fake.page_size = 2
    for number in range(3):
        await fake.put("pods", f"p{number}", pod(f"10.0.0.{number}"))
    assert api.host == fake.host
    first = json.loads(await api.page(PODS, "ns", "app=x", ""))
    second = json.loads(await api.page(PODS, "ns", "app=x", first["metadata"]["continue"]))
    assert [each["metadata"]["name"] for each in first["items"] + second["items"]] == ["p0", "p1", "p2"]


async def test_the_selector_is_the_servers_work(fake: FakeApiServer, api: ApiServer) -> None:
    await fake.put("pods", "other", pod("10.0.0.1", labels={"app": "y"}))
    page = json.loads(await api.page(PODS, "ns", "app=x", ""))
    assert page["items"] == []


@pytest.mark.parametrize("status", [401, 403, 404, 410, 429, 500, 503])
async def test_a_refusal_brings_its_status_and_the_servers_words(
    fake: FakeApiServer, api: ApiServer, status: int
) -> None:
    fake.answers["things.example.org"] = status
    with pytest.raises(ApiError, match=r"things\.example\.org: no") as error:
        await api.page(Kind("example.org", "v1", "things"), "ns", "", "")
    assert error.value.status == status


async def test_a_server_that_is_not_there_is_an_error_without_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeApiServer()
    async with fake.running():
        use(fake.host, tmp_path, monkeypatch)
    async with ApiServer() as gone:
        with pytest.raises(ApiError, match="refused") as error:
            await gone.page(PODS, "ns", "", "")
    assert error.value.status == 0


async def test_a_list_without_end_is_refused(
    fake: FakeApiServer, api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apiserver, "_LARGEST_ANSWER", 10)
    with pytest.raises(ApiError, match="more than 10 bytes"):
        await api.page(PODS, "ns", "", "")


async def test_a_watch_that_is_left_ends_at_the_server(fake: FakeApiServer, api: ApiServer) -> None:
    await fake.put("pods", "p", pod("10.0.0.1"))
    async with api.stream(PODS, "ns", "", "1", 60) as events:
        assert json.loads(await anext(events))["object"]["metadata"]["name"] == "p"
        assert fake.watching == 1
    await until(lambda: fake.watching == 0)


async def test_closing_ends_a_watch_and_the_next_request_connects_anew(fake: FakeApiServer, api: ApiServer) -> None:
    await fake.put("pods", "p", pod("10.0.0.1"))
    async with api.stream(PODS, "ns", "", "1", 60) as events:
        await anext(events)
        await api.close()
        with pytest.raises(ApiError) as error:
            await anext(events)
        assert error.value.status == 0
    assert json.loads(await api.page(PODS, "ns", "", ""))["items"]


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for each in parts:
        yield each


async def test_lines_are_put_together_from_whatever_comes() -> None:
    found = [line async for line in lines(chunks(b"a", b"b\n\nc\nd", b"\n", b"lost"))]
    assert found == [b"ab", b"c", b"d"]


async def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apiserver, "_LARGEST_EVENT", 10)
    with pytest.raises(ApiError, match="more than 10 bytes"):
        assert [line async for line in lines(chunks(b"x" * 11))]


async def test_a_token_is_somebodys_or_nobodys(fake: FakeApiServer, api: ApiServer) -> None:
    fake.tokens["t"], fake.rights = "ann", {("ann", "/metrics")}
    user = await api.authenticate("t")
    assert user == User("ann", "", ("g",), {"k": ("v",)})
    assert await api.authenticate("forged") is None
    assert await api.authorized(user, "/metrics")
    assert not await api.authorized(user, "/config")


@pytest.mark.parametrize("status", [401, 403, 500])
async def test_a_review_that_is_refused_lets_nobody_in(fake: FakeApiServer, api: ApiServer, status: int) -> None:
    fake.answers["tokenreviews"] = status
    with pytest.raises(ApiError, match="tokenreviews: no") as error:
        await api.authenticate("t")
    assert error.value.status == status
