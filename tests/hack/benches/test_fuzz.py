from pathlib import Path
from random import Random

import pytest

from hack.benches import fuzz
from hack.benches.fuzz import TARGETS, Target, mutated


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_input_is_read_or_refused_as_promised(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "FOUND", tmp_path)
    found = fuzz.fuzz(name, TARGETS[name], 150, 20.0, 1)
    assert found.findings == 0
    assert found.inputs > 0


def test_ctrl_c_ends_it_with_what_was_done() -> None:
    left = [None] * 5  # of which the first reads the seed

    def read(data: bytes) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()

    found = fuzz.fuzz("a", Target(read, [b"seed"], ()), 100, 20.0, 1)
    assert (found.inputs, found.findings, found.stopped) == (4, 0, True)


def test_good_input_is_read() -> None:
    """Else all that is mutated of it would only ever meet the first check."""
    for name, target in TARGETS.items():
        readable = 0
        for seed in target.seeds:
            try:
                target.read(seed)
                readable += 1
            except target.promises:
                pass
        assert readable, name


def test_an_error_that_is_not_promised_is_kept_and_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(data: bytes) -> None:
        if b"x" not in data:
            raise KeyError("lost")
        raise ValueError

    monkeypatch.setattr(fuzz, "FOUND", tmp_path)
    found = fuzz.fuzz("made-up", Target(read, [b"xy"], (ValueError,)), 200, 20.0, 1)
    assert 0 < found.findings < found.inputs
    assert found.refused == found.inputs - found.findings
    [kept] = tmp_path.iterdir()
    assert b"x" not in kept.read_bytes()
    assert capsys.readouterr().out.count("made-up: KeyError") == 1


def test_a_seed_makes_the_same_inputs() -> None:
    assert [mutated(Random(7), [b"abc"]) for _ in range(5)] == [mutated(Random(7), [b"abc"]) for _ in range(5)]
