"""Tokens are checked once in a while, a bounded number of them; nobody is let in unchecked."""

import asyncio
import base64
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
        self.released = asyncio.Event()
        self.released.set()

    async def authenticate(self, token: str) -> User | None:
        self.asked[token] += 1
        await self.released.wait()
        if self.away:
            raise ApiError(0, "connection refused")
        return User(token) if token in ("reader", "guest") else None

    async def authorized(self, user: User, path: str) -> bool:
        return (user.username, path) == ("reader", "/metrics")


class CheckedAccess:
    def __init__(self) -> None:
        self.now = 0.0
        self.reviewer = Reviewer()
        self.metrics = RecordedMetrics()
        self.access = Access(self.reviewer, self.metrics, lambda: self.now)

    async def status(self, token: str, path: str = "/metrics") -> int:
        return (await self.access.check(f"Bearer {token}", path)).status


@pytest.mark.parametrize("header", ["", "reader", "Basic reader", "Bearer", "Bearer   ", "bearer"])
async def test_without_a_bearer_token_nobody_is_asked(header: str) -> None:
    checked = CheckedAccess()
    verdict = await checked.access.check(header, "/metrics")
    assert (verdict.status, verdict.message) == (
        401,
        "expected an Authorization header with a bearer token of who may get /metrics",
    )
    assert not checked.reviewer.asked


async def test_who_may_and_who_may_not() -> None:
    checked = CheckedAccess()
    assert await checked.status("reader") == 200
    assert (await checked.access.check("bearer reader", "/metrics")).status == 200
    assert await checked.status("reader", "/decisions") == 403
    verdict = await checked.access.check("Bearer guest", "/metrics")
    assert verdict.status == 403
    assert "guest may not get /metrics; it takes a ClusterRole with nonResourceURLs: [/metrics]" in verdict.message
    assert await checked.status("stranger") == 401


async def test_answers_are_kept_for_a_while_and_no_longer() -> None:
    checked = CheckedAccess()
    for _ in range(3):
        assert (await checked.status("reader"), await checked.status("stranger")) == (200, 401)
    assert checked.reviewer.asked == {"reader": 1, "stranger": 1}
    checked.now = REFUSED_S
    assert (await checked.status("reader"), await checked.status("stranger")) == (200, 401)
    assert checked.reviewer.asked == {"reader": 1, "stranger": 2}
    checked.now = ALLOWED_S
    assert await checked.status("reader") == 200
    assert checked.reviewer.asked["reader"] == 2


async def test_while_the_api_server_is_away_only_those_it_knew_are_let_in() -> None:
    checked = CheckedAccess()
    assert await checked.status("reader") == 200
    checked.reviewer.away = True
    assert await checked.status("reader") == 200
    checked.now = ALLOWED_S
    verdict = await checked.access.check("Bearer reader", "/metrics")
    assert verdict.status == 503
    assert verdict.message.endswith(
        "cannot ask the Kubernetes API server whether you may read this: connection refused"
    )
    assert checked.metrics.degradations == [("access-not-checked", "connection refused")]
    assert checked.metrics.going_on() == {"access-not-checked"}
    checked.reviewer.away = False
    assert await checked.status("reader") == 200
    assert checked.metrics.going_on() == set()


async def test_only_so_many_answers_are_kept_and_the_last_used_stay() -> None:
    checked = CheckedAccess()
    assert await checked.status("reader") == 200
    for number in range(KEPT - 1):
        await checked.status(f"stranger {number}")
    assert await checked.status("reader") == 200
    await checked.status("one more")
    assert await checked.status("reader") == 200
    await checked.status("stranger 0")
    assert (checked.reviewer.asked["reader"], checked.reviewer.asked["stranger 0"]) == (1, 2)


async def test_a_flood_of_tokens_is_refused_and_the_loop_goes_on() -> None:
    checked = CheckedAccess()
    checked.reviewer.released.clear()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(checked.status(f"stranger {number}")) for number in range(WAITING)]
        await until(lambda: len(checked.reviewer.asked) == AT_ONCE)
        assert await checked.status("reader") == 503
        checked.reviewer.released.set()
    assert {task.result() for task in tasks} == {401}
    assert await checked.status("reader") == 200


async def test_who_waits_with_the_same_token_is_answered_without_asking() -> None:
    checked = CheckedAccess()
    checked.reviewer.released.clear()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(checked.status("reader")) for _ in range(AT_ONCE + 4)]
        await until(lambda: checked.reviewer.asked["reader"] == AT_ONCE)
        checked.reviewer.released.set()
    assert {task.result() for task in tasks} == {200}
    assert checked.reviewer.asked["reader"] == AT_ONCE  # those under way at once; whoever waited got their answer


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (b"whoever:reader", 200),
        (b":reader", 200),
        (b"whoever: guest ", 403),
        (b"reader", 401),
        (b"reader:", 401),
        (b"\xff:reader", 401),
    ],
)
async def test_a_browsers_password_is_a_token(authorization: bytes, status: int) -> None:
    checked = CheckedAccess()
    header = f"Basic {base64.b64encode(authorization).decode()}"
    assert (await checked.access.check(header, "/metrics")).status == status
    assert (await checked.access.check("Basic not-base64!", "/metrics")).status == 401
