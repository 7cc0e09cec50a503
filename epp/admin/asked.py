"""What to explain: a prompt, the body of a request, or a curl command line. Nothing is read from files here."""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from epp.errors import ConfigError

_CHAT: Final = "/v1/chat/completions"
_DATA: Final = frozenset(("--data", "--data-raw", "--data-binary", "--data-ascii", "--json"))
_SHORT: Final = {"d": "--data", "H": "--header"}
_SHORT_WITH_VALUE: Final = frozenset("AbcCDeEKmoPQrtTuUwxXyYz")
_WITH_VALUE: Final = _DATA | frozenset(
    f"--{name}"
    for name in re.findall(
        r"\S+",
        """
        abstract-unix-socket alt-svc aws-sigv4 cacert capath cert cert-type ciphers config connect-timeout
        connect-to continue-at cookie cookie-jar create-file-mode crlfile curves delegation dns-interface
        dns-ipv4-addr dns-ipv6-addr dns-servers doh-url dump-header ech egd-file engine etag-compare etag-save
        expect100-timeout ftp-account ftp-alternative-to-user ftp-method ftp-port ftp-ssl-ccc-mode
        happy-eyeballs-timeout-ms haproxy-clientip header hostpubmd5 hostpubsha256 hsts interface ip-tos
        ipfs-gateway keepalive-cnt keepalive-time key key-type krb libcurl limit-rate local-port login-options
        mail-auth mail-from mail-rcpt max-filesize max-redirs max-time netrc-file noproxy oauth2-bearer output
        output-dir parallel-max pass pinnedpubkey preproxy proto proto-default proto-redir proxy proxy-cacert
        proxy-capath proxy-cert proxy-cert-type proxy-ciphers proxy-crlfile proxy-header proxy-key proxy-key-type
        proxy-pass proxy-pinnedpubkey proxy-service-name proxy-tls13-ciphers proxy-tlsauthtype proxy-tlspassword
        proxy-tlsuser proxy-user proxy1.0 pubkey quote random-file range rate referer request request-target resolve
        retry retry-delay retry-max-time sasl-authzid service-name socks4 socks4a socks5 socks5-gssapi-service
        socks5-hostname speed-limit speed-time stderr telnet-option tftp-blksize time-cond tls-max tls13-ciphers
        tlsauthtype tlspassword tlsuser trace trace-ascii trace-config unix-socket upload-file url url-query user
        user-agent variable vlan-priority write-out
        """,
    )
)
"""curl's options that take a value (`curl --help all` of 7.88, and those that 8.12 added)."""
_UNREAD: Final = frozenset(("--form", "--form-string", "--data-urlencode", "-F"))
_ENDS: Final = re.compile(r"(\||\|\||&|&&|;|\d?>{1,2}|\d?>&\d|<)$")
"""Words with which a shell's command is over, or its output goes elsewhere."""
MOST_CURL: Final = 64 << 10
"""Characters of a curl line that is pasted: to split one into words takes a microsecond for each."""
_BEFORE: Final = r"\s*(?:\$\s+)?(?:(?:time|sudo|[A-Za-z_]\w*=\S*)\s+)*"
"""What may stand before a command: a prompt of the shell, variables."""
_QUOTED: Final = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.|\$'((?:[^'\\]|\\.)*)'""", re.DOTALL)
_ESCAPED: Final = re.compile(
    r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|([0-7]{1,3})|(.))", re.DOTALL
)
_LETTERS: Final = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v"}


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
    if (line := re.match(rf"{_BEFORE}(?=(\S*/)?curl\s)", text)) is None:
        return from_text(text.encode("utf-8", "replace"), "", (), model)
    if len(text) > MOST_CURL:
        raise ConfigError("--curl", f"got {len(text)} characters; expected at most {MOST_CURL}, or the body alone")
    return from_curl(text[line.end() :], "", (), _no_files)


def _no_files(name: str) -> bytes:
    raise ConfigError("--curl", f"got @{name[:60]}, a file of yours; expected what is in it")


def from_curl(line: str, path: str, headers: Sequence[str], read: Callable[[str], bytes]) -> Asked:
    """What curl would send; `read` gives the content of a file that it names. Raises ConfigError."""
    try:
        words = shlex.split(_QUOTED.sub(_plain, line.replace("\\\n", " ")))
    except ValueError as error:
        raise ConfigError("--curl", f"no command line of a shell: {error}") from None
    words = words[1:] if words and Path(words[0]).name == "curl" else words
    url, body, found = "", None, [*headers]
    for name, value in _options(words):
        if name in _DATA:
            data = _data(value, name == "--data-raw", read)
            body = data if body is None else body + (b"" if name == "--json" else b"&") + data
        elif name == "--header":
            found.append(value)
        elif name == "--oauth2-bearer":
            found.append(f"Authorization: Bearer {value}")
        elif name == "--url":
            url = url or value
        elif name in _UNREAD:
            raise ConfigError("--curl", f"{name} is not read here; expected a body of JSON by -d, --data-raw or --json")
    if not body:
        raise ConfigError("--curl", "no body in it; expected -d, --data, --data-raw, --data-binary or --json")
    try:
        path = path or urlsplit(url if "://" in url else f"http://{url}").path
    except ValueError as error:
        raise ConfigError("--curl", f"{url[:100]!r} is no URL: {error}") from None
    return Asked(path or _path_of(body), dict(map(_header, found)), body)


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options with their values, by their long names where those count; what is none is a `--url`."""
    rest = iter(words)
    for word in rest:
        if _ENDS.match(word):
            return
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            if name in _WITH_VALUE:
                value = value if equals else _next(rest, name)
            yield name, value
        elif word.startswith("-") and word != "-":
            for at, letter in enumerate(word[1:], 2):  # several may stand together, the last with its value
                if letter in _SHORT or letter in _SHORT_WITH_VALUE:
                    yield _SHORT.get(letter, f"-{letter}"), word[at:] or _next(rest, f"-{letter}")
                    break
                yield f"-{letter}", ""
        else:
            yield "--url", word


def _plain(quoted: re.Match[str]) -> str:
    """`$'...'` of a shell, as browsers copy requests, in other words of it."""
    text = quoted[1]
    return quoted[0] if text is None else shlex.quote(_ESCAPED.sub(_character, text))


def _character(escaped: re.Match[str]) -> str:
    byte, short, long, octal, letter = escaped.groups()
    if letter is not None:
        return _LETTERS.get(letter, letter if letter in "\\'\"?" else escaped[0])
    number = int(octal, 8) if octal else int(byte or short or long, 16)
    return chr(number) if number < 0x110000 else "\ufffd"


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
