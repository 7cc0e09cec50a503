"""Tokens are checked once in a while, a bounded number of them; nobody is let in unchecked."""

import asyncio
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
        self.gate = asyncio.Event()
        self.gate.set()

    async def authenticate(self, token: str) -> User | None:
        self.asked[token] += 1
        await self.gate.wait()
        if self.away:
            raise ApiError(0, "connection refused")
        return User(token) if token in ("reader", "guest") else None

    async def authorized(self, user: User, path: str) -> bool:
        return (user.username, path) == ("reader", "/metrics")


class House:
    def __init__(self) -> None:
        self.now = 0.0
        self.reviewer = Reviewer()
        self.metrics = RecordedMetrics()
        self.access = Access(self.reviewer, self.metrics, lambda: self.now)

    async def status(self, token: str, path: str = "/metrics") -> int:
        return (await self.access.check(f"Bearer {token}", path)).status


@pytest.mark.parametrize("header", ["", "reader", "Basic reader", "Bearer", "Bearer   ", "bearer"])
async def test_without_a_bearer_token_nobody_is_asked(header: str) -> None:
    house = House()
    verdict = await house.access.check(header, "/metrics")
    assert (verdict.status, verdict.message) == (
        401,
        "expected an Authorization header with a bearer token of who may get /metrics",
    )
    assert not house.reviewer.asked


async def test_who_may_and_who_may_not() -> None:
    house = House()
    assert await house.status("reader") == 200
    assert (await house.access.check("bearer reader", "/metrics")).status == 200
    assert await house.status("reader", "/decisions") == 403
    verdict = await house.access.check("Bearer guest", "/metrics")
    assert verdict.status == 403
    assert "guest may not get /metrics; it takes a ClusterRole with nonResourceURLs: [/metrics]" in verdict.message
    assert await house.status("stranger") == 401


async def test_answers_are_believed_for_a_while_and_no_longer() -> None:
    house = House()
    for _ in range(3):
        assert (await house.status("reader"), await house.status("stranger")) == (200, 401)
    assert house.reviewer.asked == {"reader": 1, "stranger": 1}
    house.now = REFUSED_S
    assert (await house.status("reader"), await house.status("stranger")) == (200, 401)
    assert house.reviewer.asked == {"reader": 1, "stranger": 2}
    house.now = ALLOWED_S
    assert await house.status("reader") == 200
    assert house.reviewer.asked["reader"] == 2


async def test_while_the_api_server_is_away_only_those_it_knew_are_let_in() -> None:
    house = House()
    assert await house.status("reader") == 200
    house.reviewer.away = True
    assert await house.status("reader") == 200
    house.now = ALLOWED_S
    verdict = await house.access.check("Bearer reader", "/metrics")
    assert verdict.status == 503
    assert verdict.message.endswith(
        "cannot ask the Kubernetes API server whether you may read this: connection refused"
    )
    assert house.metrics.degradations == [("access-not-checked", "connection refused")]
    assert house.metrics.going_on() == {"access-not-checked"}
    house.reviewer.away = False
    assert await house.status("reader") == 200
    assert house.metrics.going_on() == set()


async def test_only_so_many_answers_are_kept_and_the_last_used_stay() -> None:
    house = House()
    assert await house.status("reader") == 200
    for number in range(KEPT - 1):
        await house.status(f"stranger {number}")
    assert await house.status("reader") == 200
    await house.status("one more")
    assert await house.status("reader") == 200
    await house.status("stranger 0")
    assert (house.reviewer.asked["reader"], house.reviewer.asked["stranger 0"]) == (1, 2)


async def test_a_flood_of_tokens_is_refused_and_the_loop_goes_on() -> None:
    house = House()
    house.reviewer.gate.clear()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(house.status(f"stranger {number}")) for number in range(WAITING)]
        await until(lambda: len(house.reviewer.asked) == AT_ONCE)
        assert await house.status("reader") == 503
        house.reviewer.gate.set()
    assert {task.result() for task in tasks} == {401}
    assert await house.status("reader") == 200


async def test_who_waits_with_the_same_token_is_told_without_asking() -> None:
    house = House()
    house.reviewer.gate.clear()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(house.status("reader")) for _ in range(AT_ONCE + 4)]
        await until(lambda: house.reviewer.asked["reader"] == AT_ONCE)
        house.reviewer.gate.set()
    assert {task.result() for task in tasks} == {200}
    assert house.reviewer.asked["reader"] == AT_ONCE  # those under way at once; whoever waited was told
