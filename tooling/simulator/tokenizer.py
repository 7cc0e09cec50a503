"""The simulator's own tokenizer: four bytes of UTF-8 are one token, a token's id is those bytes as a number.

So equal text prefixes are equal token prefixes, no vocabulary is needed, and ids turn back into text. Tokens travel
packed (`Tokens`, four bytes each, little-endian). The chat template cuts text at every message, so the answer of one
turn has the same tokens when it comes back inside the next turn's prompt. Special tokens start with byte 0xFF, which
UTF-8 never contains; a piece under four bytes is filled up with zeros.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import xxhash

Tokens = bytes
"""Packed token ids: 4 bytes each, little-endian."""

START = b"\xff\x01\0\0"
"""Before a message's role."""
TEXT = b"\xff\x02\0\0"
"""Between a role and its content."""
END = b"\xff\x03\0\0"
"""After a message."""
TOOLS = b"\xff\x04\0\0"
"""Before the tool definitions, which stand first of all."""

_canonical = msgspec.json.Encoder(order="deterministic")


def count(tokens: Tokens) -> int:
    """Number of tokens."""
    return len(tokens) // 4


def encode(text: str) -> Tokens:
    """Tokens of a text; the last is zero-filled. Lone surrogates, which JSON can carry, are kept as they are."""
    data = text.encode("utf-8", "surrogatepass")
    return data + b"\0" * (-len(data) % 4)


def decode(tokens: Tokens) -> str:
    """Text of tokens, special ones and filling left out."""
    pieces = (tokens[start : start + 4] for start in range(0, len(tokens), 4))
    return b"".join(piece.rstrip(b"\0") for piece in pieces if piece[0] != 0xFF).decode("utf-8", "replace")


def pack(ids: Iterable[int]) -> Tokens:
    """Packed form of ids; ValueError for one that is not a number of 32 bits."""
    try:
        return array("I", ids).tobytes()
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers from 0 to 2**32 - 1: {error}") from None


def unpack(tokens: Tokens) -> list[int]:
    """Ids of packed tokens."""
    return array("I", tokens).tolist()


def hash_chain(tokens: Tokens, block_size: int, *, salt: str = "", adapter: str = "") -> list[int]:
    """Hashes of the full blocks of `tokens`; each stands for its block and everything before it.

    Prompts under different salts or adapters share no hash. 64 bits (xxh3): a collision among the few million blocks
    of a simulation is not to be expected.
    """
    digest = xxhash.xxh3_64_intdigest
    parent = digest(msgspec.json.encode((salt, adapter)))
    size = 4 * block_size
    chain = []
    for start in range(0, len(tokens) - size + 1, size):
        parent = digest(tokens[start : start + size], parent)
        chain.append(parent)
    return chain


def render_chat(messages: Sequence[Mapping[str, Any]], tools: Any = None, *, answer: bool = True) -> Tokens:
    """Tokens of a conversation: tools, then each message, then (with `answer`) the head of the assistant's turn."""
    pieces = [TOOLS, encode(_json(tools))] if tools else []
    for message in messages:
        pieces += [START, encode(str(message.get("role", "user"))), TEXT, encode(_content(message.get("content")))]
        if calls := message.get("tool_calls"):
            pieces.append(encode(_json(calls)))
        pieces.append(END)
    if answer:
        pieces += [START, encode("assistant"), TEXT]
    return b"".join(pieces)


def _content(content: Any) -> str:
    """Text of a message's content: a string, or parts joined by line ends; a part without text stands as its JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return _json(content)
    return "\n".join(_part(part) for part in content)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else _json(part)


def _json(value: Any) -> str:
    return _canonical.encode(value).decode()
