"""Synthetic answers: seeded, one token a word, cut where they should be."""

from hypothesis import given
from hypothesis import strategies as st

from tooling.simulator import tokenizer as tokens
from tooling.simulator.answers import LONGEST, WORDS, Wish, answer, embedding

PROMPT = tokens.encode("what is it?")


def test_each_word_is_one_token_and_pieces_are_the_tokens() -> None:
    assert all(tokens.count(tokens.encode(word)) == 1 for word in WORDS)
    assert len(set(WORDS)) == len(WORDS)
    said = answer(PROMPT, Wish(50, endless=True), (0,))
    assert len(said.pieces) == tokens.count(said.generated) == 50
    assert tokens.decode(said.generated) == said.text


@given(st.binary(max_size=40), st.integers(1, 600), st.integers(0, 600))
def test_length_and_reason(prompt: bytes, limit: int, least: int) -> None:
    least = min(least, limit)
    free = answer(prompt, Wish(10_000), (0,))
    said = answer(prompt, Wish(limit, least), (0,))
    assert 4 <= len(free.pieces) <= LONGEST
    assert len(said.pieces) == min(limit, max(len(free.pieces), least))
    assert said.reason == ("length" if limit < len(free.pieces) else "stop")
    shorter, longer = sorted((free.text, said.text), key=len)
    assert longer.startswith(shorter), "a limit only cuts"


def test_seed_and_prompt_decide() -> None:
    wish = Wish(20, endless=True)
    assert answer(PROMPT, wish, (1, None, 0)) == answer(PROMPT, wish, (1, None, 0))
    others = [
        answer(PROMPT, wish, (2, None, 0)),
        answer(PROMPT, wish, (1, None, 1)),
        answer(PROMPT[4:], wish, (1, None, 0)),
    ]
    assert all(answer(PROMPT, wish, (1, None, 0)) != other for other in others)


@given(st.integers(0, 70), st.integers(1, 9), st.integers(0, 20))
def test_a_stop_string_ends_the_text_before_and_the_tokens_after_it(at: int, length: int, least: int) -> None:
    free = answer(PROMPT, Wish(20, endless=True), (0,))
    stop = free.text[at : at + length]
    said = answer(PROMPT, Wish(20, least, endless=True, stop=("", "never", stop)), (0,))
    place = free.text.find(stop, 4 * max(0, least - 1))
    if place < 0:
        assert said == free
        return
    assert said.text == free.text[:place]
    assert said.reason == "stop"
    assert len(said.pieces) == tokens.count(said.generated) == -(-(place + length) // 4)
    assert len(said.pieces) >= least


def test_embeddings_have_length_one_and_depend_on_the_prompt() -> None:
    vector = embedding(PROMPT, 12, 0)
    assert abs(sum(value * value for value in vector) - 1) < 1e-9
    assert vector == embedding(PROMPT, 12, 0)
    assert vector != embedding(PROMPT + PROMPT, 12, 0)
