"""Where models are kept and when they are made; a made one is served in tests/engine."""

from pathlib import Path

import pytest

from tooling.laptop.models import SIZES, cached_model, make


def test_models_are_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    places = {cached_model(size) for size in SIZES}
    assert len(places) == len(SIZES)
    assert all(tmp_path in place.parents for place in places)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cached_model("tiny").is_relative_to(tmp_path / "home" / ".cache")


def test_a_model_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("as it was")
    make("tiny", tmp_path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("config.json", "as it was")]
