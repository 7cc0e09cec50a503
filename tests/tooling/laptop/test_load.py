import pytest

from tooling.laptop.load import Outcome, play
from tooling.simulator.server import SimulatedPod
from tooling.simulator.workloads import Session, Turn, chats


async def test_a_conversation_is_played_turn_by_turn_and_its_prefix_is_found_again() -> None:
    seen: list[int] = []
    async with SimulatedPod(time_scale=50) as pod:
        outcome = await play(chats(1, sessions=2, turns=3, seconds=0.1), pod.url, "sim", lambda: seen.append(1))
    assert outcome.failures == []
    assert outcome.requests == len(seen) == len(outcome.ttfts) == 6
    assert outcome.completion_tokens == 6 * 48
    assert 0.5 < outcome.hit_rate < 1
    assert 0 < outcome.ttft(50) <= outcome.ttft(90) <= max(outcome.ttfts)
    assert outcome.throughput == pytest.approx(outcome.completion_tokens / outcome.seconds)


async def test_a_refused_request_is_reported_and_ends_its_session() -> None:
    session = Session("only", 0.0, "", (Turn("one", 4), Turn("two", 4)))
    async with SimulatedPod() as pod:
        outcome = await play([session], pod.url, "not-there")
    assert outcome.requests == 2
    assert outcome.ttfts == []
    [failure] = outcome.failures
    assert failure.startswith("only, turn 1: HTTP 404")


async def test_nobody_there_is_a_failure_not_a_crash() -> None:
    outcome = await play([Session("x", 0.0, "", (Turn("one", 4),))], "http://127.0.0.1:1", "sim")
    assert len(outcome.failures) == 1


def test_an_outcome_without_answers_has_no_numbers() -> None:
    outcome = Outcome()
    assert (outcome.ttft(50), outcome.hit_rate, outcome.throughput) == (0.0, 0.0, 0.0)
