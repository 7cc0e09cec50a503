"""Requests whose client names the endpoint: what the Gateway conformance suite of GIE wants from a picker.

Sources: GIE `conformance/utils/headers`, `pkg/lwepp/handlers`. Only with `--conformance-testing`: in production no
client may say where its request goes.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
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

    def route(self, raw: RawRequest) -> AbstractAsyncContextManager["ConformanceRequest"]:
        named = tuple(
            each for text in raw.headers.get(protocol.TEST_SELECTION, "").split(",") if (each := text.strip())
        )
        pool = f"{self._router.pool.namespace}/{self._router.pool.name}"
        return _Scope(self._router.route(msgspec.structs.replace(raw, subset=named) if named else raw), pool)


class ConformanceRequest:
    """A request on its scope, as `RoutedRequest`, with more headers on its answer."""

    def __init__(self, routed: RoutedRequest, pool: str) -> None:
        self._routed = routed
        self._added = {
            protocol.TEST_SELECTED: routed.destination.partition(",")[0],
            protocol.TEST_POOL: pool,
            protocol.TEST_SEEN: "true",
        }
        self.destination = routed.destination
        self.headers = routed.headers
        self.body = routed.body
        self.renamed = routed.renamed
        self.answer_chunk: Callable[..., None] = routed.answer_chunk

    def answered(self, status: int, served: str, content_type: str = "") -> Mapping[str, str]:
        headers = self._routed.answered(status, served, content_type)
        return {**headers, **self._added, protocol.TEST_SERVED: served or NOT_TOLD}


class _Scope:
    def __init__(self, scope: RequestScope, pool: str) -> None:
        self._scope = scope
        self._pool = pool

    async def __aenter__(self) -> ConformanceRequest:
        return ConformanceRequest(await self._scope.__aenter__(), self._pool)

    async def __aexit__(self, *error: object) -> None:
        await self._scope.__aexit__(*error)
