"""Two real vLLM pods, each a node with an LMCache server, a coordinator and an L2, behind our picker and Envoy.

All of it is started once for the folder, which takes minutes on a machine that has other things to do. Every test gets
it whole, whatever the test before broke, and with the strategy that its module's fixture `strategy` names. Tests run on
the session's loop: `pytestmark = pytest.mark.asyncio(loop_scope="session")`.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from epp.configuration.loader import strategy_text
from tests.support.engines.mounted import Mount, mounted
from tests.support.engines.real_engines import PICKING, following, idle, restored
from tests.support.engines.talk import Talk
from tests.support.gateway.chain import Laptop, laptop
from tooling.laptop.engines import Tiers, Vllm, engine_python

HERE = Path(__file__).parent
BLOCK = 32
DEVICE_BLOCKS = 192
"""6,144 tokens: so few that a test can fill them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def python() -> Path:
    """The engines' Python."""
    return engine_python()


@pytest.fixture(scope="session")
def l2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    """Where both nodes have their L2: a volume as of a network, which can be away."""
    with mounted(tmp_path_factory.mktemp("l2")) as made:
        yield made


@asynccontextmanager
async def two_nodes(python: Path, tiers: Tiers, folder: Path) -> AsyncIterator[Laptop]:
    """The chain with these tiers, while the block runs."""
    engine = Vllm(python, size="tiny", block=BLOCK, blocks=DEVICE_BLOCKS, context=4096, tiers=tiers)
    async with laptop(folder, wiring="full-duplex", pods=2, flags=PICKING, engine=engine) as made:
        yield made


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def running(python: Path, l2: Mount, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Laptop]:
    """The chain: pods `pod-a` and `pod-b`, services `coordinator`, `lmcache-pod-a`, `lmcache-pod-b`."""
    async with two_nodes(python, Tiers(directory=l2.path), tmp_path_factory.mktemp("fleet")) as made:
        yield made


@pytest.fixture
def strategy(running: Laptop) -> str:
    """An EndpointPickerConfig; a module that wants another has a fixture of this name."""
    return strategy_text("prefix-aware")


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(running: Laptop, strategy: str) -> Laptop:
    """The chain, whole, and picking by the module's strategy."""
    await restored(running)
    await following(running, strategy)
    await idle(running)
    return running


@pytest_asyncio.fixture(loop_scope="session")
async def client(fleet: Laptop) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def talk(fleet: Laptop, client: openai.AsyncOpenAI) -> Talk:
    """A conversation of its own: no other test has said any of it."""
    return Talk(fleet, client)
