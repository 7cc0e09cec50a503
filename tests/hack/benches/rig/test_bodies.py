import json
from pathlib import Path

import pytest

from hack.benches.rig import bodies
from hack.benches.rig.load import SCRIPT


@pytest.mark.parametrize("size", [2 << 10, 32 << 10, 256 << 10])
@pytest.mark.parametrize("api", ["chat", "completions", "streamed completions"])
def test_bodies_have_the_size_asked_for_and_are_conversations(size: int, api: bodies.Api) -> None:
    made = list(bodies.bodies(size, 16, api, 1))
    assert {len(body) for body in made} == {size}
    assert len(set(made)) == 16
    assert all(body.count(bodies.MARK.encode()) == 1 for body in made)
    assert all(json.loads(body)["model"] == "bench" for body in made)
    first, second, other = made[0], made[7], made[8]
    assert _common(first, second) > size * 0.7  # two turns of one conversation
    assert size * 0.2 < _common(first, other) < size * 0.35  # two conversations: the system prompt


def _common(one: bytes, other: bytes) -> int:
    return next(n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)


def test_the_same_seed_makes_the_same_bodies() -> None:
    assert list(bodies.bodies(2048, 3, "chat", 1)) == list(bodies.bodies(2048, 3, "chat", 1))
    assert list(bodies.bodies(2048, 3, "chat", 1)) != list(bodies.bodies(2048, 3, "chat", 2))


def test_files_are_numbered_as_the_script_reads_them(tmp_path: Path) -> None:
    bodies.write(tmp_path / "b", 2048, 3, "chat")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["1", "2", "3"]
    assert f'string.rep("@", {len(bodies.MARK)})' in SCRIPT.read_text()
