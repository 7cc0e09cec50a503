"""The tokenizer, the chat template and the hash chain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tooling.simulator import tokenizer as tokens


@given(st.text())
def test_text_comes_back_from_its_tokens(text: str) -> None:
    if "\0" not in text:  # zero bytes are filling
        assert tokens.decode(tokens.encode(text)) == text


@given(st.text(), st.text(), st.text())
def test_equal_text_prefixes_are_equal_token_prefixes(head: str, left: str, right: str) -> None:
    shared = len(head.encode()) // 4 * 4
    assert tokens.encode(head + left)[:shared] == tokens.encode(head + right)[:shared]


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_survive_packing(ids: list[int]) -> None:
    assert tokens.unpack(tokens.pack(ids)) == ids
    assert tokens.count(tokens.pack(ids)) == len(ids)


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"], [None], [1.5]])
def test_ids_that_are_no_token_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids must be"):
        tokens.pack(ids)


def test_surrogates_are_tokens_too() -> None:
    assert tokens.count(tokens.encode("\ud800")) == 1


def test_the_next_turn_starts_with_this_turn_and_its_answer() -> None:
    turn = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]
    answer = "sim pod cat "
    prompt = tokens.render_chat(turn)
    following = tokens.render_chat([*turn, {"role": "assistant", "content": answer}, {"role": "user", "content": "?"}])
    assert following.startswith(prompt + tokens.encode(answer) + tokens.END)


def test_tools_stand_first_and_key_order_does_not_matter() -> None:
    messages = [{"role": "user", "content": "x"}]
    one = tokens.render_chat(messages, [{"type": "function", "name": "f"}])
    two = tokens.render_chat(messages, [{"name": "f", "type": "function"}])
    assert one == two
    assert one.startswith(tokens.TOOLS)
    assert one.endswith(tokens.render_chat(messages))


def test_content_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "look:"}, {"type": "image_url", "image_url": {"url": "data:x"}}, "end"]
    text = tokens.decode(tokens.render_chat([{"role": "user", "content": parts}], answer=False))
    assert text == 'userlook:\n{"image_url":{"url":"data:x"},"type":"image_url"}\nend'
    assert tokens.decode(tokens.render_chat([{"content": None}], answer=False)) == "user"


def test_the_chain_has_one_hash_per_full_block_and_depends_on_all_before() -> None:
    text = tokens.encode("abcd" * 40)
    chain = tokens.hash_chain(text, 16)
    assert len(chain) == 2
    assert tokens.hash_chain(text[: 4 * 32], 16) == chain
    other = tokens.hash_chain(b"zzzz" + text[4:], 16)
    assert not set(other) & set(chain), "a change in the first block changes all"


def test_salt_and_adapter_separate_chains() -> None:
    text = tokens.encode("abcd" * 16)
    chains = [
        tokens.hash_chain(text, 16),
        tokens.hash_chain(text, 16, salt="a"),
        tokens.hash_chain(text, 16, adapter="a"),
        tokens.hash_chain(text, 16, salt="a", adapter="a"),
    ]
    assert len({chain[0] for chain in chains}) == 4
