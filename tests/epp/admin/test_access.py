"""Tokens are checked once in a while, off the loop, a bounded number of them; nobody is let in unchecked."""

import asyncio
import threading
from collections import Counter

import pytest

from epp.admin.access import ALLOWED_S, AT_ONCE, KEPT, REFUSED_S, WAITING, Access
from epp.pool.apiserver import ApiError, User
from tests.support.process.waiting import until
from tests.support.scheduling.degradations import RecordedMetrics


class Reviewer:
    """An API server that knows `reader`, who may get /metrics, and `guest`, who may not."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.away = False
        self.gate = threading.Event()
        self.gate.set()

    def authenticate(self, token: str) -> User | None:
        self.asked[token] += 1
        assert self.gate.wait(20)
        if self.away:
            raise ApiError(0, "connection refused")
        return User(token) if token in ("reader", "guest") else None

    def authorized(self, user: User, path: str) -> bool:
        return (user.username, path) == ("reader", "/metrics")


class Rig:
    def __init__(self) -> None:
        self.now = 0.0
        self.reviewer = Reviewer()
        self.metrics = RecordedMetrics()
        self.access = Access(self.reviewer, self.metrics, lambda: self.now)

    async def status(self, token: str, path: str = "/metrics") -> int:
        return (await self.access.check(f"Bearer {token}", path)).status


@pytest.mark.parametrize("header", ["", "reader", "Basic reader", "Bearer", "Bearer   ", "bearer"])
async def test_without_a_bearer_token_nobody_is_asked(header: str) -> None:
    rig = Rig()
    verdict = await rig.access.check(header, "/metrics")
    assert (verdict.status, verdict.message) == (
        401,
        "expected an Authorization header with a bearer token of who may get /metrics",
    )
    assert not rig.reviewer.asked


async def test_who_may_and_who_may_not() -> None:
    rig = Rig()
    assert await rig.status("reader") == 200
    assert (await rig.access.check("bearer reader", "/metrics")).status == 200
    assert await rig.status("reader", "/decisions") == 403
    verdict = await rig.access.check("Bearer guest", "/metrics")
    assert verdict.status == 403
    assert "guest may not get /metrics; it takes a ClusterRole with nonResourceURLs: [/metrics]" in verdict.message
    assert await rig.status("stranger") == 401


async def test_answers_are_believed_for_a_while_and_no_longer() -> None:
    rig = Rig()
    for _ in range(3):
        assert (await rig.status("reader"), await rig.status("stranger")) == (200, 401)
    assert rig.reviewer.asked == {"reader": 1, "stranger": 1}
    rig.now = REFUSED_S
    assert (await rig.status("reader"), await rig.status("stranger")) == (200, 401)
    assert rig.reviewer.asked == {"reader": 1, "stranger": 2}
    rig.now = ALLOWED_S
    assert await rig.status("reader") == 200
    assert rig.reviewer.asked["reader"] == 2


async def test_while_the_api_server_is_away_only_those_it_knew_are_let_in() -> None:
    rig = Rig()
    assert await rig.status("reader") == 200
    rig.reviewer.away = True
    assert await rig.status("reader") == 200
    rig.now = ALLOWED_S
    verdict = await rig.access.check("Bearer reader", "/metrics")
    assert verdict.status == 503
    assert verdict.message.endswith(
        "cannot ask the Kubernetes API server whether you may read this: connection refused"
    )
    assert rig.metrics.degradations == [("access-not-checked", "connection refused")]
    assert rig.metrics.going_on() == {"access-not-checked"}
    rig.reviewer.away = False
    assert await rig.status("reader") == 200
    assert rig.metrics.going_on() == set()


async def test_only_so_many_answers_are_kept_and_the_last_used_stay() -> None:
    rig = Rig()
    assert await rig.status("reader") == 200
    for number in range(KEPT - 1):
        await rig.status(f"stranger {number}")
    assert await rig.status("reader") == 200
    await rig.status("one more")
    assert await rig.status("reader") == 200
    await rig.status("stranger 0")
    assert (rig.reviewer.asked["reader"], rig.reviewer.asked["stranger 0"]) == (1, 2)


async def test_a_flood_of_tokens_is_refused_and_the_loop_goes_on() -> None:
    rig = Rig()
    rig.reviewer.gate.clear()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(rig.status(f"stranger {number}")) for number in range(WAITING)]
        await until(lambda: len(rig.reviewer.asked) == AT_ONCE)
        assert await rig.status("reader") == 503
        rig.reviewer.gate.set()
    assert {task.result() for task in tasks} == {401}
    assert await rig.status("reader") == 200


async def test_who_waits_with_the_same_token_is_answered_without_asking() -> None:
    rig = Rig()
    rig.reviewer.gate.clear()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(rig.status("reader")) for _ in range(AT_ONCE + 4)]
        await until(lambda: rig.reviewer.asked["reader"] == AT_ONCE)
        rig.reviewer.gate.set()
    assert {task.result() for task in tasks} == {200}
    assert rig.reviewer.asked["reader"] == AT_ONCE  # those under way at once; whoever waited was told
