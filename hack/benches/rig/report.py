"""From samples to a table: medians over rounds, ratios taken within a round, since the machine's speed drifts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from hack.benches.rig.envoy import Wiring
from hack.benches.rig.pickers import ALONE, variant


class Sample(NamedTuple):
    """One variant, one scenario, one round. CPU in microseconds a request: `server` of the ext_proc server, `envoy` of
    Envoy, under 16 connections; `door_single` with one request at a time. Latencies in microseconds, one at a time.
    """

    server: float
    envoy: float
    door_single: float
    p50: float
    p99: float


Rounds = Sequence[Mapping[tuple[str, str], Sample]]
"""One mapping a round: (scenario, variant) -> sample."""

SERVERS = ("bare server", "epp")
WIRINGS: tuple[Wiring, ...] = ("full-duplex", "lean")
TARGETS = {"2 KB": 1.25, "32 KB": 1.35, "256 KB": 1.60}
"""Most that the EPP may cost, as a multiple of the bare server."""
STREAMED, LATE = "100 SSE chunks", "one late piece"
"""Scenarios of answers that end equally late: what they differ by is the stream."""
STREAMED_TARGET = 1.05
"""Most that a streamed answer may cost in the lean wiring, as a multiple of a plain one: no more, but for noise."""


class Figure(NamedTuple):
    """Median over rounds, and the spread: the largest less the smallest."""

    median: float
    spread: float


Summary = Mapping[str, Mapping[str, Mapping[str, Figure]]]
"""Scenario -> variant -> name of the figure -> figure."""


def figure(values: Iterable[float]) -> Figure:
    found = list(values)
    return Figure(median(found), max(found) - min(found))


def summary(rounds: Rounds, scenarios: Sequence[str]) -> Summary:
    """All figures by scenario and variant, JSON-ready; microseconds and ratios as [median, spread]."""
    return {scenario: _of_scenario(rounds, scenario) for scenario in scenarios}


def _of_scenario(rounds: Rounds, name: str) -> dict[str, dict[str, Figure]]:
    alone = [one[name, ALONE] for one in rounds]
    found = {
        ALONE: {
            "envoy_cpu_us": figure(sample.envoy for sample in alone),
            "p50_us": figure(sample.p50 for sample in alone),
            "p99_us": figure(sample.p99 for sample in alone),
        }
    }
    for wiring in WIRINGS:
        bare = [one[name, variant("bare server", wiring)] for one in rounds]
        for server in SERVERS:
            ours = [one[name, variant(server, wiring)] for one in rounds]
            found[variant(server, wiring)] = {
                "cpu_us": figure(sample.server for sample in ours),
                "cpu_single_us": figure(sample.door_single for sample in ours),
                "cpu_to_bare": figure(a.server / b.server for a, b in zip(ours, bare, strict=True)),
                "cpu_single_to_bare": figure(a.door_single / b.door_single for a, b in zip(ours, bare, strict=True)),
                "envoy_cpu_us": figure(sample.envoy for sample in ours),
                "added_p50_us": figure(a.p50 - b.p50 for a, b in zip(ours, alone, strict=True)),
                "added_p99_us": figure(a.p99 - b.p99 for a, b in zip(ours, alone, strict=True)),
            }
    return found


def table(found: Summary, rounds: int) -> str:
    """The summary for people."""
    scenarios = list(found)
    rows = [["", *scenarios]]

    def row(title: str, name: str, key: str, show: Callable[[Figure], str]) -> None:
        rows.append([title, *(show(found[scenario][name][key]) for scenario in scenarios)])

    for wiring in WIRINGS:
        rows.append([f"{wiring}: CPU us a request", *[""] * len(scenarios)])
        for server in SERVERS:
            row(f"  {server}", variant(server, wiring), "cpu_us", _us)
        row("  epp : bare server", variant("epp", wiring), "cpu_to_bare", _ratio)
        for server in SERVERS:
            row(f"  Envoy, with {server}", variant(server, wiring), "envoy_cpu_us", _us)
        rows.append([f"{wiring}: added latency, ms, p50 / p99", *[""] * len(scenarios)])
        for server in SERVERS:
            rows.append([f"  {server}", *(_added(found[scenario][variant(server, wiring)]) for scenario in scenarios)])
    rows.append(["Envoy alone", *[""] * len(scenarios)])
    row("  CPU us a request", ALONE, "envoy_cpu_us", _us)
    row("  latency ms, p50", ALONE, "p50_us", _ms)
    row("  latency ms, p99", ALONE, "p99_us", _ms)
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(_padded(cells, widths)) for cells in rows]
    return "\n".join(line.rstrip() for line in lines) + f"\n\nMedian of {rounds} rounds, ± half the spread.\n"


def verdicts(found: Summary) -> list[str]:
    """The targets, and whether these figures meet them."""
    lines = []
    for scenario, most in TARGETS.items():
        for wiring in WIRINGS:
            ratio = found[scenario][variant("epp", wiring)]["cpu_to_bare"].median
            met = "met" if ratio <= most else "MISSED"
            lines.append(f"{met}: epp : bare server at {scenario}, {wiring}: {ratio:.2f} (at most {most:.2f})")
    for server in SERVERS:
        name = variant(server, "lean")
        ratio = found[STREAMED][name]["cpu_us"].median / found[LATE][name]["cpu_us"].median
        met = "met" if ratio <= STREAMED_TARGET else "MISSED"
        text = f"an answer of 100 chunks costs {ratio:.2f} of a plain one as late (at most {STREAMED_TARGET:.2f})"
        lines.append(f"{met}: {server}, lean: {text}")
    for scenario in TARGETS:
        name = variant("epp", "lean")
        ratio = found[scenario][name]["cpu_single_to_bare"].median
        lines.append(f"epp : bare server at {scenario}, lean, one request at a time: {ratio:.2f}")
    return lines


def _padded(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """The first to the left, figures to the right."""
    first, *others = widths
    return [cells[0].ljust(first), *(cell.rjust(width) for cell, width in zip(cells[1:], others, strict=True))]


def _us(figure: Figure) -> str:
    return f"{figure.median:.0f} ±{figure.spread / 2:.0f}"


def _ms(figure: Figure) -> str:
    return f"{figure.median / 1000:.2f} ±{figure.spread / 2000:.2f}"


def _ratio(figure: Figure) -> str:
    return f"{figure.median:.2f} ±{figure.spread / 2:.2f}"


def _added(figures: Mapping[str, Figure]) -> str:
    return f"{figures['added_p50_us'].median / 1000:.2f} / {figures['added_p99_us'].median / 1000:.2f}"
