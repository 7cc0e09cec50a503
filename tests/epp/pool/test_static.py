import asyncio
import contextlib
import os
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import epp.pool.static
from epp.errors import ConfigError
from epp.pool.static import StaticPools, load
from tests.support.process.waiting import until
from tests.support.scheduling.degradations import RecordedMetrics

POOL = """
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: NAME}
spec: {selector: {matchLabels: {app: x}}, targetPorts: [{number: 8000}]}
"""


def entries(*addresses: str) -> str:
    rows = [f"- {{name: e{a.rpartition('.')[2]}, address: {a}, port: 8000, labels: {{app: x}}}}\n" for a in addresses]
    return "endpoints:\n" + "".join(rows) if rows else "endpoints: []\n"


@asynccontextmanager
async def watched(pools: StaticPools) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(pools.watch())
        yield
        task.cancel()


def following(path: Path, metrics: RecordedMetrics) -> StaticPools:
    return StaticPools([path], None, metrics, random.Random(1), interval=0.005)


def replace(path: Path, text: str) -> None:
    """As editors and ConfigMaps do it: the new file takes the old one's place at once."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def test_several_files_and_directories_are_one_description(tmp_path: Path) -> None:
    (tmp_path / "pools").mkdir()
    (tmp_path / "pools" / "a.yaml").write_text(POOL.replace("NAME", "a"))
    (tmp_path / "endpoints.yaml").write_text(entries("10.0.0.1"))
    (state,) = load([tmp_path / "pools", tmp_path / "endpoints.yaml"])
    assert (state.name, [each.address for each in state.endpoints]) == ("a", ["10.0.0.1:8000"])


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_files_without_a_document_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(ConfigError, match="no YAML document found"):
        load([tmp_path / "f.yaml"])


def test_a_wrong_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        following(tmp_path / "missing.yaml", RecordedMetrics())


PARTS = st.sampled_from(
    [": ", "- ", "{", "}", "[", "]", "&a ", "*a", "!!int ", "|\n", "'", "\n", "  ", "null", "1e9", "? "]
)


@given(st.data())
@settings(max_examples=300)
def test_a_mutated_file_is_a_description_or_a_configuration_error(data: st.DataObject) -> None:
    text = POOL.replace("NAME", "a") + "---\n" + entries("10.0.0.1", "10.0.0.2")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(PARTS | st.text(max_size=5)) + text[at + data.draw(st.integers(0, 10)) :]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "f.yaml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        with contextlib.suppress(ConfigError):
            assert len(load([path])) >= 1


@pytest.mark.parametrize(
    "text",
    [
        "endpoints: &a [*a]",
        "1: 2",
        "kind: [x]",
        "kind: InferencePool\napiVersion: [1]",
        "? {a: b}\n: c",
        "endpoints:\n- &a {name: *a, address: 1.1.1.1, port: 1}",
        "endpoints: &a\n- labels: {x: *a}",
        "!!int '': a",
        "a: !!bool maybe",
        "a: !!timestamp soon",
    ],
)
def test_yaml_of_odd_make_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(ConfigError):
        load([tmp_path / "f.yaml"])


async def test_a_changed_file_takes_effect_and_keeps_who_stayed(tmp_path: Path) -> None:
    path, metrics = tmp_path / "f.yaml", RecordedMetrics()
    path.write_text(entries("10.0.0.1", "10.0.0.2"))
    pools = following(path, metrics)
    (pool,) = pools.pools
    assert pool.ready
    stayed = pool.endpoints[1]
    async with watched(pools):
        replace(path, entries("10.0.0.2", "10.0.0.3"))
        await until(lambda: len(pool.endpoints) == 2 and pool.endpoints[1].address == "10.0.0.3:8000")
        replace(path, entries())
        await until(lambda: not pool.endpoints)
        replace(path, entries("10.0.0.2"))
        await until(lambda: bool(pool.endpoints))
    assert pool.endpoints[0] is not stayed
    assert metrics.degradations == []


async def test_a_bad_file_is_refused_once_and_the_old_state_stays(tmp_path: Path) -> None:
    path, metrics = tmp_path / "f.yaml", RecordedMetrics()
    path.write_text(entries("10.0.0.1"))
    pools = following(path, metrics)
    (pool,) = pools.pools
    (endpoint,) = pool.endpoints
    async with watched(pools):
        for number, bad in enumerate(("endpoints: [", "", entries("nowhere"), "\x00"), 1):
            replace(path, bad)
            await until(lambda n=number: len(metrics.degradations) == n)  # type: ignore[misc]
        path.unlink()
        await until(lambda: len(metrics.degradations) == 5)
        assert pool.endpoints == (endpoint,)
        replace(path, entries("10.0.0.1", "10.0.0.2"))
        await until(lambda: len(pool.endpoints) == 2)
    assert pool.endpoints[0] is endpoint
    assert metrics.reasons() == ["pool-file-refused"] * 5
    assert "not valid YAML" in metrics.degradations[0][1]


@pytest.mark.parametrize("bad", ["[" * 1_000, "[" * 100_000, "- " * 100_000, "endpoints: &a [*a]"])
async def test_a_file_nested_without_end_harms_nothing(tmp_path: Path, bad: str) -> None:
    path, metrics = tmp_path / "f.yaml", RecordedMetrics()
    path.write_text(entries("10.0.0.1"))
    pools = following(path, metrics)
    (pool,) = pools.pools
    async with watched(pools):
        replace(path, bad)
        await until(lambda: bool(metrics.degradations))
        assert [each.address for each in pool.endpoints] == ["10.0.0.1:8000"]
        replace(path, entries("10.0.0.2"))
        await until(lambda: pool.endpoints[0].address == "10.0.0.2:8000")
    assert metrics.reasons() == ["pool-file-refused"]


async def test_a_bug_while_files_are_read_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, metrics = tmp_path / "f.yaml", RecordedMetrics()
    path.write_text(entries("10.0.0.1"))
    pools = following(path, metrics)

    def broken(*_: object) -> None:
        raise KeyError("bug")

    async with watched(pools):
        with monkeypatch.context() as patch:
            patch.setattr(epp.pool.static, "load", broken)
            replace(path, entries("10.0.0.2"))
            await until(lambda: bool(metrics.degradations))
        replace(path, entries("10.0.0.3"))
        await until(lambda: pools.pools[0].endpoints[0].address == "10.0.0.3:8000")
    assert metrics.degradations == [("pool-file-refused", "not read: KeyError: 'bug'")]


async def test_the_set_of_pools_is_fixed_until_a_restart(tmp_path: Path) -> None:
    path, metrics = tmp_path / "f.yaml", RecordedMetrics()
    path.write_text(POOL.replace("NAME", "a"))
    pools = following(path, metrics)
    async with watched(pools):
        replace(path, POOL.replace("NAME", "a") + "---" + POOL.replace("NAME", "b"))
        await until(lambda: bool(metrics.degradations))
    assert metrics.degradations == [
        ("pool-file-refused", "default/b: InferencePools came or went; expected the same ones until a restart")
    ]
    assert [pool.name for pool in pools.pools] == ["a"]


async def test_files_that_appear_in_a_directory_count(tmp_path: Path) -> None:
    metrics = RecordedMetrics()
    (tmp_path / "a.yaml").write_text(entries("10.0.0.1"))
    pools = following(tmp_path, metrics)
    async with watched(pools):
        (tmp_path / "b.yaml").write_text(entries("10.0.0.2"))
        await until(lambda: len(pools.pools[0].endpoints) == 2)
    assert metrics.degradations == []
