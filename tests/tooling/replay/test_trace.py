import gzip
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.errors import ConfigError
from epp.plugin import Slo
from epp.prefix.index import chain_of
from tooling.replay.trace import MOONCAKE_TICK, Piece, Trace, TraceRequest, read_mooncake

PATHS = st.lists(st.integers(1, 300), min_size=1, max_size=5)


def path(lengths: list[int], first: int = 1) -> tuple[Piece, ...]:
    return tuple(Piece(first + number, length) for number, length in enumerate(lengths))


def line(
    at: int = 0,
    length: int = 600,
    output: int = 10,
    ids: tuple[int, ...] = (0, 1),
    more: Mapping[str, object] | None = None,
) -> str:
    mooncake = {"timestamp": at, "input_length": length, "output_length": output, "hash_ids": ids}
    return json.dumps({**mooncake, **(more or {})})


def written(tmp_path: Path, *lines: str, name: str = "trace.jsonl") -> Path:
    file = tmp_path / name
    text = "\n".join(lines).encode()
    file.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return file


@given(PATHS)
def test_bytes_and_chain_are_as_long_as_the_prompt(lengths: list[int]) -> None:
    ask = TraceRequest(0.0, path(lengths), 5)
    assert len(ask.bytes()) == 4 * ask.tokens == 4 * sum(lengths)
    assert len(ask.chain(16)) == ask.tokens // 16
    assert len(set(ask.chain(16))) == ask.tokens // 16, "each block stands for itself"


@given(PATHS, PATHS, PATHS)
def test_prompts_share_what_their_paths_share_and_no_more(head: list[int], one: list[int], two: list[int]) -> None:
    shared = path(head)
    first = TraceRequest(0.0, (*shared, *path(one, 1000)), 5)
    second = TraceRequest(0.0, (*shared, *path(two, 2000)), 5)
    common = sum(head) // 16
    assert first.chain(16)[:common] == second.chain(16)[:common]
    assert not set(first.chain(16)[common:]) & set(second.chain(16)[common:])
    same = [a == b for a, b in zip(chain_of(first.bytes(), 0), chain_of(second.bytes(), 0), strict=False)]
    assert sum(same) == same.index(False) if False in same else all(same)
    if sum(head) * 4 <= 16 * 1024:
        assert sum(same) == sum(head) * 4 // 256, "the picker's own blocks see it too"


def test_an_answer_is_part_of_the_chain_when_a_later_turn_contains_it() -> None:
    first = TraceRequest(0.0, (Piece(1, 30),), 34, answer=2)
    second = TraceRequest(0.0, (Piece(1, 30), Piece(2, 34), Piece(3, 100)), 5)
    assert first.chain(16) == second.chain(16)[:4]
    assert TraceRequest(0.0, (Piece(1, 30),), 34).chain(16) == first.chain(16)[:1]


def test_scaling_speeds_up_arrivals_and_leaves_pauses() -> None:
    trace = Trace(
        "t", [TraceRequest(10.0, (Piece(1, 5),), 1), TraceRequest(20.0, (Piece(2, 5),), 1, after=(0,), pause=3.0)]
    )
    assert [(ask.at, ask.pause) for ask in trace.scaled(2.0).asks] == [(5.0, 0.0), (10.0, 3.0)]
    assert trace.rate == 0.1
    assert trace.scaled(2.0).rate == 0.2


def test_the_bound_is_what_one_endless_cache_would_hold() -> None:
    pieces = path([100, 50])
    trace = Trace(
        "t",
        [TraceRequest(0.0, pieces, 1), TraceRequest(1.0, pieces, 1), TraceRequest(2.0, (pieces[0], Piece(9, 50)), 1)],
    )
    assert trace.cached_bound() == pytest.approx((0 + 149 + 100) / 450), "the last token is always computed"
    assert Trace("t", []).cached_bound() == 0.0


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_mooncake_trace(tmp_path: Path, name: str) -> None:
    file = written(tmp_path, line(0), line(1000, 512, 0, (0,)), "", line(500, 513, 3, (0, 7)), name=name)
    trace = read_mooncake(file)
    assert trace.name == "trace"
    assert [ask.at for ask in trace.asks] == [0.0, 0.5, 1.0], "in order of time"
    assert [ask.prompt for ask in trace.asks] == [((1, 512), (2, 88)), ((1, 512), (8, 1)), ((1, 512),)]
    assert [ask.output for ask in trace.asks] == [10, 3, 1], "an answer has a token at least"
    assert len(read_mooncake(file, limit=1).asks) == 1


def test_a_coarse_clock_is_spread_over_its_ticks(tmp_path: Path) -> None:
    file = written(tmp_path, *[line(tick * 3000) for tick in range(5) for _ in range(20)])
    times = [ask.at for ask in read_mooncake(file, seed=1).asks]
    assert times == sorted(times)
    assert len(set(times)) == 100
    for number, at in enumerate(times):
        assert 0 <= at - times[0] - (number // 20 - 1) * MOONCAKE_TICK < 2 * MOONCAKE_TICK
    assert times == [ask.at for ask in read_mooncake(file, seed=1).asks]
    assert times != [ask.at for ask in read_mooncake(file, seed=2).asks]


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("{", "trace.jsonl:2: no line of a Mooncake trace"),
        ('{"a": ' + "[" * 100_000, "trace.jsonl:2: no line of a Mooncake trace"),
        (line(ids=(1,)), "trace.jsonl:2: expected a hash id for each 512 tokens of input_length, 2 for 600, got 1"),
        (line(length=0, ids=()), "trace.jsonl:2: expected a hash id"),
        (line(ids=(1, -1)), "trace.jsonl:2: hash_ids: expected whole numbers from 0 that fit 64 bits, got -1"),
        (line(ids=(2**64 - 1, 1)), "trace.jsonl:2: hash_ids: expected whole numbers .*, got 18446744073709551615"),
        ('{"timestamp": 1}', "trace.jsonl:2: no line of a Mooncake trace: .*input_length"),
    ],
)
def test_what_is_no_trace_is_reported_with_its_line(tmp_path: Path, text: str, reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        read_mooncake(written(tmp_path, line(), text))


def test_a_line_says_whose_it_is_and_how_it_is_to_be_served(tmp_path: Path) -> None:
    ours = {"tenant": "acme", "priority": -2, "class": "chat", "slo_ttft_ms": 500, "slo_tpot_ms": 25.5}
    more = {"ttl_ms": 2000, "session": "s1", "adapter": "french", "model": "m", "type": "text"}
    nothing = dict.fromkeys((*ours, *more))
    lines = line(0, more={**ours, **more}), line(500, more={"slo_ttft_ms": 9}), line(900, more=nothing)
    said, short, plain = read_mooncake(written(tmp_path, *lines)).asks
    assert (said.tenant, said.priority, said.label, said.session, said.adapter) == ("acme", -2, "chat", "s1", "french")
    assert said.slo == Slo(0.5, 0.0255, "chat")
    assert said.ttl == 2.0
    assert short.slo == Slo(0.009)
    assert (plain.tenant, plain.priority, plain.label, plain.session, plain.adapter) == ("", 0, "", "", "")
    assert (plain.slo, plain.ttl) == (None, None)


def test_prompts_for_different_adapters_share_nothing(tmp_path: Path) -> None:
    adapters = ("", "a", "b", "a", "")
    file = written(tmp_path, *(line(500 * at, more={"adapter": name}) for at, name in enumerate(adapters)))
    asks = read_mooncake(file).asks
    assert asks[0].prompt == asks[4].prompt
    assert asks[1].prompt == asks[3].prompt
    assert len({piece.id for ask in asks for piece in ask.prompt}) == 6


@pytest.mark.parametrize(
    ("field", "value", "reported"),
    [
        ("tenant", 7, "text, got 7"),
        ("class", True, "text, got true"),
        ("session", ["s"], "text, got a list"),
        ("adapter", {"name": "a"}, "text, got a mapping"),
        ("priority", "high", "a whole number of 32 bits, got 'high'"),
        ("priority", 1.5, r"a whole number of 32 bits, got 1\.5"),
        ("priority", 2**31, "a whole number of 32 bits, got 2147483648"),
        ("priority", True, "a whole number of 32 bits, got true"),
        ("slo_ttft_ms", 0, "a number of milliseconds above 0, got 0"),
        ("slo_tpot_ms", -1.5, r"a number of milliseconds above 0, got -1\.5"),
        ("slo_ttft_ms", "500", "a number of milliseconds above 0, got '500'"),
        ("ttl_ms", 0, "a number of milliseconds above 0, got 0"),
    ],
)
def test_a_field_of_ours_that_is_wrong_is_named_with_its_value(
    tmp_path: Path, field: str, value: object, reported: str
) -> None:
    with pytest.raises(ConfigError, match=rf"trace\.jsonl:2: {field}: expected {reported}$"):
        read_mooncake(written(tmp_path, line(), line(more={field: value})))


def test_a_number_that_no_float_holds_is_refused(tmp_path: Path) -> None:
    text = line().replace("}", ', "slo_ttft_ms": 1e999}')
    with pytest.raises(ConfigError, match="slo_ttft_ms: expected a number of milliseconds above 0, got a huge number"):
        read_mooncake(written(tmp_path, text))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_mooncake(tmp_path)
    broken = tmp_path / "broken.gz"
    broken.write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_mooncake(broken)
    with pytest.raises(ConfigError, match="at least one request"):
        read_mooncake(written(tmp_path, "", name="empty.jsonl"))
