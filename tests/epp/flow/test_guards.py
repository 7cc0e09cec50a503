"""Guards refuse or annotate; one that fails refuses."""

from collections.abc import Callable
from typing import Any

import pytest

from epp.errors import InternalError, Refused
from epp.flow.guards import Guards
from epp.plugin import Guard, Refusal, Request, annotated
from epp.testing import request


class Says(Guard):
    def __init__(self, say: Callable[[Request], Any]) -> None:
        self.say = say

    def check(self, request: Request) -> Request | Refusal | None:
        answer: Request | Refusal | None = self.say(request)
        return answer


def guards(*say: Callable[[Request], Any]) -> tuple[Guards, list[str]]:
    failed: list[str] = []
    return Guards([Says(each) for each in say], lambda plugin, error: failed.append(f"{plugin}: {error}")), failed


def test_each_sees_what_those_before_it_said() -> None:
    asked, priorities = request(), []
    checked, failed = guards(
        lambda seen: annotated(seen, priority=5),
        lambda seen: priorities.append(seen.priority),
        lambda seen: annotated(seen, tenant="a"),
    )
    found = checked.check(asked)
    assert (found.priority, found.tenant, found.prompt) == (5, "a", asked.prompt)
    assert (priorities, failed) == ([5], [])


@pytest.mark.parametrize(
    ("status", "kind"), [(401, "authentication_error"), (403, "permission_error"), (451, "invalid_request_error")]
)
def test_a_refusal_is_an_openai_error(status: int, kind: str) -> None:
    asked: list[Request] = []
    checked, failed = guards(lambda _: Refusal(status, "not this", "denied"), asked.append)
    with pytest.raises(Refused) as refused:
        checked.check(request())
    error = refused.value
    assert (error.status, error.kind, error.message, error.code) == (status, kind, "not this", "denied")
    assert (asked, failed) == ([], [])


@pytest.mark.parametrize("wrong", ["yes", Refusal(200, "fine"), True])
def test_what_is_no_answer_does_not_let_pass(wrong: Any) -> None:
    checked, failed = guards(lambda _: wrong)
    with pytest.raises(InternalError, match="plugin 'Says' failed"):
        checked.check(request())
    assert failed == ["Says: a guard must answer None, a Request, or a Refusal with a status of 400 to 599"]


def test_a_guard_that_raises_refuses() -> None:
    def breaks(_: Request) -> None:
        raise RuntimeError("no list")

    checked, failed = guards(breaks)
    with pytest.raises(InternalError):
        checked.check(request())
    assert failed == ["Says: no list"]
