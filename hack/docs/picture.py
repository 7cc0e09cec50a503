"""Draws the live table of `hack/demo --load` as docs/table.svg: real processes, a real workload, what is there then."""

import argparse
import asyncio
import re
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from tooling.laptop.chain import Shape, running_chain
from tooling.laptop.engines import Simulated
from tooling.laptop.load import play
from tooling.laptop.table import screen
from tooling.simulator.workloads import demo

PICTURE = Path(__file__).parents[2] / "docs" / "table.svg"
SECONDS = 8.0
COLUMNS = 118
DECISIONS = 6


async def draw(file: Path) -> None:
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    with TemporaryDirectory() as directory:
        shape = Shape(port=0, picking=("--strategy", "prefix-aware"), engine=Simulated(1))
        async with running_chain(shape, Path(directory)) as chain, asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(play(demo(1), chain.url, shape.engine.model))
            await asyncio.sleep(SECONDS)
            console.print(screen(*await chain.seen(DECISIONS), {}))
            asking.cancel()
    svg = console.export_svg(title="hack/demo --load")
    file.write_text(
        re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), encoding="utf-8"
    )  # no font from elsewhere


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="hack/picture", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=PICTURE, help="instead of docs/table.svg")
    asyncio.run(draw(parser.parse_args(arguments).file))


if __name__ == "__main__":
    main()
