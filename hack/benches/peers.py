"""What a pick costs beside other endpoint pickers: CPU of each and of Envoy, behind the same Envoy, in the same run.

    ports="{endpoints} {grpc_port} {health_port} {metrics_port} --refresh-metrics-interval=1s"
    hack/bench peers --peer gie="hack/peers/gie run $ports" --peer llm-d="hack/peers/llm-d-router run build/epp $ports"

Any picker that speaks ext_proc can be compared: its command is started with the ports it has to listen on. Only ratios
mean anything: absolute figures are the machine's. Each picker shares its core with the others, which are idle then.
"""

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from hack.benches.rig.peer import OURS, peer
from hack.benches.rig.pickers import ALONE, EPP, Rig, Scenario, Setup, Variant, idle, in_turns, measured, rig
from hack.benches.rig.processes import BenchError

STREAMED = Scenario("100 chunks", 2 << 10, "streamed completions", 3.0)
WIRINGS = ("full-duplex", "lean", "buffered")
IDLE_SECONDS = 5.0


class Cell(NamedTuple):
    """CPU microseconds a request: of the picker and of Envoy."""

    picker: float
    envoy: float


class Figures(NamedTuple):
    """Of one size of pool. `cells`: (scenario, variant) -> a cell for each round."""

    endpoints: int
    cells: Mapping[tuple[str, str], Sequence[Cell]]
    idle: Mapping[str, float]
    """Share of a core that a picker uses while nobody asks."""
    rss: Mapping[str, int]
    """Its resident memory after all that, in bytes."""
    missing: Mapping[str, str]


def scenarios(kilobytes: Sequence[int]) -> list[Scenario]:
    """Large bodies get more time: the first has to be answered in it."""
    return [*(Scenario(f"{size} KB", size << 10, "chat", max(1.0, size / 128)) for size in kilobytes), STREAMED]


def run(setup: Setup, rounds: int, seconds: float) -> Figures:
    """Everything once for warmth, then `rounds` times, every second one in reverse order."""
    with rig(setup, needed=[OURS]) as up:
        for name, why in up.missing.items():
            print(f"left out: {name}: {why}", file=sys.stderr)
        _round(up, setup, seconds, 0)
        found: dict[tuple[str, str], list[Cell]] = {}
        for turn in range(rounds):
            print(f"{setup.endpoints} endpoints: round {turn + 1} of {rounds}", file=sys.stderr)
            for key, cell in _round(up, setup, seconds, turn).items():
                found.setdefault(key, []).append(cell)
        idling = {name: idle(program, IDLE_SECONDS) for name, program in up.servers.items()}
        rss = {name: resident(program.pid) for name, program in up.servers.items()}
        return Figures(setup.endpoints, found, idling, rss, up.missing)


def _round(up: Rig, setup: Setup, seconds: float, turn: int) -> dict[tuple[str, str], Cell]:
    return {
        (scenario.name, variant.name): _cell(up, scenario, variant, seconds)
        for scenario, variant in in_turns(up, setup.scenarios, turn)
    }


def _cell(up: Rig, scenario: Scenario, variant: Variant, seconds: float) -> Cell:
    picker, envoy, _ = measured(up, scenario, variant, 16, seconds * scenario.stretch)
    return Cell(picker, envoy)


def resident(pid: int) -> int:
    """Bytes of memory a process has."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise BenchError(f"process {pid} has ended")


def table(figures: Figures, pickers: Sequence[str], names: Sequence[str], wirings: Sequence[str]) -> str:
    """For people: a block for each wiring; the ratio is what another picker costs to what ours does."""
    rows = [[f"{figures.endpoints} endpoints", *names]]

    def row(title: str, variant: str, part: str) -> None:
        rows.append([title, *(_median(figures, name, variant, part) for name in names)])

    for wiring in wirings:
        rows.append([f"{wiring}: CPU us a request", *[""] * len(names)])
        present = [name for name in pickers if (names[0], f"{name}, {wiring}") in figures.cells]
        for name in present:
            row(f"  {name}", f"{name}, {wiring}", "picker")
        for name in present:
            if name != OURS:
                ratios = [_ratio(figures, scenario, wiring, name) for scenario in names]
                rows.append([f"  {name} : {OURS}", *ratios])
        for name in present:
            row(f"  Envoy, with {name}", f"{name}, {wiring}", "envoy")
    row("Envoy alone: CPU us a request", ALONE, "envoy")
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    for name, share in figures.idle.items():
        lines.append(f"{name}: idle {share * 100:.2f} % of a core; {figures.rss[name] >> 20} MiB resident")
    return "\n".join(lines) + "\n"


def _median(figures: Figures, scenario: str, variant: str, part: str) -> str:
    return f"{median(getattr(cell, part) for cell in figures.cells[scenario, variant]):.0f}"


def _ratio(figures: Figures, scenario: str, wiring: str, name: str) -> str:
    """Within each round, since the machine's speed drifts."""
    ours, theirs = (figures.cells[scenario, f"{picker}, {wiring}"] for picker in (OURS, name))
    return f"{median(b.picker / a.picker for a, b in zip(ours, theirs, strict=True)):.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    doc = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="hack/bench peers", description=doc[0] if doc else "")
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--endpoints", type=int, nargs="+", default=[4], help="sizes of pools (4)")
    parser.add_argument("--kilobytes", type=int, nargs="+", default=[2, 32, 256], help="sizes of bodies (2 32 256)")
    parser.add_argument("--wirings", nargs="+", choices=WIRINGS, default=WIRINGS[:2], help="(full-duplex lean)")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement (0.5)")
    parser.add_argument("--json", action="store_true", help="print medians as JSON instead of a table")
    parser.add_argument("--epp-command", default=EPP, help="how to start ours; default: %(default)s")
    flags = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends
    commands = {OURS: flags.epp_command, **dict(flags.peer)}
    wanted = scenarios(flags.kilobytes)
    try:
        for endpoints in flags.endpoints:
            setup = Setup(commands, flags.wirings, wanted, endpoints, 64)
            figures = run(setup, flags.rounds, flags.seconds)
            if flags.json:
                print(json.dumps(as_json(figures)))
            else:
                print(table(figures, [*commands], [one.name for one in wanted], flags.wirings), flush=True)
    except BenchError as error:
        print(f"hack/bench peers: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def as_json(figures: Figures) -> dict[str, object]:
    """Medians over rounds."""
    cells = [
        {
            "scenario": scenario,
            "variant": variant,
            "picker_us": median(cell.picker for cell in found),
            "envoy_us": median(cell.envoy for cell in found),
        }
        for (scenario, variant), found in figures.cells.items()
    ]
    return {"endpoints": figures.endpoints, "cells": cells, "idle": figures.idle, "rss": figures.rss}


if __name__ == "__main__":
    sys.exit(main())
