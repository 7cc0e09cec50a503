"""Several simulated pods behind one port, as vLLM serves its data-parallel ranks (`--data-parallel-size`)."""

import json
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Final, Protocol, Self

import aiohttp
from aiohttp import web

from epp import protocol
from epp.documents.addresses import join
from tooling.simulator.endpoints import GRACE, MAX_BODY, METRICS_TYPE
from tooling.simulator.replies import error_reply, json_reply
from tooling.simulator.requests import Refused

_ENGINE: Final = re.compile(r'(?<=[{,])engine="\d+"')
_HOP: Final = frozenset({"connection", "content-length", "date", "host", "server", "transfer-encoding"})
RANK: Final = "x-sim-rank"
"""On an answer: which rank gave it."""


class Rank(Protocol):
    """A server of its own (`SimulatedPod`); not imported, since that module has the command that makes these."""

    @property
    def url(self) -> str: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class DataParallelPod:
    """`ranks`, which listen on ports of their own, behind one: a request names one of them in `X-data-parallel-rank`,
    else it goes to the one with the fewest under way. `first` is the number of the first rank's engine, which is more
    than 0 of the second server of a hybrid deployment; the header counts from 0 there too.

    Entering raises OSError where the port is in use.
    """

    def __init__(self, name: str, host: str, port: int, ranks: Sequence[Rank], first: int = 0) -> None:
        self.name = name
        self._host, self._port = host, port
        self._ranks = ranks
        self._first = first
        self._under_way = [0] * len(ranks)

    @property
    def address(self) -> str:
        """`ip:port`, IPv6 in brackets; meaningful while entered."""
        return join(self._host, str(self._port))

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/kv_event_sources", self._kv_event_sources)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        async with AsyncExitStack() as stack:
            for rank in self._ranks:
                await stack.enter_async_context(rank)
            timeout = aiohttp.ClientTimeout(total=None)
            self._http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, auto_decompress=False))
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=GRACE)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, self._host, self._port).start()
            self._port = runner.addresses[0][1]
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        named = request.headers.get(protocol.DATA_PARALLEL_RANK, "")
        try:
            rank = int(named)
        except ValueError:  # vLLM takes what is no number for no header
            rank = min(range(len(self._ranks)), key=self._under_way.__getitem__)
        if not 0 <= rank < len(self._ranks):
            what = f"data_parallel_rank {rank} is out of range [0, {len(self._ranks)})."
            return error_reply(request, Refused(400, "BadRequestError", what))
        self._under_way[rank] += 1
        try:
            headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
            url = f"{self._ranks[rank].url}{request.path_qs}"
            async with self._http.request(request.method, url, data=await request.read(), headers=headers) as answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
                response = web.StreamResponse(status=answer.status, headers={**kept, RANK: str(rank)})
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                return response
        finally:
            self._under_way[rank] -= 1

    async def _metrics(self, request: web.Request) -> web.Response:
        """One page with the series of all engines, those of a metric together."""
        pages = []
        for number, rank in enumerate(self._ranks, self._first):
            async with self._http.get(f"{rank.url}/metrics") as answer:
                pages.append(_ENGINE.sub(f'engine="{number}"', await answer.text()).split("# HELP "))
        whole = []
        for metric in zip(*pages, strict=True):
            for page, part in enumerate(metric):
                lines = part.splitlines(keepends=True)
                samples = [line for at, line in enumerate(lines) if at and line[0] != "#"]
                if page == 0:
                    whole += ["# HELP ", *lines] if lines else []
                elif any("engine=" in line for line in samples):
                    whole += samples
        return web.Response(text="".join(whole), headers={"content-type": METRICS_TYPE})

    async def _kv_event_sources(self, request: web.Request) -> web.Response:
        sources: dict[str, Any] = {}
        for number, rank in enumerate(self._ranks, self._first):
            async with self._http.get(f"{rank.url}/kv_event_sources") as answer:
                sources.update((str(number), source) for source in json.loads(await answer.read()).values())
        return json_reply(sources)
