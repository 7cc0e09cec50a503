"""Shortlists of large pools: the same picks as bills of all endpoints, whatever the pool has been through."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from heapq import nsmallest
from random import Random

import pytest

from epp.admin.recorder import brief
from epp.configuration.loader import Pipeline, load_text, strategy_text
from epp.parsing.request import Request, Response
from epp.plugin import Endpoint, Load, Replicas, Services
from epp.scheduling.cost import ExpectedTtft
from epp.scheduling.decision import Decision
from epp.scheduling.scheduler import Scheduler
from epp.testing import services

MODES = {
    "plain": "",
    "small memory": "blocks",
    "foreign traffic": "foreign",
    "failures": "failures",
    "different speeds": "speeds",
    "adapters": "adapters",
    "two adapters": "adapters two",
    "flow control": "flow",
    "replicas": "replicas",
    "everything": "blocks foreign failures speeds adapters replicas",
    "everything, with flow control": "blocks foreign failures speeds adapters flow replicas",
}


class Pool:
    """A pool and its scheduler, on a clock of its own, to which anything may happen."""

    def __init__(self, endpoints: int, random: Random, *, fallbacks: int = 0, mode: str = "", text: str = "") -> None:
        self.now = 100.0
        self.random = random
        self.mode = mode
        self.count = 0
        self.errors: list[str] = []
        self.endpoints = tuple(self.endpoint(n) for n in range(endpoints))
        self.pipeline: Pipeline = load_text(
            text or strategy_text("prefix-aware"), clock=lambda: self.now, random=random, where="test"
        )
        self.scheduler: Scheduler = self.pipeline.scheduler(
            wall_clock=lambda: self.now,
            on_error=lambda plugin, error: self.errors.append(f"{plugin}: {error!r}"),
            fallbacks=fallbacks,
        )
        seen = Replicas(1, 3, random.choice((0.01, 0.5, 5.0))) if "replicas" in mode else Replicas()
        given: Services = replace(services(), endpoints=lambda: self.endpoints, replicas=lambda: seen)
        for plugin in self.pipeline.plugins:
            plugin.start(given)
        self.open: list[Decision] = []
        self.prefixes = [random.randbytes(random.choice((300, 3000, 9000))) for _ in range(6)]

    def endpoint(self, number: int) -> Endpoint:
        self.count += 1
        return Endpoint(f"pod-{number}", f"10.{self.count >> 16}.{self.count >> 8 & 255}.{self.count & 255}:8000")

    @property
    def cost(self) -> ExpectedTtft:
        (found,) = (plugin for plugin in self.pipeline.plugins if isinstance(plugin, ExpectedTtft))
        return found

    def choose(self) -> Decision:
        prompt = self.random.choice(self.prefixes) if self.random.random() < 0.7 else b""
        prompt += self.random.randbytes(self.random.choice((0, 100, 2000, 20_000)))
        request = Request(
            id="r",
            model=self.model(),
            prompt=prompt,
            tokens=len(prompt) // 4 + 1,
            stream=self.random.random() < 0.7,
            sees_answer=self.random.random() < 0.6,
        )
        request = asyncio.run(self.scheduler.prepare(request))
        decision = self.scheduler.choose(request, self.endpoints)
        self.open.append(decision)
        return decision

    def model(self) -> str:
        if "adapters" not in self.mode:
            return "m"
        return f"lora-{min(int(self.random.expovariate(0.2)), 1 if 'two' in self.mode else 99)}"

    def live(self) -> None:
        """Something happens."""
        random = self.random
        self.now += random.choice((0.0, 0.001, 0.05, 0.3))
        if random.random() < 0.02:
            self.now += random.choice((5, 70, 900))
        for _ in range(random.randrange(3)):
            self.scrape(random.choice(self.endpoints))
        if "flow" in self.mode:
            self.cost.saturation(random.sample(self.endpoints, random.randrange(1, len(self.endpoints) + 1)))
        for decision in random.sample(self.open, min(len(self.open), random.randrange(3))):
            if random.random() < 0.5:
                self.scheduler.first_token(decision)
                continue
            self.open.remove(decision)
            failed = "failures" in self.mode and random.random() < 0.5
            self.scheduler.answered(decision, Response(status=500 if failed else 200))
            self.scheduler.finished(decision, Response(status=500 if failed else 200, complete=True))
        if random.random() < 0.02:
            self.roll()

    def scrape(self, endpoint: Endpoint) -> None:
        random = self.random
        mine = sum(decision.endpoint is endpoint for decision in self.open)
        foreign = random.randrange(20) if "foreign" in self.mode and random.random() < 0.5 else 0
        blocks = random.choice((600, 1500, 30_000)) if "blocks" in self.mode else 30_000
        adapters = frozenset({self.model()}) if "adapters" in self.mode else frozenset()
        endpoint.load = Load(
            running=mine + foreign,
            kv_usage=min(1.0, foreign / 20),
            block_size=16,
            blocks=blocks,
            lora_max=4 if adapters else 0,
            lora_waiting=adapters,
            lora_running=adapters if random.random() < 0.1 else frozenset(),
            at=self.now,
        )
        self.scheduler.scraped(endpoint)

    def roll(self) -> None:
        """An endpoint is replaced by another."""
        at = self.random.randrange(len(self.endpoints))
        old = self.endpoints[at]
        self.endpoints = (*self.endpoints[:at], self.endpoint(self.count), *self.endpoints[at + 1 :])
        self.scheduler.removed(old)
        self.open = [decision for decision in self.open if decision.endpoint is not old]


def speeds() -> str:
    text = strategy_text("prefix-aware")
    return text.replace(
        "- type: expected-ttft\n",
        "- type: expected-ttft\n  parameters:\n    speeds: {'pod-1*': 0.5, 'pod-2*': 2, 'pod-3': 3}\n",
        1,
    )


def costs_of_all(pool: Pool, request: Request) -> dict[Endpoint, float]:
    """By the bills that a scheduler without shortlists would look at."""
    whole = pool.scheduler._with_signals(request, pool.endpoints, pool.scheduler._producers)
    bills = pool.cost.bill(whole, pool.endpoints)
    return dict(zip(pool.endpoints, map(sum, bills), strict=True))


QUICK = ("plain", "everything")
"""Modes that are tried in the lane of unit tests."""


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if mode in QUICK else pytest.mark.long) for mode in MODES]
)
@pytest.mark.parametrize("fallbacks", [0, 2])
def test_nobody_who_is_left_out_would_have_cost_less(
    mode: str, fallbacks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(mode)
    words = MODES[mode]
    pool = Pool(60, random, fallbacks=fallbacks, mode=words, text=speeds() if "speeds" in words else "")
    look = Scheduler._look
    compared, kept = 0, 0

    def both(self: Scheduler, request: Request, endpoints: Sequence[Endpoint]) -> tuple[Request, Sequence[Endpoint]]:
        nonlocal compared, kept
        looked, few = look(self, request, endpoints)
        if random.random() < 0.5:
            compared += 1
            kept += len(few)
            costs = costs_of_all(pool, request)
            wanted = 1 + fallbacks
            found = sorted(costs[endpoint] for endpoint in few)[:wanted]
            assert found == pytest.approx(nsmallest(wanted, costs.values()), rel=1e-8)
        return looked, few

    monkeypatch.setattr(Scheduler, "_look", both)
    for _ in range(1500):
        pool.choose()
        pool.live()
    assert not pool.errors
    assert compared > 600
    assert kept < compared * len(pool.endpoints) * (0.9 if words else 0.3)


def test_a_decision_says_how_many_were_not_billed() -> None:
    pool = Pool(100, Random(1))
    decision = pool.choose()
    run = decision.runs[0]
    assert len(run.endpoints) + run.others == 100
    assert run.others > 80
    assert decision.as_dict()["profiles"][0]["others"] == run.others
    assert brief(decision).startswith("default: 1 of 100")


def test_a_small_pool_and_a_subset_are_billed_as_a_whole() -> None:
    small = Pool(31, Random(1))
    assert len(small.choose().runs[0].endpoints) == 31
    large = Pool(50, Random(1))
    request = asyncio.run(large.scheduler.prepare(Request(id="r", model="m", tokens=1)))
    decision = large.scheduler.choose(request, large.endpoints[:40])
    assert len(decision.runs[0].endpoints) == 40
    assert not decision.runs[0].others


OTHERS = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: expected-ttft
- type: queue-scorer
- type: failing-endpoint-filter
- type: max-score-picker
- type: weighted-random-picker
schedulingProfiles:
- name: default
  plugins:
"""


@pytest.mark.parametrize(
    "refs",
    [
        ("failing-endpoint-filter", "expected-ttft", "max-score-picker"),
        ("expected-ttft", "queue-scorer", "max-score-picker"),
        ("expected-ttft", "weighted-random-picker"),
        ("queue-scorer", "max-score-picker"),
    ],
)
def test_filters_other_scorers_and_other_pickers_see_all(refs: tuple[str, ...]) -> None:
    text = OTHERS + "".join(f"  - pluginRef: {ref}\n" for ref in refs)
    run = Pool(50, Random(1), text=text).choose().runs[0]
    assert len(run.endpoints) == 50
    assert not run.others


def test_never_used_endpoints_are_picked_in_the_pools_order() -> None:
    pool = Pool(40, Random(1))
    picked = []
    for _ in range(40):
        request = asyncio.run(pool.scheduler.prepare(Request(id="r", model="m", tokens=500)))
        picked.append(pool.scheduler.choose(request, pool.endpoints).endpoint)
    assert picked == [*pool.endpoints]


def test_who_gave_an_answer_is_found_among_all() -> None:
    pool = Pool(60, Random(1))
    for number in (50, 7):
        given = pool.scheduler.adopt(Request(id="a", model="m", elsewhere=True), pool.endpoints[number], {})
        given.finished(Response(status=200, complete=True, id=f"resp_{number}"))
    for number in (50, 7):
        request = Request(id="b", model="m", tokens=400, previous=f"resp_{number}")
        decision = pool.scheduler.choose(request, pool.endpoints)
        assert decision.endpoint is pool.endpoints[number]
        assert decision.endpoints == [decision.endpoint]
    assert len(pool.choose().runs[0].endpoints) < 60, "others' requests have a shortlist"


def test_a_cost_that_fails_to_make_one_is_reported_and_asked_for_all_bills(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(50, Random(1))

    def broken(*args: object) -> None:
        raise ValueError("no list")

    monkeypatch.setattr(ExpectedTtft, "shortlist", broken)
    assert len(pool.choose().runs[0].endpoints) == 50
    assert pool.errors == ["expected-ttft: ValueError('no list')"]


def test_what_only_other_replicas_pick_does_not_pile_up() -> None:
    """Their requests come due without a choice here that would look."""
    pool = Pool(40, Random(1))
    pool.choose()
    for number in range(3000):
        pool.now += 0.001
        request = Request(id=str(number), model="m", tokens=400, elsewhere=True)
        adopted = pool.scheduler.adopt(request, pool.endpoints[number % 40], {})
        adopted.finished(Response(status=200, complete=True))
    order = pool.cost._order
    assert order is not None
    assert len(order._due) <= 16 * 40
    assert pool.choose().endpoint in pool.endpoints
    assert not pool.errors
