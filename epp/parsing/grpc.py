"""gRPC requests to engines, as the JSON that says the same: vLLM's `VllmEngine`, Vertex AI's `PredictionService`.

A unary request is one message in a frame. Of it some fields count, found by their numbers: a schema would be of little
help for so few, and most of a message is passed over. `GrpcUsage` reads the answers.

Sources: `vllm_engine.proto` as llm-d-router v0.10 has it; google.cloud.aiplatform.v1beta1 `prediction_service.proto`.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Final

import msgspec

from epp.errors import BadRequest
from epp.parsing.request import Api, ResponsesReader, Usage, UsageReader

MEDIA_TYPE: Final = "application/grpc"
_FRAME: Final = 5
"""Bytes before a message: whether it is compressed, and its length."""
_LONGEST_VARINT: Final = 10
_LARGEST: Final = 64 * 1024
"""Bytes of an answer's message that is looked into; vLLM's have a few tokens each."""

_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5

Value = int | memoryview
"""Of a field: a number, or the bytes of a text, a message or packed numbers."""


def why_opaque(body: bytes) -> str:
    """Why it can be read by the engine only; "": it can be read here."""
    return "grpc-encoding: a compressed message" if body[:1] == b"\x01" else ""


def _of_message(read: Callable[[memoryview], bytes]) -> Callable[[bytes], bytes]:
    """What reads a body: `read` the message in its frame. Raises BadRequest."""

    @wraps(read)
    def unwrapped(body: bytes) -> bytes:
        size = int.from_bytes(body[1:_FRAME], "big")
        if len(body) != _FRAME + size or body[0] != 0:
            raise BadRequest(f"the body is no gRPC message: {len(body)} bytes; expected one frame, not compressed")
        try:
            return read(memoryview(body)[_FRAME:])
        except ValueError as error:
            raise BadRequest(f"the body is no gRPC message of this method: {error}") from None

    return unwrapped


@_of_message
def generate(message: memoryview) -> bytes:
    """Of vLLM's `Generate` the JSON of SGLang's `/generate`, which says the same."""
    asked: dict[str, object] = {}
    for number, value in _fields(message):
        if number == 2 and isinstance(value, memoryview):  # TokenizedInput
            asked["input_ids"] = _ids(value)
        elif number == 3 and isinstance(value, memoryview):
            asked["text"] = str(value, "utf-8")
        elif number == 4 and isinstance(value, memoryview):  # SamplingParams
            limits = [limit for at, limit in _fields(value) if at == 8]
            asked["sampling_params"] = {"max_tokens": limits[-1]} if limits else {}
        elif number == 5:
            asked["stream"] = bool(value)
        elif number == 7:  # MultimodalInputs
            asked["features"] = True
    return msgspec.json.encode(asked)


@_of_message
def embed(message: memoryview) -> bytes:
    """Of vLLM's `Embed` the JSON of its `/pooling`."""
    found = [_ids(value) for number, value in _fields(message) if number == 2 and isinstance(value, memoryview)]
    return msgspec.json.encode({"input": found[-1] if found else []})


@_of_message
def http_body(message: memoryview) -> bytes:
    """The JSON in the `HttpBody` of Vertex AI's requests."""
    data = b""
    for number, value in _fields(message):
        if number == 2 and isinstance(value, memoryview):
            data = b"".join(bytes(part) for at, part in _fields(value) if at == 2 and isinstance(part, memoryview))
    return data


class GrpcUsage:
    """Reads token counts of vLLM's answers, as `UsageReader` does of JSON. Never raises; keeps one message at most."""

    __slots__ = ("_found", "_passed", "_rest")

    def __init__(self) -> None:
        self._found: Usage | None = None
        self._rest = b""
        self._passed = 0
        """Bytes to come of a message that is too large to be kept."""

    def feed(self, chunk: bytes) -> None:
        """The next piece of the answer's body."""
        data = memoryview(self._rest + chunk)
        while data:
            if self._passed:
                step = min(self._passed, len(data))
                self._passed -= step
                data = data[step:]
                continue
            if len(data) < _FRAME:
                break
            size = int.from_bytes(data[1:_FRAME], "big")
            if size > _LARGEST:
                self._passed = _FRAME + size
            elif len(data) < _FRAME + size:
                break
            else:
                self._read(data[_FRAME : _FRAME + size])
                data = data[_FRAME + size :]
        self._rest = bytes(data)

    def finish(self) -> Usage | None:
        """What was found, or None."""
        return self._found

    def _read(self, message: memoryview) -> None:
        try:
            for number, value in _fields(message):
                # GenerateResponse: a chunk (1) has its counts from field 2 on, the whole answer (2) from field 3 on.
                if number in (1, 2) and isinstance(value, memoryview):
                    counts = {at: count for at, count in _fields(value) if isinstance(count, int)}
                    prompt, completion, cached = (counts.get(number + at, 0) for at in (1, 2, 3))
                    if prompt or completion:
                        self._found = Usage(prompt, completion, cached)
        except ValueError:
            return


def usage_reader(content_type: str, api: Api) -> UsageReader | GrpcUsage:
    """For an answer of this type to a request of this API."""
    if content_type.startswith(MEDIA_TYPE) and api == "generate":
        return GrpcUsage()
    return ResponsesReader(content_type) if api == "responses" else UsageReader(content_type)


def _fields(data: memoryview) -> Iterator[tuple[int, Value]]:
    """(number, value) of a message's fields, in order. Raises ValueError."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == _LEN:
            size, at = _varint(data, at)
        elif kind in (_I64, _I32):
            size = 8 if kind == _I64 else 4
        else:
            raise ValueError(f"a field of wire type {kind}")
        if at + size > len(data):
            raise ValueError("it ends within a field")
        yield number, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_LONGEST_VARINT):
        if at >= len(data):
            raise ValueError("it ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than 64 bits")


def _ids(tokenized: memoryview) -> list[int]:
    """Of a TokenizedInput: packed, as proto3 has them, or one by one."""
    found: list[int] = []
    for number, value in _fields(tokenized):
        if number != 2:
            continue
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = _varint(value, at)
            found.append(one)
    return found
