"""Errors in the two dialects, and ids made safe."""

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request

from tooling.simulator.replies import error_reply, json_reply, printable
from tooling.simulator.requests import Refused


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (404, "not_found_error"), (413, "request_too_large"), (503, "api_error")],
)
def test_errors_speak_the_dialect_of_their_path(status: int, kind: str) -> None:
    refused = Refused(status, "SomeError", "no", "field")
    openai = error_reply(make_mocked_request("POST", "/v1/completions"), refused)
    anthropic = error_reply(make_mocked_request("POST", "/v1/messages"), refused)
    assert openai.status == anthropic.status == status
    assert msgspec.json.decode(openai.text or "") == {
        "error": {"message": "no", "type": "SomeError", "param": "field", "code": status}
    }
    assert msgspec.json.decode(anthropic.text or "") == {"type": "error", "error": {"type": kind, "message": "no"}}


def test_json_is_json() -> None:
    reply = json_reply({"a": None}, 201)
    assert (reply.status, reply.content_type, reply.body) == (201, "application/json", b'{"a":null}')


def test_ids_are_printable_and_short() -> None:
    assert printable("a b\r\nü\udcff~") == "a?b????~"
    assert len(printable("x" * 1000)) == 256
