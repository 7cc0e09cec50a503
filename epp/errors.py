"""Everything that can go wrong, drawn as a tree. Each error knows its HTTP status and its reason.

EppError                     answered to the client as OpenAI-style JSON
 · OwnAnswer           200   no error: the picker itself knows what is asked for
 · BadRequest          400   the request itself is wrong; `param` names the field
 · UnknownModel        404   no endpoint or rule serves this model
 · RequestTimeout      408   the request did not arrive whole in time
 · TooLarge            413   a bound on the request was exceeded
 · UnsupportedMedia    415   a body that has to be read cannot be
 · Rejected            429   shed on purpose; `reason` says why
   · SloUnmet          429   no endpoint would keep its SLO
 · InternalError       500   our bug; the message says nothing about the inside
 · NoEndpoint          503   no endpoint to send it to now
 · DeadlineExceeded    503   we took too long to decide
 · Refused             any   by a guard of the configuration, which says with what status
 · RateLimited         429   a tenant has used up what the configuration allows it
 · NotAllowed          403   a model that this tenant may not use
ConfigError                  a file or a flag is wrong: path, value, expectation; refused at start
 · ConfigErrors              all that is wrong with one file
"""

import errno
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from epp import protocol
from epp.telemetry.text import printable

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what they should be: text that is no UTF-8 and nesting too deep too."""
NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class Queued(NamedTuple):
    """How a request waited in flow control."""

    flow: str
    """Its fairness id there."""
    priority: int
    seconds: float
    """0: it did not have to wait."""


class EppError(Exception):
    """A request that gets an answer from us instead of from an endpoint.

    `reason`, when set, is sent in the drop-reason header and is a metric label, so it comes from a small fixed set
    (`protocol.DROP_*`). `param` is the JSON path of the field at fault and `code` what programs know the error by, as
    in OpenAI's error objects; without a code it is the reason. `headers` are set on the answer.
    """

    status: int = 500
    kind: str = "api_error"
    """`error.type` of the JSON answer, in OpenAI's vocabulary."""
    queued: Queued | None = None
    """How the request had waited when it was refused; None: it had not come to flow control."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        reason: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.reason = reason
        self.code = code
        self.headers = headers


class BadRequest(EppError):
    """The request can never succeed as it is: malformed JSON, a missing or mistyped field."""

    status = 400
    kind = "invalid_request_error"


class UnknownModel(EppError):
    """The model named in the request is not served here."""

    status = 404
    kind = "invalid_request_error"


class OwnAnswer(EppError):
    """No error at all: what the request asks for is known here, and is the answer."""

    status = 200

    def __init__(self, body: bytes) -> None:
        super().__init__("answered by the picker")
        self.body = body
        """JSON."""


class RequestTimeout(EppError):
    """The request was not complete in time: a client, or a gateway, that sends too slowly."""

    status = 408
    kind = "invalid_request_error"


class TooLarge(EppError):
    """A body, header or prompt beyond the configured bound."""

    status = 413
    kind = "invalid_request_error"


class UnsupportedMedia(EppError):
    """A body in an encoding that is not supported, where it has to be read."""

    status = 415
    kind = "invalid_request_error"


class Rejected(EppError):
    """Shed: the pool is saturated and this request's priority allows dropping it."""

    status = 429
    kind = "rate_limit_error"

    def __init__(
        self, message: str, *, reason: str = protocol.DROP_SATURATED, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        super().__init__(message, reason=reason, headers=headers)


class SloUnmet(Rejected):
    """Shed: no endpoint would serve it within its SLO. `objective`: whose SLO it is; "" = its own headers'."""

    def __init__(self, message: str, objective: str) -> None:
        super().__init__(message, reason=protocol.DROP_SLO)
        self.objective = objective


class InternalError(EppError):
    """A bug of ours. The cause is in our log, never in the answer."""


class NoEndpoint(EppError):
    """No endpoint is ready, none is in the gateway's subset, or filters dropped them all."""

    status = 503
    kind = "service_unavailable_error"

    def __init__(
        self, message: str, *, reason: str = protocol.DROP_NO_ENDPOINTS, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        super().__init__(message, reason=reason, headers=headers)


class DeadlineExceeded(EppError):
    """No decision within our own deadline (Envoy has no timer for a silent ext_proc server in full duplex)."""

    status = 503
    kind = "service_unavailable_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, reason=protocol.DROP_TTL_EXPIRED)


class Refused(EppError):
    """A guard does not let it pass."""

    def __init__(self, status: int, message: str, code: str | None) -> None:
        super().__init__(message, code=code, reason=protocol.DROP_GUARD)
        self.status = status
        self.kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")


class RateLimited(EppError):
    """Its tenant has used up what the configuration allows it a minute, or at once."""

    status = 429
    kind = "rate_limit_error"


class NotAllowed(EppError):
    """A model that others may use, and this tenant not."""

    status = 403
    kind = "permission_error"


class ConfigError(Exception):
    """A configuration that is refused. `str()` is one sentence: where, what was found, what was expected."""

    def __init__(self, path: str, message: str) -> None:
        self.path = path
        self.message = message
        super().__init__(printable(f"{path}: {message}" if path else message, _LONGEST))


class ConfigErrors(ConfigError):
    """All that is wrong with one file, in `errors`; `str()` has a line for each, of the first hundred."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        self.errors = tuple(errors)
        more = [f"and {len(errors) - _SHOWN} errors more"] if len(errors) > _SHOWN else []
        self.path, self.message = "", "\n".join([*map(str, self.errors[:_SHOWN]), *more])
        Exception.__init__(self, self.message)


def cannot_listen(address: str, error: OSError) -> str:
    """Why nobody can be served at `host:port`, and what to do."""
    if error.errno == errno.EADDRINUSE:
        return f"{address} is in use by another process; choose another port"
    if error.errno == errno.EACCES:
        return f"no permission to listen on {address}; choose a port above 1023"
    return f"cannot listen on {address}: {error.strerror or error}"


_KINDS: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_SHOWN: Final = 100
_LONGEST: Final = 1000
