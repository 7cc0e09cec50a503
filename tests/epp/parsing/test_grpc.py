"""gRPC requests are read as the JSON that says the same, and vLLM's answers for their token counts.

Messages are made by protobuf itself, from the fields that the schemas give.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from epp.errors import BadRequest, EppError, UnsupportedMedia
from epp.parsing.grpc import GrpcUsage, usage_reader
from epp.parsing.parser import Parser
from epp.parsing.request import NO_OBJECTIVE, Objective, RawRequest, Request, Usage, UsageReader

GENERATE, EMBED = (f"/vllm.grpc.engine.VllmEngine/{method}" for method in ("Generate", "Embed"))
VERTEX = "/google.cloud.aiplatform.v1beta1.PredictionService"
SCHEMA = {
    "SamplingParams": {"temperature": (1, "float"), "max_tokens": (8, "uint32"), "stop": (10, "[string]")},
    "TokenizedInput": {"original_text": (1, "string"), "input_ids": (2, "[uint32]")},
    "MultimodalInputs": {"mm_hashes": (6, "[string]")},
    "GenerateRequest": {
        "request_id": (1, "string"),
        "tokenized": (2, "TokenizedInput"),
        "text": (3, "string"),
        "sampling_params": (4, "SamplingParams"),
        "stream": (5, "bool"),
        "mm_inputs": (7, "MultimodalInputs"),
    },
    "EmbedRequest": {"request_id": (1, "string"), "tokenized": (2, "TokenizedInput")},
    "Chunk": {"ids": (1, "[uint32]"), "prompt": (2, "uint32"), "completion": (3, "uint32"), "cached": (4, "uint32")},
    "Complete": {
        "ids": (1, "[uint32]"),
        "finish_reason": (2, "string"),
        "prompt": (3, "uint32"),
        "completion": (4, "uint32"),
        "cached": (5, "uint32"),
    },
    "GenerateResponse": {"chunk": (1, "Chunk"), "complete": (2, "Complete")},
    "HttpBody": {"content_type": (1, "string"), "data": (2, "bytes")},
    "RawPredictRequest": {"endpoint": (1, "string"), "http_body": (2, "HttpBody")},
}
"""Message -> field -> (number, type)."""


def _messages() -> dict[str, type[Message]]:
    file = descriptor_pb2.FileDescriptorProto(name="tests/grpc.proto", package="tests", syntax="proto3")
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            one = kind.strip("[]")
            entry = message.field.add(name=field, number=number, label=3 if kind != one else 1)
            if one in SCHEMA:
                entry.type_name = f".tests.{one}"
                entry.type = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
            else:
                entry.type = descriptor_pb2.FieldDescriptorProto.Type.Value(f"TYPE_{one.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tests.{name}")) for name in SCHEMA}


MESSAGES = _messages()


def framed(name: str, **fields: Any) -> bytes:
    data = MESSAGES[name](**fields).SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


class Rules:
    rewrites = True

    def rewrite(self, model: str) -> str:
        return "new" if model == "old" else model

    def objective(self, name: str) -> Objective:
        return NO_OBJECTIVE


def parse(path: str, body: bytes, headers: Mapping[str, str] = {"content-type": "application/grpc"}) -> Request:
    parser = Parser(Rules(), lambda model, nbytes: nbytes // 4, trusted=True)
    parser.use(["vllmgrpc-parser", "vertexai-parser"])
    request, forward = parser.parse(RawRequest("POST", path, headers, body))
    assert forward is None
    return request


def test_token_ids_of_vllm() -> None:
    request = parse(
        GENERATE,
        framed(
            "GenerateRequest",
            request_id="r",
            tokenized={"original_text": "hi", "input_ids": [1, 300, 2**32 - 1]},
            sampling_params={"temperature": 0.5, "max_tokens": 70, "stop": ["x"]},
            stream=True,
        ),
    )
    assert (request.api, request.model, request.stream, request.max_tokens) == ("generate", "", True, 70)
    assert (json.loads(request.prompt), request.tokens) == ([1, 300, 2**32 - 1], 3)
    assert json.loads(request.body)["input_ids"] == [1, 300, 2**32 - 1]


def test_a_text_for_vllm() -> None:
    request = parse(GENERATE, framed("GenerateRequest", text="é" * 100))
    assert (request.api, json.loads(request.prompt), request.stream, request.max_tokens) == (
        "generate", "é" * 100, False, None,
    )  # fmt: skip


def test_what_is_to_be_embedded() -> None:
    request = parse(EMBED, framed("EmbedRequest", tokenized={"input_ids": [*range(500)]}))
    assert (request.api, json.loads(request.prompt)) == ("pooling", [*range(500)])


def test_the_json_in_vertex_ai_requests() -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    body = framed(
        "RawPredictRequest", endpoint="e", http_body={"content_type": "application/json", "data": json_(chat)}
    )
    request = parse(f"{VERTEX}/ChatCompletions", body)
    assert (request.api, request.model, request.max_tokens) == ("chat", "m", 5)
    assert request.body == json_(chat)
    raw = framed("RawPredictRequest", http_body={"data": json_({"model": "m", "input": "hi"})})
    assert [parse(f"{VERTEX}/{method}", raw).api for method in ("RawPredict", "StreamRawPredict")] == ["responses"] * 2


def json_(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_a_model_in_a_grpc_request_cannot_be_rewritten() -> None:
    body = framed("RawPredictRequest", http_body={"data": json_({"model": "old", "input": "hi"})})
    with pytest.raises(UnsupportedMedia, match="cannot be done in a gRPC request"):
        parse(f"{VERTEX}/RawPredict", body)


def test_a_compressed_message_is_not_read() -> None:
    with pytest.raises(UnsupportedMedia, match=r"^grpc-encoding: a compressed message; "):
        parse(GENERATE, b"\1" + framed("GenerateRequest", text="x")[1:])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is no gRPC message: 0 bytes; expected one frame, not compressed"),
        (framed("GenerateRequest", text="abc")[:-1], "the body is no gRPC message: 9 bytes; expected one frame"),
        (b"\0\0\0\0\2\x12\x05", "the body is no gRPC message of this method: it ends within a field"),
        (b"\0\0\0\0\4\x12\x02\x12\x05", "the body is no gRPC message of this method: it ends within a field"),
        (b"\0\0\0\0\3\x1a\x01\xff", "the body is no gRPC message of this method: 'utf-8' codec can't decode"),
        (b"\0\0\0\0\1\x0b", "the body is no gRPC message of this method: a field of wire type 3"),
        (b"\0\0\0\0\0", "input_ids: missing"),
    ],
)
def test_what_is_wrong_with_a_body_is_said(body: bytes, message: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(GENERATE, body)
    assert str(refused.value).startswith(message)


@given(
    body=st.binary(max_size=80), path=st.sampled_from([GENERATE, EMBED, f"{VERTEX}/RawPredict"]), frame=st.booleans()
)
def test_no_body_is_an_error_of_ours(body: bytes, path: str, frame: bool) -> None:
    request = None
    with suppress(EppError):
        request = parse(path, b"\0" + len(body).to_bytes(4, "big") + body if frame else body)
    assert request is None or request.api in ("generate", "pooling", "responses")


CHUNKS = [
    framed("GenerateResponse", chunk={"ids": [1, 2]}),
    framed("GenerateResponse", chunk={"ids": [3], "prompt": 12, "completion": 3, "cached": 8}),
]
COMPLETE = framed(
    "GenerateResponse", complete={"ids": [1, 2, 3], "finish_reason": "stop", "prompt": 12, "completion": 3, "cached": 8}
)


@pytest.mark.parametrize("answer", [b"".join(CHUNKS), COMPLETE])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_token_counts_of_answers_however_they_are_cut(answer: bytes, size: int) -> None:
    reader = usage_reader("application/grpc+proto", "generate")
    for at in range(0, len(answer), size):
        reader.feed(answer[at : at + size])
    assert reader.finish() == Usage(12, 3, 8)


def test_a_message_that_is_too_large_is_passed_over() -> None:
    reader = GrpcUsage()
    large = framed("GenerateResponse", chunk={"ids": [2**31] * 20_000})
    for at in range(0, len(large), 1000):
        reader.feed(large[at : at + 1000])
    assert reader.finish() is None
    reader.feed(COMPLETE)
    assert reader.finish() == Usage(12, 3, 8)


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_an_answer_that_is_none_has_no_counts(pieces: list[bytes]) -> None:
    reader = GrpcUsage()
    for piece in pieces:
        reader.feed(piece)
    assert isinstance(reader.finish(), Usage | None)


def test_the_json_in_vertex_ai_answers_has_its_counts() -> None:
    reader = usage_reader("application/grpc", "chat")
    assert isinstance(reader, UsageReader)
    reader.feed(framed("HttpBody", data=json_({"usage": {"prompt_tokens": 12, "completion_tokens": 3}})))
    assert reader.finish() == Usage(12, 3, -1)
