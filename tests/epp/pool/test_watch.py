import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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


class Received:
    """A listener that remembers."""

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
    monkeypatch.setattr(module, "_BREATH", 0.005)
    monkeypatch.setattr(module, "_ABSENT_PAUSE", 0.01)
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 0.02)
    monkeypatch.setattr(module, "_AWAY_PAUSE", 0.02)
    fake = FakeApiServer()
    async with fake.running():
        use(fake.host, tmp_path, monkeypatch)
        yield fake


@asynccontextmanager
async def watched(received: Received) -> AsyncIterator[Watch[str]]:
    watch = Watch(ApiServer(), PODS, "ns", read, received, random.Random(1))
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
        await asyncio.to_thread(watch.join, 5)
        assert not watch._thread.is_alive()


async def test_it_has_what_was_there_and_follows_what_comes(fake: FakeApiServer) -> None:
    await fake.put("pods", "a", pod("1"))
    received = Received()
    async with watched(received) as watch:
        await until(lambda: watch.synced)
        assert watch.objects() == {"a": "1"}
        await fake.put("pods", "b", pod("2"))
        await fake.put("pods", "a", pod("3"))
        await until(lambda: watch.objects() == {"a": "3", "b": "2"})
        await fake.delete("pods", "a")
        await until(lambda: watch.objects() == {"b": "2"})
    assert (received.troubles, received.refusals) == ([], [])


async def test_a_list_in_pages_is_one_list(fake: FakeApiServer) -> None:
    fake.page_size = 2
    for name in "abcde":
        await fake.put("pods", name, pod(name))
    async with watched(Received()) as watch:
        await until(lambda: watch.synced)
        assert watch.objects() == {name: name for name in "abcde"}
    assert fake.lists == ["pods"] * 3


async def test_a_change_of_what_we_do_not_read_is_no_change(fake: FakeApiServer) -> None:
    await fake.put("pods", "a", pod("1"))
    async with watched(Received()) as watch:
        await until(lambda: watch.synced)
        revision = watch.revision
        await fake.put("pods", "a", pod("1", ready=False))
        await fake.put("pods", "b", pod("2"))
        await until(lambda: "b" in watch.objects())
        assert watch.revision == revision + 1


async def test_a_watch_that_ends_goes_on_where_it_was(fake: FakeApiServer) -> None:
    async with watched(Received()) as watch:
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
    received = Received()
    async with watched(received) as watch:
        await until(lambda: len(fake.watched_from) == 1)
        await fake.drop(broken=True)
        await fake.put("pods", "a", pod("1"))
        await until(lambda: watch.objects() == {"a": "1"})
    assert (received.troubles, fake.lists) == ([], ["pods"])


async def test_a_version_too_old_means_a_new_list(fake: FakeApiServer) -> None:
    received = Received()
    await fake.put("pods", "a", pod("1"))
    await fake.put("pods", "b", pod("2"))
    async with watched(received) as watch:
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
    assert {reason for reason, _ in received.troubles} <= {"", "kubernetes-away"}


async def test_a_kind_that_is_not_installed_is_none_of_it_until_it_is(fake: FakeApiServer) -> None:
    fake.installed.clear()
    received = Received()
    async with watched(received) as watch:
        await until(lambda: watch.answered)
        assert (watch.synced, watch.objects()) == (False, {})
        await fake.put("pods", "a", pod("1"))
        await until(lambda: watch.objects() == {"a": "1"})
        fake.installed.clear()
        await fake.drop()
        await until(lambda: watch.objects() == {})
    assert received.troubles == []


async def test_a_refusal_is_reported_once_and_taken_back(fake: FakeApiServer) -> None:
    fake.answers["pods"] = 403
    received = Received()
    async with watched(received) as watch:
        await until(lambda: watch.answered)
        await until(lambda: watch._failures > 3)
        assert not watch.synced
        assert received.troubles == [("kubernetes-forbidden", "403 pods: no")]
        del fake.answers["pods"]
        await until(lambda: len(received.troubles) == 2)
        assert watch.synced
    assert received.troubles[1] == ("", "")


async def test_what_we_ask_wrongly_is_said(fake: FakeApiServer) -> None:
    fake.answers["pods"] = 400
    received = Received()
    async with watched(received) as watch:
        await until(lambda: watch.answered)
    assert received.troubles == [("kubernetes-refused", "pods in namespace 'ns': 400 pods: no")]


async def test_while_the_server_is_away_all_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BREATH", 0.005)
    monkeypatch.setattr(module, "_AWAY_PAUSE", 0.02)
    fake, received = FakeApiServer(), Received()
    await fake.put("pods", "a", pod("1"))
    async with fake.running():
        port = int(fake.host.rpartition(":")[2])
        use(fake.host, tmp_path, monkeypatch)
        watch = Watch(ApiServer(), PODS, "ns", read, received, random.Random(1))
        watch.start()
        await until(lambda: watch.synced)
    await until(lambda: watch._failures > 3)
    assert watch.objects() == {"a": "1"}
    assert [reason for reason, _ in received.troubles] == ["kubernetes-away"]
    async with fake.running(port):
        await fake.put("pods", "b", pod("2"))
        await until(lambda: watch.objects() == {"a": "1", "b": "2"})
        watch.stop()
        await asyncio.to_thread(watch.join, 5)
    assert [reason for reason, _ in received.troubles] == ["kubernetes-away", ""]


class Pauses:
    """Instead of a watch's `_stopped`: notes for how long the watch would have paused, and stops it in the end."""

    def __init__(self, pauses: int) -> None:
        self.seen: list[float] = []
        self._left = pauses

    def is_set(self) -> bool:
        return len(self.seen) >= self._left

    def wait(self, seconds: float) -> None:
        self.seen.append(seconds)


class Refusing:
    """An API server that fails with these statuses, in turn, the last for ever."""

    def __init__(self, *statuses: int) -> None:
        self._statuses = list(statuses)

    def page(self, kind: Kind, namespace: str, selector: str, continuation: str) -> bytes:
        raise ApiError(self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0], "no")

    def stream(self, *_: object) -> Any:
        raise AssertionError("nothing was listed")


def pauses(count: int, *statuses: int) -> list[float]:
    watch = Watch(Refusing(*statuses), PODS, "ns", read, Received(), random.Random(1))
    watch._stopped = pauses = Pauses(count)  # type: ignore[assignment]
    watch._run()
    return pauses.seen


@pytest.mark.parametrize("status", [0, 429, 500, 503])
def test_a_server_that_is_away_is_tried_again_within_a_second_for_ever(status: int) -> None:
    seen = pauses(1000, status)
    assert max(seen) < 1.0
    assert min(seen[10:]) > 0.3  # and not all the time


def test_a_server_that_says_no_is_left_in_peace_but_not_as_soon_as_it_is_back() -> None:
    assert max(pauses(20, 403)) > 2.0
    for status in (403, 410):
        assert pauses(101, *[0] * 100, status)[-1] < 0.5


async def test_an_object_we_cannot_read_leaves_what_we_had(fake: FakeApiServer) -> None:
    received = Received()
    await fake.put("pods", "new", {"status": 7})
    await fake.put("pods", "a", pod("1"))
    async with watched(received) as watch:
        await until(lambda: watch.synced)
        assert len(received.refusals) == 1
        await fake.put("pods", "a", pod("bad"))
        await fake.put("pods", "b", pod("2"))
        await until(lambda: "b" in watch.objects())
        await fake.put("services", "elsewhere", {})
        fake.compact()
        await fake.drop()
        await until(lambda: len(fake.lists) == 2 and len(received.refusals) == 4)
        assert watch.objects() == {"a": "1", "b": "2"}
    assert received.refusals[0].startswith("pods ns/new: ")
    assert received.refusals[1] == "pods ns/a: bad"


NONSENSE = ("{", "[]", '{"type": "ADDED"}', '{"type": "ADDED", "object": []}', '{"a": ' + "[" * 9_000)


@pytest.mark.parametrize("line", NONSENSE, ids=range(len(NONSENSE)))
async def test_nonsense_from_the_server_counts_as_away(fake: FakeApiServer, line: str) -> None:
    received = Received()
    async with watched(received) as watch:
        await until(lambda: len(fake.watched_from) == 1)
        await fake.raw("pods", line)
        await until(lambda: bool(received.troubles))
        fake.compact()
        await fake.put("pods", "a", pod("1"))
        await until(lambda: watch.objects() == {"a": "1"})
    assert received.troubles[0][0] == "kubernetes-away"
    assert "not the JSON" in received.troubles[0][1]


async def test_an_event_we_do_not_know_is_passed_over(fake: FakeApiServer) -> None:
    received = Received()
    async with watched(received) as watch:
        await until(lambda: len(fake.watched_from) == 1)
        await fake.raw("pods", '{"type": "NEWS", "object": {"metadata": {"name": "a"}}}')
        await fake.put("pods", "b", pod("2"))
        await until(lambda: watch.objects() == {"b": "2"})
    assert received.troubles == []


async def test_a_bug_of_ours_is_reported_and_outlived(fake: FakeApiServer) -> None:
    received = Received()
    await fake.put("pods", "a", pod("bug"))
    async with watched(received) as watch:
        await until(lambda: bool(received.troubles))
        assert received.troubles == [("kubernetes-watch-failed", "RuntimeError('bug')")]
        await fake.put("pods", "a", pod("1"))
        await until(lambda: watch.objects() == {"a": "1"})
