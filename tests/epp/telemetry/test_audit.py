import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from epp.telemetry.audit import LONGEST, AuditEntry, AuditLog
from epp.telemetry.metrics import Metrics


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def entry(n: int) -> AuditEntry:
    return AuditEntry(at=float(n), request_id=f"r{n}", model="m", status=200)


def failures(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("warmpath_degraded_total", {"reason": "audit-failed"})


async def test_an_entry_is_one_line_without_what_is_not_known(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl", Metrics())
    audit.write(AuditEntry(at=1.5, request_id="r\n1", model="m", endpoint="pod", why="cheapest", ttft_ms=3.2))
    await audit.flush()
    assert lines(audit.path) == [
        {"at": 1.5, "request_id": "r\n1", "model": "m", "endpoint": "pod", "why": "cheapest", "ttft_ms": 3.2}
    ]
    assert os.stat(audit.path).st_mode & 0o777 == 0o600


async def test_run_writes_the_rest_when_it_is_cancelled(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl", Metrics())
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(audit.run())
        await asyncio.sleep(0)
        for n in range(3):
            audit.write(entry(n))
        running.cancel()
    assert [line["request_id"] for line in lines(audit.path)] == ["r0", "r1", "r2"]


async def test_a_moved_file_is_made_anew_and_an_old_one_kept(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"request_id":"before"}\n')
    audit = AuditLog(path, Metrics())
    audit.write(entry(1))
    await audit.flush()
    path.rename(tmp_path / "audit.1")
    audit.write(entry(2))
    await audit.flush()
    assert [line["request_id"] for line in lines(tmp_path / "audit.1")] == ["before", "r1"]
    assert [line["request_id"] for line in lines(path)] == ["r2"]


def test_a_file_that_cannot_be_opened_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Is a directory"):
        AuditLog(tmp_path, Metrics())


async def test_later_failures_are_said_and_the_next_entries_written(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    metrics = Metrics()
    audit = AuditLog(folder / "audit.jsonl", metrics)
    (folder / "audit.jsonl").unlink()
    folder.rmdir()
    audit.write(entry(1))
    await audit.flush()
    assert failures(metrics) == 1
    folder.mkdir()
    audit.write(entry(2))
    await audit.flush()
    assert [line["request_id"] for line in lines(audit.path)] == ["r2"]


async def test_entries_beyond_the_buffer_are_dropped_and_counted(tmp_path: Path) -> None:
    metrics = Metrics()
    audit = AuditLog(tmp_path / "audit.jsonl", metrics, capacity=2)
    for n in range(5):
        audit.write(entry(n))
    await audit.flush()
    assert [line["request_id"] for line in lines(audit.path)] == ["r0", "r1"]
    assert failures(metrics) == 3


async def test_what_clients_choose_is_cut(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl", Metrics())
    audit.write(AuditEntry(at=1.0, request_id="r" * 100_000, fairness_id="f" * 100_000, model="m" * 100_000))
    await audit.flush()
    assert all(len(text) <= LONGEST + 1 for text in lines(audit.path)[0].values() if isinstance(text, str))
