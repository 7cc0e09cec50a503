"""Images, video and audio in a prompt: how many tokens each becomes, and what stands for it where it stood.

A picture of a megabyte is some hundred tokens. In the prompt, by whose bytes prefixes are compared and tokens counted,
a digest of it takes its place, repeated to four bytes for each of its tokens: so the same picture at the same place is
the same prefix, and as long as the engine has it. How large it is says its header; that of a picture elsewhere is not
fetched, it counts as 1024 x 768. Families of models are known by their names.

Sources: the families' processors in transformers 5.19; audio: their papers and vLLM 0.32.
"""

import re
from base64 import b64decode
from collections.abc import Callable, Iterator
from math import ceil, floor, sqrt
from typing import Final, NamedTuple

import msgspec
import xxhash

from epp.errors import UNREADABLE

_HEAD: Final = re.compile(rb'"(image|video|audio)_url"|"input_(audio)"|"source"')
_VALUE: Final = re.compile(
    rb'[ \t\r\n]{0,8}:[ \t\r\n]{0,8}(?:\{[^{}]{0,200}?"(?:url|data)"[ \t\r\n]{0,8}:[ \t\r\n]{0,8})?"'
)
_MOST_HEADS: Final = 1024
_MOST: Final = 256
"""Items of a prompt that are looked at."""
_MOST_ESCAPES: Final = 64
_BYTES: Final = 4
"""Of what stands for an item, for each of its tokens: what text has, too, with common vocabularies."""
_LARGEST: Final = 16_384
"""Tokens of one item: the most that any of the families makes of a picture."""
_USUAL: Final = (1024, 768)
"""Width and height of a picture that is not there to be looked at."""
_FRAME: Final = (640, 360)
_FRAMES: Final = 20
"""Of a video: 10 seconds, two pictures of each. Source: llm-d-router's estimate."""
_BYTES_PER_SECOND: Final = 16_000
"""Of a clip that is no WAV: 128 kbit/s, as most MP3s have."""
_SECONDS: Final = 30.0
"""Of a clip that is not there."""
_HEADER: Final = 44
"""Bytes of a WAV file's header."""
_LONGEST_UPLOAD: Final = 262_144
"""Tokens: three hours."""
_MODEL: Final = re.compile(rb'name="model"\r\n(?:[^\r\n]{1,200}\r\n){0,4}\r\n([^\r\n]{1,200})\r\n')
_SHORT: Final = 1 << 10
_LONG: Final = 192 << 10
"""Characters of base64 in which a picture's size is looked for; a JPEG may have its thumbnail before it."""

_ABSENT: Final = msgspec.Raw()
_MEDIA: Final = frozenset({b'"input_audio"', b'"image"', b'"input_image"'})
"""Types of parts that do not have one of the three URLs, or not always."""

Size = tuple[int, int]
"""Width and height, in pixels."""


class Family(NamedTuple):
    """How a family of models reads what is no text."""

    image: Callable[[int, int], int]
    """Tokens of a picture of this width and height."""
    audio: float = 25.0
    """Tokens of a second."""
    pairs: bool = False
    """Two pictures of a video are read as one."""


def condensed(prompt: bytes, model: str) -> tuple[bytes, int, int] | None:
    """The prompt with a stand-in for each item, the tokens of all items, and the bytes of all stand-ins; None: it has
    no such item. Takes long for a prompt that has none: ask `shows_media` first.
    """
    family = _family_of(model)
    parts: list[bytes] = []
    tokens = at = 0
    for start, end, kind in _items(prompt):
        count = min(_LARGEST, max(1, _tokens(prompt, start, end, kind, family)))
        digest = xxhash.xxh3_128_hexdigest(memoryview(prompt)[start:end]).encode()
        size = count * _BYTES
        parts += [prompt[at:start], (digest * (size // len(digest) + 1))[:size]]
        tokens, at = tokens + count, end
    if not parts:
        return None
    return b"".join([*parts, prompt[at:]]), tokens, tokens * _BYTES


class _Part(msgspec.Struct):
    type: msgspec.Raw = _ABSENT
    image_url: msgspec.Raw = _ABSENT
    video_url: msgspec.Raw = _ABSENT
    audio_url: msgspec.Raw = _ABSENT
    content: msgspec.Raw = _ABSENT
    output: msgspec.Raw = _ABSENT


_PARTS: Final = msgspec.json.Decoder(list[_Part])


def shows_media(messages: msgspec.Raw) -> bool:
    """Whether parts of these messages are images, video or audio; looks at nothing else of them."""
    try:
        for message in _PARTS.decode(messages):
            for parts in (message.content, message.output):
                if _is_array(parts) and any(map(_is_media, _PARTS.decode(parts))):
                    return True
    except UNREADABLE:
        return False
    return False


def _is_media(part: _Part) -> bool:
    """Or a tool's answer in parts, which are not looked into."""
    urls = (part.image_url, part.video_url, part.audio_url)
    return bytes(part.type) in _MEDIA or any(memoryview(url) for url in urls) or _is_array(part.content)


def _is_array(value: msgspec.Raw) -> bool:
    return bytes(memoryview(value)[:1]) == b"["


def _items(prompt: bytes) -> Iterator[tuple[int, int, str]]:
    """(begin, end, kind) of the value of each item, in order."""
    at = found = 0
    for _ in range(_MOST_HEADS):
        if found == _MOST or (head := _HEAD.search(prompt, at)) is None:
            return
        at = head.end()
        if (value := _VALUE.match(prompt, at)) is None:
            continue
        start = value.end()
        if (end := _closing(prompt, start)) < 0:
            return
        yield start, end, (head[1] or head[2] or b"image").decode()
        at, found = end, found + 1


def _closing(prompt: bytes, start: int) -> int:
    """Where the string that begins there ends; -1: not within reason."""
    at = start
    for _ in range(_MOST_ESCAPES):
        at = prompt.find(b'"', at)
        if at < 0 or prompt[at - 1 : at] != b"\\":
            return at
        at += 1
    return -1


def _tokens(prompt: bytes, start: int, end: int, kind: str, family: Family) -> int:
    """Of the item whose value stands there: base64 with `data:...` before it or alone, or a URL."""
    if kind == "video":
        return family.image(*_FRAME) * _FRAMES // (2 if family.pairs else 1)
    head, comma, _ = prompt[start : min(end, start + 256)].partition(b"base64,")
    begin = start + len(head) + len(comma) if comma else end if b"://" in head[:16] else start
    data = prompt[begin : min(end, begin + _LONG)]
    if kind == "audio":
        return ceil(seconds_of(data, end - begin) * family.audio)
    return family.image(*(size_of(data) or _USUAL))


_UPLOADS: Final = ("/v1/audio/transcriptions", "/v1/audio/translations")
_FIELDS: Final = 16 * 1024
"""Bytes at a form's begin, or at its end, in which fields beside the file are looked for."""


def uploaded_tokens(path: str, content_type: str, body: bytes) -> int:
    """Of the sound file in a form that is to be transcribed or translated; 0: it is no such request."""
    if not path.endswith(_UPLOADS) or not content_type.startswith("multipart/form-data"):
        return 0
    named = body.find(b"filename=", 0, _FIELDS)
    start = body.find(b"\r\n\r\n", named, named + _FIELDS) + 4
    if named < 0 or start < 4:
        return 0
    model = _MODEL.search(body[:_FIELDS]) or _MODEL.search(body[-_FIELDS:])
    family = _family_of(model[1].decode("utf-8", "replace")) if model else _UNKNOWN
    return min(_LONGEST_UPLOAD, ceil(_length(body[start : start + _HEADER], len(body) - start) * family.audio))


# --- sizes ----------------------------------------------------------------------------------------------------------


def _decoded(data: bytes, characters: int) -> bytes:
    """The first bytes of base64; empty where it is none."""
    piece = data[:characters].replace(b"\\/", b"/")
    try:
        return b64decode(piece[: len(piece) // 4 * 4])
    except ValueError:
        return b""


def size_of(data: bytes) -> Size | None:
    """Of a picture in base64, by its header: PNG, JPEG, GIF, WebP. None: it is no such one."""
    head = _decoded(data, _SHORT)
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return _positive(int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big"))
    if head.startswith((b"GIF87a", b"GIF89a")):
        return _positive(int.from_bytes(head[6:8], "little"), int.from_bytes(head[8:10], "little"))
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return _webp(head)
    if head.startswith(b"\xff\xd8"):
        return _jpeg(head) or (_jpeg(_decoded(data, _LONG)) if len(data) > _SHORT else None)
    return None


def _positive(width: int, height: int) -> Size | None:
    return (width, height) if width > 0 and height > 0 else None


def _webp(head: bytes) -> Size | None:
    kind, bits = head[12:16], head[20:]
    if kind == b"VP8 ":
        return _positive(int.from_bytes(bits[6:8], "little") & 0x3FFF, int.from_bytes(bits[8:10], "little") & 0x3FFF)
    if kind == b"VP8L" and len(bits) >= 5:
        both = int.from_bytes(bits[1:5], "little")
        return (both & 0x3FFF) + 1, (both >> 14 & 0x3FFF) + 1
    if kind == b"VP8X" and len(bits) >= 10:
        return int.from_bytes(bits[4:7], "little") + 1, int.from_bytes(bits[7:10], "little") + 1
    return None


def _jpeg(head: bytes) -> Size | None:
    at = 2
    while at + 9 <= len(head) and head[at] == 0xFF:
        marker = head[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # a frame begins
            return _positive(int.from_bytes(head[at + 7 : at + 9], "big"), int.from_bytes(head[at + 5 : at + 7], "big"))
        at += 1 if marker == 0xFF else 2 + int.from_bytes(head[at + 2 : at + 4], "big")
    return None


def seconds_of(data: bytes, characters: int) -> float:
    """Of a clip of so many characters in base64, that begins with `data`: exact for WAV, else by its length;
    `_SECONDS` where there is none.
    """
    if not data:
        return _SECONDS
    return _length(_decoded(data, 64), characters * 3 // 4)


def _length(head: bytes, size: int) -> float:
    """Seconds of a file that begins with `head`."""
    if head.startswith(b"RIFF") and head[8:16] == b"WAVEfmt " and (rate := int.from_bytes(head[28:32], "little")):
        return min(max(0, size - _HEADER), int.from_bytes(head[40:44], "little") or size) / rate
    return size / _BYTES_PER_SECOND


# --- families -------------------------------------------------------------------------------------------------------


def _merged(factor: int, least: int, most: int) -> Callable[[int, int], int]:
    """Qwen's: sides rounded to `factor` pixels, scaled to between `least` and `most` pixels; two more around it."""

    def tokens(width: int, height: int) -> int:
        columns, rows = max(1, round(width / factor)), max(1, round(height / factor))
        if columns * rows * factor**2 > most:
            scale = sqrt(width * height / most) * factor
            columns, rows = max(1, floor(width / scale)), max(1, floor(height / scale))
        elif columns * rows * factor**2 < least:
            scale = sqrt(least / (width * height)) / factor
            columns, rows = ceil(width * scale), ceil(height * scale)
        return columns * rows + 2

    return tokens


def _rows(patch: int, longest: int) -> Callable[[int, int], int]:
    """Pixtral's: patches in rows, each with an end, of a picture that is made no longer than `longest`."""

    def tokens(width: int, height: int) -> int:
        ratio = max(width / longest, height / longest, 1.0)
        if ratio > 1.0:
            width, height = max(1, floor(width / ratio)), max(1, floor(height / ratio))
        return (-(-width // patch) + 1) * -(-height // patch)

    return tokens


def _intern(width: int, height: int) -> int:
    """InternVL's: tiles of 448 pixels in the grid of 12 or fewer whose shape is nearest, and one of it all."""
    best, least, area = (1, 1), float("inf"), width * height
    grids = sorted(
        {(x, y) for x in range(1, 13) for y in range(1, 13) if x * y <= 12}, key=lambda grid: grid[0] * grid[1]
    )
    for x, y in grids:
        apart = abs(width / height - x / y)
        if apart < least:
            best, least = (x, y), apart
        elif apart == least and area > 0.5 * 448 * 448 * x * y:
            best = x, y
    tiles = best[0] * best[1]
    return 256 * (tiles + 1 if tiles > 1 else 1) + 2


def _llama4(width: int, height: int) -> int:
    """Llama 4's: tiles of 336 pixels, 16 at most, in the grid that is scaled to least; one of it all; separators."""
    grids = [(x, y) for x in range(1, 17) for y in range(1, 17) if x * y <= 16]
    scale = {(x, y): min(336 * x / width, 336 * y / height) for x, y in grids}
    up = [value for value in scale.values() if value >= 1]
    chosen = min(up) if up else max(scale.values())
    x, y = min((grid for grid in grids if scale[grid] == chosen), key=lambda grid: grid[0] * grid[1])
    return (x * y * 145 if x * y > 1 else 0) + 144 + 3


_GRIDS: Final = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
"""Heights and widths."""


def _llava_next(width: int, height: int) -> int:
    """LLaVA 1.6's: 576 of it all, and those of the grid that keeps most of it, unpadded, each row with an end."""
    kept = []
    for rows, columns in _GRIDS:
        scale = min(columns / width, rows / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        kept.append((used, -(rows * columns - used), (rows, columns)))
    rows, columns = max(kept, key=lambda each: each[:2])[2]
    rows, columns = rows // 14, columns // 14
    if width / height > columns / rows:
        rows -= (rows - int(round(height * columns / width, 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * rows / height, 7))) // 2 * 2
    return 576 + rows * (columns + 1)


def _fixed(count: int) -> Callable[[int, int], int]:
    return lambda width, height: count


def _other(width: int, height: int) -> int:
    """Where the family is not known: a token for 32 by 32 pixels, as most of this year's have it."""
    return width * height // 1024


_QWEN_3: Final = _merged(32, 65_536, 16_777_216)
_QWEN_2: Final = _merged(28, 3_136, 12_845_056)
_FAMILIES: Final = (
    (re.compile(r"qwen-?3-?omni"), Family(_QWEN_3, 13.0, pairs=True)),
    (re.compile(r"qwen-?3(\.\d+)?(-?vl|-)"), Family(_QWEN_3, pairs=True)),
    (re.compile(r"qwen-?2(\.5)?-?(vl|omni|audio)|qvq"), Family(_QWEN_2, pairs=True)),
    (re.compile(r"llava-?(v?1\.6|next)"), Family(_llava_next)),
    (re.compile(r"llava-?(v?1\.5|\d+b|$)"), Family(_fixed(576))),
    (re.compile(r"llama-?4"), Family(_llama4)),
    (re.compile(r"gemma-?3"), Family(_fixed(260), 6.25)),
    (re.compile(r"intern-?vl"), Family(_intern)),
    (re.compile(r"pixtral"), Family(_rows(16, 1024))),
    (re.compile(r"mistral-(small|medium)-3\.[12]|(mistral-small|magistral).*-25\d\d"), Family(_rows(28, 1540))),
    (re.compile(r"voxtral"), Family(_other, 12.5)),
    (re.compile(r"ultravox"), Family(_other, 6.25)),
    (re.compile(r"whisper"), Family(_other, 50.0)),
)
"""By a model's name in lower case; the first that fits."""
_UNKNOWN: Final = Family(_other)


def _family_of(model: str) -> Family:
    name = model.lower()
    return next((family for words, family in _FAMILIES if words.search(name)), _UNKNOWN)
