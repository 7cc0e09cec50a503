"""How Envoy and the endpoint picker talk: the ext_proc filter, and what each pool's routes set in it.

The filter is off; a route to a pool turns it on with the pool's own picker. The wirings differ in what of a request
goes through the picker; measured costs of each are in the benchmarks.
"""

from datetime import timedelta
from typing import Final, Literal

from envoy_data_plane.envoy.config.core.v3 import (
    BackoffStrategy,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    RetryPolicy,
    RetryPolicyRetryHostPredicate,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    ExternalProcessorRouteCacheAction,
    ExtProcOverrides,
    ExtProcPerRoute,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import Any as Packed

from epp import protocol
from gateway.clusters import picker_name
from gateway.resources import InferencePool

Wiring = Literal["lean", "full-duplex", "buffered", "streamed"]
"""lean: the request goes through the picker, which asks for it in full duplex; of the answer its head, and all of it
where the picker asks for that; full-duplex: both, whole; buffered and streamed:
the request is shown to the picker in one piece or in several but not sent back by it, of the answer its head."""

FILTER: Final = "envoy.filters.http.ext_proc"
PREVIOUS_HOSTS: Final = "envoy.retry_host_predicates.previous_hosts"
MESSAGE_TIMEOUT: Final = timedelta(seconds=60)
"""How long Envoy waits for the picker's word, which may hold a request in its queue. Not in force in full duplex."""

_BODY: Final = ProcessingModeBodySendMode
_SEND: Final = ProcessingModeHeaderSendMode.SEND
_BODIES: Final = {
    "lean": (_BODY.STREAMED, _BODY.NONE),
    "full-duplex": (_BODY.FULL_DUPLEX_STREAMED, _BODY.FULL_DUPLEX_STREAMED),
    "buffered": (_BODY.BUFFERED, _BODY.NONE),
    "streamed": (_BODY.STREAMED, _BODY.NONE),
}


def picker_filter(wiring: Wiring) -> HttpFilter:
    """The filter as every route sees it before it is turned on. Its service is a name that leads nowhere."""
    request, response = _BODIES[wiring]
    config = ExternalProcessor(
        grpc_service=GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name="epp.of-the-route")),
        processing_mode=ProcessingMode(
            request_header_mode=_SEND,
            request_body_mode=request,
            request_trailer_mode=_SEND,
            response_header_mode=_SEND,
            response_body_mode=response,
            # With trailers asked for, Envoy keeps the stream open until the answer has ended: that is how it is known.
            response_trailer_mode=_SEND,
        ),
        message_timeout=MESSAGE_TIMEOUT,
        metadata_options=MetadataOptions(
            forwarding_namespaces=_namespaces(protocol.LB_NAMESPACE, protocol.SUBSET_NAMESPACE),
            receiving_namespaces=_namespaces(protocol.LB_NAMESPACE),
        ),
        # A second choice of route could roll the dice again and send the request to another pool than the picker's.
        route_cache_action=ExternalProcessorRouteCacheAction.RETAIN,
        send_body_without_waiting_for_header_response=wiring == "streamed",
        allow_mode_override=wiring == "lean",
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
    )
    return HttpFilter(name=FILTER, typed_config=Packed.pack(config), disabled=True)


def picked_by(pool: InferencePool) -> dict[str, Packed]:
    """Per-route configuration that turns the filter on with the pool's endpoint picker."""
    overrides = ExtProcOverrides(
        grpc_service=GrpcService(
            envoy_grpc=GrpcServiceEnvoyGrpc(
                cluster_name=picker_name(pool.metadata.id), authority=pool.spec.endpoint_picker_ref.name
            ),
            retry_policy=RetryPolicy(
                # A gRPC server that stops cancels, or calls unavailable, what came in just before it could say so.
                retry_on="connect-failure,refused-stream,reset,cancelled,unavailable",
                num_retries=3,
                retry_back_off=BackoffStrategy(
                    base_interval=timedelta(milliseconds=5), max_interval=timedelta(milliseconds=50)
                ),
                retry_host_predicate=[
                    RetryPolicyRetryHostPredicate(
                        name=PREVIOUS_HOSTS, typed_config=Packed.pack(PreviousHostsPredicate())
                    )
                ],
                host_selection_retry_max_attempts=5,
            ),
        ),
        failure_mode_allow=pool.spec.endpoint_picker_ref.failure_mode == "FailOpen",
    )
    return {FILTER: Packed.pack(ExtProcPerRoute(overrides=overrides))}


def _namespaces(*names: str) -> MetadataOptionsMetadataNamespaces:
    return MetadataOptionsMetadataNamespaces(untyped=list(names))
