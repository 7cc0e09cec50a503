"""`warmpath replay`: flags to a plan, results to a table, JSON and a page."""

import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from epp import plugin
from epp.documents.strict import short
from epp.errors import ConfigError
from epp.telemetry.text import printable
from tooling.replay.figures import Slo
from tooling.replay.generators import Arrivals
from tooling.replay.page import page
from tooling.replay.policies import ALWAYS, NEVER, THRESHOLD, TOGETHER, policy
from tooling.replay.replay import Conditions, Failure
from tooling.replay.runs import Plan, Rate, Results, Source, compare, with_oracle
from tooling.replay.table import by_class, table, verdict
from tooling.simulator import presets
from tooling.simulator.engine import Transfer
from tooling.simulator.tiers import L1_SPEED, L2_SPEED

_WIDEST = 400
"""Columns of a terminal that no table needs."""
DEFAULTS = ("prefix-aware", "least-load", "round-robin")
OF_ROLES = ("prefix-aware", ALWAYS, NEVER, THRESHOLD, TOGETHER)
"""The same with `--roles`."""


# The arguments are the command's flags, handed on as click gives them.
def plan(  # noqa: PLR0913
    *,
    trace: str,
    requests: int | None,
    arrivals: Arrivals,
    pods: str | None,
    roles: str | None = None,
    transfer: float | None = None,
    l1: str | None,
    l2: str | None,
    pods_per_node: int,
    policies: Sequence[str],
    plugins_from: tuple[str, ...] | None = None,
    oracle: bool,
    load: float | None,
    rate: float | None,
    times: float | None,
    seed: int,
    runs: int,
    workers: int,
    slo_ttft: float,
    slo_tpot: float,
    scrape: float,
    event_lag: float,
    replicas: int,
    exchange: float | None,
    lean: bool,
    watch_answers: float,
    foreign: float,
    fail: Sequence[str],
    only: str | None,
    class_slo: Sequence[str],
) -> Plan:
    """The plan that the flags describe. Raises ConfigError."""
    rates = [Rate(kind, value) for kind, value in (("load", load), ("rate", rate), ("times", times)) if value]
    if len(rates) > 1:
        raise ConfigError("rate", "expected one of --load, --rate and --times")
    kinds = presets.pods(pods or ("h100-8b" if roles is not None else "8*h100-8b"))
    labels: tuple[str, ...] = ()
    if roles is not None:
        labels = presets.roles(roles)
        if len(kinds) not in (1, len(labels)):
            raise ConfigError("pods", f"expected one kind, or {len(labels)} pods as --roles says; got {len(kinds)}")
        kinds = kinds * len(labels) if len(kinds) == 1 else kinds
    found = tuple(policy(each, plugins_from) for each in policies or (OF_ROLES if labels else DEFAULTS))
    if len({each.name for each in found}) < len(found):
        raise ConfigError("policy", "two policies have one name; expected each once")
    is_file = Path(trace).suffix in (".jsonl", ".gz", ".json")
    return Plan(
        Source(trace, requests, arrivals),
        tuple(presets.with_l1(kinds, None if l1 is None else presets.tier(l1, "l1", L1_SPEED))),
        with_oracle(found) if oracle and not labels else found,
        Conditions(
            scrape=scrape,
            event_lag=event_lag,
            replicas=replicas,
            exchange=exchange,
            sees_answer=not lean,
            watched=watch_answers,
            foreign=foreign,
            roles=labels,
            transfer=Transfer() if transfer is None else Transfer(tokens_per_second=transfer),
            failures=tuple(_failure(each) for each in fail),
            l2=None if l2 is None else presets.tier(l2, "l2", L2_SPEED),
            pods_per_node=pods_per_node,
        ),
        rates[0] if rates else Rate() if is_file else Rate("load", 0.8),
        Slo(slo_ttft, slo_tpot),
        tuple(range(seed, seed + runs)),
        workers,
        only,
        dict(_class_slo(each) for each in class_slo),
    )


def _class_slo(text: str) -> tuple[str, plugin.Slo]:
    """`CLASS=TTFT/TPOT` in seconds, as in `chat=0.5/0.025`; `-` for one that is not wanted."""
    label, _, both = text.rpartition("=")
    try:
        ttft, tpot = (None if each == "-" else float(each) for each in both.split("/"))
        good = bool(label) and all(each is None or 0 < each < inf for each in (ttft, tpot))
    except ValueError:
        good = False
    if not good:
        raise ConfigError("class-slo", f"expected CLASS=TTFT/TPOT in seconds, as in chat=0.5/0.025, got {short(text)}")
    return label, plugin.Slo(ttft, tpot, label)


def _failure(text: str) -> Failure:
    """`POD@AT+SECONDS`: the third pod dies at 60 s and is back after 30 is `3@60+30`.

    `POD@AT+SECONDS:SHARE%`: meanwhile it answers that share of its requests with errors, as in `3@60+30:100%`.
    """
    try:
        pod, _, times = text.partition("@")
        times, errs, share = times.partition(":")
        at, _, seconds = times.partition("+")
        errors = float(share.removesuffix("%")) / 100 if errs else 0.0
        failure = Failure(int(pod) - 1, float(at), float(seconds), errors)
        good = 0 <= failure.at < inf and 0 < failure.seconds < inf and (not errs or 0 < errors <= 1)
    except ValueError:
        good = False
    if not good or (errs and not share.endswith("%")):
        expected = "POD@AT+SECONDS, as in 3@60+30, or POD@AT+SECONDS:SHARE%, as in 3@60+30:100%"
        raise ConfigError("fail", f"expected {expected}, got {short(text)}")
    return failure


def main(plan: Plan, *, as_json: bool, html: Path | None) -> int:
    """Run it and show it. Raises ConfigError."""
    if html is not None and not html.absolute().parent.is_dir():
        raise ConfigError(str(html), "there is no such directory")
    console = Console(stderr=True)
    results = _with_bar(plan, console)
    if html is not None:
        html.write_text(page(plan, results), encoding="utf-8")
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(results), indent=1).decode() + "\n")
    else:
        terminal = Console().width
        for shown in filter(None, (table(plan, results), by_class(results))):
            Console(width=max(terminal, Console(width=_WIDEST).measure(shown).maximum)).print(shown)
        if said := verdict(results):
            Console().print(said, soft_wrap=True)
    return 0


def _with_bar(plan: Plan, console: Console) -> Results:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    tasks: dict[str, TaskID] = {}

    def progress(what: str, ended: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(escape(printable(what)), total=total)
        if ended == total or not ended % 50:
            bar.update(tasks[what], completed=ended)

    with bar:
        return compare(plan, progress)
