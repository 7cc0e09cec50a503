"""Takes pictures of the admin server's pages: simulated pods, two pickers and a real Envoy under load, in Chromium."""

import argparse
import asyncio
import itertools
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

from playwright.async_api import Browser, Page, async_playwright

from tooling.laptop.chain import Chain, Shape, running_chain
from tooling.laptop.engines import Simulated
from tooling.laptop.load import play
from tooling.simulator.workloads import demo

PICTURES: Final = Path(__file__).parents[2] / "docs" / "pictures"
PODS: Final = 8
WIDTH: Final = 1280
LARGEST: Final = 200_000
"""Bytes of a picture."""
PROMPT: Final = {"model": "sim", "messages": [{"role": "user", "content": "Why is the sky blue? " * 40}]}
SCHEMES: Final[Sequence[Literal["light", "dark"]]] = ("light", "dark")


async def take(minutes: float) -> None:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("hack/screenshots: neither chromium nor google-chrome was found")
    PICTURES.mkdir(exist_ok=True)
    with TemporaryDirectory() as directory:
        picking = ("--strategy", "prefix-aware", "--flow-control")
        shape = Shape(port=0, pods=PODS, replicas=2, picking=picking, engine=Simulated(1))
        async with running_chain(shape, Path(directory)) as chain, asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(_ask(chain))
            await asyncio.sleep(minutes * 60)
            async with async_playwright() as playwright:
                browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
                for scheme in SCHEMES:
                    await _pages(browser, chain.replicas[0].admin, scheme)
                await browser.close()
            asking.cancel()


async def _ask(chain: Chain) -> None:
    for seed in itertools.count(1):
        await play(demo(seed), chain.url, chain.shape.engine.model)


async def _pages(browser: Browser, admin: str, scheme: Literal["light", "dark"]) -> None:
    context = await browser.new_context(viewport={"width": WIDTH, "height": 900}, color_scheme=scheme)
    page = await context.new_page()
    await page.goto(admin)
    await page.wait_for_selector("body[data-refreshed]")
    await _picture(page, f"pools-{scheme}", 900)
    await page.goto(f"{admin}/decisions")
    await _picture(page, f"decisions-{scheme}", 640)
    await page.goto(f"{admin}/explain")
    await page.fill("#text", json.dumps(PROMPT))
    await page.click("form button")
    await page.wait_for_selector("h2.answer")
    await _picture(page, f"explain-{scheme}", 800)
    await context.close()


async def _picture(page: Page, name: str, height: int) -> None:
    file = PICTURES / f"{name}.png"
    options: dict[str, Any] = {"clip": {"x": 0, "y": 0, "width": WIDTH, "height": height}, "full_page": True}
    await page.screenshot(path=file, **options)
    size = file.stat().st_size
    print(f"{file.name}: {size // 1000} KB")
    if size > LARGEST:
        sys.exit(f"hack/screenshots: {file} has {size} bytes; expected at most {LARGEST}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="hack/screenshots", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of load before the pictures")
    asyncio.run(take(parser.parse_args(arguments).minutes))


if __name__ == "__main__":
    main()
