"""OpenAI's formats of `epp.parsing.body`."""

import msgspec
import pytest

from epp.errors import BadRequest
from epp.parsing.body import Body, Chat, Completion, Embeddings, Responses


def prompt(kind: type[Body], text: bytes) -> bytes:
    return b"".join(msgspec.json.decode(text, type=kind).parts())


def test_chat_tools_stand_before_messages_whatever_their_order_in_the_body() -> None:
    assert prompt(Chat, b'{"messages": [ 1 ], "tools": [2]}') == b"[2][ 1 ]"
    assert prompt(Chat, b'{"messages": [1]}') == b"[1]"


@pytest.mark.parametrize("given", [b'"text"', b'["a", "b"]', b"[1, 2, 3]", b"[[1], [2]]"])
def test_completion_prompts_are_taken_in_every_form(given: bytes) -> None:
    assert prompt(Completion, b'{"prompt": ' + given + b"}") == given


def test_completions_may_have_embeddings_instead_of_a_prompt() -> None:
    assert prompt(Completion, b'{"prompt_embeds": "AAAA"}') == b'"AAAA"'


def test_responses_begin_with_instructions_and_tools() -> None:
    text = b'{"input": "hi", "tools": [], "instructions": "be kind", "max_output_tokens": 7}'
    assert prompt(Responses, text) == b'"be kind"[]"hi"'
    assert msgspec.json.decode(text, type=Responses).answer_tokens() == 7


def test_embeddings_take_input_or_messages() -> None:
    assert prompt(Embeddings, b'{"input": ["a"]}') == b'["a"]'
    assert prompt(Embeddings, b'{"messages": [1]}') == b"[1]"


def test_the_newer_bound_of_a_chat_wins() -> None:
    chat = msgspec.json.decode(b'{"max_tokens": 5, "max_completion_tokens": 6}', type=Chat)
    assert chat.answer_tokens() == 6
    assert msgspec.json.decode(b'{"max_tokens": 5}', type=Chat).answer_tokens() == 5


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (Chat, "messages"),
        (Completion, "prompt"),
        (Responses, "input"),
        (Embeddings, "input"),
    ],
)
@pytest.mark.parametrize("value", ["", "null", "5", "{}", "true"])
def test_a_missing_or_impossible_prompt_names_field_value_and_expectation(
    kind: type[Body], field: str, value: str
) -> None:
    text = f'{{"{field}": {value}}}' if value else "{}"
    with pytest.raises(BadRequest) as error:
        prompt(kind, text.encode())
    assert error.value.param == field
    got = f"got {value}" if value else "missing"
    assert error.value.message.startswith(f"{field}: {got}; expected ")
