"""Ids from a pod's `/tokenize`, over a real socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from epp.plugin import Api, Endpoint, Request
from epp.pool.http import BadAnswer
from epp.prefix.tokens.cache import Ids
from epp.prefix.tokens.conversation import Unsupported
from epp.prefix.tokens.remote import MAX_BODY, Remote, ids_in, question
from tooling.simulator import tokenizer as sim
from tooling.simulator.server import SimulatedPod

CHAT = {"messages": [{"role": "user", "content": "Good day"}]}


def asked(body: Any, api: Api = "chat", model: str = "sim") -> Request:
    return Request(id="1", model=model, api=api, body=json.dumps(body).encode())


def to(*addresses: str) -> Remote:
    return Remote(lambda: [Endpoint(f"pod-{i}", address) for i, address in enumerate(addresses)])


async def ids(remote: Remote, request: Request) -> Ids:
    found = question(request)
    return ids_in(await remote.page(found)) if isinstance(found, bytes) else found


async def test_a_pod_is_asked_for_what_the_request_would_give() -> None:
    async with SimulatedPod() as pod:
        remote = to(pod.address)
        wanted = sim.unpack(sim.render_chat(CHAT["messages"]))
        assert list(await ids(remote, asked(CHAT))) == wanted
        unanswered = sim.unpack(sim.render_chat(CHAT["messages"], answer=False))
        assert list(await ids(remote, asked({**CHAT, "add_generation_prompt": False}))) == unanswered
        tool = {"type": "function", "function": {"name": "f"}}
        with_tools = sim.unpack(sim.render_chat(CHAT["messages"], [tool]))
        assert list(await ids(remote, asked({**CHAT, "tools": [tool]}))) == with_tools
        assert list(await ids(remote, asked({"prompt": "Good day"}, "completions"))) == sim.unpack(
            sim.encode("Good day")
        )
        remote.close()


async def test_ids_need_no_pod() -> None:
    assert list(await ids(to(), asked({"prompt": [1, 2]}, "completions"))) == [1, 2]


async def test_what_is_not_rendered_is_sent_to_nobody() -> None:
    for messages in ([], [{"role": "assistant", "content": "a", "reasoning_content": "b"}]):
        with pytest.raises(Unsupported):
            await ids(to("127.0.0.1:1"), asked({"messages": messages}))


def test_no_pod_is_asked_about_a_huge_body() -> None:
    with pytest.raises(Unsupported, match=f"at most {MAX_BODY}"):
        question(asked({"prompt": "a" * MAX_BODY}, "completions"))


@asynccontextmanager
async def server(answer: Callable[[bytes], bytes]) -> AsyncIterator[tuple[str, list[bytes], list[int]]]:
    """Answers each request; its address, the requests seen, and how many connections came."""
    seen: list[bytes] = []
    connections: list[int] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                seen.append(head + await reader.readexactly(size))
                writer.write(answer(seen[-1]))
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with listener:
        host, port = listener.sockets[0].getsockname()
        yield f"{host}:{port}", seen, connections


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


async def test_a_connection_is_kept_and_every_pod_has_its_turn() -> None:
    def answer(request: bytes) -> bytes:
        return ok(b'{"tokens": [1, 2], "count": 2}')

    async with server(answer) as (one, seen, made), server(answer) as (two, others, others_made):
        remote = to(one, two)
        for _ in range(6):
            assert list(await ids(remote, asked(CHAT))) == [1, 2]
        assert (len(seen), len(others), len(made), len(others_made)) == (3, 3, 1, 1)
        remote.close()


async def test_the_model_and_every_flag_are_passed_on() -> None:
    async with server(lambda _: ok(b'{"tokens": []}')) as (address, seen, _):
        remote = to(address)
        kwargs = {"enable_thinking": False}
        await ids(remote, asked({**CHAT, "chat_template_kwargs": kwargs, "add_special_tokens": True}, model="m"))
        sent = json.loads(seen[0].partition(b"\r\n\r\n")[2])
        assert sent == {
            "model": "m",
            "messages": CHAT["messages"],
            "chat_template_kwargs": kwargs,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "add_special_tokens": True,
        }
        remote.close()


async def test_a_kept_connection_that_was_closed_is_made_anew() -> None:
    def answer(request: bytes) -> bytes:
        return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 13\r\n\r\n" + b'{"tokens":[]}'

    async with server(answer) as (address, _, made):
        remote = to(address)
        for _ in range(3):
            assert list(await ids(remote, asked(CHAT))) == []
        assert len(made) == 3
        remote.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        ok(b"{}"),
        ok(b"nonsense"),
        ok(b'{"tokens": ["a"]}'),
        ok(b'{"tokens": [99999999999]}'),
        ok(b'{"x": ' + b"[" * 9_000),
        b"SSH-2.0\r\n\r\n",
    ],
)
async def test_anything_but_ids_is_a_bad_answer(answer: bytes) -> None:
    async with server(lambda _: answer) as (address, _, _):
        remote = to(address)
        with pytest.raises(BadAnswer):
            await ids(remote, asked(CHAT))
        remote.close()


async def test_without_an_endpoint_there_is_nobody_to_ask() -> None:
    with pytest.raises(BadAnswer, match="no endpoint"):
        await ids(to(), asked(CHAT))
    with pytest.raises(OSError, match=r"refused|Connect"):
        await ids(to("127.0.0.1:1"), asked(CHAT))
