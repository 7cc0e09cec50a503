import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epp.pool import watch as module
from epp.pool.apiserver import PODS, ApiError, ApiServer, Kind
from epp.pool.watch import Watch
from tests.support.kubernetes.api_server import FakeApiServer, pod, use
from tests.support.process.waiting import until


class Ip(msgspec.Struct, rename={"ip": "podIP"}):
    ip: str


class Thing(msgspec.Struct):
    status: Ip


class RecordingListener:
    """A listener that keeps what it was called with."""

    def __init__(self) -> None:
        self.changes = 0
        self.troubles: list[tuple[str, str]] = []
        self.refusals: list[str] = []

    def changed(self) -> None:
        self.changes += 1

    def trouble(self, watch: Watch[Any], reason: str, detail: str) -> None:
        self.troubles.append((reason, detail))

    def refused(self, detail: str) -> None:
        self.refusals.append(detail)


def read(raw: bytes) -> str:
    ip = msgspec.json.decode(raw, type=Thing).status.ip
    if ip == "bug":
        raise RuntimeError(ip)
    if ip == "bad":
        raise msgspec.ValidationError(ip)
    return ip


@pytest.fixture
async def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApiServer]:
    monkeypatch.setattr(module, "_SHORTEST_PAUSE", 0.005)
    monkeypatch.setattr(module, "_ABSENT_PAUSE", 0.01)
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 0.02)
    monkeypatch.setattr(module, "_AWAY_PAUSE", 0.02)
    fake = FakeApiServer()
    async with fake.running():
        use(fake.host, tmp_path, monkeypatch)
        yield fake


@asynccontextmanager
async def watched(listener: RecordingListener) -> AsyncIterator[Watch[str]]:
    async with ApiServer() as api, asyncio.TaskGroup() as group:
        watch = Watch(api, PODS, "ns", read, listener, random.Random(1))
        task = group.create_task(watch.run())
        try:
            yield watch
        finally:
            task.cancel()


async def test_it_has_what_was_there_and_follows_what_comes(fake: FakeApiServer) -> None:
    await fake.put("pods", "a", pod("1"))
    listener = RecordingListener()
    async with watched(listener) as watch:
        await until(lambda: watch.synced)
        assert watch.objects() == {"a": "1"}
        await fake.put("pods", "b", pod("2"))
        await fake.put("pods", "a", pod("3"))
        await until(lambda: watch.objects() == {"a": "3", "b": "2"})
        await fake.delete("pods", "a")
        await until(lambda: watch.objects() == {"b": "2"})
    assert (listener.troubles, listener.refusals) == ([], [])


async def test_a_list_in_pages_is_one_list(fake: FakeApiServer) -> None:
    fake.page_size = 2
    for name in "abcde":
        await fake.put("pods", name, pod(name))
    async with watched(RecordingListener()) as watch:
        await until(lambda: watch.synced)
        assert watch.objects() == {name: name for name in "abcde"}
    assert fake.lists == ["pods"] * 3


async def test_a_change_of_what_we_do_not_read_is_no_change(fake: FakeApiServer) -> None:
    await fake.put("pods", "a", pod("1"))
    async with watched(RecordingListener()) as watch:
        await until(lambda: watch.synced)
        revision = watch.revision
        await fake.put("pods", "a", pod("1", ready=False))
        await fake.put("pods", "b", pod("2"))
        await until(lambda: "b" in watch.objects())
        assert watch.revision == revision + 1


async def test_a_watch_that_ends_goes_on_where_it_was(fake: FakeApiServer) -> None:
    async with watched(RecordingListener()) as watch:
        await fake.put("pods", "a", pod("1"))
        await until(lambda: "a" in watch.objects())
        await fake.bookmark("pods")
        await fake.raw("pods", '{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "777"}}}')
        await fake.put("pods", "b", pod("2"))
        await until(lambda: "b" in watch.objects())
        lists = len(fake.lists)
        last = str(fake._version)
        await fake.drop()
        await until(lambda: ("pods", last) in fake.watched_from)
        await fake.put("pods", "c", pod("3"))
        await until(lambda: "c" in watch.objects())
        assert len(fake.lists) == lists


async def test_a_broken_connection_is_made_again_and_nothing_is_missed(fake: FakeApiServer) -> None:
    listener = RecordingListener()
    async with watched(listener) as watch:
        await until(lambda: len(fake.watched_from) == 1)
        await fake.drop(broken=True)
        await fake.put("pods", "a", pod("1"))
        await until(lambda: watch.objects() == {"a": "1"})
    assert (listener.troubles, fake.lists) == ([], ["pods"])


async def test_a_version_too_old_means_a_new_list(fake: FakeApiServer) -> None:
    listener = RecordingListener()
    await fake.put("pods", "a", pod("1"))
    await fake.put("pods", "b", pod("2"))
    async with watched(listener) as watch:
        await until(lambda: watch.synced and len(fake.watched_from) == 1)
        fake.answers["pods"] = 503
        await fake.drop()
        await fake.delete("pods", "a")
        await fake.put("pods", "c", pod("3"))
        fake.compact()
        assert "a" in watch.objects()
        del fake.answers["pods"]
        await until(lambda: watch.objects() == {"b": "2", "c": "3"})
    assert len(fake.lists) == 2
    assert {reason for reason, _ in listener.troubles} <= {"", "kubernetes-away"}


async def test_a_kind_that_is_not_installed_is_none_of_it_until_it_is(fake: FakeApiServer) -> None:
    fake.installed.clear()
    listener = RecordingListener()
    async with watched(listener) as watch:
        await until(lambda: watch.answered)
        assert (watch.synced, watch.objects()) == (False, {})
        await fake.put("pods", "a", pod("1"))
        await until(lambda: watch.objects() == {"a": "1"})
        fake.installed.clear()
        await fake.drop()
        await until(lambda: watch.objects() == {})
    assert listener.troubles == []


async def test_a_refusal_is_reported_once_and_its_end_too(fake: FakeApiServer) -> None:
    fake.answers["pods"] = 403
    listener = RecordingListener()
    async with watched(listener) as watch:
        await until(lambda: watch.answered)
        await until(lambda: watch._failures > 3)
        assert not watch.synced
        expected = "a Role that allows get, list and watch of pods in namespace 'ns'"
        assert listener.troubles == [("kubernetes-forbidden", f"403 pods: no; expected {expected}")]
        del fake.answers["pods"]
        await until(lambda: len(listener.troubles) == 2)
        assert watch.synced
    assert listener.troubles[1] == ("", "")


async def test_a_request_that_is_wrong_is_reported(fake: FakeApiServer) -> None:
    fake.answers["pods"] = 400
    listener = RecordingListener()
    async with watched(listener) as watch:
        await until(lambda: watch.answered)
    assert listener.troubles == [("kubernetes-refused", "pods in namespace 'ns': 400 pods: no")]


async def test_while_the_server_is_away_all_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHORTEST_PAUSE", 0.005)
    monkeypatch.setattr(module, "_AWAY_PAUSE", 0.02)
    fake, listener = FakeApiServer(), RecordingListener()
    await fake.put("pods", "a", pod("1"))
    async with AsyncExitStack() as closing:
        await closing.enter_async_context(fake.running())
        port = int(fake.host.rpartition(":")[2])
        use(fake.host, tmp_path, monkeypatch)
        async with watched(listener) as watch:
            await until(lambda: watch.synced)
            await closing.aclose()
            await until(lambda: watch._failures > 3)
            assert watch.objects() == {"a": "1"}
            assert [reason for reason, _ in listener.troubles] == ["kubernetes-away"]
            async with fake.running(port):
                await fake.put("pods", "b", pod("2"))
                await until(lambda: watch.objects() == {"a": "1", "b": "2"})
    assert [reason for reason, _ in listener.troubles] == ["kubernetes-away", ""]


class Refusing:
    """An API server that fails with these statuses, in turn, the last for ever."""

    def __init__(self, *statuses: int) -> None:
        self._statuses = list(statuses)

    async def page(self, kind: Kind, namespace: str, selector: str, continuation: str) -> bytes:
        raise ApiError(self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0], "no")

    def stream(self, *_: object) -> Any:
        raise AssertionError("nothing was listed")


async def pauses(count: int, *statuses: int) -> list[float]:
    """The longest pause that each of so many rounds asks for, in seconds."""
    watch = Watch(Refusing(*statuses), PODS, "ns", read, RecordingListener(), random.Random(1))
    return [await watch._round() for _ in range(count)]


@pytest.mark.parametrize("status", [0, 429, 500, 503])
async def test_a_server_that_is_away_is_tried_again_within_a_second_for_ever(status: int) -> None:
    seen = await pauses(1000, status)
    assert max(seen) < 1.0
    assert min(seen[10:]) > 0.6  # and not all the time


async def test_a_server_that_refuses_is_asked_rarely_but_soon_after_it_came_back() -> None:
    assert max(await pauses(20, 403)) > 4.0
    for status in (403, 410):
        assert (await pauses(101, *[0] * 100, status))[-1] < 0.5


async def test_an_object_we_cannot_read_leaves_what_we_had(fake: FakeApiServer) -> None:
    listener = RecordingListener()
    await fake.put("pods", "new", {"status": 7})
    await fake.put("pods", "a", pod("1"))
    async with watched(listener) as watch:
        await until(lambda: watch.synced)
        assert len(listener.refusals) == 1
        await fake.put("pods", "a", pod("bad"))
        await fake.put("pods", "b", pod("2"))
        await until(lambda: "b" in watch.objects())
        await fake.put("services", "elsewhere", {})
        fake.compact()
        await fake.drop()
        await until(lambda: len(fake.lists) == 2 and len(listener.refusals) == 4)
        assert watch.objects() == {"a": "1", "b": "2"}
    assert listener.refusals[0].startswith("pods ns/new: ")
    assert listener.refusals[1] == "pods ns/a: bad"


NONSENSE = (
    "{",
    "[]",
    '{"type": "ADDED"}',
    '{"type": "ADDED", "object": []}',
    '{"a": ' + "[" * 9_000,
    '{"type": "\udcff"}',
)


@pytest.mark.parametrize("line", NONSENSE, ids=range(len(NONSENSE)))
async def test_nonsense_from_the_server_counts_as_away(fake: FakeApiServer, line: str) -> None:
    listener = RecordingListener()
    async with watched(listener) as watch:
        await until(lambda: len(fake.watched_from) == 1)
        await fake.raw("pods", line)
        await until(lambda: bool(listener.troubles))
        fake.compact()
        await fake.put("pods", "a", pod("1"))
        await until(lambda: watch.objects() == {"a": "1"})
    assert listener.troubles[0][0] == "kubernetes-away"
    assert "not the JSON" in listener.troubles[0][1]


async def test_an_event_we_do_not_know_is_passed_over(fake: FakeApiServer) -> None:
    listener = RecordingListener()
    async with watched(listener) as watch:
        await until(lambda: len(fake.watched_from) == 1)
        await fake.raw("pods", '{"type": "NEWS", "object": {"metadata": {"name": "a"}}}')
        await fake.put("pods", "b", pod("2"))
        await until(lambda: watch.objects() == {"b": "2"})
    assert listener.troubles == []


async def test_a_bug_of_ours_is_reported_and_survived(fake: FakeApiServer) -> None:
    listener = RecordingListener()
    await fake.put("pods", "a", pod("bug"))
    async with watched(listener) as watch:
        await until(lambda: bool(listener.troubles))
        assert listener.troubles == [("kubernetes-watch-failed", "RuntimeError('bug')")]
        await fake.put("pods", "a", pod("1"))
        await until(lambda: watch.objects() == {"a": "1"})
