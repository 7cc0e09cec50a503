"""A collector of traces: OTLP over gRPC on a port of its own, which keeps what it gets."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb


class Collector:
    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def _export(self, request: Any, context: grpc.ServicerContext) -> Any:
        for resource in request.resource_spans:
            self.resources.append(attributes(resource.resource))
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return pb.ExportTraceServiceResponse()

    @contextmanager
    def running(self) -> Iterator["Collector"]:
        server = grpc.server(ThreadPoolExecutor(1))
        export = grpc.unary_unary_rpc_method_handler(
            self._export,
            request_deserializer=pb.ExportTraceServiceRequest.FromString,
            response_serializer=pb.ExportTraceServiceResponse.SerializeToString,
        )
        name = "opentelemetry.proto.collector.trace.v1.TraceService"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Export": export}),))
        self.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield self
        finally:
            server.stop(None)


def attributes(of: Any) -> dict[str, str]:
    """A span's or resource's attributes as text."""
    return {each.key: str(getattr(each.value, each.value.WhichOneof("value"))) for each in of.attributes}
