"""What a body asks an engine to read: what is taken over, what is changed on the way, and what is not rendered."""

import json
import tracemalloc
from array import array
from typing import Any

import pytest

from epp.plugin import Api, Request
from epp.prefix.tokens.conversation import Unsupported
from epp.prefix.tokens.prompt import MAX_BODY, Chat, Text, prompt_of
from tests.support.prompts.bodies import PROMPTS, USER


def asked(body: Any, api: Api = "chat") -> Request:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Request(id="1", model="m", api=api, body=data)


def chat(**body: Any) -> Chat:
    found = prompt_of(asked({"messages": [USER], **body}))
    assert isinstance(found, Chat)
    return found


@pytest.mark.parametrize(("api", "body"), PROMPTS.values(), ids=PROMPTS)
def test_every_prompt_of_the_corpus_is_read(api: Api, body: dict[str, Any]) -> None:
    found = prompt_of(asked(body, api))
    assert isinstance(found, Chat if api == "chat" else Text)


def test_defaults_are_those_of_the_two_formats() -> None:
    found = chat()
    assert (found.answer, found.go_on, found.special, found.tools, found.variables) == (True, False, False, None, {})
    assert prompt_of(asked({"prompt": "hi"}, "completions")) == Text("hi", special=True)


def test_ids_are_taken_as_they_are() -> None:
    assert prompt_of(asked({"prompt": [1, 2, 3]}, "completions")) == array("I", [1, 2, 3])
    assert prompt_of(asked({"prompt": [[1, 2, 3]]}, "completions")) == array("I", [1, 2, 3])
    assert prompt_of(asked({"prompt": ["hi"]}, "completions")) == Text("hi")


def test_generate_takes_one_list_of_ids() -> None:
    assert prompt_of(asked({"token_ids": [1, 2]}, "generate")) == array("I", [1, 2])
    assert prompt_of(asked({"input_ids": [7]}, "generate")) == array("I", [7])
    bodies: tuple[dict[str, Any], ...] = ({"text": "a"}, {"token_ids": []}, {"token_ids": [1], "features": {"n": 1}})
    for body in bodies:
        with pytest.raises(Unsupported):
            prompt_of(asked(body, "generate"))


def test_variables_come_from_several_fields_and_empty_ones_do_not_count() -> None:
    assert chat(chat_template_kwargs={"a": 1, "b": None, "c": "auto", "d": False}).variables == {"a": 1, "d": False}
    assert chat(reasoning_effort="none").variables == {"reasoning_effort": "none", "enable_thinking": False}
    given = {"enable_thinking": False, "add_generation_prompt": False, "continue_final_message": True}
    found = chat(reasoning_effort="high", chat_template_kwargs=given)
    assert found.variables == {"reasoning_effort": "high", "enable_thinking": False}
    assert (found.answer, found.go_on) == (True, False)
    assert chat(documents=[{"title": "t"}]).variables == {"documents": [{"title": "t"}]}


def test_an_effort_is_what_the_engine_makes_of_it() -> None:
    efforts = {"high": "max", "low": "none"}
    for effort, variables in (
        ("high", {"reasoning_effort": "max", "enable_thinking": True}),
        ("low", {"reasoning_effort": "none", "enable_thinking": False}),
        ("medium", {"reasoning_effort": "medium", "enable_thinking": True}),
    ):
        found = prompt_of(asked({"messages": [USER], "reasoning_effort": effort}), efforts)
        assert isinstance(found, Chat)
        assert found.variables == variables
    kept = prompt_of(asked({"messages": [USER], "chat_template_kwargs": {"reasoning_effort": "high"}}), efforts)
    assert isinstance(kept, Chat)
    assert kept.variables == {"reasoning_effort": "high"}
    sent = {"messages": [USER], "output_config": {"effort": "high"}, "max_tokens": 1}
    anthropic = prompt_of(asked(sent, "messages"), efforts)
    assert isinstance(anthropic, Chat)
    assert anthropic.variables == {"reasoning_effort": "max", "enable_thinking": True}


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("chat", {"messages": []}),
        ("chat", {"messages": [USER], "tools": []}),
        ("chat", {"messages": [USER], "chat_template": "{{ messages }}"}),
        ("chat", {"messages": [USER], "chat_template_kwargs": {"chat_template": "x"}}),
        ("chat", {"messages": [USER], "chat_template_kwargs": {"messages": []}}),
        ("chat", {"messages": [USER], "continue_final_message": True}),
        ("chat", {"messages": [USER], "truncate_prompt_tokens": 5}),
        ("chat", {"messages": [USER], "kv_transfer_params": {"prompt_token_ids": [1]}}),
        ("chat", {"messages": [USER], "add_generation_prompt": "no"}),
        ("chat", {"messages": [1]}),
        ("chat", {}),
        ("chat", b"[]"),
        ("chat", b"{"),
        ("chat", b'{"messages": [{"role": "user", "content": "\xff"}]}'),
        ("chat", b'{"messages": ' + b"[" * 100_000),
        ("completions", {"prompt": ["a", "b"]}),
        ("completions", {"prompt": [[1], [2]]}),
        ("completions", {"prompt": []}),
        ("completions", {"prompt": None}),
        ("completions", {"prompt": [-1]}),
        ("completions", {"prompt": [2**40]}),
        ("completions", {"prompt": "a", "suffix": "b"}),
        ("completions", {"prompt": "a", "prompt_embeds": "AAAA"}),
        ("messages", {"messages": [{"role": "system", "content": "a"}]}),
        ("messages", {"messages": [USER], "output_config": {"effort": 1}}),
        ("messages", {"messages": 1}),
        ("responses", {"input": "hi"}),
        ("embeddings", {"input": "hi"}),
        ("other", b""),
    ],
)
def test_what_is_not_rendered_is_reported(api: Api, body: Any) -> None:
    with pytest.raises(Unsupported):
        prompt_of(asked(body, api))


def test_a_huge_body_is_not_looked_at() -> None:
    with pytest.raises(Unsupported, match="bytes"):
        prompt_of(asked(b" " * (MAX_BODY + 1)))


PAIRS = b'{"a":{' + b",".join(b'"%d":""' % n for n in range(100_000)) + b"}}"


@pytest.mark.parametrize(
    ("message", "what"),
    [(b'{"a":[' + piece * 1_000_000 + b"1]}", "commas") for piece in (b"{},", b"[],", b'"a",')] + [(PAIRS, "colons")],
    ids=["objects", "arrays", "texts", "pairs"],
)
def test_a_body_of_many_values_is_not_built(message: bytes, what: str) -> None:
    """Decoding is one step in which no other thread runs: 4 MB of such values took 0.2 s of everybody's time."""
    request = asked(b'{"messages":[' + message + b"]}")
    tracemalloc.start()
    try:
        with pytest.raises(Unsupported, match=f"{what}.*; expected at most"):
            prompt_of(request)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_long_prompts_have_few_values() -> None:
    ids = list(range(131_072))
    assert prompt_of(asked({"prompt": ids}, "completions")) == array("I", ids)
    source = "def f(a: int, b: str) -> dict[str, int]:\n    return {'a': [a, 1], 'b': len(b)}\n" * 6000
    assert prompt_of(asked({"prompt": source}, "completions")) == Text(source)
