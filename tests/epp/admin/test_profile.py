import threading
from collections.abc import Iterator

import pytest

from epp.admin import profile
from epp.admin.profile import Profiler, stacks
from epp.errors import Rejected


def waiting_here(gate: threading.Event, started: threading.Event) -> None:
    started.set()
    gate.wait(30)


@pytest.fixture
def busy() -> Iterator[None]:
    gate, started = threading.Event(), threading.Event()
    thread = threading.Thread(target=waiting_here, args=(gate, started), name="the; worker")
    thread.start()
    assert started.wait(10)
    yield
    gate.set()
    thread.join()


@pytest.mark.usefixtures("busy")
def test_a_stack_names_thread_and_functions_from_outside_in() -> None:
    (stack,) = [each for each in stacks() if "waiting_here" in each]
    thread, *calls = stack.split(";")
    assert thread == "the,_worker"
    assert calls[0].startswith("threading.")
    assert f"{__name__}.waiting_here" in calls
    assert not any("test_a_stack" in each for each in stacks())  # not of who asks


@pytest.mark.usefixtures("busy")
def test_a_profile_counts_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line.rpartition(" ") for line in Profiler().folded(1).splitlines()]
    (count,) = [int(count) for stack, _, count in lines if "waiting_here" in stack]
    assert count > 1
    monkeypatch.setattr(profile, "MOST", 0)
    assert {line.partition(" ")[0] for line in Profiler()._sampled(0.05).splitlines()} == {"other"}


@pytest.mark.usefixtures("busy")
def test_one_at_a_time() -> None:
    profiler = Profiler()
    with profiler._turn, pytest.raises(Rejected):
        profiler.folded(1)
    assert profiler.folded(1)


def test_a_process_that_ends_does_not_wait_for_a_profile() -> None:
    profiler = Profiler()
    profiler.stop()
    assert profiler.folded(60) == ""
