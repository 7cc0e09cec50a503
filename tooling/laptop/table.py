"""What a person sees while the chain runs: endpoints and the last decisions, from the EPP's admin server."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from epp.telemetry.text import printable


def screen(
    pools: Sequence[Mapping[str, Any]], decisions: Sequence[Mapping[str, Any]], gone: Mapping[str, str]
) -> Group:
    """The whole live view, of the JSON of `/endpoints` and `/decisions`. `gone`: names of dead pods by `ip:port`."""
    return Group(endpoint_table(pools, gone), decision_table(decisions))


def endpoint_table(pools: Sequence[Mapping[str, Any]], gone: Mapping[str, str]) -> Table:
    """One row per endpoint of every pool, and one per dead pod. Queue, running and KV use are as last scraped."""
    table = Table(title="endpoints", title_justify="left", expand=True)
    for name in ("pool", "endpoint", "address"):
        table.add_column(name, no_wrap=True)
    for name in ("queue", "running", "KV use", "in flight", "prefix hits", "share"):
        table.add_column(name, justify="right")
    for pool in pools:
        for row in pool["endpoints"]:
            if row["address"] not in gone:
                table.add_row(*map(plain, (pool["name"], row["name"], row["address"])), *_figures(row))
    for address, name in gone.items():
        table.add_row("gone", plain(name), plain(address), *("–",) * 6, style="dim")
    return table


def _figures(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (*_load(row), str(row["in_flight"]), _percent(row["predicted_hit_rate"]), _percent(row["share"]))


def _load(row: Mapping[str, Any]) -> tuple[str, str, str]:
    load = row["load"]
    if load is None:
        return "–", "–", "–"
    return str(load["waiting"]), str(load["running"]), _percent(load["kv_usage"])


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def decision_table(decisions: Sequence[Mapping[str, Any]]) -> Table:
    """The last decisions, newest first, each with the reason in words."""
    table = Table(title="last decisions", title_justify="left", expand=True)
    table.add_column("request", no_wrap=True, max_width=14)
    table.add_column("tokens", justify="right")
    table.add_column("endpoint", no_wrap=True)
    table.add_column("why", ratio=1)
    for decision in decisions:
        texts = (decision["request_id"], str(decision["tokens"]), decision["endpoint"], why(decision))
        table.add_row(*map(plain, texts))
    return table


def plain(text: str) -> Text:
    """What may come from a client or a file, shown as it is: no markup, no emoji codes, no control characters."""
    return Text(printable(text))


def why(decision: Mapping[str, Any]) -> str:
    """One line: the bill of the chosen endpoint and of the runner-up, or the scores where there is no bill."""
    runs = [run for run in decision["profiles"] if not run.get("stage")]
    rows = [row for run in runs for row in run["endpoints"]]
    chosen = next((row for row in rows if row["endpoint"] == decision["endpoint"]), None)
    if chosen is None:
        return "the only way"
    others = sorted((row for row in rows if row is not chosen), key=lambda row: -float(row["total"]))
    if "bill_ms" in chosen:
        terms = ", ".join(f"{term} {ms:.1f}" for term, ms in chosen["bill_ms"].items() if ms >= 0.05)
        text = f"{chosen['cost_ms']:.1f} ms ({terms or 'free'})"
        if "prefill" in decision:
            text += f"; prefilled by {', '.join(decision['prefill'])}"
        return f"{text}; next: {others[0]['endpoint']} {others[0]['cost_ms']:.1f} ms" if others else text
    scores = ", ".join(f"{name} {part['score']:.2f}" for name, part in chosen["scores"].items())
    return scores or "no scorer: the picker alone"
