"""What browsers are answered: the pages, what their script refreshes, and the form that explains.

What is shown to everybody alike is made once for all viewers, and anew after a second at the earliest.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec
from aiohttp import web

from epp.admin import page, views
from epp.admin.asked import Asked, from_pasted
from epp.admin.bills import name
from epp.admin.overview import Overview
from epp.admin.recorder import Decisions
from epp.admin.turns import Page, Turns
from epp.errors import BadRequest, ConfigError, EppError, TooLarge
from epp.parsing.request import RawRequest
from epp.telemetry.metrics import Metrics
from epp.telemetry.pace import Pace

GLANCED: Final = 6
"""Decisions on the first page."""
LISTS: Final = (20, 100)
"""Decisions in a list: as many as are asked for, or more."""
LARGEST_FORM: Final = 1 << 20
"""Bytes."""
FIELDS: Final = 8
MOST_MODELS: Final = 50
"""Offered by the form."""
SLICE: Final = 20
"""Endpoints drawn at once: some 1.5 ms."""
HTML: Final = "text/html"
JSON: Final = "application/json"

Explain = Callable[[str, RawRequest], Awaitable[dict[str, Any]]]
"""`(pool, request)`: what would be decided for it, JSON-ready; the pool's name is empty where none is asked for."""


def wants_page(request: web.Request) -> bool:
    """Whether a browser asks: JSON is for everybody else. `format=json` or `html` overrules."""
    asked = request.query.get("format")
    if asked not in (None, "json", "html"):
        raise BadRequest(f"format: got '{asked[:50]}'; expected json or html", param="format")
    return asked == "html" if asked else HTML in request.headers.get("Accept", "")


class Screens:
    """Of one picker."""

    def __init__(
        self,
        metrics: Metrics,
        pools: Sequence[views.PoolView],
        decisions: Decisions,
        overview: Overview,
        turns: Turns,
    ) -> None:
        self._metrics = metrics
        self._pools = pools
        self._decisions = decisions
        self._overview = overview
        self._turns = turns
        self._table = page.DecisionTable()

    async def static(self, request: web.Request) -> web.Response:
        file = request.match_info["file"]
        if file not in page.STATIC:
            raise web.HTTPNotFound
        return web.Response(body=page.static(file), content_type=page.STATIC[file])

    async def index(self, request: web.Request) -> web.Response:
        """The first page; with `live`, what has changed in it."""
        live = "live" in request.query
        made = await (self._turns.recent("live", self._live) if live else self._turns.recent("overview", self._whole))
        return _answer(made)

    async def decisions(self, request: web.Request, limit: int) -> web.Response:
        """The list of decisions; with `live`, what has changed in it."""
        limit = next((size for size in LISTS if limit <= size), LISTS[-1])

        async def made() -> Page:
            text = page.decisions(self._drawn(limit), limit, f"/decisions?format=html&live&limit={limit}")
            return text.encode(), HTML

        async def live() -> Page:
            return msgspec.json.encode({"version": "", "parts": page.decision_parts(self._drawn(limit))}), JSON

        asked = ("decisions-live", live) if "live" in request.query else ("decisions", made)
        return _answer(await self._turns.recent(f"{asked[0]} {limit}", asked[1]))

    def decision(self, shown: Mapping[str, Any]) -> web.Response:
        """One decision, of `Record.as_dict`."""
        return web.Response(text=page.decision(shown), content_type=HTML)

    def form(self) -> web.Response:
        """To be filled in."""
        return web.Response(text=page.explain(self._form("", "", "")), content_type=HTML)

    async def explained(self, request: web.Request, explain: Explain) -> web.Response:
        """The form that was filled in, and its answer."""
        body = await request.read()
        if len(body) > LARGEST_FORM:
            raise TooLarge(f"got {len(body)} bytes; expected at most {LARGEST_FORM}")
        fields = await asyncio.to_thread(_fields, body)
        text, model, pool = fields.get("text", ""), fields.get("model", ""), fields.get("pool", "")
        said, error, status = None, "", 200
        try:
            asked = await asyncio.to_thread(from_pasted, text, model.strip())
            async with self._turns.turn():
                said = await explain(pool, _raw(asked))
        except ConfigError as wrong:
            error, status = str(wrong).removeprefix("--"), 400
        except EppError as refused:
            error, status = f"It would be refused with {refused.status}: {refused.message}", refused.status
        shown = page.explain(self._form(text, model, pool), said, error)
        return web.Response(text=shown, content_type=HTML, status=status)

    def _form(self, text: str, model: str, pool: str) -> dict[str, Any]:
        served = dict.fromkeys(
            name(one.id) for each in self._pools for endpoint in each.endpoints for one in endpoint.models or ()
        )
        models = [*served][:MOST_MODELS]
        return {
            "text": text,
            "model": model or (models[0] if models else ""),
            "pool": pool,
            "models": models,
            "pools": [f"{each.namespace}/{each.name}" for each in self._pools],
            "most": LARGEST_FORM // 2,
        }

    def _drawn(self, limit: int) -> page.Drawn:
        return self._table.drawn(self._decisions.newest(limit))

    async def _whole(self) -> Page:
        pace, overview = Pace(), self._overview
        version, step = overview.version, overview.step
        glance, drawn = overview.glance(), self._drawn(GLANCED)
        tables, said = [], []
        endpoints = [pool.endpoints for pool in self._pools]
        for number, (pool, columns) in enumerate(zip(self._pools, await overview.columns(pace), strict=True)):
            scale = overview.scale(pool)
            some, parts = [*zip(endpoints[number], zip(*columns, strict=True), strict=True)], []
            for start in range(0, len(some), SLICE):
                slice_ = some[start : start + SLICE]
                parts.append(
                    page.endpoint_rows((overview.identity(e), row, overview.charts(e, scale)) for e, row in slice_)
                )
                await pace.rest()
            tables.append(page.endpoint_table(number, scale, parts))
            shadows = views.shadows(self._metrics, pool)
            said.append(page.said(self._metrics.statistics(pool), shadows))
        text = page.overview(glance, tables, said, drawn, page.Live("/?live", version, step))
        return text.encode(), HTML

    async def _live(self) -> Page:
        overview = self._overview
        version, step = overview.version, overview.step
        columns = await overview.columns(Pace())
        shown = {
            "version": version,
            "step": step,
            "scales": [*map(overview.scale, self._pools)],
            "columns": columns,
            "parts": page.parts(overview.glance(), self._drawn(GLANCED)),
        }
        return msgspec.json.encode(shown), JSON


def _answer(made: Page) -> web.Response:
    body, content_type = made
    charset = "utf-8" if content_type == HTML else None
    return web.Response(body=body, content_type=content_type, charset=charset)


def _fields(body: bytes) -> dict[str, str]:
    """Of a form. Browsers end lines with CR and LF, which no prompt does."""
    try:
        found = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=FIELDS, errors="strict")
    except ValueError as error:
        raise BadRequest(f"no form as a browser sends it: {error}") from None
    return {field: values[0].replace("\r\n", "\n") for field, values in found.items()}


def _raw(asked: Asked) -> RawRequest:
    headers = {key: value for key, value in asked.headers.items() if key not in ("host", "content-length")}
    return RawRequest("POST", asked.path, headers, asked.body)
