"""Schedulers built by hand, for tests that need no configuration."""

from collections.abc import Mapping, Sequence
from typing import Any

from epp.plugin import Endpoint, Filter, Load, Picker, Plugin, PrefixMatch, Producer, ProfileHandler, Request, Scorer
from epp.scheduling.decision import Chain, OnError
from epp.scheduling.pickers import MaxScorePicker, SingleProfileHandler
from epp.scheduling.scheduler import Scheduler


class Held(Producer[PrefixMatch]):
    """Says what each endpoint holds, by its name: (tokens, blocks of 10)."""

    produces = PrefixMatch

    def __init__(self, **held: tuple[int, int]) -> None:
        self.held = held

    def produce(self, request: Request, endpoints: Sequence[Endpoint]) -> Mapping[Endpoint, PrefixMatch]:
        return {e: PrefixMatch(*self.held.get(e.name, (0, 0)), 10) for e in endpoints}


def pod(name: str, *, labels: Mapping[str, str] | None = None, address: str = "", **load: Any) -> Endpoint:
    return Endpoint(name, address or f"{name}:8000", labels or {}, Load(**load))


def pods(names: str) -> list[Endpoint]:
    """One idle endpoint for each letter."""
    return [pod(name) for name in names]


def ask(id: str = "r", **fields: Any) -> Request:
    return Request(id=id, model=fields.pop("model", "llama"), **fields)


def fail(plugin: str, error: Exception) -> None:
    raise error


def scheduler(
    *scorers: Scorer | tuple[Scorer, float],
    filters: Sequence[Filter] = (),
    picker: Picker | None = None,
    producers: Sequence[Producer[Any]] = (),
    handler: ProfileHandler | None = None,
    others: Sequence[Plugin] = (),
    on_error: OnError = fail,
    fallbacks: int = 0,
) -> Scheduler:
    """One profile named `default`. Unless `on_error` is given, a plugin's exception fails the test."""
    picker = picker or MaxScorePicker()
    handler = handler or SingleProfileHandler()
    weighed = [entry if isinstance(entry, tuple) else (entry, 1.0) for entry in scorers]
    chain = Chain("default", filters, weighed, picker)
    plugins = [*producers, *filters, *(scorer for scorer, _ in weighed), picker, handler, *others]
    return Scheduler(
        producers, {"default": chain}, handler, plugins, wall_clock=lambda: 1.5, on_error=on_error, fallbacks=fallbacks
    )
