import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

from epp.plugin import Cost, Endpoint, Filter, LatencyPrediction, PrefixMatch, Request
from epp.scheduling.decision import summary
from epp.scheduling.inflight import InFlightLoad
from epp.scheduling.pickers import MaxScorePicker
from epp.scheduling.scorers import ActiveRequestScorer
from tests.support.scheduling.schedulers import Held, ask, pod, pods, scheduler


class Bill(Cost):
    terms = ("work", "queue")
    meanings: ClassVar[Mapping[str, str]] = {"queue": "what waits there"}

    def bill(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[tuple[float, ...]]:
        return [(0.25, 0.0015 * i) for i in range(len(endpoints))]


class NotLast(Filter):
    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        return endpoints[:-1]


def test_the_explanation_is_json_and_holds_no_prompt() -> None:
    s = scheduler(
        (Bill(), 2),
        ActiveRequestScorer(),
        filters=[NotLast()],
        producers=[InFlightLoad()],
        picker=MaxScorePicker(max_num_of_endpoints=2),
    )
    secret = "my-secret-prompt"
    request = ask("id-1", prompt=secret.encode(), body=secret.encode(), tokens=4, headers={"x-user": secret})
    decision = s.choose(request, pods("abc"))
    text = json.dumps(decision.as_dict())
    assert secret not in text
    assert json.loads(text) == {
        "request_id": "id-1",
        "model": "llama",
        "at": 1.5,
        "tokens": 4,
        "endpoint": "a",
        "address": "a:8000",
        "fallbacks": ["b"],
        "profiles": [
            {
                "profile": "default",
                "terms": {"queue": "what waits there"},
                "dropped": [{"filter": "NotLast", "endpoints": ["c"]}],
                "endpoints": [
                    {
                        "endpoint": "a",
                        "total": 3.0,
                        "scores": {
                            "Bill": {"score": 1.0, "weight": 2.0},
                            "ActiveRequestScorer": {"score": 1.0, "weight": 1.0},
                        },
                        "bill_ms": {"work": 250.0, "queue": 0.0},
                        "cost_ms": 250.0,
                    },
                    {
                        "endpoint": "b",
                        "total": 2 * (0.251 / 0.2525) + 1.0,
                        "scores": {
                            "Bill": {"score": 0.251 / 0.2525, "weight": 2.0},
                            "ActiveRequestScorer": {"score": 1.0, "weight": 1.0},
                        },
                        "bill_ms": {"work": 250.0, "queue": 1.5},
                        "cost_ms": 251.5,
                    },
                ],
                "picks": ["a", "b"],
            }
        ],
    }


def test_one_endpoint_is_its_address_and_several_are_a_list() -> None:
    a, b = pods("ab")
    decision = scheduler().choose(ask(), [a, b])
    assert decision.destination == "a:8000"
    decision.endpoints = [b, a]
    assert (decision.endpoint, decision.destination) == (b, "b:8000,a:8000")


def test_a_summary_says_who_why_and_who_else() -> None:
    s = scheduler(Bill(), producers=[Held(a=(90, 6))])
    decision = s.choose(ask("id-1", tokens=150), [pod("a", waiting=3, at=1.0), pod("b")])
    decision.predictions = {decision.endpoint: LatencyPrediction(0.0208, 0.01)}
    decision.waited, decision.beside = 0.5, {"prefill": ["p 1"]}
    assert summary(decision) == (
        "id=id-1; endpoint=a; tokens=150; cached=90; ttft-ms=20.8; queue=3; waited-ms=500.0; prefill=p%201; "
        "cost-ms=250.0; next=b cost-ms=251.5"
    )
    decision.request.signals[PrefixMatch][decision.endpoint] = PrefixMatch(90, 6, 10, l1=40, l2=7)  # type: ignore[index]
    assert "; cached=90; l1=40; l2=7; " in summary(decision)


def test_a_summary_of_scores_or_of_nothing() -> None:
    scored = scheduler(ActiveRequestScorer(), producers=[InFlightLoad()]).choose(ask(), [pod("a"), pod("b")])
    assert summary(scored) == "id=r; endpoint=a; tokens=0; score=1; next=b score=1"
    lone = scheduler().choose(ask(), [Endpoint("a", "a:8000", {})])
    assert summary(lone) == "id=r; endpoint=a; tokens=0; score=0"


def test_a_summary_is_short_and_visible_whatever_names_are() -> None:
    odd = "\r\n\x00; é=" * 60
    decision = scheduler(Bill()).choose(ask(odd), [pod(odd), pod("b" + odd)])
    line = summary(decision)
    assert len(line) < 2048
    assert all(" " <= c <= "~" for c in line)
    assert [part.partition("=")[0] for part in line.split("; ")] == [
        "id", "endpoint", "tokens", "cost-ms", "next",
    ]  # fmt: skip
