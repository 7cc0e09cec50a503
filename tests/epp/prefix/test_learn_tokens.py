"""What `LearnTokens` of `epp.prefix.token_ratio` learns from answers and counters."""

import pytest

from epp.parsing.request import Usage
from epp.plugin import Endpoint, Load, Request, Response
from epp.prefix.token_ratio import LearnTokens, TokenRatio
from epp.testing import endpoint, request


class Seen:
    """A learner and what it told."""

    def __init__(self) -> None:
        self.reported: list[tuple[str, int, int]] = []
        self.learner = LearnTokens(lambda model, size, tokens: self.reported.append((model, size, tokens)))

    def send(self, to: Endpoint, prompt: str, model: str = "m") -> Request:
        sent = request(prompt, model)
        self.learner.on_picked(sent, to)
        return sent

    def scrape(self, of: Endpoint, prompt_tokens: int, running: int = 0) -> None:
        of.load = Load(prompt_tokens=prompt_tokens, at=1.0, running=running)
        self.learner.on_scraped(of)


def test_an_answer_tells_exactly() -> None:
    seen, pod = Seen(), endpoint()
    sent = seen.send(pod, "x" * 400)
    seen.learner.on_finished(sent, pod, Response(status=200, usage=Usage(prompt=80)))
    assert seen.reported == [("m", 400, 80)]
    assert seen.learner.statistics() == {"from_answers": 1, "from_counters": 0}


def test_without_answers_the_engines_counter_tells() -> None:
    seen, pod = Seen(), endpoint()
    seen.scrape(pod, 1000)
    for _ in range(3):
        seen.learner.on_finished(seen.send(pod, "x" * 400), pod, Response(status=200))
    seen.scrape(pod, 1240)
    assert seen.reported == [("m", 1200, 240)]


@pytest.mark.parametrize(
    ("tokens", "running", "second"),
    [(1240, 9, "m"), (1240, 0, "other"), (1000, 0, "m"), (10, 0, "m")],
    ids=["foreign traffic", "two models", "nothing counted yet", "the engine restarted"],
)
def test_a_window_that_says_nothing(tokens: int, running: int, second: str) -> None:
    seen, pod = Seen(), endpoint()
    seen.scrape(pod, 1000)
    seen.send(pod, "x" * 400)
    seen.send(pod, "x" * 400, second)
    seen.scrape(pod, tokens, running=running)
    seen.send(pod, "x" * 400)
    assert seen.reported == []


def test_before_the_first_scrape_nothing_is_known() -> None:
    seen, pod = Seen(), endpoint()
    seen.send(pod, "x" * 400)
    seen.scrape(pod, 100)
    seen.send(pod, "x" * 400)
    assert seen.reported == []


def test_an_endpoint_that_left_is_forgotten_and_its_requests_still_end() -> None:
    seen, pod = Seen(), endpoint()
    sent = seen.send(pod, "x" * 400)
    seen.learner.on_removed(pod)
    seen.learner.on_finished(sent, pod, Response(status=200, usage=Usage(prompt=100)))
    assert seen.reported == [("m", 400, 100)]


def test_what_was_not_parsed_teaches_nothing() -> None:
    seen, pod = Seen(), endpoint()
    seen.scrape(pod, 0)
    sent = request("", "", api="other")
    seen.learner.on_picked(sent, pod)
    seen.learner.on_finished(sent, pod, Response(status=200, usage=Usage(prompt=9)))
    seen.scrape(pod, 50)
    seen.learner.on_finished(seen.send(pod, "x"), pod, Response())
    assert seen.reported == []


@pytest.mark.parametrize("response", [Response(status=500), Response(status=400), Response(served="10.0.0.9:80")])
def test_a_prompt_that_was_not_computed_tells_nothing(response: Response) -> None:
    seen, pod = Seen(), endpoint()
    seen.scrape(pod, 1000)
    seen.learner.on_finished(seen.send(pod, "x" * 400), pod, Response(status=200))
    seen.learner.on_finished(seen.send(pod, "x" * 4000), pod, response)
    seen.scrape(pod, 1080)
    seen.learner.on_finished(seen.send(pod, "y" * 400), pod, Response(status=200))
    assert seen.reported == []
    seen.scrape(pod, 1160)
    seen.send(pod, "z" * 400)
    assert seen.reported == [("m", 400, 80)], "and the next window does again"


def test_a_peer_s_prompts_count_with_their_bytes() -> None:
    here, there, pod = Seen(), Seen(), endpoint()
    shared = here.learner.to_peers(here.send(pod, "x" * 400), pod)
    assert shared == 400
    sent = Request(id="", model="m", elsewhere=True)
    there.learner.from_peer(sent, pod, shared)
    there.learner.on_finished(sent, pod, Response(status=200, usage=Usage(prompt=80)))
    assert there.reported == [("m", 400, 80)]


def test_what_was_learned_is_passed_on_where_nothing_is_known() -> None:
    here, there = TokenRatio(), TokenRatio()
    for model in ("a", "b"):
        for _ in range(50):
            here.observe(model, 4096, 2048)
    there.observe("b", 65536, 8192)
    known = there.ratio("b")
    [piece] = here.learner().snapshot()
    there.learner().restore(piece, {})
    assert there.ratio("a") == here.ratio("a") != 4.0
    assert there.ratio("b") == known
    with pytest.raises(ValueError, match="are not"):
        there.restore([("c", 1.0, 0.0)])
