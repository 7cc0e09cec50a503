"""Request bodies as conversations make them: a system prompt for all, a history per conversation, a new turn each."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

MARK = "@" * 16
"""Stands where each request gets 16 characters of its own: what follows it was never seen before by anybody."""
WORDS = "the of and to in is it you that he was for on are with as his they be at one have this from"

Api = Literal["chat", "completions", "streamed completions"]
PATHS: dict[Api, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "streamed completions": "/v1/completions",
}


def bodies(size: int, count: int, api: Api, seed: int) -> Iterator[bytes]:
    """`count` bodies of exactly `size` bytes: a quarter shared by all, half by the eight of a conversation, the rest
    each request's own.
    """
    rng = random.Random(f"{size} {seed}")
    system = _text(rng, size // 4)
    history = ""
    for n in range(count):
        if n % 8 == 0:
            history = _text(rng, size // 2)
        plain = _body(api, system, history, MARK)
        yield _body(api, system, history, MARK + _text(rng, size - len(plain))).encode()


def _body(api: Api, system: str, history: str, turn: str) -> str:
    if api != "chat":
        streams = api == "streamed completions"
        return json.dumps({"model": "bench", "stream": streams, "max_tokens": 100, "prompt": system + history + turn})
    half = len(history) // 2
    turns = [("system", system), ("user", history[:half]), ("assistant", history[half:]), ("user", turn)]
    messages = [{"role": role, "content": content} for role, content in turns]
    return json.dumps({"model": "bench", "max_tokens": 100, "messages": messages})


def _text(rng: random.Random, length: int) -> str:
    """Exactly `length` ASCII characters that JSON leaves as they are."""
    words = " ".join(rng.choices(WORDS.split(), k=length // 3 + 2))
    return words[: max(0, length)].ljust(max(0, length), "x")


def write(folder: Path, size: int, count: int, api: Api, seed: int = 1) -> None:
    """One file a body, `1` to `count`, for the script of wrk."""
    folder.mkdir(parents=True)
    for n, body in enumerate(bodies(size, count, api, seed), 1):
        (folder / str(n)).write_bytes(body)
