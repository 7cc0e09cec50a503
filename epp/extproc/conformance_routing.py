"""Requests whose client names the endpoint: what the Gateway conformance suite of GIE wants from a picker.

Sources: GIE `conformance/utils/headers`, `pkg/lwepp/handlers`. Only with `--conformance-testing`: in production no
client may say where its request goes.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from epp import protocol
from epp.parsing.request import RawRequest
from epp.route import RequestScope, RoutedRequest, Router

NOT_TOLD: Final = "fail: missing destination endpoint served metadata"


class ConformanceRouter:
    """A router's `route`, but the header `test-epp-endpoint-selection` (`ip` or `ip:port`, separated by commas) goes
    before the gateway's subset, and answers say in headers where they come from and where they were sent.
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    def route(self, raw: RawRequest) -> RequestScope:
        named = tuple(
            each for text in raw.headers.get(protocol.TEST_SELECTION, "").split(",") if (each := text.strip())
        )
        return _Scope(self._router, msgspec.structs.replace(raw, subset=named) if named else raw)


class ConformanceRequest(RoutedRequest):
    """The same, with more headers on its answer."""

    __slots__ = ()

    def answered(
        self, status: int, served: str, content_type: str = "", prefill_fallback: str = ""
    ) -> Mapping[str, str]:
        selected = self.destination.partition(",")[0]  # before a retry that was served elsewhere changes it
        return {
            **super().answered(status, served, content_type, prefill_fallback),
            protocol.TEST_SELECTED: selected,
            protocol.TEST_POOL: f"{self._pool.namespace}/{self._pool.name}",
            protocol.TEST_SEEN: "true",
            protocol.TEST_SERVED: served or NOT_TOLD,
        }


class _Scope(RequestScope):
    __slots__ = ()
    routed = ConformanceRequest
