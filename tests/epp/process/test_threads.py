import os
from collections.abc import Callable
from typing import Any

import pytest

from epp.process.threads import background_policy


def test_threads_may_run_in_the_background_and_this_one_does_not() -> None:
    assert background_policy() == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def refuse(*what: Any) -> None:
    raise OSError("Invalid argument")


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(os, "sched_setscheduler", refuse),
        lambda patch: patch.delattr(os, "sched_setscheduler"),
        lambda patch: patch.delattr(os, "SCHED_BATCH"),
    ],
)
def test_there_is_none_where_the_system_has_none_or_forbids_it(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    change(monkeypatch)
    assert background_policy() is None
