"""`warmpath conformance`: options in, a report and an exit status out."""

import asyncio
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from epp.errors import ConfigError
from epp.telemetry.text import printable
from tooling.conformance import report
from tooling.conformance.suite import CASES, Result, run
from tooling.conformance.target import ConformanceOptions, host_and_port
from tooling.conformance.verdict import Unreachable

PASSED: Final = 0
FAILED: Final = 1
UNREACHABLE: Final = 2


def header(text: str) -> tuple[str, str]:
    """Of `name=value`. Raises ConfigError."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError("--header", f"{text!r} is not NAME=VALUE")
    return name.lower(), value


def options(
    target: str,
    tls: bool,
    endpoints: Sequence[str],
    model: str,
    headers: Sequence[str],
    health: str | None,
    timeout: float,
) -> ConformanceOptions:
    """The command's options, checked. Raises ConfigError."""
    for flag, address in (("--target", target), ("--health", health)):
        host, _, port = (address or "localhost:1").rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(flag, f"{address!r} is not HOST:PORT")
    for endpoint in endpoints:
        if host_and_port(endpoint) is None:
            raise ConfigError("--endpoint", f"{endpoint!r} is not IP:PORT (IPv6 in brackets)")
    return ConformanceOptions(target, tls, tuple(endpoints), model, dict(map(header, headers)), health, timeout)


async def conform(options: ConformanceOptions, *, as_json: bool, console: Console, errors: Console) -> int:
    """Run all cases and report to `console`; progress and trouble go to `errors`. The exit status."""
    try:
        with Progress(
            TextColumn("{task.description}"), MofNCompleteColumn(), console=errors, transient=True
        ) as progress:
            task = progress.add_task("conformance", total=len(CASES))
            results: list[Result] = await run(options, seen=lambda _: progress.advance(task))
    except Unreachable as nobody:
        errors.print(Text(printable(str(nobody))), soft_wrap=True)
        return UNREACHABLE
    if as_json:
        console.out(report.as_json(results, options.target), highlight=False)
    else:
        console.print(report.table(results, options.target))
    return PASSED if report.passed(results) else FAILED


def main(options: ConformanceOptions, *, as_json: bool) -> int:
    """The same on a terminal."""
    return asyncio.run(conform(options, as_json=as_json, console=Console(), errors=Console(stderr=True)))
