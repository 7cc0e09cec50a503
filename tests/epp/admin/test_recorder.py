import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from epp.admin.recorder import Decisions, Recorder, brief
from epp.errors import NoEndpoint, Queued, Rejected, SloUnmet
from epp.parsing.request import RawRequest
from epp.plugin import LatencyPrediction, PrefixMatch, Response, Slo, Usage
from epp.scheduling.decision import Comparison
from epp.telemetry.audit import AuditLog
from epp.telemetry.metrics import Metrics
from epp.telemetry.metrics_table import MAX_PRIORITIES
from tests.support.scheduling.decisions import SECRET, decision, endpoint
from tests.support.scheduling.signals import with_signal

APART = {
    "plugin_name": "pd", "plugin_type": "disagg-profile-handler", "model_name": "m", "decision_type": "prefill-decode",
}  # fmt: skip


class Desk:
    """A recorder with a clock in hand."""

    def __init__(self, audit: Path | None = None) -> None:
        self.now = 100.0
        self.metrics = Metrics(lambda: self.now)
        self.decisions = Decisions()
        self.audit = AuditLog(audit, self.metrics) if audit else None
        self.recorder = Recorder(
            "p", self.metrics, self.decisions, self.audit, clock=lambda: self.now, wall_clock=lambda: 5.0
        )

    def value(self, name: str, /, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    async def audited(self) -> list[dict[str, Any]]:
        assert self.audit is not None
        await self.audit.flush()
        return [json.loads(line) for line in self.audit.path.read_text().splitlines()]


def test_who_prefills_has_the_request_in_flight_until_that_is_done() -> None:
    desk, (decodes, prefills) = Desk(), [endpoint(1), endpoint(2)]
    made = decision("r1", [decodes])
    parts = made.parts = [(made.request, prefills)]

    def in_flight() -> tuple[int, int]:
        return desk.metrics.endpoint(decodes).in_flight, desk.metrics.endpoint(prefills).in_flight

    desk.recorder.decided(made, 99.999)
    assert in_flight() == (1, 1)
    made.parts = []
    desk.recorder.parts_ended(parts)
    assert in_flight() == (1, 0)
    desk.recorder.finished(made, Response(status=200))
    assert in_flight() == (0, 0)


def test_a_request_is_followed_to_its_end_and_its_prompt_let_go() -> None:
    desk, pods = Desk(), [endpoint(1), endpoint(2)]
    made = decision("r1", pods, cached=60)
    made.headers = {"tracestate": "what=a,client=sent"}
    desk.recorder.decided(made, 99.999)
    assert desk.metrics.endpoint(pods[0]).in_flight == 1
    assert desk.metrics.endpoint(pods[0]).predicted_hit_rate == 0.6

    desk.now = 101.0
    desk.recorder.finished(made, Response(status=200, first_token_at=100.5, usage=Usage(100, 11, 64), complete=True))
    assert desk.metrics.endpoint(pods[0]).in_flight == 0
    assert desk.metrics.endpoint(pods[0]).checked_cached == 64
    assert desk.value("warmpath_ttft_seconds_sum", model="m", source="answer") == pytest.approx(0.501)
    assert desk.value("warmpath_request_duration_seconds_sum", model="m") == pytest.approx(1.001)
    kept = desk.decisions.find("r1")
    assert kept is not None
    assert kept.decision.request.body == kept.decision.request.prompt == b""
    assert not kept.decision.request.signals
    assert not kept.decision.headers
    assert kept.as_dict()["predicted_cached_tokens"] == 60
    assert desk.value("warmpath_predicted_cached_tokens_total", pool="p", tier="device") == 60
    assert desk.value("llm_d_epp_disagg_decision_total", **APART) is None


def test_what_each_tier_is_predicted_to_hold_is_counted() -> None:
    desk, pod = Desk(), endpoint(1)
    for _ in range(2):
        made = decision("r1", [pod])
        made.request = with_signal(made.request, PrefixMatch, {pod: PrefixMatch(16, 1, 10, l1=32, l2=8)})
        desk.recorder.decided(made, 100.0)
    tiers = {
        tier: desk.value("warmpath_predicted_cached_tokens_total", pool="p", tier=tier)
        for tier in ("device", "l1", "l2")
    }
    assert tiers == {"device": 32, "l1": 64, "l2": 16}
    assert desk.value("warmpath_endpoint_predicted_cached_tokens_total", pool="p", endpoint=pod.name) is None
    assert desk.metrics.endpoint(pod).predicted == 112


def test_times_are_counted_by_priority_of_which_there_is_a_bounded_number() -> None:
    desk, pods = Desk(), [endpoint(1)]
    for priority in (0, -1, *range(2, MAX_PRIORITIES + 5)):
        made = decision("r1", pods)
        made.request = replace(made.request, priority=priority)
        desk.now = 100.0
        desk.recorder.decided(made, 100.0)
        desk.now = 103.0
        desk.recorder.finished(made, Response(status=200, first_token_at=None if priority else 101.0))
    here = {"pool": "p", "priority": "0"}
    assert desk.value("warmpath_priority_duration_seconds_sum", **here) == 3
    assert desk.value("warmpath_priority_ttft_seconds_sum", **here) == 1
    assert desk.value("warmpath_priority_ttft_seconds_count", pool="p", priority="-1") == 0
    assert desk.value("warmpath_priority_duration_seconds_count", pool="p", priority="other") == 5
    rows = [*desk.metrics.rows("warmpath_priority_duration_seconds")]
    assert len(rows) == MAX_PRIORITIES + 1


def test_stages_that_were_apart_are_counted_with_the_request() -> None:
    desk, made = Desk(), decision("r1", [endpoint(1)])
    desk.metrics.add_handler("p", lambda: ("pd", "disagg-profile-handler"))
    made.division = "prefill-decode"
    desk.recorder.decided(made, 100.0)
    desk.recorder.finished(made, Response(status=200))
    assert desk.value("llm_d_epp_disagg_decision_total", **APART) == 1


def test_what_the_shadow_would_have_done_is_counted() -> None:
    desk, made = Desk(), decision("r1", [endpoint(1), endpoint(2)])
    made.shadow = Comparison("new", agreed=False, regret=0.5, run=made.runs[0])
    desk.recorder.decided(made, 99.999)
    assert desk.value("warmpath_shadow_picks_total", pool="p", profile="new", outcome="other") == 1
    assert desk.value("warmpath_shadow_dearer_seconds_total", pool="p", profile="new") == 0.5
    kept = desk.decisions.find("r1")
    assert kept is not None
    assert kept.as_dict()["shadow"]["regret_ms"] == 500.0


def test_an_end_counts_once_and_only_after_a_beginning() -> None:
    desk, made = Desk(), decision("r1", [endpoint(1)])
    desk.recorder.finished(made, Response(status=200))
    assert desk.value("warmpath_requests_total", model="m", status="200") is None
    desk.recorder.decided(made, 100.0)
    for _ in range(2):
        desk.recorder.finished(made, Response(status=200))
    assert desk.value("warmpath_requests_total", model="m", status="200") == 1
    assert desk.value("warmpath_requests_running", model="m") == 0


def test_a_request_the_gateway_moved_ends_where_it_began_and_proves_no_prediction() -> None:
    desk, pods = Desk(), [endpoint(1), endpoint(2)]
    made = decision("r1", pods, cached=60)
    desk.recorder.decided(made, 100.0)
    made.endpoints = [pods[1], pods[0]]
    desk.recorder.finished(made, Response(status=200, usage=Usage(100, 10, 0)))
    assert [desk.metrics.endpoint(pod).in_flight for pod in pods] == [0, 0]
    assert [desk.metrics.endpoint(pod).checked_predicted for pod in pods] == [0, 0]


async def test_the_audit_log_says_who_what_where_why_and_no_prompt(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "audit.jsonl")
    headers = {"x-gateway-inference-objective": "gold", "x-llm-d-inference-fairness-id": "team", "cookie": SECRET}
    made = decision("r1", [endpoint(1), endpoint(2)], at=5.0, cached=60, headers=headers)
    desk.recorder.decided(made, 99.5)
    desk.now = 101.0
    desk.recorder.finished(made, Response(status=200, first_token_at=100.5, usage=Usage(100, 11, 64)))
    raw = RawRequest("POST", "/v1/chat/completions", {"x-request-id": "r2", **headers}, SECRET.encode())
    desk.recorder.failed(raw, NoEndpoint("nobody"))
    late = Rejected("too late", reason="rejected-ttl-expired")
    late.queued = Queued("team", 7, 60.0)
    desk.recorder.failed(raw, late)
    waited = decision("r3", [endpoint(1)], at=5.0)
    waited.waited, waited.flow = 0.25, "team"
    desk.recorder.decided(waited, desk.now - 0.5)
    desk.recorder.finished(waited, Response(status=200))
    answered, refused, expired, served = await desk.audited()
    assert {name: expired[name] for name in ("why", "status", "priority", "flow", "waited_ms")} == {
        "why": "rejected-ttl-expired",
        "status": 429,
        "priority": 7,
        "flow": "team",
        "waited_ms": 60_000.0,
    }
    assert (served["flow"], served["waited_ms"]) == ("team", 250.0)
    assert answered == {
        "at": 5.0,
        "request_id": "r1",
        "objective": "gold",
        "fairness_id": "team",
        "model": "m",
        "endpoint": "default/pod-1",
        "address": "10.0.0.1:8000",
        "why": "default: 1 of 2, 12.0 ms (queue 2.0, work 10.0)",
        "status": 200,
        "estimated_tokens": 100,
        "predicted_cached_tokens": 60,
        "prompt_tokens": 100,
        "completion_tokens": 11,
        "cached_tokens": 64,
        "decision_ms": 500.0,
        "ttft_ms": 1000.0,
        "duration_ms": 1500.0,
    }
    assert refused["request_id"] == "r2"
    assert (refused["status"], refused["why"], refused["objective"]) == (503, "rejected-no-endpoints", "gold")
    assert desk.audit is not None
    assert SECRET not in desk.audit.path.read_text()


def test_brief_names_the_filters_that_dropped_somebody() -> None:
    made = decision("r1", [endpoint(1)])
    made.runs[0].dropped = [("zone", [endpoint(2), endpoint(3)])]
    made.runs[0].scored[0].bills = ()
    assert brief(made) == "default: 1 of 1, expected-ttft 1.00, 2 dropped by zone"
    made.runs = []
    assert brief(made) == "no profile ran"


def test_a_body_that_was_not_read_is_counted_and_the_decision_says_why() -> None:
    desk, made = Desk(), decision("r1", [endpoint(1)])
    made.request = msgspec.structs.replace(made.request, opaque="content-encoding: gzip")
    desk.recorder.decided(made, 99.0)
    assert desk.value("warmpath_degraded_total", reason="opaque-body") == 1
    desk.recorder.finished(made, Response(status=200))
    assert made.as_dict()["opaque"] == "content-encoding: gzip"


def test_failures_count_for_the_endpoint_that_failed() -> None:
    desk, pods = Desk(), [endpoint(1), endpoint(2)]
    for status in (500, 501, 400, 200, 0):
        made = decision(f"r{status}", pods)
        desk.recorder.decided(made, 99.0)
        desk.recorder.finished(made, Response(status=status))
    assert [desk.metrics.endpoint(pod).failures for pod in pods] == [1, 0]
    retried = decision("retried", pods)
    desk.recorder.decided(retried, 99.0)
    retried.endpoints = pods[::-1]
    desk.recorder.finished(retried, Response(status=503, served=pods[1].address))
    assert [desk.metrics.endpoint(pod).failures for pod in pods] == [2, 1]


@pytest.mark.parametrize(
    ("slo", "response", "ended", "outcome"),
    [
        (Slo(0.6, 0.05), Response(status=200, first_token_at=100.5, usage=Usage(100, 11, 0)), 101.0, "met"),
        (Slo(0.4, 0.05), Response(status=200, first_token_at=100.5, usage=Usage(100, 11, 0)), 101.0, "missed-ttft"),
        (Slo(0.6, 0.04), Response(status=200, first_token_at=100.5, usage=Usage(100, 11, 0)), 101.0, "missed-tpot"),
        (Slo(0.4, 0.04), Response(status=200, first_token_at=100.5, usage=Usage(100, 11, 0)), 101.0, "missed-both"),
        (Slo(0.6, 0.04), Response(status=200, first_token_at=100.5, usage=Usage(100, 1, 0)), 101.0, "met"),
        (Slo(0.6), Response(status=200, first_token_at=100.5), 101.0, "met"),
        (Slo(0.6, 0.04), Response(status=200, first_token_at=100.5), 101.0, "unseen"),
        (Slo(0.4, 0.04), Response(status=200, first_token_at=100.5), 101.0, "missed-ttft"),
        (Slo(0.6), Response(status=200), 101.0, "unseen"),
        (Slo(0.6), Response(), 101.0, "unseen"),
        (Slo(0.6), Response(status=500), 101.0, "failed"),
        (Slo(0.6), Response(status=429), 101.0, "failed"),
    ],
)
def test_what_became_of_an_slo_is_counted_and_shown(slo: Slo, response: Response, ended: float, outcome: str) -> None:
    desk, made = Desk(), decision("r1", [endpoint(1)])
    made.request = replace(made.request, slo=Slo(slo.ttft, slo.tpot, "chat"), stream=True)
    desk.recorder.decided(made, 100.0)
    desk.now = ended
    desk.recorder.finished(made, response)
    assert desk.value("warmpath_slo_requests_total", pool="p", objective="chat", outcome=outcome) == 1
    kept = desk.decisions.find("r1")
    assert kept is not None
    shown = kept.as_dict()
    assert shown["slo"]["objective"] == "chat"
    assert shown["outcome"]["slo"] == outcome


def test_an_answer_that_a_plugin_asked_for_counts_as_no_sample_and_is_shown() -> None:
    desk, made = Desk(), decision("r1", [endpoint(1)])
    made.request = replace(made.request, slo=Slo(0.4, None, "chat"), stream=True, watched="asked")
    made.predictions = {made.endpoint: LatencyPrediction(0.5, 0.01)}
    desk.recorder.decided(made, 100.0)
    desk.now = 101.0
    desk.recorder.finished(made, Response(status=200, first_token_at=100.5, usage=Usage(100, 11, 0)))
    assert desk.value("warmpath_slo_requests_total", pool="p", objective="chat", outcome="unseen") == 1
    assert desk.value("warmpath_ttft_seconds_count", model=made.request.model, source="answer") is None
    assert desk.value("warmpath_priority_duration_seconds_count", pool="p", priority="0") == 1
    assert desk.value("warmpath_priority_ttft_seconds_count", pool="p", priority="0") == 0
    assert desk.value("warmpath_ttft_prediction_ratio_count") == 0
    kept = desk.decisions.find("r1")
    assert kept is not None
    assert kept.as_dict()["outcome"]["slo"] == "missed-ttft"
    assert kept.as_dict()["watched"] == "asked"


def test_of_an_answer_that_is_not_streamed_nothing_is_known_of_its_tokens() -> None:
    desk, made = Desk(), decision("r1", [endpoint(1)])
    made.request = replace(made.request, slo=Slo(0.1, 0.01), stream=False)
    made.predictions = {made.endpoint: LatencyPrediction(0.5, 0.01)}
    desk.recorder.decided(made, 100.0)
    desk.now = 101.0
    desk.recorder.finished(made, Response(status=200, first_token_at=101.0, usage=Usage(100, 11, 0)))
    assert desk.value("warmpath_slo_requests_total", pool="p", objective="(headers)", outcome="unseen") == 1
    assert desk.value("warmpath_ttft_prediction_ratio_count") == 0


def test_a_request_that_is_shed_for_its_slo_is_counted_with_the_others() -> None:
    desk = Desk()
    raw = RawRequest("POST", "/v1/chat/completions", {})
    desk.recorder.failed(raw, SloUnmet("no endpoint would keep it", "chat"))
    desk.recorder.failed(raw, NoEndpoint("none"))
    assert desk.value("warmpath_slo_requests_total", pool="p", objective="chat", outcome="shed") == 1


def test_predictions_are_compared_with_what_came() -> None:
    desk, pods = Desk(), [endpoint(1), endpoint(2)]
    for moved in (False, True):
        made = decision("r1", pods)
        made.request = replace(made.request, stream=True)
        made.predictions = {pods[0]: LatencyPrediction(0.25, 0.05), pods[1]: LatencyPrediction(0.1, 0.1)}
        desk.now = 100.1
        desk.recorder.decided(made, 100.0)
        shown = desk.decisions.find("r1")
        assert shown is not None
        assert shown.as_dict()["predicted"] == {"ttft_ms": 250.0, "tpot_ms": 50.0}
        if moved:
            made.endpoints = [pods[1], pods[0]]
        desk.now = 101.6
        response = Response(status=200, first_token_at=100.6, usage=Usage(100, 11, 0), complete=True)
        desk.recorder.finished(made, response)
    for name, ratio in (("ttft", 0.5 / 0.25), ("tpot", 0.1 / 0.05)):
        assert desk.value(f"warmpath_{name}_prediction_ratio_count") == 1, "what was served elsewhere proves nothing"
        assert desk.value(f"warmpath_{name}_prediction_ratio_sum") == pytest.approx(ratio)
