from random import Random

import pytest

from epp.configuration.loader import load_text
from epp.scheduling.cost import ExpectedTtft
from hack.benches.predictions import Expected, Running, Seen, configuration, loads, row, table
from hack.benches.rig.processes import BenchError
from tooling.laptop.engines import EngineError


def test_a_row_compares_what_was_predicted_of_each_half() -> None:
    times = [(10.0, 1.0), (5.0, 1.0), (1.1, 1.0), (0.9, 1.0), (3.0, 2.0), (2.0, 2.0)]
    tpots = [None, 1.0, 0.5, 0.1, None, 0.2]
    made = row("8 at a time", [(Expected(x, 0.1), Seen("", y, z)) for (x, y), z in zip(times, tpots, strict=True)])
    assert (made.requests, made.ttft) == (6, 1.0)
    assert made.errors == pytest.approx([4.0, 0.1])
    assert made.milliseconds == pytest.approx(1e3 * (0.1 + 1.0 + 0.0) / 3)
    assert made.tpot == pytest.approx(0.25), "of 0.1 and 0.2 s"
    assert table([made]).splitlines()[-1] == "| 8 at a time | 6 | 1000 ms | 400 % | 10 % | 367 ms | 25 % |"


def test_too_few_requests_are_no_figure() -> None:
    with pytest.raises(BenchError, match="3 requests of 'chats' were answered in time: expected more --seconds"):
        row("chats", [(Expected(1.0, 1.0), Seen("", 1.0))] * 3)


def test_the_configuration_is_one() -> None:
    made = load_text(configuration(2e-4), clock=lambda: 0.0, random=Random(1))
    [scorer] = [each for each in made.plugins if isinstance(each, ExpectedTtft)]
    assert scorer.step_seconds == pytest.approx(40 * 2e-4)


def test_loads_of_the_smallest_prompts_can_be_made() -> None:
    assert [*loads(1.0, 2, 1.5)][-2:] == ["1.5 a second", "64 at a time, short"]


def test_an_engine_that_runs_already_is_a_pod() -> None:
    layout = Running("http://127.0.0.1:8000/", "llama", "/models/llama").lay_out(["pod-a"])
    assert [pod.address for pod in layout.pods] == ["127.0.0.1:8000"]
    assert layout.programs["pod-a"].ready == "http://127.0.0.1:8000/health"


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "http://127.0.0.1", "https://127.0.0.1:8000"])
def test_an_engine_elsewhere_is_refused(url: str) -> None:
    with pytest.raises(EngineError, match=r"expected http://127\.0\.0\.1:PORT"):
        Running(url, "llama", None).lay_out(["pod-a"])
