"""From plugin specifications to plugin objects, each built once, checked, and given its name, clock and randomness."""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from random import Random
from types import new_class
from typing import Any, Final, TypeVar, cast

from epp.configuration import builtin
from epp.configuration.schema import PluginSpec
from epp.documents.strict import Problems, Wrong, build, nearest, short
from epp.errors import ConfigError
from epp.plugin import (
    CacheRoom,
    EncoderMatch,
    FailureShare,
    InFlight,
    Plugin,
    PrefixMatch,
    Producer,
    ReadsPrefixMatch,
    Reference,
    SessionState,
)
from epp.scheduling.headroom import LatencyHeadroom

# mypy: disable-error-code="type-abstract"
# Abstract classes are passed around here to ask with isinstance, never to be made.

P = TypeVar("P", bound=Plugin)

ENTRY_POINTS: Final = "warmpath.plugins"
OWN: Final = ("epp", "tooling")

_PRODUCERS: Final[Mapping[type[Any], str]] = {
    PrefixMatch: "approx-prefix-cache-producer",
    CacheRoom: "approx-cache-room-producer",
    InFlight: "inflight-load-producer",
    FailureShare: "failure-share-producer",
    EncoderMatch: "mm-embeddings-cache-producer",
    LatencyHeadroom: "predicted-latency-producer",
    SessionState: "session-state-producer",
}
"""Signal -> the producer added where a plugin needs it and the configuration has none."""
_PREFIX_PRODUCERS: Final = ("approx-prefix-cache-producer", "precise-prefix-cache-producer")
"""Types that are added where a plugin names one as its producer of prefix matches."""


@dataclass(frozen=True)
class PluginEntry:
    """One plugin and how it came in: as written at `path`, or `added` (the reason)."""

    name: str
    type: str
    plugin: Plugin
    parameters: Mapping[str, Any]
    path: str
    added: str = ""


class PluginRegistry:
    """The plugins of one configuration, by name.

    An entry of `previous` with the same name, type and parameters is taken over as it is, with all it knows.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        random: Random,
        previous: Mapping[str, PluginEntry],
        plugins_from: Sequence[str] | None = None,
    ) -> None:
        self.by_name: dict[str, PluginEntry] = {}
        self.built_in: dict[str, str] = {}
        """Names of plugins whose job is done without a plugin object -> their paths."""
        self.types: dict[str, str] = {}
        """Their types."""
        self.idle: list[tuple[str, str]] = []
        """Path and why, of their parameters that change nothing."""
        self.failed: set[str] = set()
        """Names of plugins that are declared and wrong; nothing more is reported of them."""
        self.nameless = False
        """Whether the name of one of those is not known."""
        self._clock = clock
        self._random = random
        self._previous = previous
        self._plugins_from = plugins_from

    @property
    def incomplete(self) -> bool:
        """Whether a plugin is missing that an error reported already."""
        return self.nameless or bool(self.failed)

    def reported(self, name: str) -> bool:
        """Whether an error said already why there is no plugin of this name."""
        return name in self.failed or isinstance(name, Wrong) or (self.nameless and name not in self.by_name)

    def declare(self, specs: list[PluginSpec], problems: Problems) -> None:
        """Build what `plugins:` lists; companions last, since they are made of another plugin."""
        later: list[tuple[type[Plugin], PluginSpec, str]] = []
        names: set[str] = set()
        for path, spec in _moved(specs, problems):
            name = spec.name or spec.type
            if name in names and not isinstance(name, Wrong):
                problems.add(f"{path}.name", f"a plugin above is called {short(name)} too; expected a name of its own")
                continue
            names.add(name)
            if isinstance(spec.type, Wrong):
                self.failed.add(name)
                self.nameless |= not spec.name
                continue
            before = len(problems.errors)
            with problems.collect():
                cls = self._class(spec, path)
                if cls is None:
                    self.built_in[name], self.types[name] = path, builtin.ALIASES.get(spec.type, spec.type)
                elif hasattr(cls, "companion_of"):
                    later.append((cls, spec, path))
                else:
                    self._make(cls, spec, path)
            if len(problems.errors) > before:
                self.failed.add(name)
        for cls, spec, path in later:
            before = len(problems.errors)
            with problems.collect():
                self._make(cls, spec, path)
            if len(problems.errors) > before:
                self.failed.add(spec.name or spec.type)

    def builtin(self, type_: str, kind: type[P], reason: str) -> P:
        """The entry that has this built-in type's name, or a new one with default parameters."""
        entry = self.by_name.get(type_)
        plugin = entry.plugin if entry else self._make(find_class(type_, type_), PluginSpec(type_), type_, reason)
        if not isinstance(plugin, kind):
            raise ConfigError(
                entry.path if entry else type_, f"{short(type_)} is another plugin's name; expected its own"
            )
        return plugin

    def no_plugin(self, name: str) -> str:
        """Why a reference to it is wrong."""
        if name in self.built_in:
            return f"{short(name)} is built in and always on; expected the name of a plugin that is chosen here"
        named = [entry.name for entry in self.by_name.values() if not entry.added]
        if same := next((entry for entry in self.by_name.values() if entry.type == name), None):
            return f"no plugin is called {short(name)}; the one of that type is called {same.name!r}"
        return f"no plugin is called {short(name)}{nearest(name, named) or '; expected one of ' + ', '.join(named)}"

    def name_prefix_producers(self, problems: Problems) -> None:
        """Tell the producers of `PrefixMatch` apart, and each plugin that names one under what its signal is.

        The first is read by all that name none. A type of ours that is named and not declared is added.
        """
        readers = [entry for entry in self.by_name.values() if isinstance(entry.plugin, ReadsPrefixMatch)]
        named = {}
        for entry in readers:
            wanted = cast("ReadsPrefixMatch", entry.plugin).prefix_match_info_producer_name
            path = f"{entry.path}.parameters.prefixMatchInfoProducerName"
            if not wanted or self.reported(wanted):
                continue
            if wanted not in self.by_name and wanted in _PREFIX_PRODUCERS:
                self.builtin(wanted, Producer, f"{entry.name} reads what it finds")
            if not _finds_prefixes(found := self.by_name.get(wanted)):
                own = [each.name for each in self.by_name.values() if _finds_prefixes(each)]
                what = "no plugin is called" if found is None else "no producer of prefix matches is"
                problems.add(path, f"{what} {short(wanted)}{nearest(wanted, [*own, *_PREFIX_PRODUCERS])}")
                continue
            named[entry.name] = wanted
        signals: dict[str, type[PrefixMatch]] = {}
        for entry in self.by_name.values():
            if _finds_prefixes(entry):
                first = not signals
                signals[entry.name] = PrefixMatch if first else _signal_of(entry.name)
                vars(entry.plugin)["produces"] = signals[entry.name]
        for entry in readers:
            plugin = cast("ReadsPrefixMatch", entry.plugin)
            plugin.prefix_match = signals.get(named.get(entry.name, ""), PrefixMatch)
            needs = tuple(plugin.prefix_match if issubclass(need, PrefixMatch) else need for need in plugin.needs)
            vars(plugin)["needs"] = needs

    def referred(self, reference: Reference, path: str, reason: str) -> Plugin:
        """The plugin of this name, or else of this type, or a new one where that may be added."""
        name, kind = reference.name, reference.kind
        entry = self.by_name.get(name)
        if entry is None and reference.add:
            entry = next((each for each in self.by_name.values() if each.type == name), None)
            if entry is None and name in builtin.CLASSES:
                self.builtin(name, Plugin, reason)
                entry = self.by_name[name]
        if entry is None:
            raise ConfigError(path, self.no_plugin(name))
        if not isinstance(entry.plugin, kind):
            raise ConfigError(path, f"expected a {kind.__name__.lower()}; {short(name)} is a {entry.type}")
        return entry.plugin

    def own(self, type_: str, name: str, kind: type[P], reason: str) -> P:
        """A new entry of this built-in type under a name of its own, with default parameters."""
        if name in self.by_name:
            raise ConfigError(self.by_name[name].path, f"{short(name)} is the name of an entry that is added")
        plugin = self._make(find_class(type_, type_), PluginSpec(type_, name), type_, reason)
        assert isinstance(plugin, kind)
        return plugin

    def producer(self, signal: type[Any], wanted_by: str, path: str) -> None:
        """Add a producer of the signal where no plugin produces it."""
        if any(
            isinstance(entry.plugin, Producer) and entry.plugin.produces is signal for entry in self.by_name.values()
        ):
            return
        if signal not in _PRODUCERS and self.incomplete:
            return  # one of those that failed may be who does
        if signal not in _PRODUCERS:
            raise ConfigError(path, f"needs the signal {signal.__qualname__}, and no plugin produces it")
        self.builtin(_PRODUCERS[signal], Producer, f"{wanted_by} needs {signal.__qualname__}")

    def _class(self, spec: PluginSpec, path: str) -> type[Plugin] | None:
        """The class a type names; None for what is built in."""
        kind, parameters = builtin.ALIASES.get(spec.type, spec.type), spec.parameters or {}
        if kind in builtin.MISSING:
            raise ConfigError(f"{path}.type", f"{kind} is not there yet: {builtin.MISSING[kind]}")
        problems = Problems()
        if (harmless := builtin.BUILT_IN.get(kind)) is None:
            return find_class(kind, f"{path}.type", self._plugins_from)
        for key, value in () if kind in builtin.NOTHING else parameters.items():
            where, known = f"{path}.parameters.{key}", harmless.get(key)
            if isinstance(known, builtin.Idle):
                self.idle += [(where, known.why)] if known.why and value != known.usual else []
            elif known is None:
                expected = (
                    "; expected one of " + ", ".join(harmless) if harmless else "; no parameters are expected here"
                )
                problems.add(where, f"unknown{nearest(key, harmless) or expected}")
            elif value not in known:
                problems.add(where, f"{kind} with {short(value)} is not there; {short(known[0])} is built in")
        problems.check()
        return None

    def _make(self, cls: type[Plugin], spec: PluginSpec, path: str, added: str = "") -> Plugin:
        name, parameters = spec.name or spec.type, dict(spec.parameters or {})
        owner = self._companion(cls, name, path) if hasattr(cls, "companion_of") else None
        before = self._previous.get(name)
        if before and type(before.plugin) is cls and before.parameters == parameters and self._kept(owner):
            plugin = before.plugin
        else:
            plugin = _construct(cls, parameters, owner, path)
        try:
            plugin.name, plugin.clock, plugin.random = name, self._clock, self._random
        except AttributeError as error:
            raise ConfigError(
                path, f"{cls.__qualname__} does not let name, clock and random be set: {error}"
            ) from error
        self.by_name[name] = PluginEntry(name, spec.type, plugin, parameters, path, added)
        return plugin

    def _kept(self, owner: Plugin | None) -> bool:
        return owner is None or any(entry.plugin is owner for entry in self._previous.values())

    def _companion(self, cls: Any, name: str, path: str) -> Plugin:
        """The active plugin that `cls` is the other half of; added if no plugin does its job."""
        wanted: type[Plugin] = cls.companion_of
        if issubclass(wanted, Producer):
            self.producer(wanted.produces, name, path)
        for entry in self.by_name.values():
            if isinstance(entry.plugin, wanted):
                return entry.plugin
        raise ConfigError(
            path, f"{cls.__qualname__} works only with {wanted.__qualname__}, which is not among the plugins"
        )


def _finds_prefixes(entry: PluginEntry | None) -> bool:
    return entry is not None and isinstance(entry.plugin, Producer) and type(entry.plugin).produces is PrefixMatch


@cache
def _signal_of(producer: str) -> type[PrefixMatch]:
    """Under what the prefix matches of a producer of this name are, where it is not the first."""
    return new_class(f"PrefixMatch of {producer}", (PrefixMatch,), {"frozen": True, "gc": False})


def _moved(specs: list[PluginSpec], problems: Problems) -> list[tuple[str, PluginSpec]]:
    """`specs` with their paths; parameters that another type has now go to one of that type, as GIE v1.5 means them."""
    kept: list[tuple[str, PluginSpec]] = []
    added: dict[str, tuple[str, dict[str, Any]]] = {}
    for i, spec in enumerate(specs):
        path, own = f"plugins[{i}]", dict(spec.parameters or {})
        for key in spec.parameters or ():
            if (owner := builtin.BELONGS.get((spec.type, key))) is None:
                continue
            if any(other.type == owner for other in specs):
                problems.add(f"{path}.parameters.{key}", f"a parameter of {owner}, which is configured on its own")
            added.setdefault(owner, (path, {}))[1][key] = own.pop(key)
        if (owner := builtin.IMPLIES.get(spec.type)) is not None:
            added.setdefault(owner, (path, {}))
        kept.append((path, PluginSpec(spec.type, spec.name, own)))
    have = {spec.type for spec in specs}
    return kept + [(path, PluginSpec(owner, "", own)) for owner, (path, own) in added.items() if owner not in have]


def find_class(type_: str, path: str, plugins_from: Sequence[str] | None = None) -> type[Plugin]:
    """The class of a built-in type, an entry point, or `module.Class`. Raises ConfigError with the nearest known name.

    `plugins_from`: modules that may be imported besides our own, with what lies below each; None: any.
    """
    where = builtin.CLASSES.get(type_, type_)
    if "." not in where:
        points = {point.name: point.value.replace(":", ".") for point in metadata.entry_points(group=ENTRY_POINTS)}
        if type_ not in points:
            raise ConfigError(path, _no_type(type_, points))
        where = points[type_]
    module, _, name = where.rpartition(".")
    module = builtin.MODULES.get(module, module)
    if not all(entry.isidentifier() for entry in where.split(".")):
        raise ConfigError(path, f"expected a known type or module.Class, got {short(type_)}")
    if plugins_from is not None and not any(f"{module}.".startswith(f"{each}.") for each in (*OWN, *plugins_from)):
        allowed = ", ".join(plugins_from) or "none"
        message = f"{short(where)} is code of the module {module}; --plugins-from allows {allowed}"
        raise ConfigError(path, f"{message}; expected a built-in type, or that module to be allowed")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:  # whatever a user's module raises while it is imported
        said = f"{short(module)} cannot be imported: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            said += "; expected it beside the configuration, installed, or in PYTHONPATH"
        raise ConfigError(path, said) from error
    if not (isinstance(found, type) and issubclass(found, Plugin)):
        raise ConfigError(path, f"expected {short(where)} to be a class made from epp.plugin's, got {short(found)}")
    if missing := ", ".join(sorted(getattr(found, "__abstractmethods__", ()))):
        raise ConfigError(path, f"{found.__qualname__} does not have the method {missing}")
    return found


def _no_type(type_: str, points: Iterable[str]) -> str:
    if type_ in builtin.REMOVED:
        successor, how = builtin.REMOVED[type_]
        return f"{type_} is gone from GIE and llm-d; expected {successor} ({how})"
    near = nearest(
        type_, [*builtin.CLASSES, *builtin.ALIASES, *builtin.BUILT_IN, *builtin.MISSING, *builtin.REMOVED, *points]
    )
    name = near.split("'")[1] if near else ""
    if name in builtin.MISSING:
        near = f"; {name} is a known type, but not there yet: {builtin.MISSING[name]}"
    elif name in builtin.REMOVED:
        near = f"; did you mean {builtin.REMOVED[name][0]!r}?"
    return f"no plugin type {short(type_)}{near or '; expected a known type or module.Class'}"


def _construct(cls: type[Plugin], parameters: dict[str, Any], owner: Plugin | None, path: str) -> Plugin:
    try:
        if owner is None:
            return build(cls, parameters, f"{path}.parameters")
        if parameters:
            raise ConfigError(f"{path}.parameters", "unknown; no parameters are expected here")
        make: Any = cls
        made: Plugin = make(owner)
        return made
    except ConfigError:
        raise
    except Exception as error:  # whatever a user's constructor raises
        raise ConfigError(path, f"{cls.__qualname__} cannot be made: {type(error).__name__}: {error}") from error
