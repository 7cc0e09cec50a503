import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.parsing.parser import Parser, Rules
from epp.parsing.request import NO_OBJECTIVE, Objective, RawRequest, Slo
from epp.pool.store import Endpoint, Load, Pool, PoolState, Rewrite, Target
from tests.support.process.waiting import until


def endpoint(name: str, address: str, **labels: str) -> Endpoint:
    return Endpoint(name, address, labels)


def pool_of(*addresses: str) -> Pool:
    pool = Pool("p", random=random.Random(1))
    pool.replace(endpoint(f"e{i}", address) for i, address in enumerate(addresses))
    return pool


def test_an_unchanged_server_keeps_its_endpoint_and_its_load() -> None:
    pool = pool_of("10.0.0.1:8000", "10.0.0.2:8000")
    first, second = pool.endpoints
    first.load = Load(waiting=4)
    pool.replace([endpoint("e1", "10.0.0.2:8000"), endpoint("e0", "10.0.0.1:8000")])
    assert pool.endpoints == (second, first)
    assert first.load.waiting == 4


def test_listeners_hear_of_removals_then_additions_with_the_new_tuple_in_place() -> None:
    pool = pool_of("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
    received: list[tuple[str, str, int]] = []
    pool.on_removed.append(lambda e: received.append(("removed", e.name, len(pool.endpoints))))
    pool.on_added.append(lambda e: received.append(("added", e.name, len(pool.endpoints))))
    pool.replace(
        [
            endpoint("e0", "10.0.0.1:8000"),
            endpoint("e1", "10.0.0.2:9000"),
            endpoint("e2", "10.0.0.3:8000", role="decode"),
            endpoint("e3", "10.0.0.4:8000"),
        ]
    )
    changed = [("removed", "e1"), ("removed", "e2"), ("added", "e1"), ("added", "e2"), ("added", "e3")]
    assert received == [(what, name, 4) for what, name in changed]


def test_listeners_hear_when_endpoints_come_into_a_pool_that_had_none() -> None:
    pool = Pool("p", random=random.Random(1))
    filled: list[int] = []
    pool.on_filled.append(lambda: filled.append(len(pool.endpoints)))
    first, second = endpoint("e0", "10.0.0.1:8000"), endpoint("e1", "10.0.0.2:8000")
    pool.replace([first])
    assert filled == [], "those of the first state may have been there for long"
    for endpoints in ([first, second], [second], [], [first, second], [], []):
        pool.replace(endpoints)
    assert filled == [2]
    late = Pool("late", random=random.Random(1))
    late.on_filled.append(lambda: filled.append(len(late.endpoints)))
    late.replace([])
    late.replace([first])
    assert filled == [2, 1]


@pytest.mark.parametrize("second", [("e0", "10.0.0.9:1"), ("e9", "10.0.0.1:8000")])
def test_endpoints_with_the_same_name_or_address_are_refused_and_nothing_changes(second: tuple[str, str]) -> None:
    pool = pool_of("10.0.0.1:8000")
    before = pool.endpoints
    with pytest.raises(ValueError, match="names and addresses of their own"):
        pool.replace([endpoint("e0", "10.0.0.1:8000"), endpoint(*second)])
    assert pool.endpoints is before


def ranks(name: str, address: str, size: int) -> list[Endpoint]:
    return [Endpoint(f"{name}-rank-{rank}", address, rank=rank) for rank in range(size)]


def test_ranks_of_one_server_share_its_address() -> None:
    pool = Pool("p", random=random.Random(1))
    one, two = ranks("a", "10.0.0.1:8000", 12), ranks("b", "[2001:db8::1]:8000", 2)
    pool.replace([*sorted(one, key=lambda each: each.name), *reversed(two), endpoint("c", "10.0.0.3:8000")])
    assert pool.ranks_at("10.0.0.1:8000") == one
    assert pool.ranks_at("[2001:0db8::1]:8000") == two
    assert pool.ranks_at("10.0.0.9:8000") == ()
    assert [pool.endpoint_at("10.0.0.1:8000", rank) for rank in (None, 0, 11, 12)] == [one[0], one[0], one[11], one[0]]
    assert pool.endpoint_at("10.0.0.3:8000", 1) is pool.endpoints[-1]
    for subset in (("10.0.0.1:8000",), ("10.0.0.1",)):
        assert set(pool.candidates(subset)) == set(one)
    before = pool.endpoints
    pool.replace([*two, *one])
    assert set(pool.endpoints) < set(before)


@pytest.mark.parametrize(
    "found",
    [
        [Endpoint("a", "10.0.0.1:1", rank=1)],
        [Endpoint("a", "10.0.0.1:1", rank=0), Endpoint("b", "10.0.0.1:1", rank=2)],
        [Endpoint("a", "10.0.0.1:1", rank=0), Endpoint("b", "10.0.0.1:1", rank=0)],
        [Endpoint("a", "10.0.0.1:1"), Endpoint("b", "10.0.0.1:1", rank=1)],
    ],
)
def test_a_server_without_one_of_its_ranks_is_refused(found: list[Endpoint]) -> None:
    with pytest.raises(ValueError, match="names and addresses of their own"):
        Pool("p", random=random.Random(1)).replace(found)


def test_without_a_subset_nothing_is_copied() -> None:
    pool = pool_of("10.0.0.1:8000")
    assert pool.candidates(None) is pool.endpoints


@pytest.mark.parametrize(
    ("subset", "names"),
    [
        ((), []),
        (("10.0.0.1:8000",), ["e0"]),
        ((" 10.0.0.1:8000 ",), ["e0"]),
        (("10.0.0.1:8001", "10.0.0.1:8000"), ["e0", "e1"]),
        (("10.0.0.1",), ["e0", "e1"]),
        (("10.0.0.1:8009", "10.0.0.9", "nonsense", "", "[", ":", "[::1"), []),
        (("[2001:db8::1]:8000",), ["e2"]),
        (("[2001:DB8:0::1]:8000",), ["e2"]),
        (("2001:db8::1",), ["e2", "e3"]),
        (("[2001:db8::1]",), ["e2", "e3"]),
        (("2001:db8::1:8000",), ["e2"]),
        (("::ffff:10.0.0.1",), ["e0", "e1"]),
        (("10.0.0.1", "10.0.0.1:8000", "2001:db8::1"), ["e0", "e1", "e2", "e3"]),
    ],
)
def test_subsets_name_endpoints_in_every_spelling(subset: tuple[str, ...], names: list[str]) -> None:
    pool = pool_of("10.0.0.1:8000", "10.0.0.1:8001", "[2001:db8::1]:8000", "[2001:db8::1]:8001")
    assert [each.name for each in pool.candidates(subset)] == names


@given(st.lists(st.text(max_size=30), max_size=5))
def test_no_subset_makes_it_raise(subset: list[str]) -> None:
    assert pool_of("10.0.0.1:8000", "[::1]:8000").candidates(tuple(subset)) is not None


def test_an_address_is_found_however_it_is_spelt() -> None:
    pool = pool_of("10.0.0.1:8000", "[2001:db8::1]:8000")
    assert pool.endpoint_at("10.0.0.1:8000") is pool.endpoints[0]
    assert pool.endpoint_at("[2001:0db8::1]:8000") is pool.endpoints[1]
    assert pool.endpoint_at("10.0.0.1") is None
    assert pool.endpoint_at("10.0.0.9:8000") is None


def test_an_empty_answer_is_explained() -> None:
    pool = Pool("p", "ns", random=random.Random(1))
    assert pool.why_empty(None) == "pool ns/p is not loaded yet"
    assert pool.is_new
    assert not pool.ready
    pool.replace([])
    assert pool.ready
    assert not pool.is_new
    assert pool.why_empty(None) == "pool ns/p has no ready endpoint"
    pool.replace([endpoint("e0", "10.0.0.1:8000")])
    assert "subset is empty: it allows none of the 1 endpoints of pool ns/p" in pool.why_empty(())
    why = pool.why_empty(("10.0.0.9:1", "b", "c", "d" * 1000))
    assert why == "none of the 1 endpoints of pool ns/p is in the gateway's subset (10.0.0.9:1, b, c, …)"


def test_a_pool_is_what_the_parser_asks_for_rules() -> None:
    rules: Rules = rewriting(Rewrite(("a",), (Target("b"),)))
    body = b'{"model": "a", "messages": []}'
    request, forward = Parser(rules, lambda model, nbytes: nbytes, str, trusted=True).parse(
        RawRequest("POST", "/v1/chat/completions", {}, body)
    )
    assert (request.model, forward) == ("b", b'{"model": "b", "messages": []}')


def test_objectives_are_known_by_name() -> None:
    pool = pool_of()
    vip = Objective(7, Slo(0.5))
    pool.apply(PoolState("p", objectives={"vip": vip}))
    assert (pool.objective("vip"), pool.objective("unknown")) == (vip, NO_OBJECTIVE)


def rewriting(*rules: Rewrite) -> Pool:
    pool = pool_of()
    pool.apply(PoolState("p", rewrites=rules))
    return pool


def test_a_rule_for_a_model_wins_over_one_for_any_and_the_first_over_the_next() -> None:
    pool = rewriting(
        Rewrite((), (Target("any"),)),
        Rewrite(("a", "b"), (Target("first"),)),
        Rewrite(("b", "c"), (Target("second"),)),
        Rewrite((), (Target("never"),)),
    )
    assert [pool.rewrite(model) for model in "abcd"] == ["first", "first", "second", "any"]


def test_without_a_rule_a_model_keeps_its_name() -> None:
    assert rewriting(Rewrite(("a",), ())).rewrite("a") == "a"
    assert rewriting().rewrite("a") == "a"


@pytest.mark.parametrize(("weights", "share"), [((9, 1), 0.9), ((None, None), 0.5), ((3, None), 0.75)])
def test_targets_are_chosen_by_weight(weights: tuple[int | None, int | None], share: float) -> None:
    pool = rewriting(Rewrite(("a",), (Target("x", weights[0]), Target("y", weights[1]))))
    chosen = Counter(pool.rewrite("a") for _ in range(4000))
    assert abs(chosen["x"] / 4000 - share) < 0.03


class Tended:
    """Work that notes who is worked on, until it is cancelled or told to fail."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.at_work: list[str] = []
        self.left: list[tuple[str, bool]] = []
        """Who left, and whether it was worked on still."""
        self.fails = asyncio.Event()
        self.short = False
        self.done: list[str] = []

    async def work(self, endpoint: Endpoint) -> None:
        if self.short:
            self.done.append(endpoint.name)
            return
        self.at_work.append(endpoint.name)
        try:
            await self.fails.wait()
            raise RuntimeError(f"no {endpoint.name}")
        finally:
            self.at_work.remove(endpoint.name)

    def leave(self, endpoint: Endpoint) -> None:
        self.left.append((endpoint.name, endpoint.name in self.at_work))

    @asynccontextmanager
    async def tended(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.pool.run_for_each("test of", self.work, self.leave))
            yield
            task.cancel()


async def test_each_endpoint_is_tended_from_its_coming_to_its_going() -> None:
    pool = pool_of("10.0.0.1:8000", "10.0.0.2:8000")
    tended = Tended(pool)
    async with tended.tended():
        await until(lambda: tended.at_work == ["e0", "e1"])
        first = pool.endpoints[0]
        pool.replace([first, endpoint("e2", "10.0.0.3:8000")])
        assert tended.left == [("e1", True)]
        await until(lambda: sorted(tended.at_work) == ["e0", "e2"])
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert {"test of e0", "test of e2"} <= names
        assert "test of e1" not in names
    assert tended.at_work == []
    pool.replace([])
    assert tended.left == [("e1", True)], "nobody listens any more"


async def test_work_that_is_done_before_its_endpoint_leaves_is_no_fault() -> None:
    tended = Tended(pool_of("10.0.0.1:8000"))
    tended.short = True
    async with tended.tended():
        await until(lambda: tended.done == ["e0"])
        tended.pool.replace([])
        assert tended.left == [("e0", False)]


async def test_work_that_fails_ends_it_all_and_says_why() -> None:
    tended = Tended(pool_of("10.0.0.1:8000", "10.0.0.2:8000"))
    asyncio.get_running_loop().call_soon(tended.fails.set)
    with pytest.raises(ExceptionGroup, match="TaskGroup") as error:
        await tended.pool.run_for_each("test of", tended.work, tended.leave)
    assert [str(each) for each in error.value.exceptions][:1] == ["no e0"]
    assert tended.at_work == []
    assert (tended.pool.on_added, tended.pool.on_removed) == ([], [])
