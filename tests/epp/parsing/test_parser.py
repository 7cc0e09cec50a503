import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.errors import BadRequest, UnsupportedMedia
from epp.parsing.parser import _USUAL, PARSERS, Parser
from epp.parsing.request import NO_OBJECTIVE, Api, Objective, RawRequest, Request, Slo

CHAT = {"model": "qwen", "messages": [{"role": "user", "content": "hi"}]}


class Rules:
    """Rewrites `old` to `new` if it `rewrites`; the objective `vip` has priority 7 and an SLO."""

    def __init__(self, rewrites: bool = True) -> None:
        self.rewrites = rewrites

    def rewrite(self, model: str) -> str:
        return "new" if model == "old" and self.rewrites else model

    def objective(self, name: str) -> Objective:
        return Objective(7, Slo(2.0, 0.05, "vip")) if name == "vip" else NO_OBJECTIVE


def parse(
    body: bytes | Any,
    path: str = "/v1/chat/completions",
    headers: Mapping[str, str] | None = None,
    method: str = "POST",
    rewrites: bool = True,
    trusted: bool = True,
) -> tuple[Request, bytes | None]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    parser = Parser(Rules(rewrites), lambda model, nbytes: nbytes // 4, lambda: "made-up", trusted=trusted)
    raw = RawRequest(method, path, headers or {}, content, sees_answer=True, watched="sampled", watchable=0.5)
    return parser.parse(raw)


def test_a_chat_request_is_read_once_and_forwarded_as_it_came() -> None:
    body = json.dumps({**CHAT, "stream": True, "max_tokens": 9, "cache_salt": "s"}).encode()
    request, forward = parse(body, headers={"x-request-id": "r1", "x-gateway-inference-objective": "vip"})
    assert forward is None
    assert (request.id, request.model, request.api, request.priority) == ("r1", "qwen", "chat", 7)
    assert request.asked == "qwen"
    assert request.prompt == json.dumps(CHAT["messages"]).encode()
    assert request.tokens == len(request.prompt) // 4
    assert (request.stream, request.max_tokens, request.salt) == (True, 9, "s")
    assert request.body is body
    assert request.sees_answer
    assert (request.watched, request.watchable) == ("sampled", 0.5)


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/completions", "completions"),
        ("/v1/responses", "responses"),
        ("/v1/embeddings", "embeddings"),
        ("/v1/messages", "messages"),
        ("/llm/v1/chat/completions/", "chat"),
        ("/v1/chat/completions?timeout=5/v1/messages", "chat"),
        ("/v1/chat/%63ompletions", "chat"),
        ("/v1%2Fchat%2fcompletions", "chat"),
        ("//v1//chat///completions//", "chat"),
        ("/v1/models/../chat/./completions", "chat"),
        ("/v1/models/%2e%2E/chat/completions?x=%2f..", "chat"),
        ("/v1/chat/completions#x", "chat"),
        ("/v1/chat/completions/render", "chat"),
        ("/v1/completions/render", "completions"),
        ("/inference/v1/generate", "generate"),
        ("/v1/chat/completions/batch", "chat"),
        ("/cohere/v2/chat", "chat"),
        ("/v2/rerank", "pooling"),
        ("/score", "pooling"),
        ("/v2/embed", "pooling"),
        ("/v1/decisions", "pooling"),
        ("/v1/systemone", "pooling"),
        ("/invocations", "chat"),
        ("/generate", "other"),
        ("/v1/chat/%2563ompletions", "other"),
        ("/v1/chat/completions%3fx", "other"),
        ("/v1/chat/completions/%ff", "other"),
        ("/v1/messages/count_tokens", "other"),
        ("/v1/models", "other"),
        ("/tokenize", "other"),
        ("/v1/audio/transcriptions", "other"),
        ("/", "other"),
        ("", "other"),
    ],
)
def test_the_end_of_the_path_tells_the_format(path: str, api: Api) -> None:
    body = {**CHAT, "prompt": "p", "input": "i", "token_ids": [1, 2], "query": "q"}
    request, _ = parse(body, path)
    assert (request.api, request.model, request.asked) == (api, "qwen", "qwen")


@pytest.mark.parametrize(
    ("path", "whole"),
    [
        ("/v1/chat/completions", False),
        ("/llm/v1/completions/", False),
        ("/v1/responses", False),
        ("/v1/messages", False),
        ("/inference/v1/generate", False),
        ("/v1/chat/completions/batch", True),
        ("/v1/chat/completions/render", True),
        ("/v2/chat", True),
        ("/v1/embeddings", True),
        ("/score", True),
        ("/invocations", True),
        ("/v1/audio/transcriptions", True),
    ],
)
def test_the_path_tells_whether_sidecars_divide_the_work(path: str, whole: bool) -> None:
    request, _ = parse({**CHAT, "prompt": "p", "input": "i", "token_ids": [1, 2], "query": "q"}, path)
    assert request.whole is whole


def test_the_documentation_names_the_paths_that_are_read() -> None:
    page = Path(__file__).parents[3] / "docs" / "gateway.md"
    section = page.read_text("utf-8").partition("## Which requests are read")[2].partition("\n## ")[0]
    usual = (each.end for name in _USUAL for each in PARSERS[name])
    assert [path for path in usual if f"`{path}`" not in section] == []


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/messages/count_tokens", b'{"messages": [], "model": "qwen"}', "qwen"),
        ("/v1/audio/speech", b' \r\n{"model": "qwen", "input": "hi"}', "qwen"),
        ("/v1/audio/speech", b" " * 1000 + b'{"model": "qwen", "input": "hi"}', "qwen"),
        ("/v1/audio/speech", b'{"model": ["qwen"]}', ""),
        ("/v1/audio/speech", b'{"model": null}', ""),
        ("/v1/audio/speech", b'{"model": "' + b"q" * 1025 + b'"}', ""),
        ("/v1/audio/speech", b'{"model": "qwen"', ""),
        ("/v1/audio/speech", b'{"model": "qwen"} {"model": "x"}', ""),
        ("/v1/audio/speech", b'["model"]', ""),
        ("/v1/audio/transcriptions", b"--x\r\n", ""),
        ("/invocations", b'{"model": "qwen", "data": "x"}', "qwen"),
        ("/", b"", ""),
    ],
)
def test_of_other_bodies_the_model_is_read_if_there_is_one(path: str, body: bytes, model: str) -> None:
    request, forward = parse(body, path)
    assert (request.api, request.model, request.asked, request.prompt) == ("other", model, model, b"")
    assert forward is None


def test_the_model_of_other_bodies_is_rewritten_too() -> None:
    request, forward = parse(b'{"messages": [],"model": "old"}', "/v1/messages/count_tokens")
    assert (request.api, request.model, request.asked) == ("other", "new", "old")
    assert forward == b'{"messages": [],"model": "new"}'
    assert parse(b'{"model": "old"}', "/v1/models", method="DELETE")[1] is None


def test_a_batch_of_conversations_has_an_answer_for_each() -> None:
    turn = {"role": "user", "content": "hi"}
    body = {"model": "qwen", "messages": [[turn], [turn, turn], [turn]], "max_tokens": 9}
    request, _ = parse(body, "/v1/chat/completions/batch")
    assert (request.answers, request.max_tokens) == (3, 9)
    assert request.prompt == json.dumps(body["messages"]).encode()
    assert parse({**body, "n": 2}, "/v1/chat/completions/batch")[0].answers == 6
    assert parse({**body, "messages": []}, "/v1/chat/completions/batch")[0].answers == 1
    with pytest.raises(BadRequest, match="messages: missing"):
        parse({"model": "qwen"}, "/v1/chat/completions/batch")


def test_what_is_not_posted_is_routed_by_load_alone() -> None:
    request, forward = parse(b"", "/v1/chat/completions", {"x-llm-d-inference-objective": "vip"}, method="GET")
    assert (request.api, request.model, request.prompt, request.tokens, request.priority) == ("other", "", b"", 0, 7)
    assert forward is None


@pytest.mark.parametrize(
    ("method", "path", "body", "previous"),
    [
        ("POST", "/v1/responses", {"previous_response_id": "resp_1"}, "resp_1"),
        ("POST", "/v1/responses", {"previous_response_id": None}, ""),
        ("POST", "/v1/responses", {"previous_response_id": 5}, ""),
        ("POST", "/v1/responses", {}, ""),
        ("POST", "/v1/chat/completions", {"previous_response_id": "resp_1"}, ""),
        ("GET", "/v1/responses/resp_1", None, "resp_1"),
        ("GET", "/v1/responses/resp_1?stream=true", None, "resp_1"),
        ("DELETE", "/v1/responses/resp%5F1", None, "resp_1"),
        ("POST", "/team/v1/responses/resp_1/cancel", None, "resp_1"),
        ("GET", "/v1/responses/resp_1/input_items", None, "resp_1"),
        ("GET", "/v1/responses", None, ""),
        ("GET", "/v1/responses/resp_1/more", None, ""),
    ],
)
def test_the_answer_that_a_request_names(method: str, path: str, body: dict[str, Any] | None, previous: str) -> None:
    given = b"" if body is None else {**CHAT, "input": "i", **body}
    request, _ = parse(given, path, method=method)
    assert request.previous == previous


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": 2, "best_of": 5}, 5),
        ({"n": "3"}, 1),
        ({"n": -3}, 1),
        ({"n": 0}, 1),
        ({"n": None, "best_of": 1.5}, 1),
        ({"n": 10**400}, 10**8),
    ],
)
def test_how_many_answers_are_asked_for(fields: dict[str, Any], answers: int) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert parse({**CHAT, "prompt": "p", **fields}, path)[0].answers == answers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/completions"])
@pytest.mark.parametrize(("given", "key"), [("k", "k"), ("k" * 300, "k" * 256), (None, ""), (5, "")])
def test_the_key_by_which_requests_share_a_prefix(path: str, given: object, key: str) -> None:
    body = {**CHAT, "input": "i", "prompt": "p"}
    assert parse({**body, "prompt_cache_key": given}, path)[0].cache_key == key
    assert parse(body, path)[0].cache_key == ""


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/inference/v1/generate", {"token_ids": [5, 60, 700]}, ("generate", "", b"[5, 60, 700]", 3, None)),
        (
            "/inference/v1/generate",
            {"model": "qwen", "token_ids": [5], "sampling_params": {"max_tokens": 9}},
            ("generate", "qwen", b"[5]", 1, 9),
        ),
        (
            "/v1/completions",
            {"model": "qwen", "prompt": [[1, 2], [3]]},
            ("completions", "qwen", b"[[1, 2], [3]]", 3, None),
        ),
        ("/v1/completions", {"model": "qwen", "prompt": ["1, 2"]}, ("completions", "qwen", b'["1, 2"]', 2, None)),
        ("/rerank", {"query": "q", "documents": ["d"]}, ("pooling", "", b'"q"["d"]', 2, None)),
        ("/score", {"model": "qwen", "text_1": "a", "text_2": ["b"]}, ("pooling", "qwen", b'"a"["b"]', 2, None)),
        (
            "/v1/decisions",
            {"model": "qwen", "questions": [{"type": "predicate"}], "input": "text"},
            ("pooling", "qwen", b'"text"[{"type": "predicate"}]', 7, None),
        ),
        ("/v2/embed", {"model": "qwen", "texts": ["ab"]}, ("pooling", "qwen", b'["ab"]', 1, None)),
    ],
)
def test_token_ids_count_themselves_and_pooling_has_its_texts(
    path: str, body: dict[str, Any], expected: tuple[str, str, bytes, int, int | None]
) -> None:
    request, _ = parse(body, path, rewrites=False)
    assert (request.api, request.model, request.prompt, request.tokens, request.max_tokens) == expected


def test_the_parsers_that_are_named_read_and_no_others() -> None:
    parser = Parser(Rules(False), lambda model, nbytes: nbytes // 4, trusted=False)
    parser.use(["sglanghttp-parser", "anthropic-parser"])
    ids = RawRequest("POST", "/generate", {}, b'{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 7}}')
    request, _ = parser.parse(ids)
    assert (request.api, request.tokens, request.max_tokens) == ("generate", 3, 7)
    text, _ = parser.parse(RawRequest("POST", "/generate", {}, b'{"text": "abcdefg"}'))
    assert (text.api, text.prompt) == ("generate", b'"abcdefg"')
    chat = RawRequest("POST", "/v1/chat/completions", {}, json.dumps(CHAT).encode())
    with pytest.raises(BadRequest) as refused:
        parser.parse(chat)
    assert refused.value.message == (
        "path: '/v1/chat/completions' is read by none of sglanghttp-parser, anthropic-parser; "
        "expected one of /v1/messages, /generate"
    )
    assert parser.parse(RawRequest("GET", "/v1/models", {}))[0].api == "other"
    parser.use(["anthropic-parser", "passthrough-parser"])
    assert parser.parse(chat)[0].api == "other"
    parser.use(())
    assert parser.parse(chat)[0].api == "chat"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/inference/v1/generate", {"token_ids": "text"}, "token_ids"),
        ("/inference/v1/generate", {}, "token_ids"),
        ("/inference/v1/generate", {"model": 5, "token_ids": [1]}, "model"),
        ("/rerank", {"model": "", "query": "q"}, "model"),
    ],
)
def test_wrong_token_ids_and_models_are_refused(path: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(body, path)
    assert refused.value.param == param


def test_unknown_paths_may_have_any_body() -> None:
    body = b"\x00\xff not json"
    request, forward = parse(body, "/v1/audio/speech")
    assert (request.api, request.body, forward) == ("other", body, None)


GZIPPED = gzip.compress(json.dumps(CHAT).encode())


@pytest.mark.parametrize("headers", [{"content-encoding": "gzip"}, {"content-type": "multipart/form-data; boundary=b"}])
def test_bodies_we_cannot_read_are_routed_by_load_and_say_so(headers: dict[str, str]) -> None:
    request, forward = parse(GZIPPED, headers=headers, rewrites=False)
    assert (request.api, forward) == ("other", None)
    assert request.opaque.startswith("content-")
    assert not parse(GZIPPED, "/v1/models", headers)[0].opaque
    assert not parse(GZIPPED, headers=headers, method="GET")[0].opaque


@pytest.mark.parametrize("headers", [{"content-encoding": "gzip"}, {"content-type": "multipart/form-data; boundary=b"}])
def test_bodies_we_cannot_read_are_refused_where_models_are_rewritten(headers: dict[str, str]) -> None:
    with pytest.raises(UnsupportedMedia, match=r"^content-.*; expected JSON without a content-encoding"):
        parse(GZIPPED, headers=headers)


@pytest.mark.parametrize("coding", ["gzip", "br", "identity, zstd"])
def test_a_coding_that_is_not_there_hides_no_model(coding: str) -> None:
    body = b'{"model":"old","messages":[]}'
    assert parse(body, headers={"content-encoding": coding})[1] == b'{"model":"new","messages":[]}'


def test_a_rewritten_model_changes_the_body_to_forward_only() -> None:
    body = b'{"model":"old","messages":[{"model":"old"}]}'
    request, forward = parse(body)
    assert request.model == "new"
    assert request.body == body
    assert forward == b'{"model":"new","messages":[{"model":"old"}]}'


@pytest.mark.parametrize("given", ["", "x" * 257])
def test_requests_without_a_usable_id_get_one(given: str) -> None:
    assert parse(CHAT, headers={"x-request-id": given})[0].id == "made-up"


@pytest.mark.parametrize(
    ("headers", "slo"),
    [
        ({}, None),
        ({"x-slo-ttft-ms": "500"}, Slo(0.5)),
        ({"x-llm-d-slo-ttft-ms": "250", "x-slo-ttft-ms": "500", "x-slo-tpot-ms": "12.5"}, Slo(0.25, 0.0125)),
        ({"x-llm-d-slo-ttft-ms": "0", "x-slo-tpot-ms": ""}, None),
        ({"x-llm-d-inference-objective": "vip"}, Slo(2.0, 0.05, "vip")),
        ({"x-llm-d-inference-objective": "vip", "x-slo-tpot-ms": "20"}, Slo(2.0, 0.02, "vip")),
        ({"x-llm-d-inference-objective": "vip", "x-slo-ttft-ms": "0"}, Slo(None, 0.05, "vip")),
        ({"x-llm-d-inference-objective": "made up", "x-slo-tpot-ms": "20"}, Slo(None, 0.02)),
    ],
)
def test_headers_say_within_what_to_serve_else_the_objective_does(headers: dict[str, str], slo: Slo | None) -> None:
    assert parse(CHAT, headers=headers)[0].slo == slo
    assert parse(b"", "/other", headers)[0].slo == slo, "of a request that is not read, too"
    request = parse(CHAT, headers=headers, trusted=False)[0]
    assert (request.slo, request.priority) == (None, 0)


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", "1e10", "1" * 1000])
def test_an_slo_that_is_no_time_is_refused_by_its_header(value: str) -> None:
    with pytest.raises(BadRequest, match=r"^x-llm-d-slo-tpot-ms: got '.{1,60}'; expected milliseconds") as error:
        parse(CHAT, headers={"x-slo-tpot-ms": value})
    assert error.value.param == "x-llm-d-slo-tpot-ms"
    assert parse(CHAT, headers={"x-slo-tpot-ms": value}, trusted=False)[0].slo is None


def test_the_newer_objective_header_wins() -> None:
    headers = {"x-llm-d-inference-objective": "nobody", "x-gateway-inference-objective": "vip"}
    assert parse(CHAT, headers=headers)[0].priority == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [(b"{", None), (b"[]", None), (b"", None), (b"{}", "model"), (b'{"model":"m"}', "messages")],
)
def test_wrong_bodies_of_known_paths_are_refused(body: bytes, param: str | None) -> None:
    with pytest.raises(BadRequest) as error:
        parse(body)
    assert error.value.param == param


PATHS = st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages"])


@given(st.data(), PATHS)
def test_a_mutated_body_is_read_or_refused_never_anything_else(data: st.DataObject, path: str) -> None:
    body = bytearray(
        b'{"model":"old","messages":[{"role":"user","content":"\\ud83d\\ude00 \xc3\xa9"}],"prompt":"p","input":["i"],'
        b'"stream":true,"max_tokens":5,"cache_salt":"s","tools":[{"a":1.5e3}]}'
    )
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 8))] = data.draw(
            st.binary(max_size=6) | st.sampled_from([b'"', b"{", b"}", b"\\", b"\\ud800", b"null", b",", b'"model":5,'])
        )
    try:
        request, forward = parse(bytes(body), path)
    except BadRequest:
        return
    assert request.model
    assert forward is None or request.model == "new"


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


@given(st.binary(max_size=300).filter(lambda body: not _is_json(body)))  # constants of our own code are among them
def test_random_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse(body)


@pytest.mark.parametrize(
    ("body", "api"),
    [
        (CHAT, "chat"),
        ({"model": "m", "prompt": "p"}, "completions"),
        ({"model": "m"}, "other"),
        (b"", "other"),
        (b"[]", "other"),
    ],
)
def test_without_method_and_path_the_body_tells_the_format(body: Any, api: Api) -> None:
    request, _ = parse(body, path="", method="")
    assert request.api == api


@pytest.mark.parametrize(
    ("body", "api"),
    [
        (b'{"model":"m","m\\u0065ssages":[]}', "chat"),
        (b'{"model":"m","prompt":"\\"messages\\"","x":{"messages":[]}}', "completions"),
    ],
)
def test_without_a_path_only_fields_of_the_body_itself_tell_the_format(body: bytes, api: Api) -> None:
    assert parse(body, path="", method="")[0].api == api
