"""A shadow compares and reports; picks and accounts are what they are without it."""

import asyncio
from collections.abc import Sequence
from random import Random

import pytest

from epp.errors import NoEndpoint
from epp.plugin import Cost, Endpoint, Filter, Request, Response, Scorer
from epp.scheduling.decision import Chain, Comparison, Decision
from epp.scheduling.pickers import MaxScorePicker
from epp.scheduling.shadow import ShadowPolicy
from tests.support.scheduling.pipelines import loaded
from tests.support.scheduling.schedulers import ask, pods, scheduler


class Price(Cost):
    """The n-th endpoint of the pool costs n seconds, as it is named: a 1, b 2, c 3."""

    terms = ("all",)

    def bill(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[tuple[float, ...]]:
        return [(float(ord(e.name) - ord("a") + 1),) for e in endpoints]


class Wants(Scorer):
    def __init__(self, *names: str) -> None:
        self.names = names

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return [float(endpoint.name in self.names) for endpoint in endpoints]


class Breaks(Price):
    def bill(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[tuple[float, ...]]:
        raise ZeroDivisionError


class Nobody(Filter):
    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        return []


def shadow(
    *scorers: Scorer, filters: Sequence[Filter] = (), sample: float = 1.0, cost: Cost | None = None
) -> ShadowPolicy:
    chain = Chain("new", filters, [(scorer, 1.0) for scorer in scorers], MaxScorePicker())
    return ShadowPolicy(chain, cost or Price(), sample, Random(1), lambda plugin, error: None)


def compared(policy: ShadowPolicy, picked: str) -> Comparison:
    endpoints = pods("abc")
    comparison = policy.compare(ask(), endpoints, endpoints["abc".index(picked)])
    assert comparison is not None
    return comparison


@pytest.mark.parametrize(("picked", "regret"), [("a", 1.0), ("b", 0.0), ("c", -1.0)])
def test_regret_is_what_its_pick_costs_more_than_ours(picked: str, regret: float) -> None:
    comparison = compared(shadow(Wants("b")), picked)
    assert (comparison.profile, comparison.agreed, comparison.regret) == ("new", picked == "b", regret)


def test_an_endpoint_it_finds_as_good_is_no_disagreement() -> None:
    assert compared(shadow(Wants("a", "c")), "c").agreed
    assert not compared(shadow(), "c").agreed, "a profile without scorers finds nothing good"


def test_what_it_cannot_do_is_said_and_harms_nothing() -> None:
    for policy in (shadow(Wants("a"), filters=[Nobody()]), shadow(Wants("a"), cost=Breaks())):
        comparison = compared(policy, "a")
        assert comparison.run is None
        assert comparison.as_dict() == {"profile": "new", "failed": True}


def test_a_sample_is_a_share_of_the_requests() -> None:
    policy, endpoints = shadow(Wants("a"), sample=0.1), pods("abc")
    looked = [policy.compare(ask(), endpoints, endpoints[0]) is not None for _ in range(5000)]
    assert 0.08 < sum(looked) / len(looked) < 0.12


def test_a_request_nobody_can_take_is_refused_before_the_shadow_looks() -> None:
    s = scheduler(filters=[Nobody()])
    s._shadow = shadow(Wants("a"))
    with pytest.raises(NoEndpoint):
        s.choose(ask(), pods("abc"))


CONFIG = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: expected-ttft
- type: no-hit-lru-scorer
- type: tooling.policies.SglangCacheAware
- {{type: session-affinity-filter, parameters: {{strategy: session_id}}}}
- {{type: max-score-picker, name: first}}
- {{type: max-score-picker, name: second}}
schedulingProfiles:
- {{name: main, plugins: [{{pluginRef: expected-ttft}}, {{pluginRef: no-hit-lru-scorer}}, {{pluginRef: first}}]}}
- name: new
  plugins:
  - {{pluginRef: session-affinity-filter}}
  - {{pluginRef: no-hit-lru-scorer}}
  - {{pluginRef: tooling.policies.SglangCacheAware}}
  - {{pluginRef: second}}
shadow: {{profile: new, sample: {sample}}}
"""


def play(sample: float) -> tuple[list[str], object, list[Decision]]:
    """Picks, the accounts at the end, and the decisions, of some hundred requests that come, answer and end."""
    pipeline = loaded(CONFIG.format(sample=sample))

    def raised(plugin: str, error: Exception) -> None:
        raise error

    s = pipeline.scheduler(wall_clock=lambda: 0.0, on_error=raised, shadow_random=Random(1))
    draw, endpoints, decisions = Random(2), pods("abcd"), list[Decision]()
    for n in range(300):
        prompt = b"%d" % draw.randrange(12) * 4000
        request = ask(
            str(n), prompt=prompt, tokens=1000, stream=True, sees_answer=True, headers={"x-session-id": str(n % 9)}
        )
        asyncio.run(s.prepare(request))
        decisions.append(s.choose(request, endpoints))
        if n >= 20:
            s.first_token(decisions[n - 10])
            s.finished(decisions[n - 20], Response(status=200, complete=True))
    return [decision.endpoint.name for decision in decisions], s.statistics(), decisions


def test_picks_and_accounts_are_the_same_with_it_and_without() -> None:
    picks, accounts, decisions = play(1.0)
    without = play(1e-9)
    assert (picks, accounts) == without[:2]
    assert all(decision.shadow is None for decision in without[2])
    comparisons = [decision.shadow for decision in decisions if decision.shadow is not None]
    assert len(comparisons) == 300
    assert 0 < sum(comparison.agreed for comparison in comparisons) < 300
    assert sum(comparison.regret for comparison in comparisons) > 0, "ours is the cheapest by its own bill"
