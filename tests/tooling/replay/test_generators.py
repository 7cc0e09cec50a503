from collections import Counter

import pytest

from epp.plugin import Slo
from tests.support.scheduling.replaying import play
from tooling.replay.generators import ARRIVALS, WORKLOADS, Arrivals, documents
from tooling.replay.trace import Trace
from tooling.simulator.engine import LAPTOP


def made(name: str, requests: int = 600, arrivals: Arrivals = "poisson", seed: int = 1) -> Trace:
    return WORKLOADS[name](seed, requests, arrivals)


@pytest.mark.parametrize("name", WORKLOADS)
def test_seeds_repeat_and_differ(name: str) -> None:
    assert made(name).asks == made(name).asks
    assert made(name).asks != made(name, seed=2).asks


@pytest.mark.parametrize("name", WORKLOADS)
def test_pieces_stand_for_a_text_and_all_before_it(name: str) -> None:
    known: dict[int, tuple[int, int]] = {}
    for ask in made(name).asks:
        before = 0
        for piece in ask.prompt:
            assert known.setdefault(piece.id, (before, piece.tokens)) == (before, piece.tokens)
            before = piece.id
        if ask.answer:
            assert known.setdefault(ask.answer, (before, ask.output)) == (before, ask.output)


@pytest.mark.parametrize("name", WORKLOADS)
def test_what_comes_after_comes_later(name: str) -> None:
    asks = made(name).asks
    for number, ask in enumerate(asks):
        assert all(earlier < number for earlier in ask.after)
        assert ask.tokens > 0
        assert ask.output > 0
    roots = [ask.at for ask in asks if not ask.after]
    assert roots == sorted(roots) or name == "demo"


@pytest.mark.parametrize("name", sorted(set(WORKLOADS) - {"demo"}))
def test_as_many_requests_as_asked_for_and_the_last_conversation_whole(name: str) -> None:
    assert 600 <= len(made(name).asks) < 900


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_arrivals_come_once_a_second_in_the_mean(arrivals: Arrivals) -> None:
    times = [ask.at for ask in made("independent", 4000, arrivals).asks]
    assert 3400 < times[-1] < 4600
    together = Counter(times).most_common(1)[0][1]
    assert (together > 5) == (arrivals == "bursty")


def test_shares_of_what_is_cached_are_those_of_the_shapes() -> None:
    bounds = {name: made(name, 3000).cached_bound() for name in WORKLOADS}
    assert bounds["independent"] == 0.0
    assert 0.85 < bounds["chats"] < 0.97
    assert bounds["agents"] > 0.9
    assert 0.7 < bounds["tools"] < 0.85
    assert 0.8 < bounds["batches"] < 0.92
    assert 0.7 < bounds["reasoning"] < 0.85
    assert bounds["documents-8k"] == pytest.approx(15 / 16, abs=0.03)


def test_documents_are_cold_as_often_at_the_end_as_at_the_beginning() -> None:
    trace = documents(1, 4000, "steady", length=1000, fresh=0.1)
    first_seen: dict[int, int] = {}
    for number, ask in enumerate(trace.asks):
        first_seen.setdefault(ask.prompt[0].id, number)
    halves = Counter(number // 2000 for number in first_seen.values())
    assert halves[0] == pytest.approx(200, rel=0.25)
    assert halves[1] == pytest.approx(200, rel=0.25)


def test_helpers_work_side_by_side_and_are_waited_for() -> None:
    asks = made("agents", 2000).asks
    joins = [ask for ask in asks if len(ask.after) > 1]
    assert joins
    for ask in joins:
        assert {asks[number].session.rpartition("-")[0] for number in ask.after} == {ask.session}


def test_a_few_tools_are_asked_for_most_of_the_time() -> None:
    used = Counter(ask.prompt[0].id for ask in made("tools", 3000).asks if not ask.after)
    assert 30 < len(used) <= 40
    assert sum(count for _, count in used.most_common(8)) > sum(used.values()) / 2


def test_a_document_is_asked_about_once_it_is_summarised_and_then_no_more() -> None:
    asks = made("batches", 2000).asks
    questions = Counter(ask.after[0] for ask in asks if ask.after)
    assert min(questions.values()) >= 4
    assert max(questions.values()) <= 19
    for ask in asks:
        assert not ask.after or ask.prompt[0] == asks[ask.after[0]].prompt[0]


def test_no_prompt_has_what_was_thought() -> None:
    asks = made("reasoning", 2000).asks
    later = [ask for ask in asks if ask.after]
    assert later
    for ask in later:
        (before,) = ask.after
        reported = len(asks[before].prompt)
        assert ask.prompt[:reported] == asks[before].prompt
        assert ask.prompt[reported].tokens <= asks[before].output
    assert not any(ask.answer for ask in asks)
    assert sum(ask.output for ask in asks) > 2 * sum(ask.prompt[-1].tokens for ask in asks)


def test_prompts_for_different_adapters_have_nothing_in_common() -> None:
    asks = made("adapters", 2000).asks
    owner: dict[int, str] = {}
    for ask in asks:
        assert all(owner.setdefault(piece.id, ask.adapter) == ask.adapter for piece in ask.prompt)
    used = Counter(ask.adapter for ask in asks)
    assert len(used) > 30
    assert used["adapter-1"] > 4 * used["adapter-10"]


def test_the_demo_is_what_the_laptop_sends() -> None:
    trace = made("demo")
    assert len(trace.asks) == 107
    served = play(trace, pods="3*laptop")
    cached = sum(one.cached for one in served.served) / sum(ask.tokens for ask in trace.asks)
    spread = play(trace, pods="3*laptop", name="round-robin")
    assert cached > sum(one.cached for one in spread.served) / sum(ask.tokens for ask in trace.asks)
    assert max(ask.tokens for ask in trace.asks) < LAPTOP.capacity


def test_classes_have_priorities_tenants_and_what_they_want() -> None:
    agents = made("agents-with-slo", 2000).asks
    assert {(ask.label, ask.priority, ask.slo) for ask in agents} == {
        ("watched", 1, Slo(1.0, objective="watched")),
        ("background", 0, Slo(10.0, objective="background")),
    }
    assert {ask.tenant for ask in agents} == {"red", "green", "blue"}
    for ask in agents:
        for before in ask.after:
            assert (agents[before].session, agents[before].label) == (ask.session, ask.label)
            assert ask.tokens > agents[before].tokens


def test_a_pool_of_nothing_is_asked_a_tenth_at_once() -> None:
    asks = made("burst-from-zero", 1000).asks
    assert Counter(ask.at for ask in asks if ask.label == "burst") == {5.0: 100}
    assert min(ask.at for ask in asks if ask.label == "later") > 5.0


def test_the_published_case_has_its_rates_and_lengths() -> None:
    asks = made("batch-gateway", 6000).asks
    interactive = [ask for ask in asks if ask.label == "interactive"]
    times = [ask.at for ask in interactive]
    assert all(at % 180 < 90 for at in times)
    assert sum(at < 90 for at in times) == pytest.approx(15 * 90, rel=0.1)
    assert sum(not ask.after for ask in asks if ask.label == "batch") == 63
    assert {(ask.tokens, ask.output) for ask in asks} == {(512, 128)}
    assert {ask.priority for ask in asks} == {1, -1}


def test_chats_and_reports_want_different_things() -> None:
    asks = made("chats-and-reports", 2000).asks
    reports = [ask for ask in asks if ask.label == "report"]
    chats = [ask for ask in asks if ask.label == "chat"]
    assert len(reports) + len(chats) == len(asks)
    assert 400 < len(reports) < 600
    assert {(ask.slo.ttft, ask.slo.tpot) for ask in chats if ask.slo} == {(0.5, 0.025)}
    assert {(ask.slo.ttft, ask.slo.tpot) for ask in reports if ask.slo} == {(20.0, 0.1)}
    assert min(ask.tokens for ask in reports) > 1000
