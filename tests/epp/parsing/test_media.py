"""Images, video and audio in prompts. Sizes are of files that Pillow 13 wrote, tokens those that the processors
of transformers 5.19 make of the same width and height.
"""

import json
import struct
from base64 import b64decode, b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from epp.parsing.media import condensed, seconds_of, shows_media, size_of
from epp.parsing.parser import Parser
from epp.parsing.request import NO_OBJECTIVE, Objective, RawRequest, Request

PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAASwAAADIAQAAAAB6pOH4AAAAHklEQVR42u3BMQEAAADCoPVPbQdvoAAA"
    "AAAAAADgNx54AAG94zQeAAAAAElFTkSuQmCC"
)
JPEG = b64encode(
    b"\xff\xd8\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0\xff\xdb\0C\0" + b"\xff" * 64
    + b"\xff\xc0\0\x0b\x08\0\xc8\x01,\x01\x01\x11\0"
).decode()  # fmt: skip
PICTURES = {
    "png": PNG,
    "gif": "R0lGODdhLAHIAIAAAAAAAAAAACwAAAAALAHIAEAI/w==",
    "jpeg": JPEG,
    "jpeg, in the web's way": JPEG.replace("/", "\\/"),
    "progressive": "/9j/4AAQSkZJRgABAQAAAQABAAD/wgALCADIASwBAREA/8Q=",
    "webp": "UklGRqYAAABXRUJQVlA4IJoAAABwEACdASosAcgAP83m8XO/uDOsoCgD8DmJaW7h",
    "lossless webp": "UklGRiIAAABXRUJQVlA4TBYAAAAvK8ExAAcQEf0PACjS//8U0f/U/68B",
    "webp with metadata": b64encode(b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\x08\0\0\0\x2b\x01\0\xc7\0\0").decode(),
}
"""All of 300 by 200 pixels."""
LARGE = b64encode(
    b"\xff\xd8\xff\xe1"
    + struct.pack(">H", 60_000)
    + bytes(59_998)
    + b"\xff\xc0\0\x11\x08"
    + struct.pack(">HH", 200, 300)
).decode()
SIZES = [(640, 480), (1024, 768), (1920, 1080), (100, 100), (4000, 3000), (336, 336), (500, 1500)]
TOKENS = {
    "Qwen/Qwen2.5-VL-7B-Instruct": [393, 1001, 2693, 18, 15303, 146, 974],
    "qwen2-vl-72b": [393, 1001, 2693, 18, 15303, 146, 974],
    "Qwen/Qwen3-VL-30B-A3B": [302, 770, 2042, 66, 11752, 102, 754],
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": [727, 1887, 2322, 147, 1887, 147, 1597],
    "mistralai/Pixtral-12B-2409": [1230, 3120, 2340, 56, 3120, 462, 1472],
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": [432, 1064, 1736, 20, 2352, 156, 1026],
    "OpenGVLab/InternVL3-8B": [3330, 3330, 2306, 258, 3330, 258, 1026],
    "llava-hf/llava-v1.6-mistral-7b-hf": [2340, 2340, 1948, 1176, 2340, 1176, 2376],
    "llava-hf/llava-1.5-7b-hf": [576] * 7,
    "google/gemma-3-27b-it": [260] * 7,
    "another": [300, 768, 2025, 9, 11718, 110, 732],
}


def png(width: int, height: int) -> str:
    return (
        "data:image/png;base64,"
        + b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", width, height)).decode()
    )


def wav(seconds: float, rate: int = 32_000) -> str:
    size = int(seconds * rate)
    head = b"RIFF" + struct.pack("<I", 36 + size) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 16_000, rate, 2, 16)
    return b64encode(head + b"data" + struct.pack("<I", size) + bytes(size)).decode()


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"detail": "auto", "url": url}}


def user(*parts: Any) -> bytes:
    return json.dumps([{"role": "user", "content": [{"type": "text", "text": "what is this? "}, *parts]}]).encode()


def tokens(model: str, *parts: Any) -> int:
    found = condensed(user(*parts), model)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("data", PICTURES.values(), ids=PICTURES)
def test_a_pictures_size_is_in_its_header(data: str) -> None:
    assert size_of(data.encode()) == (300, 200)


def test_a_jpeg_with_a_thumbnail_before_its_size() -> None:
    assert size_of(LARGE.encode()) == (300, 200)


@given(
    st.binary(max_size=200),
    st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"\xff\xd8\xff", b"RIFF1234WEBPVP8"]),
)
def test_no_bytes_are_an_error(data: bytes, head: bytes) -> None:
    for value in (data, b64encode(head + data)):
        width, height = size_of(value) or (1, 1)
        assert min(width, height) >= 1
        assert seconds_of(value, len(value)) >= 0


@pytest.mark.parametrize("model", TOKENS)
def test_tokens_of_a_picture_by_family(model: str) -> None:
    assert [tokens(model, image(png(*size))) for size in SIZES] == TOKENS[model]


def test_no_picture_has_more_tokens_than_any_family_makes() -> None:
    assert tokens("another", image(png(65_535, 65_535))) == 16_384


def test_a_picture_elsewhere_is_of_a_usual_size() -> None:
    assert tokens("another", image("https://example.com/cat.png")) == 768
    assert tokens("google/gemma-3-4b-it", image("https://example.com/cat.png")) == 260


def test_sound_and_video() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": wav(4), "format": "wav"}}
    assert tokens("qwen2-audio-7b", sound) == 100
    assert tokens("mistralai/Voxtral-Mini-3B", sound) == 50
    assert tokens("another", {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{wav(2)}"}}) == 50
    assert tokens("another", {"type": "audio_url", "audio_url": {"url": "https://example.com/a.mp3"}}) == 750
    assert seconds_of(b64encode(bytes(32_000)), 42_668) == pytest.approx(2.0, abs=0.01)
    assert tokens("another", {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}) == 4500


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "image_url": png(320, 320)},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": png(320, 320)[22:]}},
        {"image_url": {"url": png(320, 320)}},
    ],
)
def test_parts_of_other_apis(part: Any) -> None:
    assert tokens("another", part) == 100
    assert shows_media(Raw(user(part)))
    assert parsed({"model": "another", "messages": json.loads(user(part))}).media_tokens == 100


def test_what_stands_for_a_picture_is_the_same_for_the_same_and_as_long_as_its_tokens() -> None:
    first, other = (condensed(user(image(png(320, side)), {"type": "text", "text": "?"}), "m") for side in (320, 640))
    assert first is not None
    assert other is not None
    again = condensed(user(image(png(320, 320)), {"type": "text", "text": "and?"}), "m")
    assert again is not None
    before = len(user()) - 2
    assert first[0][: before + 460] == again[0][: before + 460]
    assert first[0][before:] != other[0][before:]
    assert (first[1], first[2], other[1]) == (100, 400, 200)
    assert len(first[0]) == len(user(image(""), {"type": "text", "text": "?"})) + 400


@pytest.mark.parametrize(
    "prompt",
    [
        user({"type": "text", "text": '"image_url": {"url": "https://example.com/not.png"}'}),
        json.dumps([{"type": "function", "function": {"parameters": {"image_url": {"type": "string"}}}}]).encode(),
        user({"type": "image_url", "image_url": {"url": None}}),
        b'[{"image_url": {"url": "never ends',
        b"[]",
    ],
)
def test_what_is_no_picture_stays(prompt: bytes) -> None:
    assert condensed(prompt, "m") is None


def test_a_picture_in_a_tools_answer() -> None:
    answer = {"type": "tool_result", "content": [{"type": "image", "source": {"data": png(320, 320)[22:]}}]}
    assert parsed({"model": "m", "messages": json.loads(user(answer))}, "/v1/messages").media_tokens == 100
    call = {"type": "function_call_output", "output": [{"type": "input_image", "image_url": png(320, 320)}]}
    assert parsed({"model": "m", "input": [call]}, "/v1/responses").media_tokens == 100


@pytest.mark.parametrize("messages", [user(), b"[]", b'"text"', b"[1]", b"{}", b'[{"content": "a [b]"}]', b"", b"[{"])
def test_messages_of_text_show_no_media(messages: bytes) -> None:
    assert not shows_media(Raw(messages))


class Rules:
    rewrites = False

    def rewrite(self, model: str) -> str:
        return model

    def objective(self, name: str) -> Objective:
        return NO_OBJECTIVE


def parsed(body: Any, path: str = "/v1/chat/completions") -> Request:
    parser = Parser(Rules(), lambda model, nbytes: nbytes // 4, trusted=True)
    request, forward = parser.parse(RawRequest("POST", path, {}, json.dumps(body).encode()))
    assert forward is None
    return request


def test_a_request_counts_its_pictures_as_the_tokens_they_become() -> None:
    content = json.loads(user(image(png(1280, 1280) + "A" * 1_000_000)))
    request = parsed({"model": "another", "messages": content})
    assert request.media_tokens == 1600
    assert 1600 < request.tokens < 1650
    assert len(request.prompt) < 7_000
    assert len(request.body) > 1_000_000
    assert parsed({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).media_tokens == 0


def form(sound: bytes, model: str = "openai/whisper-large-v3", first: bool = True) -> bytes:
    field = f'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n'.encode()
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    file = head + sound + b"\r\n"
    return b"".join([field, file] if first else [file, field]) + b"--b--\r\n"


@pytest.mark.parametrize("first", [True, False])
def test_an_upload_counts_by_the_seconds_of_its_sound(first: bool) -> None:
    def asked(
        body: bytes, path: str = "/v1/audio/transcriptions", kind: str = "multipart/form-data; boundary=b"
    ) -> int:
        parser = Parser(Rules(), lambda model, nbytes: nbytes // 4, trusted=True)
        request, _ = parser.parse(RawRequest("POST", path, {"content-type": kind}, body))
        assert (request.api, request.prompt) == ("other", b"")
        return request.tokens

    sound = b64decode(wav(12))
    assert asked(form(sound, first=first)) == 600
    assert asked(form(sound, "another", first), "/api/v1/audio/translations") == 300
    assert asked(form(bytes(160_000), first=first)) == pytest.approx(500, abs=5)
    assert asked(form(sound), kind="application/json") == 0
    assert asked(b"--b--", "/v1/audio/transcriptions") == 0
    assert asked(form(sound), "/v1/audio/speech") == 0
