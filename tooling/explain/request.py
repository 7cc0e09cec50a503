"""What to ask about: a request from a file, from standard input, or as a curl command line."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from epp.errors import ConfigError

_CHAT: Final = "/v1/chat/completions"
_WITH_VALUE: Final = frozenset(
    [
        "-X",
        "--request",
        "-o",
        "--output",
        "-m",
        "--max-time",
        "-A",
        "--user-agent",
        "-u",
        "--user",
        "-b",
        "--cookie",
        "-e",
        "--referer",
        "--connect-timeout",
        "--retry",
        "--cacert",
        "--cert",
        "--key",
        "-w",
        "--write-out",
        "--resolve",
        "-x",
        "--proxy",
    ]
)
"""curl's options that take a value and say nothing about where a request goes."""
_DATA: Final = frozenset(("-d", "--data", "--data-raw", "--data-binary", "--data-ascii", "--json"))


@dataclass(frozen=True)
class Asked:
    """A request as a client would send it."""

    path: str
    headers: Mapping[str, str]
    body: bytes


def from_text(text: bytes, path: str, headers: Sequence[str], model: str) -> Asked:
    """A JSON body, or a prompt as it is, for `model`. `headers`: `NAME: VALUE` each. Raises ConfigError."""
    stripped = text.strip()
    if not stripped:
        raise ConfigError("request", "got nothing; expected a JSON body, or a prompt")
    body = stripped if stripped.startswith(b"{") else _asking(stripped.decode("utf-8", "replace"), model)
    return Asked(path or _path_of(body), dict(map(_header, headers)), body)


def from_curl(line: str, path: str, headers: Sequence[str]) -> Asked:
    """What curl would send. Raises ConfigError."""
    try:
        words = shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError("--curl", f"no command line of a shell: {error}") from None
    words = words[1:] if words and Path(words[0]).name == "curl" else words
    url, body, found = "", b"", [*headers]
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if name in _DATA:
            body = _data(value if equals else _next(rest, name), raw=name == "--data-raw")
        elif name in ("-H", "--header"):
            found.append(value if equals else _next(rest, name))
        elif name == "--url":
            url = value if equals else _next(rest, name)
        elif name in _WITH_VALUE:
            value if equals else _next(rest, name)
        elif not word.startswith("-"):
            url = word
    if not body:
        raise ConfigError("--curl", "no body in it; expected -d, --data, --data-raw, --data-binary or --json")
    return Asked(
        path or urlsplit(url if "://" in url else f"http://{url}").path or _path_of(body),
        dict(map(_header, found)),
        body,
    )


def _next(words: Any, name: str) -> str:
    word: str | None = next(words, None)
    if word is None:
        raise ConfigError("--curl", f"{name} is the last word; expected its value after it")
    return word


def _data(value: str, *, raw: bool) -> bytes:
    if raw or not value.startswith("@"):
        return value.encode()
    try:
        return Path(value[1:]).read_bytes()
    except OSError as error:
        raise ConfigError("--curl", f"{value[1:]} cannot be read: {error.strerror}") from None


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise ConfigError("--header", f"got {text[:60]!r}; expected NAME: VALUE")
    return name.strip().lower(), value.strip()


def _asking(prompt: str, model: str) -> bytes:
    if not model:
        raise ConfigError("--model", "missing; expected the model that the prompt is for")
    return json.dumps({"model": model, "messages": [{"role": "user", "content": prompt}]}).encode()


def _path_of(body: bytes) -> str:
    try:
        fields = json.loads(body)
    except ValueError:
        return _CHAT  # the picker says what is wrong with it
    return "/v1/completions" if "prompt" in fields and "messages" not in fields else _CHAT
