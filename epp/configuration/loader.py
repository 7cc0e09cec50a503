"""From a configuration to objects ready to run: `load`. All that can be wrong is reported before the first request.

What a configuration leaves out is added here: producers of signals that plugins need, a picker, a profile handler, a
saturation detector, the profile `default`. `epp.configuration.describe` shows the result, additions included.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any, Final

from epp.configuration.builtin import ALIASES, BUILT_IN, EXTRACTOR, IDLE, LISTENERS, MISSING, NOTHING
from epp.configuration.engines import CoreMetricsExtractor
from epp.configuration.flow import flow_settings, policies, with_flow_control
from epp.configuration.limits import limit_settings
from epp.configuration.registry import PluginEntry, PluginRegistry
from epp.configuration.schema import (
    FILE_DISCOVERY,
    EndpointPickerConfig,
    ProfilePlugin,
    SchedulingProfile,
    placed,
    salvaged,
)
from epp.documents.files import content_of
from epp.documents.strict import MAX_BYTES, Problems, Wrong, nearest, short, value_at
from epp.errors import ConfigError, ConfigErrors
from epp.flow.limits import LimitSettings
from epp.flow.queues import FlowSettings
from epp.parsing.parser import PARSERS
from epp.plugin import (
    Admitter,
    BandSelectionPolicy,
    Cost,
    Decider,
    Detector,
    FairnessPolicy,
    Filter,
    Guard,
    OrderingPolicy,
    Picker,
    Plugin,
    PrefixMatch,
    Producer,
    ProfileHandler,
    Scorer,
    UsageLimitPolicy,
)
from epp.pool.engines import ALL_ENGINES, Engines
from epp.scheduling.decision import Chain, OnError
from epp.scheduling.scheduler import OnPartsEnded, Scheduler
from epp.scheduling.shadow import ShadowPolicy

# mypy: disable-error-code="type-abstract"
# Abstract classes are passed around here to ask with isinstance, never to be made.

Clock = Callable[[], float]

DEFAULT_STRATEGY: Final = "prefix-aware"
_STRATEGIES: Final = resources.files("epp.configuration") / "strategies"


@dataclass(frozen=True)
class Profile:
    """What a chain is made of; scorers with their weights."""

    name: str
    filters: tuple[Filter, ...]
    scorers: tuple[tuple[Scorer, float], ...]
    picker: Picker

    def chain(self) -> Chain:
        return Chain(self.name, self.filters, self.scorers, self.picker)


@dataclass(frozen=True)
class ShadowProfile:
    """A profile that picks beside the others, for a `sample` (share) of the requests; `cost` prices its picks."""

    profile: Profile
    sample: float
    cost: Cost


@dataclass(frozen=True)
class Pipeline:
    """A configuration as objects, ready to run."""

    plugins: tuple[Plugin, ...]
    """All that take entry, each once, for their hooks."""
    producers: tuple[Producer[Any], ...]
    """In the order to run them: a plugin that needs a signal comes after the one that finds it."""
    profiles: Mapping[str, Profile]
    handler: ProfileHandler
    detector: Detector
    flow: FlowSettings | None
    """Of flow control; None: requests do not wait here."""
    shadow: ShadowProfile | None
    parsers: tuple[str, ...]
    """Types of those that the configuration names, in its order; none: the usual ones."""
    endpoints_file: Path | None
    """The pool's endpoints, where `--endpoints` names none."""
    registry: Mapping[str, PluginEntry]
    """Every plugin of the configuration and every one added, by name."""
    unused: tuple[str, ...]
    """Names of plugins that are declared and referred to by nothing; they take no entry."""
    idle: tuple[str, ...] = ()
    """Settings of the configuration that are accepted and change nothing: path and why."""
    guards: tuple[Guard, ...] = ()
    """In the order of the configuration."""
    limits: LimitSettings | None = None
    engines: Engines = ALL_ENGINES

    def scheduler(
        self,
        *,
        wall_clock: Clock,
        on_error: OnError,
        fallbacks: int = 0,
        others: Sequence[Plugin] = (),
        shadow_random: Random | None = None,
        on_parts_ended: OnPartsEnded = lambda parts: None,
        made: Callable[..., Scheduler] = Scheduler,
    ) -> Scheduler:
        """A scheduler of this configuration, see `Scheduler`. `others`: plugins that have hooks beside its own.

        `shadow_random` draws the requests that the shadow profile looks at; None: it looks at none. `made`: its class,
        or what takes the same arguments.
        """
        shadow = None
        if self.shadow is not None and shadow_random is not None:
            chain = self.shadow.profile.chain()
            shadow = ShadowPolicy(chain, self.shadow.cost, self.shadow.sample, shadow_random, on_error)
        return made(
            self.producers,
            {name: profile.chain() for name, profile in self.profiles.items()},
            self.handler,
            (*self.plugins, *others),
            wall_clock=wall_clock,
            on_error=on_error,
            fallbacks=fallbacks,
            shadow=shadow,
            on_parts_ended=on_parts_ended,
        )


def strategies() -> list[str]:
    """Names of the built-in configurations."""
    return sorted(each.name.removesuffix(".yaml") for each in _STRATEGIES.iterdir() if each.name.endswith(".yaml"))


def strategy_text(name: str) -> str:
    """The YAML of a built-in configuration. ConfigError names the ones there are."""
    known = strategies()
    if name not in known:
        raise ConfigError("strategy", f"expected one of {', '.join(known)}, got {short(name)}{nearest(name, known)}")
    return (_STRATEGIES / f"{name}.yaml").read_text("utf-8")


def load_strategy(name: str, *, clock: Clock, random: Random, flow_control: bool = False) -> Pipeline:
    """The pipeline of a built-in configuration."""
    return load_text(strategy_text(name), clock=clock, random=random, where=f"{name}.yaml", flow_control=flow_control)


def load_text(
    text: str | bytes,
    *,
    clock: Clock,
    random: Random,
    where: str = "",
    previous: Pipeline | None = None,
    plugins_from: Sequence[str] | None = None,
    flow_control: bool = False,
) -> Pipeline:
    """The pipeline of an EndpointPickerConfig in YAML. Raises ConfigError: a line for each error, each with `where`.

    `plugins_from`: modules whose classes it may name, besides our own; None: any. `flow_control`: as if the
    configuration had its feature gate on, see `with_flow_control`.
    """
    problems = Problems()
    pipeline = None
    if (config := salvaged(text, problems)) is not None:
        with problems.collect():
            registry = PluginRegistry(clock, random, previous.registry if previous else {}, plugins_from)
            if flow_control and not config.flow_control_on:
                config = with_flow_control(config)
            pipeline = _load(config, registry, problems)
    if pipeline is None:
        raise placed(ConfigErrors(problems.errors), where)
    return pipeline


def read_file(path: Path) -> bytes:
    """A configuration file's bytes, little more of them than a configuration may have. Raises ConfigError."""
    return content_of(path, MAX_BYTES)


def load_file(
    path: Path,
    *,
    clock: Clock,
    random: Random,
    plugins_from: Sequence[str] | None = None,
    flow_control: bool = False,
) -> Pipeline:
    """The pipeline of an EndpointPickerConfig file, as `load_text`; to follow its changes, see
    `epp.configuration.reload`.
    """
    return load_text(
        read_file(path),
        clock=clock,
        random=random,
        where=str(path),
        plugins_from=plugins_from,
        flow_control=flow_control,
    )


def load(config: EndpointPickerConfig, *, clock: Clock, random: Random, previous: Pipeline | None = None) -> Pipeline:
    """The pipeline of a configuration. Raises ConfigError.

    A plugin that `previous` has under the same name, type and parameters is taken over as it is, so that a reload
    forgets neither caches nor requests in flight, except those of the plugins it changes.
    """
    problems = Problems()
    pipeline = _load(config, PluginRegistry(clock, random, previous.registry if previous else {}), problems)
    problems.check()
    assert pipeline is not None
    return pipeline


def _load(config: EndpointPickerConfig, registry: PluginRegistry, problems: Problems) -> Pipeline | None:
    """The same; what is wrong goes to `problems`, except what follows from an error reported already. None: wrong."""
    registry.nameless = any(error.path == "plugins" for error in problems.errors)
    if not config.plugins and not registry.nameless:
        problems.add("plugins", "expected at least one plugin, got none")
    registry.declare(config.plugins, problems)
    registry.name_prefix_producers(problems)
    _check_built_in(config, registry, problems)
    detector = _detector(config, registry, problems)
    flow = flow_settings(config, registry, detector, problems) if config.flow_control_on else None
    limits = limit_settings(config, problems)
    parsers = _parsers(config, registry, problems)
    profiles = _profiles(config, registry, problems)
    shadow = None
    with problems.collect():
        shadow = _shadow(config, profiles, registry)
    if registry.incomplete or any(error.path.startswith(("shadow", "schedulingProfiles")) for error in problems.errors):
        return None  # whether the rest fits together cannot be said
    with problems.collect():
        engines = _engines(registry)
        handler = _handler(profiles, registry)
        links = _links(registry)
        linked = [plugin for _, plugins in links for plugin in plugins.values()]
        unused = _unused(registry, profiles.values(), shadow, handler, (detector, *linked, *policies(flow)))
        producers = _producers(registry, unused)
    if problems.errors:
        return None
    for plugin, others in links:
        plugin.connect(others)
    plugins = tuple(entry.plugin for entry in registry.by_name.values() if entry.name not in unused)
    return Pipeline(
        plugins,
        producers,
        profiles,
        handler,
        detector,
        flow,
        shadow,
        parsers,
        config.endpoints_file,
        registry.by_name,
        tuple(unused),
        _idle(config, registry),
        tuple(entry.plugin for entry in registry.by_name.values() if isinstance(entry.plugin, Guard)),
        limits,
        engines,
    )


def _engines(registry: PluginRegistry) -> Engines:
    engines = None
    for entry in registry.by_name.values():
        if isinstance(entry.plugin, CoreMetricsExtractor):
            if engines is not None:
                raise ConfigError(entry.path, f"{entry.name} is a second {entry.type}; expected one")
            engines = entry.plugin.engines
    return engines or ALL_ENGINES


def _check_built_in(config: EndpointPickerConfig, registry: PluginRegistry, problems: Problems) -> None:
    """Parsers and data sources that sections name: a declared plugin, or the type itself."""
    for path, name in config.built_in:
        if (
            name == EXTRACTOR
            or name in registry.built_in
            or ALIASES.get(name, name) in BUILT_IN
            or registry.reported(name)
        ):
            continue
        entry = registry.by_name.get(name)
        if entry is not None and (entry.type in LISTENERS or isinstance(entry.plugin, Producer)):
            continue
        if name in registry.by_name:
            problems.add(path, f"{short(name)} is no parser, data source or extractor")
        elif name in MISSING:
            problems.add(path, f"{name} is not there yet: {MISSING[name]}")
        else:
            problems.add(path, f"no plugin is called {short(name)}{nearest(name, [*registry.built_in, *BUILT_IN])}")


def _parsers(config: EndpointPickerConfig, registry: PluginRegistry, problems: Problems) -> tuple[str, ...]:
    found = []
    for path, name in config.parsers:
        type_ = registry.types.get(name, name)
        if type_ in PARSERS:
            found.append(type_)
        elif type_ in BUILT_IN:
            problems.add(path, f"{short(name)} is no parser; expected one of {', '.join(PARSERS)}")
    return tuple(found)


def _detector(config: EndpointPickerConfig, registry: PluginRegistry, problems: Problems) -> Detector:
    path, name = config.detector
    entry = registry.by_name.get(name)
    if entry is not None:
        if isinstance(entry.plugin, Detector):
            return entry.plugin
        problems.add(path, f"{short(name)} is no saturation detector")
    elif name not in ("", "utilization-detector", "concurrency-detector") and not registry.reported(name):
        problems.add(path, registry.no_plugin(name))
    elif name == "concurrency-detector":
        return registry.builtin(name, Detector, f"named by {path}")
    if not name and config.flow_control_on:
        own = [each for each in registry.by_name.values() if isinstance(each.plugin, Detector)]
        if cost := next((each.plugin for each in own if isinstance(each.plugin, Cost)), None):
            assert isinstance(cost, Detector)
            return cost
    return registry.builtin("utilization-detector", Detector, "the default")


# --- profiles -------------------------------------------------------------------------------------------------------


def _profiles(config: EndpointPickerConfig, registry: PluginRegistry, problems: Problems) -> dict[str, Profile]:
    profiles: dict[str, Profile] = {}
    specs = config.scheduling_profiles or [_default_profile(registry)]
    for i, spec in enumerate(specs):
        path = f"schedulingProfiles[{i}]"
        if spec.name in profiles and not isinstance(spec.name, Wrong):
            problems.add(
                f"{path}.name", f"a profile above is called {short(spec.name)} too; expected a name of its own"
            )
        with problems.collect():
            shadow = config.shadow is not None and config.shadow.profile == spec.name
            profiles[spec.name] = _profile(spec, path, shadow, registry, problems)
    return profiles


def _default_profile(registry: PluginRegistry) -> SchedulingProfile:
    """Every filter, scorer and picker. A detector that can filter is left out: it was declared to detect."""
    names = [
        entry.name
        for entry in registry.by_name.values()
        if isinstance(entry.plugin, (Filter, Scorer, Picker))
        and (isinstance(entry.plugin, Scorer) or not isinstance(entry.plugin, Detector))
    ]
    return SchedulingProfile("default", [ProfilePlugin(name) for name in names])


def _picker(profile: str, shadow: bool, registry: PluginRegistry) -> Picker:
    reason = f"profile {profile} has no picker"
    if not shadow:
        return registry.builtin("max-score-picker", Picker, reason)
    return registry.own("max-score-picker", f"{profile}-picker", Picker, reason)


def _profile(spec: SchedulingProfile, path: str, shadow: bool, registry: PluginRegistry, problems: Problems) -> Profile:
    filters: list[Filter] = []
    scorers: list[tuple[Scorer, float]] = []
    pickers: list[Picker] = []
    seen: set[str] = set()
    for j, reference in enumerate(spec.plugins):
        where = f"{path}.plugins[{j}]"
        with problems.collect():
            plugin = _in_profile(reference, where, registry, seen)
            if isinstance(plugin, Filter):
                filters.append(plugin)
            if isinstance(plugin, Scorer):
                scorers.append((plugin, 1.0 if reference.weight is None else reference.weight))
            if isinstance(plugin, Picker):
                pickers.append(plugin)
                if len(pickers) > 1:
                    problems.add(f"{where}.pluginRef", f"{plugin.name} is a second picker; expected one for a profile")
    picker = pickers[0] if pickers else _picker(spec.name, shadow, registry)
    return Profile(spec.name, tuple(filters), tuple(scorers), picker)


def _in_profile(reference: ProfilePlugin, path: str, registry: PluginRegistry, seen: set[str]) -> Plugin | None:
    name, weight = reference.plugin_ref, reference.weight
    if registry.reported(name):
        return None
    if name in seen:
        raise ConfigError(f"{path}.pluginRef", f"{short(name)} is in this profile already; expected it once")
    seen.add(name)
    entry = registry.by_name.get(name)
    if entry is None and registry.types.get(name) == "token-producer":  # samples of llm-d have it there
        registry.idle.append((f"{path}.pluginRef", f"{short(name)} is built in and always on"))
        return None
    if entry is None:
        raise ConfigError(f"{path}.pluginRef", registry.no_plugin(name))
    chosen = isinstance(entry.plugin, (Filter, Scorer, Picker))
    if isinstance(entry.plugin, (Producer, Admitter)) and not chosen and weight is None:
        return None  # llm-d's files name them in profiles too; they work by being declared
    if not chosen:
        raise ConfigError(f"{path}.pluginRef", f"expected a filter, scorer or picker; {short(name)} is {_kind(entry)}")
    if weight is not None and not isinstance(entry.plugin, Scorer):
        raise ConfigError(f"{path}.weight", f"expected on scorers only; {short(name)} is {_kind(entry)}")
    if weight is not None and weight < 0.0:
        raise ConfigError(f"{path}.weight", f"expected 0 or more, got {short(weight)}")
    return entry.plugin


def _kind(entry: PluginEntry) -> str:
    kinds = {Filter: "filter", Picker: "picker", Producer: "producer", ProfileHandler: "profile handler"}
    kinds |= {Detector: "saturation detector", FairnessPolicy: "fairness policy", OrderingPolicy: "ordering policy"}
    kinds |= {UsageLimitPolicy: "usage limit policy", BandSelectionPolicy: "band selection policy", Guard: "guard"}
    kinds[Decider] = "decider"
    return "a " + next(
        (word for kind, word in kinds.items() if isinstance(entry.plugin, kind)), "plugin of no such kind"
    )


def _shadow(
    config: EndpointPickerConfig, profiles: dict[str, Profile], registry: PluginRegistry
) -> ShadowProfile | None:
    """Take the shadow's profile out of `profiles`, and see to what it needs."""
    if config.shadow is None:
        return None
    name, path = config.shadow.profile, "shadow.profile"
    if isinstance(name, Wrong):
        return None
    if name not in profiles:
        near = nearest(name, profiles) or "; expected one of " + ", ".join(profiles)
        raise ConfigError(path, f"no profile is called {short(name)}{near}")
    if len(profiles) == 1:
        raise ConfigError(path, f"{short(name)} is the only profile; expected one beside the one whose picks count")
    profile = profiles.pop(name)
    for other in profiles.values():
        if other.picker is profile.picker:  # a picker remembers whose turn it is
            raise ConfigError(
                path, f"{short(name)} has the same picker as profile {other.name}; expected one of its own"
            )
    costs = [entry.plugin for entry in registry.by_name.values() if entry.type == "expected-ttft"]
    cost = costs[0] if costs else registry.builtin("expected-ttft", Cost, "shadow: says what its picks would cost")
    assert isinstance(cost, Cost)
    return ShadowProfile(profile, config.shadow.sample, cost)


def _idle(config: EndpointPickerConfig, registry: PluginRegistry) -> tuple[str, ...]:
    found = list(config.idle)
    parsers = {name for _, name in config.parsers}
    for name, path in registry.built_in.items():
        if registry.types[name] == FILE_DISCOVERY:
            if name != config.discovery[1]:
                found.append((path, f"{short(name)} says nothing: dataLayer.discovery does not name it"))
        elif (why := NOTHING.get(registry.types[name])) is not None:
            found.append((path, why))
        elif registry.types[name] not in PARSERS:
            found.append((path, f"{short(name)} is built in and always on"))
        elif name not in parsers:
            found.append((path, f"{short(name)} reads nothing: requestHandler.parsers does not name it"))
    found += registry.idle
    for entry in registry.by_name.values():
        for key, idle in IDLE.get(ALIASES.get(entry.type, entry.type), {}).items():
            if (value := value_at(entry.parameters, key)) is not None and value != idle.usual:
                found.append((f"{entry.path}.parameters.{key}", idle.why))
    return tuple(f"{path}: {why}" for path, why in found)


# --- what holds them together ---------------------------------------------------------------------------------------


def _handler(profiles: Mapping[str, Profile], registry: PluginRegistry) -> ProfileHandler:
    found = [entry for entry in registry.by_name.values() if isinstance(entry.plugin, ProfileHandler)]
    if len(found) > 1:
        raise ConfigError(found[1].path, f"{found[1].name} is a second profile handler; expected one")
    if len(profiles) > 1 and (not found or found[0].type == "single-profile-handler"):
        names = ", ".join(profiles)
        raise ConfigError("schedulingProfiles", f"{names}: several need a profile handler that chooses among them")
    handler = registry.builtin(
        found[0].name if found else "single-profile-handler", ProfileHandler, "there is one profile"
    )
    try:
        handler.check([*profiles])
    except ValueError as error:
        raise ConfigError("schedulingProfiles", str(error)) from error
    return handler


def _links(registry: PluginRegistry) -> list[tuple[Plugin, Mapping[str, Plugin]]]:
    """Each plugin that works with others, and those by the parameters that name them; added where that may be."""
    links: dict[str, tuple[Plugin, Mapping[str, Plugin]]] = {}
    while new := [entry for entry in registry.by_name.values() if entry.name not in links]:
        for entry in new:
            found = {}
            for parameter, reference in entry.plugin.refers().items():
                path = f"{entry.path}.parameters.{parameter}"
                found[parameter] = registry.referred(reference, path, f"{entry.name} works with it")
            links[entry.name] = entry.plugin, found
    return [link for link in links.values() if link[1]]


def _unused(
    registry: PluginRegistry,
    profiles: Iterable[Profile],
    shadow: ShadowProfile | None,
    handler: ProfileHandler,
    asked: Iterable[Plugin],
) -> list[str]:
    """Names of the plugins that nothing refers to; `asked`: those of admission and flow control."""
    used: set[int] = {id(handler), *map(id, asked)}
    if shadow is not None:
        profiles = [*profiles, shadow.profile]
        used.add(id(shadow.cost))
    for profile in profiles:
        members = (*profile.filters, *(scorer for scorer, _ in profile.scorers), profile.picker)
        used.update(id(plugin) for plugin in members)
    chosen = (
        BandSelectionPolicy,
        Filter,
        Scorer,
        Picker,
        Decider,
        Detector,
        FairnessPolicy,
        OrderingPolicy,
        UsageLimitPolicy,
    )  # any other kind works by being declared
    found = [p.name for p in registry.by_name.values() if isinstance(p.plugin, chosen) and id(p.plugin) not in used]
    read = {PrefixMatch}.union(*(p.plugin.needs for p in registry.by_name.values()))
    return found + [
        p.name
        for p in registry.by_name.values()
        if isinstance(p.plugin, Producer)
        and issubclass(p.plugin.produces, PrefixMatch)
        and p.plugin.produces not in read
    ]


def _producers(registry: PluginRegistry, unused: list[str]) -> tuple[Producer[Any], ...]:
    """Add the producers that are needed, refuse two of one signal, and order them all."""
    problems = Problems()
    todo = [entry for entry in registry.by_name.values() if entry.name not in unused]
    done: set[str] = set()
    while todo:  # an added producer may need more signals, so look again until nothing new came in
        for entry in todo:
            done.add(entry.name)
            for signal in (*entry.plugin.needs, *getattr(entry.plugin, "looks_at", ())):
                with problems.collect():
                    registry.producer(signal, entry.name, entry.path)
        todo = [entry for entry in registry.by_name.values() if entry.name not in done and entry.name not in unused]
    by_signal: dict[type[Any], PluginEntry] = {}
    for entry in registry.by_name.values():
        if isinstance(entry.plugin, Producer) and entry.name not in unused:
            first = by_signal.setdefault(entry.plugin.produces, entry)
            if first is not entry:
                what = entry.plugin.produces.__qualname__
                problems.add(entry.path, f"{entry.name} and {first.name} both produce {what}; expected one of them")
    problems.check()
    return _in_order(by_signal)


def _in_order(by_signal: Mapping[type[Any], PluginEntry]) -> tuple[Producer[Any], ...]:
    ordered: dict[type[Any], Producer[Any]] = {}
    waiting = dict(by_signal)
    while waiting:
        ready = [signal for signal, entry in waiting.items() if all(need in ordered for need in entry.plugin.needs)]
        if not ready:
            names = ", ".join(entry.name for entry in waiting.values())
            raise ConfigError(next(iter(waiting.values())).path, f"these need each other's signals: {names}")
        for signal in ready:
            plugin = waiting.pop(signal).plugin
            assert isinstance(plugin, Producer)
            ordered[signal] = plugin
    return tuple(ordered.values())
