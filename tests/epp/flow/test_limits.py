"""What tenants may use: counted exactly, given back, shared by replicas, bounded."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from epp.errors import BadRequest, EppError, NotAllowed, RateLimited, UnknownModel, UnsupportedMedia
from epp.flow import limits as module
from epp.flow.limits import ALIVE, FORGET, OVERFLOW, TELL, Limits, LimitSettings, TenantLimits
from epp.flow.tenants import TenantSource
from epp.plugin import Request, Response, Usage
from epp.testing import endpoint, request

SOURCE = TenantSource("x-tenant")
POD = endpoint()


class Timer:
    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at, self.call, self.off = at, call, False

    def cancel(self) -> None:
        self.off = True


class World:
    """Replicas that hear each other, and the time."""

    def __init__(self, count: int = 1, own: dict[str, TenantLimits] | None = None, **usual: Any) -> None:
        self.now = 1000.0
        self.settings = LimitSettings(TenantLimits(**usual), own or {}, SOURCE)
        self.timers: list[Timer] = []
        self.refused: list[tuple[str, str]] = []
        self.full = 0
        self.silent: set[int] = set()
        self.replicas: list[Limits] = []
        for number in range(count):
            self.start(number, alone=count == 1)

    def start(self, number: int, *, alone: bool = False) -> Limits:
        made = Limits(
            self.settings,
            lambda: self.now,
            lambda tenant, limit: self.refused.append((tenant, limit)),
            self._is_full,
            instance=number + 1,
            tell=None if alone else lambda piece: self._tell(number, piece),
            later=self._later,
        )
        self.replicas.append(made)
        return made

    def _is_full(self) -> None:
        self.full += 1

    def _tell(self, number: int, piece: Any) -> None:
        for other, replica in enumerate(self.replicas):
            if other != number and number not in self.silent:
                replica.restore(piece, {})

    def _later(self, seconds: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.now + seconds, call))
        return self.timers[-1]

    def pass_(self, seconds: float) -> None:
        end = self.now + seconds
        while due := sorted((each for each in self.timers if not each.off and each.at <= end), key=lambda t: t.at):
            self.now = max(self.now, due[0].at)
            self.timers.remove(due[0])
            due[0].call()
        self.now = end

    def ask(self, who: str = "a", at: int = 0, **fields: Any) -> Request:
        fields = {"tokens": 0, **fields}
        return self.replicas[at].admit(request(headers={"x-tenant": who}, **fields))

    def error(self, who: str = "a", at: int = 0, **fields: Any) -> EppError:
        with pytest.raises(EppError) as found:
            self.ask(who, at, **fields)
        return found.value

    def used(self, asked: Request, at: int = 0, status: int = 200, **usage: int) -> None:
        self.replicas[at].ended(asked, Response(status=status, usage=Usage(**usage) if usage else None))

    def left(self, asked: Request, what: str, at: int = 0) -> str:
        return self.replicas[at].answer_headers(asked, POD)[f"x-ratelimit-remaining-{what}"]


# --- a request's own limits -----------------------------------------------------------------------------------------


def test_a_prompt_too_long_and_an_answer_too_long_are_refused_as_openai_does() -> None:
    world = World(max_prompt_tokens=100, max_output_tokens=50)
    world.ask(tokens=100, max_tokens=50)
    long = world.error(tokens=101)
    assert (type(long), long.param, long.code) == (BadRequest, "messages", "context_length_exceeded")
    assert long.message == "messages: about 101 tokens; expected at most 100"
    assert world.error(tokens=101, api="completions").param == "prompt"
    assert world.error(tokens=101, api="embeddings").param == "input"
    body = b'{"max_completion_tokens": 51}'
    much = world.error(max_tokens=51, body=body)
    assert (type(much), much.param, much.code) == (BadRequest, "max_completion_tokens", "invalid_value")
    assert world.error(max_tokens=51).param == "max_tokens"
    assert world.error(max_tokens=51, api="responses").param == "max_output_tokens"
    assert {limit for _, limit in world.refused} == {"prompt-tokens", "output-tokens"}


def test_models_are_those_the_client_names_and_beginnings_with_a_star() -> None:
    world = World(models=("llama", "sql-*"), own={"b": TenantLimits(models=("big",)), "none": TenantLimits(models=())})
    for model in ("llama", "sql-1", "sql-"):
        world.ask(asked=model)
    unknown, foreign = world.error(asked="other"), world.error(asked="big")
    assert (type(unknown), type(foreign)) == (UnknownModel, NotAllowed)
    assert (unknown.status, foreign.status) == (404, 403)
    assert (unknown.code, unknown.param) == ("model_not_found", "model")
    assert world.ask("b", asked="big").tenant == "b"
    assert isinstance(world.error("none", asked="big"), NotAllowed)
    assert isinstance(world.error(api="other", asked="big", body=b"{}"), NotAllowed)
    world.ask(api="other", asked="llama", body=b"{}")
    world.ask(api="other", asked="", body=b"audio")


def test_what_cannot_be_read_is_refused_where_something_in_it_counts() -> None:
    world = World(models=("llama",))
    with pytest.raises(UnsupportedMedia, match="content-encoding: gzip; expected JSON"):
        world.ask(api="other", opaque="content-encoding: gzip", body=b"x")
    with pytest.raises(UnsupportedMedia):
        World(max_output_tokens=9).ask(api="other", opaque="content-encoding: gzip", body=b"x")
    World(requests_per_minute=9).ask(api="other", opaque="content-encoding: gzip", body=b"x")
    world.ask(api="other", body=b"audio")


def test_a_tenants_models_are_those_it_may_use_and_asking_for_them_uses_nothing() -> None:
    world = World(own={"few": TenantLimits(models=("m", "sql-*"))}, requests_per_minute=1)
    limits = world.replicas[0]
    for _ in range(2):
        may = limits.models_for(Request(id="r", model="", tenant="few"))
        assert may is not None
        assert [may(name) for name in ("m", "sql-1", "n")] == [True, True, False]
    assert limits.models_for(Request(id="r", model="", tenant="other")) is None


def test_a_request_without_a_body_counts_as_none() -> None:
    world = World(requests_per_minute=1)
    for _ in range(3):
        world.ask(api="other")
    world.ask()
    assert isinstance(world.error(), RateLimited)


# --- rates ----------------------------------------------------------------------------------------------------------


def test_a_minutes_requests_may_come_at_once_and_then_steadily() -> None:
    world = World(requests_per_minute=60)
    for _ in range(60):
        asked = world.ask()
    assert world.left(asked, "requests") == "0"
    error = world.error()
    assert (error.status, error.kind, error.code, error.reason) == (
        429,
        "rate_limit_error",
        "rate_limit_exceeded",
        "rejected-limit",
    )
    assert error.headers == {
        "retry-after": "1",
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
    }
    world.ask("b")
    world.pass_(1.0)
    world.ask()
    world.error()
    world.pass_(60.0)
    for _ in range(60):
        world.ask()
    world.error()
    assert world.refused == [("a", "requests")] * 3


def test_tokens_are_taken_at_the_estimate_and_corrected() -> None:
    world = World(tokens_per_minute=1000)
    first = world.ask(tokens=300, max_tokens=500)
    assert world.left(first, "tokens") == "200"
    world.used(first, prompt=310, completion=90)
    second = world.ask(tokens=500)
    assert world.left(second, "tokens") == "100"
    error = world.error(tokens=200)
    assert error.headers["retry-after"] == "6"
    assert error.headers["x-ratelimit-remaining-tokens"] == "100"
    world.used(second)  # nothing was seen of its answer
    assert world.error(tokens=101).status == 429
    third = world.ask(tokens=100)
    world.used(third, status=503)
    assert world.left(world.ask(tokens=100), "tokens") == "0"


@pytest.mark.parametrize(
    ("api", "prompt", "each", "answers"),
    [
        ("chat", [], 1, 1),
        ("chat", [], 3, 3),
        ("completions", "a", 5, 5),
        ("completions", ["a", "b"], 2, 4),
        ("completions", [[1, 2], [3]], 1, 2),
        ("completions", [1, 2, 3], 1, 1),
        ("completions", [], 1, 1),
    ],
)
def test_tokens_of_all_answers_count(api: Any, prompt: Any, each: int, answers: int) -> None:
    world = World(tokens_per_minute=1000)
    world.ask(api=api, prompt=json.dumps(prompt).encode(), answers=each, tokens=20, max_tokens=10)
    with pytest.raises(RateLimited, match=f" {20 + 10 * answers} are used, 980 asked for"):
        world.ask(tokens=980)


def test_an_answer_without_a_bound_that_is_not_seen_counts_as_such_answers_do() -> None:
    world = World(tokens_per_minute=100_000)
    for tokens in (100, 300):
        world.used(world.ask(tokens=10), prompt=10, completion=tokens)
    world.used(world.ask(tokens=10, max_tokens=5), prompt=10, completion=5)  # says nothing of those without a bound
    unseen = world.ask(tokens=10)
    assert world.left(unseen, "tokens") == str(100_000 - 110 - 310 - 15 - 10), "its prompt alone, until it ends"
    world.used(unseen)
    left = 100_000 - 110 - 310 - 15 - 210
    failed = world.ask(tokens=0)
    assert world.left(failed, "tokens") == str(left)
    world.used(failed, status=400)
    world.used(world.ask(tokens=1, model="new"))
    world.used(world.ask(tokens=1, api="embeddings"))
    assert world.left(world.ask(tokens=0), "tokens") == str(100_000 - 110 - 310 - 15 - 210 - 2), (
        "of these nothing is known"
    )


def test_an_answer_that_a_plugin_asked_for_counts_as_it_was_and_says_nothing_of_others() -> None:
    world = World(tokens_per_minute=100_000)
    world.used(world.ask(tokens=10), prompt=10, completion=100)
    world.used(replace(world.ask(tokens=10), watched="asked"), prompt=10, completion=5000)
    world.used(world.ask(tokens=10))
    assert world.left(world.ask(tokens=0), "tokens") == str(100_000 - 110 - 5010 - 110)


def test_of_several_answers_without_a_bound_each_counts() -> None:
    world = World(tokens_per_minute=1000)
    world.used(world.ask(answers=2, tokens=10), prompt=10, completion=80)
    world.used(world.ask(answers=3, tokens=10))
    assert world.left(world.ask(tokens=0), "tokens") == str(1000 - 90 - 10 - 3 * 40)


def test_models_whose_answers_lengths_are_known_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MODELS", 2)
    world = World(tokens_per_minute=10_000)
    for model in ("a", "b", "a", "c"):
        world.used(world.ask(model=model, tokens=0), prompt=0, completion=10)
    for model in ("a", "b", "c"):
        world.used(world.ask(model=model, tokens=0))
    assert world.left(world.ask(tokens=0), "tokens") == str(10_000 - 4 * 10 - 2 * 10), "b made room"


def test_a_list_of_prompts_that_is_broken_asks_for_one_answer() -> None:
    world = World(tokens_per_minute=100)
    asked = world.ask(api="completions", prompt=b'["\x80', tokens=20, max_tokens=80)
    assert world.left(asked, "tokens") == "0"


def test_more_than_a_minutes_tokens_never_pass_and_clients_are_told() -> None:
    error = World(tokens_per_minute=1000).error(tokens=1001)
    assert error.headers["x-should-retry"] == "false"
    assert "retry-after" not in error.headers


def test_what_got_no_endpoint_has_used_nothing() -> None:
    world = World(requests_per_minute=1, tokens_per_minute=100, concurrent_requests=1)
    for _ in range(3):
        asked = world.ask(tokens=100)
        world.replicas[0].given_back(asked)
        world.replicas[0].given_back(asked)
        world.used(asked)
    assert world.left(world.ask(tokens=100), "tokens") == "0"


def test_requests_at_once_end_once() -> None:
    world = World(concurrent_requests=2)
    first, _ = world.ask(), world.ask()
    assert world.error().headers == {"retry-after": "1"}
    assert world.refused == [("a", "concurrent-requests")]
    world.used(first)
    world.used(first)
    world.ask()
    world.error()


def test_a_guards_word_counts_before_the_header() -> None:
    world = World(requests_per_minute=1)
    world.ask("a")
    assert world.ask("a", tenant="b").tenant == "b"
    world.error("b")


def test_other_limits_keep_what_was_used() -> None:
    world = World(requests_per_minute=10)
    for _ in range(6):
        world.ask()
    world.replicas[0].configure(LimitSettings(TenantLimits(requests_per_minute=5), {}, SOURCE))
    world.error()
    world.replicas[0].configure(LimitSettings(TenantLimits(requests_per_minute=7), {}, SOURCE))
    assert world.left(world.ask(), "requests") == "0"


# --- bounds ---------------------------------------------------------------------------------------------------------


def test_tenants_are_bounded_and_forgetting_gives_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TENANTS", 3)
    world = World(requests_per_minute=2)
    for name in "abc":
        world.ask(name)
    world.ask("d")
    world.ask("e")
    assert world.full == 2
    assert world.error("f").message.startswith(f"rate limit reached for '{OVERFLOW}'")
    world.ask("a")
    world.error("a")
    world.pass_(60.0)
    for ended in "ghijk":
        world.replicas[0].given_back(world.ask(ended))
    assert len(world.replicas[0]._tenants) <= 4


# --- replicas -------------------------------------------------------------------------------------------------------


def test_replicas_count_together_and_hear_within_a_tenth_of_a_second() -> None:
    world = World(3, requests_per_minute=6, tokens_per_minute=600, concurrent_requests=5)
    asked = [(world.ask(at=at, tokens=100), at) for at in (0, 1, 2)]
    world.pass_(TELL)
    for each, at in asked:
        assert world.left(each, "requests", at) == "3"
    world.ask(at=0, tokens=1)
    world.ask(at=1, tokens=1)
    world.pass_(TELL)
    assert world.error(at=2).message.endswith("5 requests at once; the limit is 5; retry later")
    for each, at in asked:
        world.used(each, at, prompt=10, completion=0)
    world.pass_(TELL)
    last = world.ask(at=2, tokens=1)
    assert world.left(last, "tokens", 2) == "570"
    world.pass_(TELL)
    assert world.error(at=1).headers["x-ratelimit-remaining-requests"] == "0"


def test_what_a_lost_replica_had_in_flight_is_forgotten_and_a_live_one_stays() -> None:
    world = World(3, concurrent_requests=2)
    world.ask(at=0)
    world.ask(at=1)
    world.pass_(10 * ALIVE)
    world.error(at=2)
    world.silent.add(0)
    world.pass_(FORGET + ALIVE)
    world.ask(at=2)
    assert world.error(at=2).headers == {"retry-after": "1"}


def test_a_replica_that_joins_knows_what_was_used() -> None:
    world = World(2, requests_per_minute=3)
    for _ in range(3):
        world.ask()
    world.pass_(TELL)
    late = world.start(2)
    for piece in world.replicas[1].snapshot():
        late.restore(piece, {})
        late.restore(piece, {})
    assert world.error(at=2).status == 429


def test_many_tenants_come_in_pieces() -> None:
    world = World(2, requests_per_minute=1)
    for number in range(450):
        world.ask(str(number))
    world.pass_(TELL)
    for number in (0, 250, 449):
        world.error(str(number), at=1)
    assert len([*world.replicas[1].snapshot()]) == 3


def test_nothing_is_told_and_no_timer_runs_where_nothing_happens() -> None:
    world = World(2, requests_per_minute=9)
    world.used(world.ask())
    world.pass_(10.0)
    assert not world.timers


STEP = st.tuples(st.sampled_from(["ask", "ask", "end", "back", "pass"]), st.integers(0, 5), st.integers(0, 2))


@given(st.lists(STEP, max_size=80))
@example([("ask", 0, 0)] * 3 + [("end", 5, 0)] * 2 + [("ask", 0, 0), ("ask", 2, 0)])
def test_any_history_keeps_the_limits_and_ends_with_nothing_in_flight(steps: list[tuple[str, int, int]]) -> None:
    world = World(3, requests_per_minute=5, tokens_per_minute=50, concurrent_requests=3)
    inside: list[tuple[Request, int]] = []
    passed: list[float] = []
    backs = 0
    for what, n, at in steps:
        if what == "ask":
            try:
                inside.append((world.ask(at=at, tokens=5 + n), at))
            except RateLimited:
                continue
            passed.append(world.now)
        elif what == "end" and inside:
            asked, where = inside.pop(n % len(inside))
            world.used(asked, where, prompt=5, completion=n)
        elif what == "back" and inside:
            asked, where = inside.pop(n % len(inside))
            world.replicas[where].given_back(asked)
            backs += 1
        elif what == "pass":
            world.pass_(float(n))
        world.pass_(TELL)
        assert len(inside) <= 3
    for first, start in enumerate(passed):
        for last in range(first, len(passed)):
            assert last - first + 1 <= 5 + (passed[last] - start) * 5 / 60 + backs + 1e-6
    for asked, where in inside:
        world.used(asked, where)
    # Answers may be longer than was foreseen: those of the last three requests by five tokens each.
    world.pass_(61.0 * (50 + 3 * 5) / 50)
    for replica in world.replicas:
        assert all(tenant.is_idle(world.now) for tenant in replica._tenants.values())
