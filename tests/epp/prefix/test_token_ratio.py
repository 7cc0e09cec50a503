from hypothesis import given
from hypothesis import strategies as st

from epp.prefix.token_ratio import DEFAULT_RATIO, TokenRatio


def test_four_bytes_a_token_until_something_was_learned() -> None:
    ratio = TokenRatio()
    assert ratio.tokens("a", 4000) == 1000
    assert ratio.tokens("a", 0) == 0
    assert ratio.tokens("a", 1) == 1


def test_a_model_learns_its_own_ratio() -> None:
    ratio = TokenRatio()
    for _ in range(200):
        ratio.observe("a", 6000, 2000)
    assert abs(ratio.ratio("a") - 3.0) < 0.01
    assert ratio.ratio("b") == DEFAULT_RATIO


def test_one_odd_answer_among_many_changes_little() -> None:
    ratio = TokenRatio()
    for _ in range(100):
        ratio.observe("a", 8000, 2000)
    ratio.observe("a", 8000, 1)
    assert abs(ratio.ratio("a") - 4.0) < 0.1


def test_short_prompts_and_nonsense_teach_nothing() -> None:
    ratio = TokenRatio()
    for nbytes, tokens in [(100, 90), (0, 5), (-5, 5), (5000, 0), (5000, -1)]:
        ratio.observe("a", nbytes, tokens)
    assert ratio.ratio("a") == DEFAULT_RATIO


def test_the_models_used_least_recently_are_forgotten() -> None:
    ratio = TokenRatio(limit=2)
    for model in ("a", "b", "a", "c"):
        ratio.observe(model, 4000, 4000)
    assert ratio.ratio("b") == DEFAULT_RATIO
    assert ratio.ratio("a") < DEFAULT_RATIO


@given(st.lists(st.tuples(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12)), max_size=50))
def test_whatever_is_observed_the_ratio_stays_in_bounds(seen: list[tuple[int, int]]) -> None:
    ratio = TokenRatio()
    for nbytes, tokens in seen:
        ratio.observe("a", nbytes, tokens)
    assert 0.49 <= ratio.ratio("a") <= 16.01
