"""What is remembered of pieces of text: least recently used first out, within its room."""

from array import array

from epp.prefix.tokens.cache import TokenCache, key_of


def ids(count: int, start: int = 0) -> "array[int]":
    return array("I", range(start, start + count))


def test_what_was_put_is_found() -> None:
    pieces = TokenCache(10_000)
    pieces.put(b"a", ids(3), 9)
    assert pieces.get(b"a") == ids(3)
    assert pieces.get(b"b") is None


def test_the_least_recently_used_goes_first() -> None:
    pieces = TokenCache(4000)
    for name in (b"a", b"b", b"c", b"d", b"e"):
        pieces.put(name, ids(130), 1)
    pieces.get(b"a")
    pieces.put(b"f", ids(130), 1)
    assert [pieces.get(name) is not None for name in (b"a", b"b", b"c", b"f")] == [True, False, True, True]


def test_what_is_kept_never_takes_more_than_its_room() -> None:
    pieces = TokenCache(20_000)
    for i in range(500):
        pieces.put(str(i % 90).encode(), ids(i % 70), 1)
        assert pieces.bytes <= 20_000
    assert len(pieces) > 20


def test_a_piece_put_twice_counts_once() -> None:
    pieces = TokenCache(10_000)
    pieces.put(b"a", ids(10), 1)
    before = pieces.bytes
    pieces.put(b"a", ids(10), 1)
    assert (pieces.bytes, len(pieces)) == (before, 1)


def test_a_huge_piece_pushes_nobody_out() -> None:
    pieces = TokenCache(8000)
    pieces.put(b"a", ids(100), 1)
    pieces.put(b"huge", ids(1000), 1)
    assert pieces.get(b"a") is not None
    assert pieces.get(b"huge") is None


def test_tokenized_bytes_are_counted_whether_kept_or_not() -> None:
    pieces = TokenCache(8000)
    pieces.put(b"a", ids(100), 30)
    pieces.put(b"huge", ids(1000), 12)
    assert pieces.encoded == 42


def test_a_key_stands_for_one_text_of_one_tokenizer() -> None:
    one, other = b"1" * 16, b"2" * 16
    assert key_of(one, "text") == key_of(one, "text")
    assert len({key_of(one, "text"), key_of(other, "text"), key_of(one, "texts"), key_of(one, "\ud800")}) == 4
