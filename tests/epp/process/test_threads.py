import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from epp.process.threads import in_background


def policy_of_thread() -> int:
    """Of a thread that starts now."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]


def test_threads_started_meanwhile_do_not_interrupt_others() -> None:
    with in_background():
        assert policy_of_thread() == os.SCHED_BATCH
    assert (os.sched_getscheduler(0), policy_of_thread()) == (os.SCHED_OTHER, os.SCHED_OTHER)


def test_the_policy_is_as_before_where_the_block_fails() -> None:
    with pytest.raises(KeyError), in_background():
        raise KeyError
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_policy_that_was_chosen_for_the_process_stays() -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        with in_background():
            pass
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def refuse(*what: Any) -> None:
    raise OSError("Invalid argument")


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(os, "sched_setscheduler", refuse),
        lambda patch: patch.delattr(os, "sched_getscheduler"),
    ],
)
def test_nothing_changes_where_the_system_has_no_such_policy(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    policy = os.sched_getscheduler
    with monkeypatch.context() as patch:
        change(patch)
        with in_background():
            assert policy(0) == os.SCHED_OTHER
    assert policy(0) == os.SCHED_OTHER
