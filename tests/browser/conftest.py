"""The pages in a real Chromium, the system's own: Playwright drives it and brings none. The lane `hack/test browser`.

Tests run on the session's loop: `pytestmark = pytest.mark.asyncio(loop_scope="session")`.
"""

import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace
from playwright.async_api import Browser, Page, async_playwright, expect

from epp.admin.history import EVERY
from epp.admin.recorder import Decisions, Recorder
from epp.admin.server import AdminServer, AdminSettings
from epp.plugin import Endpoint, Load, Response
from epp.pool.store import Pool
from epp.scheduling.cost import ExpectedTtft
from epp.scheduling.decision import Scored
from epp.telemetry.metrics import Metrics
from tests.support.scheduling.decisions import decision

expect.set_options(timeout=30_000)  # a machine with much else to do needs more than the five seconds of the default
HERE = Path(__file__).parent
ENDPOINTS = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.browser)


class Shown:
    """A pool of 300 endpoints of two roles on 38 nodes, and its admin server."""

    def __init__(self) -> None:
        self.pool = Pool("llama", random=random.Random(1))
        self.pool.replace(
            Endpoint(
                f"default/pod-{n:03d}",
                f"10.0.{n // 250}.{n % 250 + 1}:8000",
                {"llm-d.ai/role": "prefill" if n % 3 == 0 else "decode"},
                Load(waiting=n % 5, running=n % 40, kv_usage=n / ENDPOINTS, at=0.0),
                f"node-{n // 8}",
            )
            for n in range(ENDPOINTS)
        )
        self.metrics = Metrics()
        self.metrics.add_pool(self.pool)
        self.decisions = Decisions()
        self.recorder = Recorder("llama", self.metrics, self.decisions, wall_clock=lambda: 1.0)
        self.server = AdminServer(self.metrics, [self.pool], self.decisions, list, lambda: "", AdminSettings(port=0))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def request(self, name: str) -> None:
        made = decision(name, self.pool.endpoints[:6], cached=50)
        self.recorder.decided(made, 0.0)
        self.recorder.finished(made, Response(status=200))

    def billed(self, name: str) -> None:
        """A request with all terms of `expected-ttft` in its bills."""
        made = decision(name, self.pool.endpoints[:6], cached=50)
        costs = [tuple(0.001 * (at + n) for n in range(1, 11)) for at in range(6)]
        scores = made.runs[0].scored[0].scores
        made.runs[0].scored = [Scored("expected-ttft", 1.0, scores, ExpectedTtft.terms, costs, ExpectedTtft.meanings)]
        self.recorder.decided(made, 0.0)
        self.recorder.finished(made, Response(status=200))

    def look(self) -> None:
        """A step more in the histories of endpoints."""
        for _ in range(EVERY):
            self.server._history.look()

    def load(self, number: int, **figures: float | None) -> None:
        endpoint = self.pool.endpoints[number]
        endpoint.load = replace(endpoint.load, **figures)


@pytest_asyncio.fixture(loop_scope="session")
async def shown() -> AsyncIterator[Shown]:
    found = Shown()
    found.look()  # the scale of its charts is that of its loads from now on: a page is loaded anew where it changes
    async with found.server:
        yield found


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def browser() -> AsyncIterator[Browser]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.fail("neither chromium nor google-chrome was found")
    async with async_playwright() as playwright:
        # Without its sandbox, as root cannot have it; it shows our own pages alone.
        started = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        await started.close()


@pytest_asyncio.fixture(loop_scope="session")
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A new one; whatever its console or its policy complains of fails the test."""
    complaints: list[str] = []
    context = await browser.new_context(viewport={"width": 1400, "height": 900})
    opened = await context.new_page()
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    yield opened
    await context.close()
    assert complaints == []
