"""The sidecar between simulated engines, over real sockets: what is asked of whom, and what comes back."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from yarl import URL

from epp import protocol
from tests.support.process.waiting import until
from tooling.laptop.ports import free_ports, is_free
from tooling.sidecar.command import tls_of
from tooling.sidecar.proxy import Connector, Sidecar, SidecarSettings, page_of
from tooling.simulator.server import SimulatedPod

PREFILLER = "x-prefiller-host-port"
FALLBACK = "x-prefill-fallback"
ASK = {"model": "sim", "prompt": "word " * 400, "max_tokens": 5}
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "word " * 400}], "max_tokens": 5, "stream": True}


class Engine:
    """Writes down what it is asked, and answers what it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Mapping[str, str], dict[str, Any]]] = []
        self.answers: list[web.Response] = []
        self.connections = set[Any]()
        self.left = 0
        self.hangs = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        assert request.transport is not None
        self.connections.add(request.transport.get_extra_info("peername"))
        self.asked.append(
            (request.raw_path if hasattr(request, "raw_path") else request.path, request.headers, _json(body))
        )
        if self.hangs:
            try:
                await asyncio.Event().wait()
            finally:
                self.left += 1
        return self.answers.pop(0) if self.answers else web.json_response({"kv_transfer_params": {"from": "prefill"}})

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[int]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        server = TestServer(app, port=port or None)
        await server.start_server()
        try:
            assert server.port is not None
            yield server.port
        finally:
            await server.close()


def _json(body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(body) if body.startswith(b"{") else {"raw": body.decode()}
    return found


class Pair:
    """A sidecar with an engine beside it and one that prefills."""

    def __init__(self, client: aiohttp.ClientSession, sidecar: Sidecar, prefiller: str) -> None:
        self.client = client
        self.sidecar = sidecar
        self.prefiller = prefiller
        self.beside, self.prefills = Engine(), Engine()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.sidecar.port}"

    async def ask(
        self, body: Any = ASK, path: str = "/v1/completions", **headers: str
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        given = {PREFILLER: self.prefiller, **{name.replace("_", "-"): value for name, value in headers.items()}}
        async with self.client.post(path, json=body, headers=given) as response:
            return response, await response.read()


@asynccontextmanager
async def pair(connector: Connector = "nixlv2", **settings: Any) -> AsyncIterator[Pair]:
    beside, prefills = Engine(), Engine()
    async with beside.serve() as port, prefills.serve() as other:
        given = SidecarSettings(host="127.0.0.1", port=0, model_server_port=port, kv_connector=connector, **settings)
        async with Sidecar(given) as sidecar, aiohttp.ClientSession(f"http://127.0.0.1:{sidecar.port}") as client:
            made = Pair(client, sidecar, f"127.0.0.1:{other}")
            made.beside, made.prefills = beside, prefills
            yield made


async def test_the_prefiller_is_asked_for_one_token_and_the_engine_for_all() -> None:
    async with pair() as made:
        body = {**CHAT, "min_tokens": 3, "stream_options": {"include_usage": True}}
        response, _ = await made.ask(body, "/v1/chat/completions?x=1", x_request_id="r1", authorization="Bearer k")
        ((_, headers, first),) = made.prefills.asked
        ((path, passed, second),) = made.beside.asked
    assert (first["max_tokens"], first["max_completion_tokens"], first["stream"]) == (1, 1, False)
    assert "stream_options" not in first
    assert "min_tokens" not in first
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert first["kv_transfer_params"]["remote_block_ids"] is None
    assert second == {**body, "kv_transfer_params": {"from": "prefill"}}
    assert path == "/v1/chat/completions?x=1"
    for seen in (headers, passed):
        assert (seen["x-request-id"], seen["authorization"]) == ("r1", "Bearer k")
        assert PREFILLER not in seen
    assert FALLBACK not in response.headers
    assert made.sidecar.counts == {"prefilled": 1}


@pytest.mark.parametrize("sampling", [None, {"temperature": 0.5, "max_tokens": 7, "min_tokens": 3}])
async def test_of_token_ids_the_sampling_says_how_many_are_wanted(sampling: dict[str, Any] | None) -> None:
    body = {"model": "sim", "token_ids": [1, 2, 3], **({} if sampling is None else {"sampling_params": sampling})}
    async with pair() as made:
        await made.ask(body, "/inference/v1/generate")
        ((path, _, first),) = made.prefills.asked
        ((_, _, second),) = made.beside.asked
    assert path == "/inference/v1/generate"
    assert first["sampling_params"] == (
        {"max_tokens": 1} if sampling is None else {"temperature": 0.5, "max_tokens": 1}
    )
    assert first["stream"] is False
    assert "max_tokens" not in first
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert second == {**body, "kv_transfer_params": {"from": "prefill"}}


async def test_shared_storage_needs_no_words() -> None:
    async with pair("shared-storage") as made:
        await made.ask({**ASK, "cache_hit_threshold": 0.8})
        await made.ask()
        asked = [body for _, _, body in made.prefills.asked]
        assert [body["max_tokens"] for body in asked] == [1, 1]
        assert all("kv_transfer_params" not in body for body in asked)
        assert [body.get("cache_hit_threshold") for _, _, body in made.beside.asked] == [0, None]


# --- SGLang: both at once -------------------------------------------------------------------------------------------


async def test_sglangs_engines_are_told_where_to_meet() -> None:
    async with pair("sglang", sglang_bootstrap_port=9000) as made:
        made.beside.answers = [web.Response(text="the answer", headers={"x-own": "1"})]
        body = {**CHAT, "n": 2}
        response, text = await made.ask(body, "/v1/chat/completions?x=1", x_request_id="r1")
        assert (response.status, response.headers["x-own"], text) == (200, "1", b"the answer")
        ((_, headers, first),), ((path, passed, second),) = made.prefills.asked, made.beside.asked
    room = {name: first[name] for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")}
    assert (room["bootstrap_host"], room["bootstrap_port"]) == ("127.0.0.1", 9000)
    assert 0 <= room["bootstrap_room"] < 1 << 62
    assert first == second == body | room
    assert path == "/v1/chat/completions?x=1"
    for seen in (headers, passed):
        assert seen["x-request-id"] == "r1"
        assert seen["x-override-bootstrap-host"] == "127.0.0.1"
        assert seen["x-override-bootstrap-room"] == str(room["bootstrap_room"])
    assert FALLBACK not in response.headers
    assert made.sidecar.counts == {"prefilled": 1}


async def test_requests_meet_in_rooms_of_their_own_whatever_a_client_says() -> None:
    async with pair("sglang") as made:
        given = {"bootstrap_host": "10.0.0.9", "bootstrap_room": 7}
        for _ in range(3):
            await made.ask({**ASK, **given}, x_override_bootstrap_host="10.0.0.9")
        asked = [*made.prefills.asked, *made.beside.asked]
    assert {body["bootstrap_host"] for _, _, body in asked} == {"127.0.0.1"}
    assert {headers["x-override-bootstrap-host"] for _, headers, _ in asked} == {"127.0.0.1"}
    assert len({body["bootstrap_room"] for _, _, body in asked}) == 3


@pytest.mark.parametrize(
    ("answer", "status", "kind", "reason"),
    [
        (web.Response(status=500, text="out of memory"), 500, "server_error", "status"),
        (web.Response(status=503, text="the queue is full"), 503, "server_error", "status"),
        (web.Response(status=400, text="the prompt is too long"), 400, "invalid_request_error", None),
        (None, 502, "server_error", "unreachable"),
    ],
)
async def test_what_sglangs_prefiller_does_wrong_is_an_error_at_once(
    answer: web.Response | None, status: int, kind: str, reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine that decodes would wait for it, and computes no prompt. What it says may quote one: no log has it."""
    async with pair("sglang") as made:
        made.beside.hangs = True
        if answer is None:
            made.prefiller = "127.0.0.1:1"
        else:
            made.prefills.answers = [answer]
        response, body = await made.ask()
        error = json.loads(body)["error"]
        assert (response.status, error["type"], response.headers.get(FALLBACK)) == (status, kind, reason)
        assert (answer.text if answer is not None else "ClientConnectorError") in error["message"]
        await until(lambda: made.beside.left == len(made.beside.asked))
        assert made.sidecar.counts == {f"fallback-{reason or 'status'}": 1}
    (line,) = caplog.messages
    assert answer is None or (answer.text or "?") not in line


async def test_a_prefiller_of_sglang_that_hangs_is_left_with_the_other() -> None:
    async with pair("sglang", prefill_timeout=0.05) as made:
        made.prefills.hangs = made.beside.hangs = True
        response, _ = await made.ask()
        assert (response.status, response.headers[FALLBACK]) == (504, "timeout")
        await until(lambda: (made.prefills.left, made.beside.left) == (1, 1))


async def test_an_error_of_sglangs_engine_that_decodes_takes_the_other_along() -> None:
    async with pair("sglang") as made:
        made.prefills.hangs = True
        made.beside.answers = [web.Response(status=400, text="no such model")]
        response, body = await made.ask()
        assert (response.status, body) == (400, b"no such model")
        await until(lambda: made.prefills.left == len(made.prefills.asked))


async def test_a_client_of_sglang_that_leaves_takes_both_along() -> None:
    async with pair("sglang") as made:
        made.prefills.hangs = made.beside.hangs = True
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(made.ask())
            await until(lambda: bool(made.beside.asked and made.prefills.asked))
            task.cancel()
            await until(lambda: (made.prefills.left, made.beside.left) == (1, 1))
    assert made.sidecar.counts == {}


@pytest.mark.parametrize("body", [[1], "text"])
async def test_what_is_no_request_is_for_sglang_to_refuse(body: Any) -> None:
    async with pair("sglang") as made:
        response, _ = await made.ask(body)
        assert (response.status, response.headers[FALLBACK]) == (200, "unsupported")
        assert made.prefills.asked == []


# --- what is passed on ----------------------------------------------------------------------------------------------


async def test_without_a_prefiller_named_it_only_passes_on() -> None:
    async with pair() as made:
        made.beside.answers = [
            web.Response(status=418, text="short and stout", headers={"x-own": "1", "set-cookie": "a=b"})
        ]
        async with aiohttp.request("PUT", URL(f"{made.url}/any/path?q=%2F", encoded=True), data=b"\x00raw") as response:
            assert (response.status, response.headers["x-own"], response.headers["set-cookie"]) == (418, "1", "a=b")
            assert await response.read() == b"short and stout"
        assert made.beside.asked[0][0] == "/any/path?q=%2F"
        assert made.prefills.asked == []


async def test_engines_are_sent_what_the_client_sends_and_nothing_of_our_own() -> None:
    """Else an engine would compress what its client cannot read, as SGLang does its metrics."""
    async with pair() as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.sidecar.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: pod\r\nX-Own: 1\r\nConnection: close\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await reader.read()
        writer.close()
        await made.ask(accept_encoding="gzip")
        ((_, passed, _), (_, compressed, _)), ((_, read, _),) = made.beside.asked, made.prefills.asked
    assert {name.lower() for name in passed} == {"host", "x-own"}
    assert compressed["accept-encoding"] == "gzip"
    assert "accept-encoding" not in read, "the sidecar reads it"


async def test_a_retry_that_reaches_the_prefiller_is_served_there_as_a_whole() -> None:
    async with pair() as made:
        made.prefiller = f"127.0.0.1:{made.sidecar.port}"
        response, _ = await made.ask()
        assert response.status == 200
        assert FALLBACK not in response.headers
        assert [body for _, _, body in made.beside.asked] == [ASK]
        assert made.sidecar.counts == {"local": 1}


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([web.Response(status=500)], "status"),
        ([web.Response(status=400)], "status"),
        ([web.Response(text="no json")], "no-params"),
        ([web.json_response([1])], "no-params"),
        ([web.json_response({"kv_transfer_params": None})], "no-params"),
    ],
)
async def test_what_the_prefiller_does_wrong_is_done_here(answers: list[web.Response], reason: str) -> None:
    async with pair() as made:
        made.prefills.answers = answers
        response, _ = await made.ask()
        assert (response.status, response.headers[FALLBACK]) == (200, reason)
        assert [body for _, _, body in made.beside.asked] == [ASK]
        assert made.sidecar.counts == {f"fallback-{reason}": 1}


@pytest.mark.parametrize(
    ("named", "body", "reason"),
    [
        ("127.0.0.1:1", ASK, "unreachable"),
        ("evil.example:80", ASK, "malformed"),
        ("127.0.0.1", ASK, "malformed"),
        (" , ", ASK, "malformed"),
        (None, {**ASK, "n": 2}, "unsupported"),
        (None, [1], "unsupported"),
    ],
)
async def test_what_cannot_be_prefilled_elsewhere_is_done_here(named: str | None, body: Any, reason: str) -> None:
    async with pair() as made:
        made.prefiller = made.prefiller if named is None else named
        response, _ = await made.ask(body)
        assert (response.status, response.headers[FALLBACK]) == (200, reason)
        assert made.prefills.asked == []


async def test_a_prefiller_that_hangs_is_left() -> None:
    async with pair(prefill_timeout=0.05) as made:
        made.prefills.hangs = True
        response, _ = await made.ask()
        assert response.headers[FALLBACK] == "timeout"
        await until(lambda: made.prefills.left == 1)


async def test_it_asks_again_where_that_may_help() -> None:
    async with pair(prefill_max_retries=2, prefill_retry_backoff=0.0) as made:
        made.prefills.answers = [web.Response(status=503), web.Response(status=502)]
        response, _ = await made.ask()
        assert FALLBACK not in response.headers
        assert len(made.prefills.asked) == 3
        made.prefills.answers = [web.Response(status=400), web.Response(status=200)]
        response, _ = await made.ask()
        assert response.headers[FALLBACK] == "status"


@pytest.mark.parametrize("where", ["prefills", "beside"])
async def test_a_client_that_leaves_takes_the_request_along(where: str) -> None:
    async with pair() as made:
        engine: Engine = getattr(made, where)
        engine.hangs = True
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(made.ask())
            await until(lambda: len(engine.asked) == 1)
            task.cancel()
            await until(lambda: engine.left == 1)
    assert engine.left == 1, "once"


async def test_what_is_too_much_is_refused() -> None:
    async with pair(max_body=1000, max_requests=1) as made:
        response, body = await made.ask({**ASK, "prompt": "x" * 2000})
        assert (response.status, json.loads(body)["error"]["type"]) == (413, "invalid_request_error")
        made.prefills.hangs = True
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(made.ask({**ASK, "prompt": "x"}))
            await until(lambda: len(made.prefills.asked) == 1)
            response, body = await made.ask({**ASK, "prompt": "x"})
            assert (response.status, "1 requests are served" in body.decode()) == (503, True)
            task.cancel()


async def test_an_engine_that_is_away_is_said() -> None:
    settings = SidecarSettings(host="127.0.0.1", port=0, model_server_port=1)
    async with Sidecar(settings) as sidecar, aiohttp.ClientSession() as client:
        async with client.get(f"http://127.0.0.1:{sidecar.port}/health") as response:
            assert response.status == 502
            assert "the engine on port 1" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(("body", "path"), [(ASK, "/v1/completions"), (CHAT, "/v1/chat/completions")])
async def test_simulated_engines_answer_as_one_would(body: dict[str, Any], path: str) -> None:
    """Prompt computed by the one, answer by the other, byte for byte; and nothing is kept when it was fetched."""
    async with SimulatedPod(name="p") as p, SimulatedPod(name="d") as d:
        given = SidecarSettings(host="127.0.0.1", port=0, model_server_port=int(d.address.rpartition(":")[2]))
        async with Sidecar(given) as sidecar, aiohttp.ClientSession() as client:
            headers = {PREFILLER: p.address, "x-request-id": "same"}
            texts = []
            for url in (f"http://127.0.0.1:{sidecar.port}{path}", f"{p.url}{path}"):
                async with client.post(url, json=body, headers=headers) as response:
                    assert response.status == 200
                    texts.append(_without_times(await response.read()))
            assert texts[0] == texts[1]
            assert sidecar.counts == {"prefilled": 1}
            assert d.engine.totals.computed_tokens <= 16
            assert p.engine.totals.generation_tokens == 1 + 5
            await until(lambda: p.engine.kept_blocks == 0)


def _without_times(answer: bytes) -> list[Any]:
    """What is said, without what differs between any two answers."""
    lines = [line.removeprefix(b"data: ") for line in answer.splitlines() if line.startswith((b"data: {", b"{"))]
    return [{k: v for k, v in json.loads(line).items() if k in ("id", "choices", "object", "model")} for line in lines]


# --- data-parallel ranks, TLS, metrics ------------------------------------------------------------------------------


async def test_a_rank_has_a_port_of_its_own_and_is_reached_by_name_too() -> None:
    first, second = Engine(), Engine()
    engines = next(port for (port,) in iter(lambda: free_ports(1), []) if is_free(port + 1))
    async with first.serve(engines), second.serve(engines + 1):
        given = SidecarSettings(host="127.0.0.1", port=0, model_server_port=engines, data_parallel_size=2)
        async with Sidecar(given) as sidecar, aiohttp.ClientSession() as client:
            one, two = sidecar.ports
            for port, rank in ((one, ""), (two, ""), (one, f"10.0.0.1:{two}"), (two, f"10.0.0.1:{one}")):
                headers = {"x-data-parallel-host-port": rank} if rank else {}
                async with client.post(f"http://127.0.0.1:{port}/v1/completions", json=ASK, headers=headers) as answer:
                    assert answer.status == 200
            async with client.post(
                f"http://127.0.0.1:{one}/v1/completions", json=ASK, headers={"x-data-parallel-host-port": "10.0.0.1:1"}
            ) as answer:
                assert (answer.status, str(two) in (await answer.json())["error"]["message"]) == (400, True)
    assert (len(first.asked), len(second.asked)) == (2, 2)
    assert not any("x-data-parallel-host-port" in headers for _, headers, _ in [*first.asked, *second.asked])


async def test_engines_may_be_reached_over_tls() -> None:
    beside = Engine()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", beside.handle)
    server = TestServer(app, scheme="https")
    await server.start_server(ssl=tls_of(None))
    assert server.port is not None
    both = frozenset({"prefiller", "decoder"})
    try:
        for skipped, status, said in ((both, 200, None), (frozenset[str](), 502, "unreachable")):
            given = SidecarSettings(
                host="127.0.0.1", port=0, model_server_port=server.port, enable_tls=both,
                tls_insecure_skip_verify=skipped,
            )  # fmt: skip
            async with Sidecar(given) as sidecar, aiohttp.ClientSession() as client:
                headers = {PREFILLER: f"127.0.0.1:{server.port}"}
                url = f"http://127.0.0.1:{sidecar.port}/v1/completions"
                async with client.post(url, json=ASK, headers=headers) as answer:
                    assert answer.status == status
                    assert sidecar.counts == ({f"fallback-{said}": 1} if said else {"prefilled": 1})
    finally:
        await server.close()
    assert len(beside.asked) == 2


async def test_a_connection_that_an_engine_may_close_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MODEL_SERVER_IDLE", 0.05)
    async with pair() as made:
        for _ in range(2):
            response, _ = await made.ask()
            assert response.status == 200
            await asyncio.sleep(0.1)
        assert [len(each.connections) for each in (made.beside, made.prefills)] == [2, 2]


def test_its_metrics() -> None:
    page = page_of({"prefilled": 3, "fallback-timeout": 1}).decode()
    assert 'warmpath_sidecar_requests_total{outcome="fallback-timeout"} 1.0\n' in page
    assert 'warmpath_sidecar_requests_total{outcome="prefilled"} 3.0\n' in page


async def test_metrics_are_served_where_a_port_is_given() -> None:
    (port,) = free_ports(1)
    given = SidecarSettings(host="127.0.0.1", port=0, model_server_port=1, metrics_port=port)
    async with Sidecar(given), aiohttp.ClientSession() as client:
        async with client.get(f"http://127.0.0.1:{port}/metrics") as answer:
            assert (answer.status, answer.content_type) == (200, "text/plain")
