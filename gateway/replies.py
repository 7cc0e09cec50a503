"""What Envoy answers by itself, in the JSON of OpenAI's errors; what endpoints and pickers answer stays as it is."""

import json
from typing import Final

from envoy_data_plane.envoy.config.accesslog.v3 import AccessLogFilter, ExtensionFilter, ResponseFlagFilter
from envoy_data_plane.envoy.config.core.v3 import DataSource, SubstitutionFormatString
from envoy_data_plane.envoy.extensions.access_loggers.filters.cel.v3 import ExpressionFilter
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    LocalReplyConfig,
    ResponseMapper,
)
from envoy_data_plane.google.protobuf import Any as Packed

INVALID, UNAVAILABLE = "invalid_request_error", "service_unavailable_error"
_MATCH: Final = "expected the host, path, method and headers of an HTTPRoute's rule"
_LISTENS: Final = "expected a server that listens at the pool's target port"


def local_replies() -> LocalReplyConfig:
    """Each kind of failure has its flag; the endpoint picker's own answers have none and pass as they are."""
    return LocalReplyConfig(
        mappers=[
            _when_flagged(("NR",), f"No route of this gateway matches the request; {_MATCH}.", INVALID),
            _when_flagged(("UH", "NC"), "No endpoint is ready to serve this request.", UNAVAILABLE),
            _when_flagged(("UT",), "The request took longer than its route allows.", UNAVAILABLE),
            _when_flagged(("SI",), "Nothing was sent for too long.", UNAVAILABLE),
            _when_flagged(("UF",), f"No connection to the endpoint; {_LISTENS}.", UNAVAILABLE),
            _when_flagged(("UC", "UR", "URX", "UPE", "LR"), "The endpoint broke the connection.", UNAVAILABLE),
            _when_flagged(("UO", "OM"), "The gateway has too many requests at once.", UNAVAILABLE),
            _when_flagged(("DPE", "IH"), "The request is not valid HTTP.", INVALID),
            _mapper(_details("request_payload_too_large"), "The request body is too large.", INVALID),
            _mapper(_details("ext_proc_"), "The endpoint picker did not answer.", UNAVAILABLE),
        ]
    )


def body(message: str, kind: str) -> str:
    """An error in OpenAI's shape."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}})


def _when_flagged(flags: tuple[str, ...], message: str, kind: str) -> ResponseMapper:
    return _mapper(AccessLogFilter(response_flag_filter=ResponseFlagFilter(flags=list(flags))), message, kind)


def _details(prefix: str) -> AccessLogFilter:
    """Failures that have no flag are known by Envoy's name of the detail."""
    expression = ExpressionFilter(expression=f"response.code_details.startsWith('{prefix}')")
    name = "envoy.access_loggers.extension_filters.cel"
    return AccessLogFilter(extension_filter=ExtensionFilter(name=name, typed_config=Packed.pack(expression)))


def _mapper(when: AccessLogFilter, message: str, kind: str) -> ResponseMapper:
    source = DataSource(inline_string=body(message, kind))
    text = SubstitutionFormatString(text_format_source=source, content_type="application/json")
    return ResponseMapper(filter=when, body_format_override=text)
