"""A trace over a socket: who is asked what, when, and with which answers in the prompt."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from hack.benches.rig.asking import EngineClient, client, play, text
from hack.benches.rig.processes import BenchError
from tests.support.process.web_server import serving
from tooling.replay.trace import Piece, Trace, TraceRequest


@dataclass
class Api:
    """Answers like vLLM's completions with `return_token_ids`: as many tokens as asked for, each its place."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    sessions: list[str | None] = field(default_factory=list)
    withheld: int = 0
    """Tokens that each answer has too few."""
    status: int = 200

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.status != 200:
            return web.Response(status=self.status, text="not now")
        body = await request.json()
        self.bodies.append(body)
        self.sessions.append(request.headers.get("x-session-id"))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(body["max_tokens"] - self.withheld):
            await _event(response, {"choices": [{"token_ids": [number], "text": ""}]})
        usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": 7}}
        await _event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    def prompt(self, output: int) -> Sequence[int]:
        """Of the request that wanted so many tokens."""
        [found] = [body["prompt"] for body in self.bodies if body["max_tokens"] == output]
        return list(found)


async def _event(response: web.StreamResponse, data: object) -> None:
    await response.write(b"data: " + json.dumps(data).encode() + b"\n\n")


@pytest_asyncio.fixture
async def api() -> AsyncIterator[Api]:
    made = Api()
    app = web.Application()
    app.router.add_post("/v1/completions", made.answer)
    async with serving(app) as address:
        made.url = f"http://{address}"
        yield made


async def test_an_answer_is_counted_by_its_tokens(api: Api) -> None:
    async with client() as http:
        answered = await EngineClient(http, api.url, "m").ask([1, 2, 3], 5, "me")
    assert (answered.prompt, answered.cached, answered.ids) == (3, 7, [0, 1, 2, 3, 4])
    assert answered.sent < answered.times[0] <= answered.times[-1]
    assert api.sessions == ["me"]
    assert api.bodies[0]["ignore_eos"] is True


async def test_prompts_share_what_the_trace_says(api: Api) -> None:
    shared, own, other = Piece(1, 40), Piece(2, 10), Piece(3, 10)
    trace = Trace(
        "t",
        [
            TraceRequest(0.0, (shared, own), 2, answer=9),
            TraceRequest(0.0, (shared, other), 3),
            TraceRequest(0.0, (shared, own, Piece(9, 2), Piece(4, 5)), 4, after=(0,)),
        ],
    )
    async with client() as http:
        answers = await play(trace, EngineClient(http, api.url, "m"), "salt")
    first, second, third = (api.prompt(output) for output in (2, 3, 4))
    assert [len(prompt) for prompt in (first, second, third)] == [50, 50, 57]
    assert first[:40] == second[:40]
    assert first[40:] != second[40:]
    assert third[:52] == [*first, 0, 1], "the answer itself is in the next prompt"
    assert answers[2].sent >= answers[0].times[-1]


def test_another_name_is_another_text() -> None:
    assert text("a", 50) == text("a", 60)[:50]
    assert text("a", 50) != text("b", 50)


@pytest.mark.parametrize(
    ("fault", "reported"),
    [({"withheld": 1}, "1 token ids came from .*; expected 2"), ({"status": 503}, "HTTP 503: not now")],
)
async def test_half_an_answer_is_none(api: Api, fault: dict[str, int], reported: str) -> None:
    for name, value in fault.items():
        setattr(api, name, value)
    async with client() as http:
        with pytest.raises(BenchError, match=reported):
            await play(Trace("t", [TraceRequest(0.0, (Piece(1, 4),), 2)]), EngineClient(http, api.url, "m"), "salt")


async def test_nobody_there_is_reported() -> None:
    async with client() as http:
        with pytest.raises(BenchError, match=r"no answer from http://127\.0\.0\.1:1: "):
            await EngineClient(http, "http://127.0.0.1:1", "m").ask([1], 1)
