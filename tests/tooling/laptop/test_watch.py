"""The rest, with real processes, is in tests/integration/test_chain_changes.py."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from epp.documents.files import stamp_of
from epp.errors import ConfigError
from gateway.errors import GatewayError
from tests.support.process.waiting import until
from tooling.laptop.chain import Chain, ChainError
from tooling.laptop.engines import LaptopPod
from tooling.laptop.watch import watch


@dataclass
class Fake:
    """As much of a chain as is watched."""

    endpoints_file: Path
    ends: list[tuple[str, str]] = field(default_factory=list)
    pods: list[LaptopPod] = field(default_factory=lambda: [LaptopPod("pod-a", 1)])
    replicas: list[Any] = field(default_factory=lambda: [SimpleNamespace(name="epp-1"), SimpleNamespace(name="epp-2")])
    gone: list[str] = field(default_factory=list)
    envoy: Any = field(default_factory=lambda: SimpleNamespace(status=None))
    reloads: list[str] = field(default_factory=list)
    error: Exception | None = None

    @property
    def processes(self) -> "Fake":
        return self

    @property
    def files(self) -> list[Path]:
        return [self.endpoints_file]

    def ended(self) -> list[tuple[str, str]]:
        ends, self.ends = self.ends, []
        return ends

    async def reload(self) -> bool:
        self.reloads.append(self.endpoints_file.read_text())
        if self.error:
            raise self.error
        return True


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    file = tmp_path / "endpoints.yaml"
    file.write_text("endpoints: [{name: pod-a}, {name: pod-b}]\n")
    return Fake(file)


def chain(fake: Fake) -> Chain:
    return cast(Chain, fake)


async def ends(fake: Fake) -> str:
    with pytest.raises(ChainError) as error:
        await asyncio.wait_for(watch(chain(fake), lambda _: None), 10)
    return str(error.value)


async def test_without_envoy_there_is_no_going_on(fake: Fake) -> None:
    fake.envoy.status = 1
    assert await ends(fake) == "Envoy ended with status 1"


async def test_without_a_replica_there_is_no_going_on(fake: Fake) -> None:
    fake.ends = [("epp-1", "epp-1 ended: why"), ("epp-2", "epp-2 ended: why not")]
    assert await ends(fake) == "epp-2 ended: why not"


@pytest.mark.parametrize("error", [GatewayError("it is wrong"), ConfigError("", "it is wrong")])
async def test_a_change_is_applied_once_and_a_refusal_is_reported_once(fake: Fake, error: Exception) -> None:
    reported: list[str] = []
    task = asyncio.ensure_future(watch(chain(fake), reported.append))
    await asyncio.sleep(0)
    fake.endpoints_file.write_text("endpoints: []\n# one\n")
    await until(lambda: reported == ["the gateway follows the changed files"])
    fake.error = error
    fake.endpoints_file.write_text("endpoints: []\n# another\n")
    await until(lambda: reported[1:] == ["refused, the old files stay in force: it is wrong"])
    fake.ends = [("pod-a", "pod-a ended")]
    await until(lambda: len(reported) == 4)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert len(fake.reloads) == 3
    assert fake.gone == ["pod-a"]


@pytest.mark.parametrize("content", ["[" * 100_000, "- " * 100_000, "", "endpoints: 5", "a: &a [*a]"])
async def test_an_endpoints_file_nobody_can_read_stays_as_it_is_when_a_pod_ends(fake: Fake, content: str) -> None:
    reported: list[str] = []
    fake.endpoints_file.write_text(content)
    fake.ends = [("pod-a", "pod-a ended")]
    task = asyncio.ensure_future(watch(chain(fake), reported.append))
    await until(lambda: len(reported) > 1 or task.done())
    assert not task.done()
    task.cancel()
    assert f"{fake.endpoints_file.name} still has pod-a: " in reported[1]
    assert fake.endpoints_file.read_text() == content


def test_a_stamp_changes_with_content_and_when_a_file_is_gone(fake: Fake) -> None:
    first = stamp_of(chain(fake).files)
    assert stamp_of(chain(fake).files) == first
    fake.endpoints_file.write_text("endpoints: []\n")
    second = stamp_of(chain(fake).files)
    fake.endpoints_file.unlink()
    assert len({first, second, stamp_of(chain(fake).files)}) == 3
