import json
from collections.abc import Sequence

from epp.plugin import Cost, Endpoint, Filter, Request
from epp.scheduling.inflight import InFlightLoad
from epp.scheduling.pickers import MaxScorePicker
from epp.scheduling.scorers import ActiveRequestScorer
from tests.support.scheduling.schedulers import ask, pods, scheduler


class Bill(Cost):
    terms = ("work", "queue")

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
