"""A configuration file that changes: good files take effect, bad ones are refused, however they are written."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import epp.configuration.reload
from epp.configuration.loader import Pipeline
from epp.configuration.reload import ConfigFile
from epp.errors import ConfigError
from tests.support.process.waiting import until
from tests.support.scheduling.degradations import RecordedMetrics
from tests.support.scheduling.pipelines import RANDOM, clock

CONFIG = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins: [{{type: {}}}]
"""
ALL, WARM = (
    CONFIG.format("tests.support.plugins.All"),
    CONFIG.format("tests.support.plugins.Warm"),
)


def write(path: Path, text: str) -> None:
    path.write_text(text)


class Watched:
    def __init__(self, path: Path, plugins_from: Sequence[str] | None = None) -> None:
        self.metrics = RecordedMetrics()
        self.file = ConfigFile(
            path, clock=clock, random=RANDOM, metrics=self.metrics, interval=0.005, plugins_from=plugins_from
        )
        self.pipelines: list[Pipeline] = []

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.file.watch(self.pipelines.append))
            yield
            task.cancel()

    async def change(self) -> set[str]:
        """The names of the next pipeline's plugins."""
        before = len(self.pipelines)
        await until(lambda: len(self.pipelines) > before)
        assert self.file.pipeline is self.pipelines[-1]
        return set(self.pipelines[-1].registry)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(ALL)
    return path


async def test_a_changed_file_takes_effect(path: Path) -> None:
    watched = Watched(path)
    assert "tests.support.plugins.All" in watched.file.pipeline.registry
    async with watched.watching():
        write(path, WARM)
        assert "tests.support.plugins.Warm" in await watched.change()
        write(path, ALL)
        assert "tests.support.plugins.All" in await watched.change()
    assert watched.metrics.degradations == []


async def test_an_editor_that_renames_over_the_file(path: Path) -> None:
    watched = Watched(path)
    async with watched.watching():
        new = path.with_suffix(".new")
        write(new, WARM)
        new.rename(path)
        assert "tests.support.plugins.Warm" in await watched.change()


async def test_a_config_map_swaps_a_symbolic_link(tmp_path: Path) -> None:
    for name, text in (("v1", ALL), ("v2", WARM)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "config.yaml").symlink_to("..data/config.yaml")
    watched = Watched(tmp_path / "config.yaml")
    async with watched.watching():
        (tmp_path / "..tmp").symlink_to("v2")
        (tmp_path / "..tmp").rename(tmp_path / "..data")
        assert "tests.support.plugins.Warm" in await watched.change()


async def test_a_bad_file_is_refused_once_and_the_old_pipeline_stays(path: Path) -> None:
    watched = Watched(path)
    old = watched.file.pipeline
    async with watched.watching():
        write(path, CONFIG.format("queue-scorre"))
        await until(lambda: bool(watched.metrics.degradations))
        os.utime(path, ns=(1, 1))
        await until(lambda: len(watched.metrics.degradations) > 1)
        assert watched.file.pipeline is old
        assert watched.pipelines == []
        assert watched.metrics.going_on() == {"config-refused"}
        write(path, WARM)
        assert "tests.support.plugins.Warm" in await watched.change()
    assert watched.metrics.going_on() == set()
    assert watched.metrics.reasons() == ["config-refused"] * 2
    assert "did you mean 'queue-scorer'" in watched.metrics.degradations[0][1]


HOSTILE = ("[" * 100_000, "- " * 100_000, "a: &a [*a]", CONFIG.format('"w\\e[2J"'))


@pytest.mark.parametrize("text", HOSTILE)
async def test_whatever_a_file_holds_its_refusal_harms_nothing_else(path: Path, text: str) -> None:
    watched = Watched(path)
    async with watched.watching():
        write(path, text)
        await until(lambda: bool(watched.metrics.degradations))
        write(path, WARM)
        await watched.change()
    ((reason, detail),) = watched.metrics.degradations
    assert reason == "config-refused"
    assert detail.isprintable()


async def test_a_plugin_that_ends_its_process_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path.parent / "quits.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(str(path.parent))
    watched = Watched(path)
    async with watched.watching():
        write(path, WARM.replace("tests.support.plugins.Warm", "quits.Now"))
        await until(lambda: bool(watched.metrics.degradations))
    assert "'quits' cannot be imported: SystemExit: 0" in watched.metrics.degradations[0][1]


async def test_a_change_cannot_name_modules_that_are_not_allowed(path: Path) -> None:
    watched = Watched(path, plugins_from=("tests.support.plugins",))
    async with watched.watching():
        write(path, WARM.replace("tests.support.plugins.Warm", "antigravity.Fly"))
        await until(lambda: bool(watched.metrics.degradations))
    assert "--plugins-from allows tests.support.plugins" in watched.metrics.degradations[0][1]


async def test_a_bug_while_a_file_is_loaded_is_a_refusal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(path)

    def broken(*_: object, **__: object) -> None:
        raise KeyError("bug")

    async with watched.watching():
        with monkeypatch.context() as patch:
            patch.setattr(epp.configuration.reload, "load_text", broken)
            write(path, WARM)
            await until(lambda: bool(watched.metrics.degradations))
        write(path, WARM + "# again\n")
        await watched.change()
    assert watched.metrics.degradations == [("config-refused", "not loaded: KeyError: 'bug'")]


async def test_a_file_that_goes_and_comes_back(path: Path) -> None:
    watched = Watched(path)
    async with watched.watching():
        os.unlink(path)
        await until(lambda: bool(watched.metrics.degradations))
        write(path, WARM)
        assert "tests.support.plugins.Warm" in await watched.change()
    assert watched.metrics.reasons() == ["config-refused"]
    assert "cannot be read" in watched.metrics.degradations[0][1]


async def test_a_file_that_was_only_touched_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(path)
    read: list[bytes] = []

    def reading(file: Path) -> bytes:
        read.append(file.read_bytes())
        return read[-1]

    monkeypatch.setattr(epp.configuration.reload, "read_file", reading)
    async with watched.watching():
        os.utime(path, ns=(1, 1))
        write(path.with_suffix(".new"), WARM)
        # The touch is seen before what comes after it, so one pipeline means that the touch made none.
        await until(lambda: read == [ALL.encode()])
        path.with_suffix(".new").rename(path)
        await watched.change()
    assert len(watched.pipelines) == 1


async def test_what_a_change_does_not_concern_is_kept(path: Path) -> None:
    watched = Watched(path)
    kept = watched.file.pipeline.registry["utilization-detector"].plugin
    async with watched.watching():
        write(path, WARM)
        await watched.change()
    assert watched.file.pipeline.detector is kept


def test_a_bad_file_at_the_start(path: Path) -> None:
    write(path, "a: [")
    with pytest.raises(ConfigError, match=r"config.yaml: line 2, column 1: not valid YAML"):
        Watched(path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"config.yaml: cannot be read: No such file"):
        Watched(path)
