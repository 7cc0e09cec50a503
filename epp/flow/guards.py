"""`Guards`: the guards of a configuration, asked for each request before anything else is done with it."""

from collections.abc import Callable, Sequence
from typing import Final

from epp.errors import EppError, InternalError, Refused
from epp.plugin import Guard, Refusal, Request

_STATUSES: Final = range(400, 600)


class Guards:
    """`on_error(plugin, exception)` hears of guards that fail; the request they failed for is refused."""

    def __init__(self, guards: Sequence[Guard], on_error: Callable[[str, Exception], None]) -> None:
        self._checks = [(guard.name or type(guard).__name__, guard.check) for guard in guards]
        self._on_error = on_error

    def check(self, request: Request) -> Request:
        """The request as the guards let it pass. Raises Refused, or InternalError where one of them fails."""
        for name, check in self._checks:
            try:
                said = check(request)
                if said is not None:
                    request = _passed(said)
            except EppError:
                raise
            except Exception as error:
                self._on_error(name, error)
                raise InternalError(f"plugin {name!r} failed") from error
        return request


def _passed(said: Request | Refusal) -> Request:
    if isinstance(said, Request):
        return said
    if not isinstance(said, Refusal) or said.status not in _STATUSES:
        raise ValueError("a guard must answer None, a Request, or a Refusal with a status of 400 to 599")
    raise Refused(*said)
