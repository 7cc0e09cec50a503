"""A request from a file, a prompt or a curl line."""

import json
import subprocess

import pytest

from epp.admin.asked import Asked, from_curl, from_pasted, from_text
from epp.errors import ConfigError


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b'{"model": "m", "messages": []}', "/v1/chat/completions"),
        (b'{"model": "m", "prompt": "p"}', "/v1/completions"),
        (b"{broken", "/v1/chat/completions"),
    ],
)
def test_a_body_goes_to_the_path_that_its_fields_tell(body: bytes, path: str) -> None:
    assert from_text(b"\n" + body + b"\n", "", [], "") == Asked(path, {}, body)
    assert from_text(body, "/x", ["X-Team: a: b"], "") == Asked("/x", {"x-team": "a: b"}, body)


def test_a_prompt_becomes_a_chat() -> None:
    asked = from_text(b"Why?\n", "", [], "qwen")
    assert asked.path == "/v1/chat/completions"
    assert json.loads(asked.body) == {"model": "qwen", "messages": [{"role": "user", "content": "Why?"}]}


@pytest.mark.parametrize(
    ("text", "headers", "error"),
    [
        (b" ", [], "request: got nothing"),
        (b"Why?", [], "--model: missing"),
        (b"{}", ["no colon"], "--header: got 'no colon'; expected NAME: VALUE"),
    ],
)
def test_what_is_no_request_is_refused(text: bytes, headers: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=f"^{error}"):
        from_text(text, "", headers, "")


BODY = '{"model": "m", "messages": []}'


def read(file: str) -> bytes:
    raise ConfigError("--curl", f"{file} was read")


@pytest.mark.parametrize(
    "line",
    [
        f"curl -s http://gw:8080/v1/chat/completions -H 'X-Team: a' -d '{BODY}'",
        f"curl --url https://gw/v1/chat/completions?x=1 --header='x-team: a' --data-raw='{BODY}' -o /dev/null",
        f"curl -X POST \\\n  http://gw/v1/chat/completions \\\n -H 'x-team: a' --max-time 5 --json '{BODY}'",
        f"/usr/bin/curl gw:80 -H 'x-team: a' --data-binary '{BODY}'",
        f"curl -sSd'{BODY}' -H'x-team: a' http://gw/v1/chat/completions",
        f"curl http://gw/v1/chat/completions -sX POST -H 'x-team: a' -d '{BODY}' | jq . > out 2>&1",
        f"curl -4 --interface lo http://gw/v1/chat/completions -Hx-team:a --json '{BODY[:9]}' --json '{BODY[9:]}'",
        f"curl 'http://gw/v1/chat/completions' -H $'x-team: \\u0061' --data-raw $'{BODY}' --compressed --insecure",
    ],
)
def test_a_curl_line_is_what_curl_would_send(line: str) -> None:
    assert from_curl(line, "", [], read) == Asked("/v1/chat/completions", {"x-team": "a"}, BODY.encode())


def test_what_browsers_copy_is_read_as_a_shell_reads_it() -> None:
    """Compared with bash itself."""
    text = r"""$'{"a":"it\'s\n\x41\u00e9\t\101 \\ \q"}'"""
    said = subprocess.run(
        ["bash", "-c", f"printf %s {text}"], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}
    )
    assert from_curl(f"curl gw -d {text}", "", [], read).body == said.stdout
    plain = """'costs 5$' """
    assert from_curl(f"curl gw -d {plain}-H 'x: $' -H 'y: b'", "", [], read).headers == {"x": "$", "y": "b"}


def test_several_bodies_are_put_together_as_curl_does() -> None:
    assert from_curl("curl gw -d a=1 -d b=2", "", [], read).body == b"a=1&b=2"


def test_a_curl_line_may_name_a_file_that_the_caller_reads() -> None:
    asked = from_curl("curl -d @body.json http://gw/v1/completions", "", ["x-a: b"], {"body.json": b"{}"}.__getitem__)
    assert asked == Asked("/v1/completions", {"x-a": "b"}, b"{}")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("curl http://gw/", "no body in it; expected -d"),
        ("curl -d", "-d is the last word; expected its value"),
        ("curl -d 'open", "no command line of a shell"),
        ("curl -d @/nowhere http://gw/", "/nowhere was read"),
        ("curl -F file=@a.wav http://gw/", "-F is not read here; expected a body of JSON"),
        ("curl -d {} -H nothing http://gw/", "got 'nothing'; expected NAME: VALUE"),
        ("curl -d {} http://[::1/", "is no URL: Invalid IPv6"),
    ],
)
def test_a_curl_line_that_asks_nothing_is_refused(line: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        from_curl(line, "", [], read)


@pytest.mark.parametrize("before", ["curl", "$ curl", "\n  curl \\\n", "time TOKEN=x /bin/curl"])
def test_a_curl_line_is_known_by_its_first_word(before: str) -> None:
    assert from_pasted(f"{before} gw -d '{{}}'", "") == Asked("/v1/chat/completions", {}, b"{}")


def test_a_body_and_a_prompt_may_be_pasted_too() -> None:
    assert from_pasted(BODY, "") == Asked("/v1/chat/completions", {}, BODY.encode())
    assert json.loads(from_pasted("curling is a sport", "m").body)["messages"][0]["content"] == "curling is a sport"
    assert from_pasted("a lone surrogate \ud800", "m").body.endswith(b'surrogate ?"}]}')


@pytest.mark.parametrize("name", ["/etc/hostname", "-"])
def test_what_is_pasted_reads_no_file(name: str) -> None:
    with pytest.raises(ConfigError, match=f"got @{name}, a file of yours; expected what is in it"):
        from_pasted(f"curl gw -d @{name}", "")


def test_a_pasted_curl_line_has_a_bound() -> None:
    with pytest.raises(ConfigError, match="expected at most 65536, or the body alone"):
        from_pasted(f"curl gw -d '{'x' * 70_000}'", "")
