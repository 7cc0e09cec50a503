"""What `hack/bench calibrate` makes of answers, without an engine."""

from pathlib import Path

import pytest

from hack.benches.calibrate import at_load, compared, errors, kind_of, noise, pod_file, step_time, typical
from hack.benches.rig.asking import Answered
from hack.benches.rig.fit import Fitted, Timing
from hack.benches.rig.processes import BenchError
from hack.benches.rig.workloads import mixed
from tooling.replay.policies import policy
from tooling.replay.replay import Conditions, Replay
from tooling.simulator.engine import LAPTOP
from tooling.simulator.presets import pods

FITTED = Fitted(
    base=12.5e-3, per_decode=1.5e-3, per_context_token=2e-6, linear=0.5e-3, attention=3.25e-8, overhead=8e-3
)


def test_what_it_writes_replay_reads(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    made = kind_of(FITTED, LAPTOP, "mine", 0.25)
    file.write_text(pod_file(made, "Made for a test.\nTwice."))
    assert pods(str(file)) == [made]
    assert made.parameters.blocks == LAPTOP.blocks
    assert made.parameters.attention == FITTED.attention


def test_the_step_time_is_that_of_steps_in_which_all_decode() -> None:
    early = Answered(sent=0, prompt=100, cached=0, times=[1 + 0.1 * n for n in range(20)])
    late = Answered(sent=0, prompt=100, cached=0, times=[2 + 0.1 * n for n in range(20)])
    found = step_time([early, late])
    assert found.seconds / found.steps == pytest.approx(0.1)
    assert found.decodes == 2 * found.steps
    assert 2 * 100 < found.context / found.steps < 2 * 120
    assert found.requests == 0


def test_answers_that_hardly_overlap_say_nothing() -> None:
    early = Answered(sent=0, prompt=100, cached=0, times=[0.1 * n for n in range(20)])
    late = Answered(sent=0, prompt=100, cached=0, times=[1.85 + 0.1 * n for n in range(20)])
    with pytest.raises(BenchError, match="2 answers overlapped for 0 tokens; expected at least 4"):
        step_time([early, late])


def test_of_each_place_the_median_counts() -> None:
    rounds = [[Timing(seconds=s, steps=1), Timing(seconds=10 * s, steps=2)] for s in (3.0, 1.0, 9.0)]
    assert [timing.seconds for timing in typical(rounds)] == [3.0, 30.0]
    assert [timing.seconds for timing in typical(rounds[:2])] == [1.0, 10.0]


def test_an_engine_that_is_as_the_replay_says_has_no_error() -> None:
    kind = kind_of(FITTED, LAPTOP, "mine", 1.0)
    trace = at_load(mixed(1, 12), kind, 0.3, 1)
    served = Replay(trace, [kind], policy("round-robin").build, Conditions(), 1).run()
    answers = []
    for ask, each in zip(trace.asks, served, strict=True):
        first, step = each.first + FITTED.overhead, (each.ended - each.first) / (ask.output - 1)
        times = [first + step * n for n in range(ask.output)]
        answers.append(Answered(each.sent, ask.tokens, each.cached, times))
    slow = [Answered(each.sent, each.prompt, each.cached, [at + 5 for at in each.times]) for each in answers]
    reported = compared(trace, [answers, slow, answers], kind, FITTED, 1)
    assert reported[1:] == [
        "  TTFT: median error 0.0%, nine in ten within 0.0%, bias +0.0%; the engine itself 0.0% from round to round",
        "  TPOT: median error 0.0%, nine in ten within 0.0%, bias +0.0%; the engine itself 0.0% from round to round",
    ]


def test_errors_are_relative_and_only_the_bias_has_a_sign() -> None:
    found = errors([1.0, 2.0, 4.0, 0.0], [1.1, 1.8, 3.6, 5.0])
    assert found.median == pytest.approx(0.1)
    assert found.p90 == pytest.approx(0.1)
    assert found.bias == pytest.approx(-0.1)


def test_noise_is_how_far_rounds_are_off_their_median() -> None:
    assert noise([[1.0, 5.0], [1.0, 5.0], [9.0, 5.0]]) == 0
    assert noise([[1.0, 5.0], [1.2, 6.0], [1.1, 5.5]]) == pytest.approx(1 / 11)
