"""Spans as a collector gets them, and what of them endpoints are told."""

import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from epp.admin.traces import Traces, Tracing
from epp.errors import ConfigError, EppError, NoEndpoint
from epp.parsing.request import RawRequest, Request, Response, Usage
from epp.plugin import Endpoint
from epp.scheduling.decision import Decision
from tests.support.process.otlp import Collector, attributes
from tests.support.scheduling.decisions import SECRET, decision, endpoint

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{PARENT}-01"


class Received:
    """The observer behind."""

    def __init__(self) -> None:
        self.reported: list[str] = []

    def decided(self, decision: Decision, complete_at: float) -> None:
        self.reported.append("decided")

    def finished(self, decision: Decision, response: Response) -> None:
        self.reported.append("finished")

    def failed(self, raw: RawRequest, error: EppError) -> None:
        self.reported.append("failed")


BILLED = {
    "warmpath.endpoint": "default/pod-1",
    "warmpath.profile": "default",
    "warmpath.candidates": "2",
    "warmpath.dropped.healthy": "0",
    "warmpath.cached_tokens": "60",
    "warmpath.l1_tokens": "0",
    "warmpath.l2_tokens": "0",
    "warmpath.bill.queue_ms": "2.0",
    "warmpath.bill.work_ms": "10.0",
    "warmpath.cost_ms": "12.0",
    "warmpath.total": "1.0",
    "warmpath.score.expected-ttft": "1.0",
    "warmpath.next.endpoint": "default/pod-2",
    "warmpath.next.cost_ms": "1012.0",
    "warmpath.next.total": "1.0",
}


class Rig:
    def __init__(self) -> None:
        self.lost = 0
        self.tracing = Tracing(self._lose)
        self.received = Received()
        self.now, self.off = 100.0, 1_000_000.0
        self.traces = Traces(self.received, self.tracing, lambda: self.now, lambda: self.off + self.now)

    def _lose(self) -> None:
        self.lost += 1

    def decide(self, **headers: str) -> Decision:
        request = Request(id="r1", model="tuned", asked="base", priority=3, headers=headers, prompt=SECRET.encode())
        decision = Decision(request, [Endpoint("default/a", "10.0.0.1:8000")], {"x-kept": "1"}, [], 0.0)
        self.traces.decided(decision, self.now - 0.25)
        return decision


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector().running() as collector:
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "picker")
        yield collector


def test_a_request_is_a_span_of_the_callers_trace_and_the_endpoint_is_reported(collector: Collector) -> None:
    rig = Rig()
    decision = rig.decide(traceparent=SAMPLED)
    rig.now += 2
    usage = Usage(prompt=10, completion=-1, cached=4)
    rig.traces.finished(decision, Response(status=200, served="10.0.0.2:8000", usage=usage))
    rig.tracing.flush()
    assert rig.received.reported == ["decided", "finished"]
    (span,), (inner,) = collector.named("gateway.request"), collector.named("gateway.request_orchestration")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert (inner.trace_id, inner.parent_span_id) == (span.trace_id, span.span_id)
    assert decision.headers == {"x-kept": "1", "traceparent": f"00-{TRACE}-{span.span_id.hex()}-01"}
    assert span.end_time_unix_nano - span.start_time_unix_nano == 2_250_000_000
    assert inner.end_time_unix_nano - inner.start_time_unix_nano == 250_000_000
    assert attributes(inner) == {"target_model": "tuned", "request_prio": "3"}
    assert attributes(span) == {
        "gen_ai.request.model": "base",
        "http.request.id": "r1",
        "warmpath.endpoint": "default/a",
        "warmpath.served": "10.0.0.2:8000",
        "server.address": "10.0.0.1:8000",
        "http.response.status_code": "200",
        "gen_ai.usage.input_tokens": "10",
        "gen_ai.usage.cached_tokens": "4",
    }
    assert collector.resources[0]["service.name"] == "picker"
    assert SECRET not in str(collector.spans)


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_wall_clock_that_is_set_meanwhile_does_not_change_how_long_a_request_took(
    collector: Collector, hours: int
) -> None:
    rig = Rig()
    decision = rig.decide(traceparent=SAMPLED)
    rig.now, rig.off = rig.now + 2, rig.off + hours * 3600
    rig.traces.finished(decision, Response(status=200, first_token_at=rig.now - 1))
    rig.tracing.flush()
    [span] = collector.named("gateway.request")
    [first] = span.events
    assert span.end_time_unix_nano - span.start_time_unix_nano == 2_250_000_000
    assert span.end_time_unix_nano - first.time_unix_nano == 1_000_000_000


def test_each_stage_is_a_span_and_the_choice_has_the_bill(collector: Collector) -> None:
    rig = Rig()
    made = decision("r1", [endpoint(1), endpoint(2)], cached=60, headers={"traceparent": SAMPLED})
    made.times, made.waited = (99.0, 99.5, 99.75, 99.875), 0.25
    rig.traces.decided(made, 98.0)
    rig.traces.finished(made, Response(status=200, first_token_at=rig.now + 1))
    rig.tracing.flush()
    (whole,), (outer,) = collector.named("gateway.request"), collector.named("gateway.request_orchestration")
    stages = [span for span in collector.spans if span.parent_span_id == outer.span_id]
    took = {span.name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in stages}
    assert took == {
        "warmpath.parse": 1.0, "warmpath.prepare": 0.5, "warmpath.flow_control": 0.25, "warmpath.choose": 0.125,
    }  # fmt: skip
    assert stages[0].start_time_unix_nano == whole.start_time_unix_nano
    by_name = {span.name: attributes(span) for span in stages}
    assert by_name["warmpath.choose"] == BILLED
    assert by_name["warmpath.prepare"] == {"warmpath.prompt_tokens": "100"}
    (event,) = whole.events
    assert (event.name, (event.time_unix_nano - whole.start_time_unix_nano) / 1e9) == ("first token", 3.0)
    assert SECRET not in str(collector.spans)


def test_another_stage_has_a_bill_of_its_own_and_a_wait_that_was_none_no_span(collector: Collector) -> None:
    rig, pods = Rig(), [endpoint(1), endpoint(2)]
    made = decision("r1", pods, headers={"traceparent": SAMPLED})
    (run,) = made.runs
    prefill = replace(run, profile="p", stage="prefill", picks=[pods[1]])
    made.runs, made.times, made.ways = [run, prefill], (99.0, 99.5, 99.5, 99.875), {"here": 2.0, "apart": 1.0}
    rig.traces.decided(made, 98.0)
    rig.tracing.flush()
    assert collector.named("warmpath.flow_control") == []
    said = attributes(collector.named("warmpath.choose")[0])
    assert (said["warmpath.prefill.endpoint"], said["warmpath.prefill.profile"]) == ("default/pod-2", "p")
    assert (said["warmpath.prefill.cost_ms"], said["warmpath.cost_ms"]) == ("1012.0", "12.0")
    assert said["warmpath.ways.apart_ms"] == "1000.0"


def test_what_fails_is_an_error(collector: Collector) -> None:
    rig = Rig()
    rig.traces.failed(RawRequest("POST", "/", {"traceparent": SAMPLED}), NoEndpoint("nobody"))
    rig.traces.finished(rig.decide(traceparent=SAMPLED), Response())
    rig.tracing.flush()
    assert [span.status.code for span in collector.named("gateway.request")] == [2, 2]
    assert collector.spans[0].status.message == "rejected-no-endpoints"
    assert rig.received.reported == ["failed", "decided", "finished"]


def test_who_does_not_sample_is_not_sampled_and_its_trace_goes_on(collector: Collector) -> None:
    rig = Rig()
    decision = rig.decide(traceparent=f"00-{TRACE}-{PARENT}-00")
    rig.traces.finished(decision, Response(status=200))
    rig.tracing.flush()
    assert collector.spans == []
    assert decision.headers["traceparent"].startswith(f"00-{TRACE}-")
    assert decision.headers["traceparent"].endswith("-00")


def test_of_traces_that_begin_here_a_share_is_kept(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    for _ in range(500):
        rig.traces.finished(rig.decide(), Response(status=200))
    rig.tracing.flush()
    assert 0 < len(collector.named("gateway.request")) < 250
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    rig, before = Rig(), len(collector.spans)
    rig.traces.finished(rig.decide(), Response(status=200))
    rig.tracing.flush()
    assert len(collector.spans) == before + 2


def test_whatever_a_client_calls_a_trace_is_taken(collector: Collector) -> None:
    rig = Rig()

    @given(st.text(), st.text())
    def taken(traceparent: str, tracestate: str) -> None:
        for parent in (traceparent, SAMPLED):
            decision = rig.decide(traceparent=parent, tracestate=tracestate)
            rig.traces.finished(decision, Response(status=200))

    taken()
    rig.tracing.flush()
    assert not rig.traces._open
    assert len(collector.named("gateway.request")) >= 100


def test_a_collector_that_is_away_costs_spans_and_is_reported(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    rig = Rig()
    rig.traces.finished(rig.decide(traceparent=SAMPLED), Response(status=200))
    rig.tracing.flush()
    assert rig.lost == 1


def test_on_the_console_a_span_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
    rig = Rig()
    rig.traces.finished(rig.decide(traceparent=SAMPLED), Response(status=200))
    rig.tracing.flush()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("{") and TRACE in line for line in lines)


def test_another_exporter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(ConfigError, match="--tracing: OTEL_TRACES_EXPORTER is 'zipkin'; expected console or otlp"):
        Rig()


def test_without_the_sdk_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match="its extra `tracing`"):
        Rig()
