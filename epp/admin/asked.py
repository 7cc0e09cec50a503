"""What to explain: a prompt, the body of a request, or a curl command line. Nothing is read from files here."""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
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
MOST_CURL: Final = 64 << 10
"""Characters of a curl line that is pasted: to split one into words takes a microsecond for each."""
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


def from_pasted(text: str, model: str) -> Asked:
    """Whichever of these it is. Raises ConfigError."""
    if re.match(r"\s*\$?\s*curl\s", text) is None:
        return from_text(text.encode("utf-8", "replace"), "", (), model)
    if len(text) > MOST_CURL:
        raise ConfigError("--curl", f"got {len(text)} characters; expected at most {MOST_CURL}, or the body alone")
    return from_curl(text.strip().removeprefix("$"), "", (), _no_files)


def _no_files(name: str) -> bytes:
    raise ConfigError("--curl", f"got @{name[:60]}, a file of yours; expected what is in it")


def from_curl(line: str, path: str, headers: Sequence[str], read: Callable[[str], bytes]) -> Asked:
    """What curl would send; `read` gives the content of a file that it names. Raises ConfigError."""
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
            body = _data(value if equals else _next(rest, name), name == "--data-raw", read)
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
    try:
        path = path or urlsplit(url if "://" in url else f"http://{url}").path
    except ValueError as error:
        raise ConfigError("--curl", f"{url[:100]!r} is no URL: {error}") from None
    return Asked(path or _path_of(body), dict(map(_header, found)), body)


def _next(words: Any, name: str) -> str:
    word: str | None = next(words, None)
    if word is None:
        raise ConfigError("--curl", f"{name} is the last word; expected its value after it")
    return word


def _data(value: str, raw: bool, read: Callable[[str], bytes]) -> bytes:
    return value.encode("utf-8", "replace") if raw or not value.startswith("@") else read(value[1:])


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
    completion = isinstance(fields, dict) and "prompt" in fields and "messages" not in fields
    return "/v1/completions" if completion else _CHAT
