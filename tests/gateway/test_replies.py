import json

from gateway.replies import body, local_replies


def test_every_reply_is_an_openai_error_without_commands_of_envoy() -> None:
    for mapper in local_replies().mappers:
        assert mapper.body_format_override is not None
        assert mapper.body_format_override.content_type == "application/json"
        source = mapper.body_format_override.text_format_source
        assert source is not None
        assert source.inline_string is not None
        assert "%" not in source.inline_string
        assert set(json.loads(source.inline_string)["error"]) == {"message", "type", "param", "code"}


def test_bodies_are_json_whatever_the_message() -> None:
    assert json.loads(body('"quoted"', "api_error"))["error"]["message"] == '"quoted"'
