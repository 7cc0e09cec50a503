"""The lives of plugins: `Plugin.start` and `Plugin.run` as configurations come and go, and what they report."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeAlias

from epp.plugin import Plugin, Services
from epp.scheduling.decision import OnError, name_of

Lasting: TypeAlias = "dict[str, set[Reports]]"
"""Reason of a lasting degradation -> whose it is. One for a process: it is over when nobody has it any more."""


class Lifecycle:
    """Starts and ends the plugins of one pool: those in use live, each in a task of its own.

    Each gets `services`, with reports of its own. What a plugin raises goes to `on_error` and harms no other.
    """

    def __init__(self, services: Services, lasting: Lasting, on_error: OnError) -> None:
        self._services = services
        self._lasting = lasting
        self._on_error = on_error
        self._group: asyncio.TaskGroup | None = None
        self._living: dict[Plugin, tuple[Services, Reports]] = {}
        self._tasks: dict[Plugin, asyncio.Task[None]] = {}

    def use(self, plugins: Iterable[Plugin]) -> None:
        """These live from now on. Those that do already go on as they are; the lives of all others end."""
        wanted = dict.fromkeys(plugins)
        for plugin in [plugin for plugin in self._living if plugin not in wanted]:
            _, reports = self._living.pop(plugin)
            if (task := self._tasks.pop(plugin, None)) is not None:
                task.cancel()
            reports.end()
        for plugin in wanted:
            if plugin not in self._living:
                self._start(plugin)

    async def run(self) -> None:
        """For ever: do what the plugins in use do beside requests."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for plugin, (services, _) in self._living.items():
                self._begin(plugin, services)
            try:
                await asyncio.Event().wait()
            finally:
                self._group = None

    def _start(self, plugin: Plugin) -> None:
        reports = Reports(self._services, self._lasting)
        services = replace(self._services, degraded=reports.degraded, recovered=reports.recovered)
        self._living[plugin] = services, reports
        try:
            plugin.start(services)
        except Exception as error:
            self._on_error(name_of(plugin), error)
        self._begin(plugin, services)

    def _begin(self, plugin: Plugin, services: Services) -> None:
        if self._group is not None and type(plugin).run is not Plugin.run:
            name = f"plugin {name_of(plugin)}"
            self._tasks[plugin] = self._group.create_task(self._live(plugin, services), name=name)

    async def _live(self, plugin: Plugin, services: Services) -> None:
        try:
            await plugin.run(services)
        except Exception as error:
            self._on_error(name_of(plugin), _first(error))


def _first(error: Exception) -> Exception:
    """Of what several tasks raised, the first: a group's own text says nothing."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


class Reports:
    """What one plugin, or a part of a pool, reports in its life."""

    def __init__(self, services: Services, lasting: Lasting) -> None:
        self._services = services
        self._lasting = lasting
        self._over = False

    def degraded(self, reason: str, detail: str = "", *, lasting: bool = False) -> None:
        lasting = lasting and not self._over  # requests that are under way at a reload still end with its hooks
        if lasting:
            self._lasting.setdefault(reason, set()).add(self)
        self._services.degraded(reason, detail, lasting=lasting)

    def recovered(self, reason: str) -> None:
        having = self._lasting.get(reason, set())
        if self in having:
            having.discard(self)
            if not having:
                self._services.recovered(reason)

    def end(self) -> None:
        """Nothing it reported lasts any longer."""
        self._over = True
        for reason in self._lasting:
            self.recovered(reason)
