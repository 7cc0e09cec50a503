"""One API server for all tests of this folder, a namespace for each test, and how long changes took at the end."""

import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.support.kubernetes.cluster import Cluster
from tests.support.kubernetes.control_plane import ControlPlane
from tests.support.process.waiting import until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TOOK = pytest.StashKey[list[tuple[str, float]]]()
_numbers = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.kubernetes)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for what, seconds in config.stash.get(TOOK, []):
        terminalreporter.write_line(f"{seconds * 1000:7.0f} ms until {what} was seen")


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    plane = ControlPlane(tmp_path_factory.mktemp("kubernetes"))
    try:
        plane.start()
        plane.define("-k", str(ROOT / "manifests" / "crds"))
        yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="session")
def restricted(plane: ControlPlane) -> str:
    """A namespace that takes no pod but of the Pod Security Standard `restricted`."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": "manifests", "labels": labels}})
    return "manifests"


@pytest.fixture(scope="session")
def served(plane: ControlPlane) -> set[tuple[str, str]]:
    """(apiVersion, kind) of everything the API server knows."""
    lines = plane.kubectl("api-resources", "--no-headers").splitlines()
    return {(line.split()[-3], line.split()[-1]) for line in lines}


@pytest.fixture
def cluster(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A fresh namespace; our credentials are the administrator's."""
    name = f"test-{next(_numbers)}"
    plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig()))
    return Cluster(plane, name)


@pytest.fixture
def took(request: pytest.FixtureRequest) -> list[tuple[str, float]]:
    """What was waited for and how many seconds, to be printed at the end."""
    return request.config.stash.setdefault(TOOK, [])


@pytest.fixture
def seen(took: list[tuple[str, float]]) -> Callable[..., Awaitable[None]]:
    """Waits until a condition holds and notes how long it took; far beyond what is expected it fails."""

    async def wait(what: str, condition: Callable[[], bool], timeout: float = 20.0) -> None:
        start = time.monotonic()
        await until(condition, timeout)
        took.append((what, time.monotonic() - start))

    return wait
