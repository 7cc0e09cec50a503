"""Asking over HTTP: good answers, and all others told."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tests.support.process import web_server
from tests.support.process.dropped import dropping
from tooling.doctor.http import MOST, HttpClient, Trouble


@asynccontextmanager
async def server(response: web.Response) -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        return response if request.method == "GET" else web.json_response({"sent": await request.json()})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with web_server.serving(app) as address:
        yield f"http://{address}"


async def test_a_get_and_a_post() -> None:
    async with server(web.json_response({"a": 1})) as url, HttpClient(5.0) as ask:
        assert await ask.json(url) == {"a": 1}
        assert await ask.json(url, {"b": 2}) == {"sent": {"b": 2}}


@pytest.mark.parametrize(
    ("response", "reported", "status"),
    [
        (web.Response(status=404, text="nobody here"), "status 404: nobody here", 404),
        (web.Response(status=302, headers={"location": "/elsewhere"}), "status 302", 302),
        (web.Response(text="[]"), "no JSON object", 200),
        (web.Response(body=b"\xff"), "no JSON object", 200),
        (web.Response(body=b" " * (MOST + 1)), f"more than {MOST} bytes", 200),
    ],
)
async def test_other_answers_are_trouble(response: web.Response, reported: str, status: int) -> None:
    async with server(response) as url, HttpClient(5.0) as ask:
        with pytest.raises(Trouble, match=reported) as trouble:
            await ask.json(url)
        assert trouble.value.status == status


async def test_nobody_and_nonsense_are_trouble_without_a_status() -> None:
    async with HttpClient(5.0) as ask:
        for url in ("http://127.0.0.1:1", "http://[", "nonsense"):
            with pytest.raises(Trouble) as trouble:
                await ask.bytes(url)
            assert trouble.value.status == 0


async def test_silence_is_trouble() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with HttpClient(0.05) as ask:
            with pytest.raises(Trouble, match=r"within 0\.05 s"):
                await ask.bytes(f"http://127.0.0.1:{silent.getsockname()[1]}")


async def test_an_address_that_does_not_answer_is_dropped() -> None:
    with dropping() as port:
        async with HttpClient(0.2) as ask:
            with pytest.raises(Trouble, match=r"^no connection within 0\.1 s$") as trouble:
                await ask.bytes(f"http://127.0.0.1:{port}")
    assert (trouble.value.status, trouble.value.dropped) == (0, True)
