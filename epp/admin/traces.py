"""Spans of requests, joined to the caller's trace and handed on to the endpoint, for the collector that OTEL_* names.

Names as the reference pickers have them (GIE v1.5): `gateway.request`, and in it `gateway.request_orchestration`, from
the complete request to the decision. In that are ours, one for each stage: `warmpath.parse`, `warmpath.prepare`,
`warmpath.flow_control` where the request had to wait, and `warmpath.choose`, whose attributes are the bill.

The environment says the rest, as OpenTelemetry has it: OTEL_TRACES_EXPORTER (`console`, the default, or `otlp` over
gRPC), OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG (default: a tenth
of the traces begun here). No prompt is in a span. The SDK is optional, and imported only where traces are wanted.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from epp import __version__, protocol
from epp.errors import ConfigError, EppError
from epp.parsing.request import RawRequest, Response
from epp.plugin import Endpoint, PrefixMatch
from epp.route import RequestObserver
from epp.scheduling.decision import Decision, ProfileRun, row_as_dict

SHARE: Final = 0.1
"""Of traces that begin here, how many are kept if the environment does not say."""
LONGEST: Final = 256
"""Characters of a value that a client chose."""
FLUSH_MS: Final = 2000
"""What is left at the end has this long to be sent."""


class Tracing:
    """Makes tracers. `lost()` is called, in a thread, whenever spans could not be delivered. ConfigError."""

    def __init__(self, lost: Callable[[], object]) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        except ImportError:
            expected = "the Python package `opentelemetry-sdk` is missing; expected warmpath with its extra `tracing`"
            raise ConfigError("--tracing", expected) from None
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "warmpath"}
        sampler = None if "OTEL_TRACES_SAMPLER" in os.environ else ParentBased(TraceIdRatioBased(SHARE))
        self._provider = TracerProvider(
            sampler=sampler, resource=Resource.create({**named, "service.version": __version__}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(lost)))
        self.tracer = self._provider.get_tracer("warmpath", __version__)

    def flush(self) -> None:
        """Send what is left. Blocks, a little."""
        self._provider.force_flush(FLUSH_MS)


def _exporter(lost: Callable[[], object]) -> Any:
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter, SpanExportResult

    kind = os.environ.get("OTEL_TRACES_EXPORTER") or "console"
    if kind == "console":
        return ConsoleSpanExporter(out=sys.stdout, formatter=lambda span: span.to_json(indent=None) + "\n")
    if kind != "otlp":
        raise ConfigError("--tracing", f"OTEL_TRACES_EXPORTER is {kind!r}; expected console or otlp")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    class Watched(SpanExporter):
        """OTLP that says when it fails."""

        def __init__(self) -> None:
            self._inner = OTLPSpanExporter()

        def export(self, spans: Sequence[Any]) -> SpanExportResult:
            result = self._inner.export(spans)
            if result is not SpanExportResult.SUCCESS:
                lost()
            return result

        def shutdown(self) -> None:
            self._inner.shutdown()

    return Watched()


class Traces:
    """An observer that makes a span of each request and passes every call on to `inner`.

    `clock`: seconds, monotonic, the router's. `wall_clock`: seconds since the epoch.
    """

    def __init__(
        self, inner: RequestObserver, tracing: Tracing, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._inner = inner
        self._tracer = tracing.tracer
        self._clock = clock
        self._wall_clock = wall_clock
        self._propagator = TraceContextTextMapPropagator()
        self._otel = trace
        self._open: dict[Decision, tuple[Any, Callable[[float], int]]] = {}
        """The span of each request that has not ended, and what makes its times: a wall clock that is set meanwhile
        does not make it an hour long, or end before it began."""

    def decided(self, decision: Decision, complete_at: float) -> None:
        """The span begins when the request was complete; the endpoint gets it in `traceparent`."""
        self._inner.decided(decision, complete_at)
        request = decision.request
        at = self._wall()
        now, began = at(self._clock()), at(complete_at)
        span = self._begun(request.headers, began)
        inside = self._otel.set_span_in_context(span)
        if span.is_recording():
            span.set_attributes(
                {
                    "gen_ai.request.model": (request.asked or request.model)[:LONGEST],
                    "http.request.id": request.id[:LONGEST],
                    "warmpath.endpoint": decision.endpoint.name,
                    "server.address": decision.endpoint.address,
                }
            )
            child = self._tracer.start_span("gateway.request_orchestration", context=inside, start_time=began)
            child.set_attributes({"target_model": request.model[:LONGEST], "request_prio": request.priority})
            self._stages(decision, at, complete_at, self._otel.set_span_in_context(child))
            child.end(now)
        headers: dict[str, str] = {}
        self._propagator.inject(headers, inside)
        decision.headers = {**decision.headers, **headers}
        self._open[decision] = span, at

    def finished(self, decision: Decision, response: Response) -> None:
        """The span ends with the answer, or without one."""
        if (opened := self._open.pop(decision, None)) is None:
            self._inner.finished(decision, response)
            return
        span, at = opened
        if span.is_recording():
            if response.first_token_at is not None:
                span.add_event("first token", timestamp=at(response.first_token_at))
            span.set_attribute("http.response.status_code", response.status)
            span.set_attribute("warmpath.served", response.served or decision.endpoint.address)
            if (usage := response.usage) is not None:
                counts = {
                    "input_tokens": usage.prompt,
                    "output_tokens": usage.completion,
                    "cached_tokens": usage.cached,
                }
                span.set_attributes({f"gen_ai.usage.{name}": count for name, count in counts.items() if count >= 0})
            if response.status == 0 or response.status >= 500:
                span.set_status(self._otel.StatusCode.ERROR)
        span.end(at(self._clock()))
        self._inner.finished(decision, response)

    def failed(self, raw: RawRequest, error: EppError) -> None:
        """A span without length: the request got its answer from us."""
        now = int(self._wall_clock() * 1e9)
        span = self._begun(raw.headers, now)
        span.set_attribute("http.response.status_code", error.status)
        span.set_attribute("http.request.id", raw.headers.get(protocol.REQUEST_ID, "")[:LONGEST])
        span.set_status(self._otel.StatusCode.ERROR, error.reason or error.kind)
        span.end(now)
        self._inner.failed(raw, error)

    def _stages(self, decision: Decision, at: Callable[[float], int], complete_at: float, inside: Any) -> None:
        if not decision.times:
            return
        preparing, prepared, choosing, chosen = decision.times
        stages: list[tuple[str, float, float, Mapping[str, Any]]] = [
            ("parse", complete_at, preparing, {"http.request.body.size": len(decision.request.body)}),
            ("prepare", preparing, prepared, {"warmpath.prompt_tokens": decision.request.tokens}),
            *([("flow_control", prepared, choosing, {})] if decision.waited else []),
            ("choose", choosing, chosen, explained(decision)),
        ]
        for name, begin, end, attributes in stages:
            span = self._tracer.start_span(f"warmpath.{name}", context=inside, start_time=at(begin))
            span.set_attributes(attributes)
            span.end(at(end))

    def _wall(self) -> Callable[[float], int]:
        """Makes nanoseconds since the epoch of times on our clock; the same shift for all, so that none overtakes."""
        shift = self._wall_clock() - self._clock()
        return lambda at: int((at + shift) * 1e9)

    def _begun(self, headers: Any, at: int) -> Any:
        context = self._propagator.extract(headers)
        return self._tracer.start_span("gateway.request", context, self._otel.SpanKind.SERVER, start_time=at)


def explained(decision: Decision) -> dict[str, Any]:
    """Why the request goes where it goes, as attributes: the chosen endpoint's bill, and what the next best would cost.

    Terms in milliseconds. Endpoints of other stages have their bills under `warmpath.STAGE.`.
    """
    chosen, found = decision.endpoint, dict[str, Any]()
    found["warmpath.endpoint"] = chosen.name
    held = decision.request.signals.get(PrefixMatch, {}).get(chosen)
    if held is not None:
        found.update(
            {"warmpath.cached_tokens": held.tokens, "warmpath.l1_tokens": held.l1, "warmpath.l2_tokens": held.l2}
        )
    if decision.predicted is not None:
        found["warmpath.predicted_ttft_ms"] = round(decision.predicted.ttft * 1000, 3)
    for way, seconds in decision.ways.items():
        found[f"warmpath.ways.{way}_ms"] = round(seconds * 1000, 3)
    for run in decision.runs:
        prefix = f"warmpath.{run.stage}." if run.stage else "warmpath."
        found[f"{prefix}profile"] = run.profile
        found[f"{prefix}candidates"] = len(run.endpoints) + run.others
        for name, gone in run.dropped:
            found[f"{prefix}dropped.{name}"] = len(gone)
        picked = chosen if not run.stage else run.picks[0]
        if run.stage:
            found[f"{prefix}endpoint"] = picked.name
        if picked in run.endpoints:
            found.update({f"{prefix}{name}": value for name, value in _bill(run, picked).items()})
            others = [each for each in range(len(run.endpoints)) if run.endpoints[each] is not picked]
            if others:
                best = run.endpoints[max(others, key=lambda at: run.totals[at])]
                found[f"{prefix}next.endpoint"] = best.name
                cost = row_as_dict(run, run.endpoints.index(best))
                found.update({f"{prefix}next.{key}": cost[key] for key in ("cost_ms", "total") if key in cost})
    return found


def _bill(run: ProfileRun, endpoint: Endpoint) -> dict[str, float]:
    row = row_as_dict(run, run.endpoints.index(endpoint))
    bill = {f"bill.{term}_ms": ms for term, ms in row.get("bill_ms", {}).items()}
    cost: dict[str, float] = {key: row[key] for key in ("cost_ms", "total") if key in row}
    return {**bill, **cost, **{f"score.{name}": each["score"] for name, each in row["scores"].items()}}
