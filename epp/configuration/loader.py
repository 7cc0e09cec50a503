"""From a configuration to objects ready to run: `load`. All that can be wrong is told before the first request.

What a configuration leaves out is added here: producers of signals that plugins need, a picker, a profile handler, a
saturation detector, the profile `default`. `epp.configuration.describe` shows the result, additions included.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any, Final

from epp.configuration.builtin import ALIASES, BUILT_IN, IDLE, LISTENERS, MISSING
from epp.configuration.registry import Part, Parts
from epp.configuration.schema import EndpointPickerConfig, ProfilePlugin, SchedulingProfile, placed, salvaged
from epp.documents.strict import MAX_BYTES, Problems, Wrong, nearest, short, value_at
from epp.errors import ConfigError, ConfigErrors
from epp.plugin import Cost, Detector, Filter, Picker, Plugin, Producer, ProfileHandler, Scorer

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


@dataclass(frozen=True)
class Shadow:
    """A profile that picks beside the others, for a `sample` (share) of the requests; `cost` prices its picks."""

    profile: Profile
    sample: float
    cost: Cost


@dataclass(frozen=True)
class Pipeline:
    """A configuration as objects, ready to run."""

    plugins: tuple[Plugin, ...]
    """All that take part, each once, for their hooks."""
    producers: tuple[Producer[Any], ...]
    """In the order to run them: whoever needs a signal comes after who finds it."""
    profiles: Mapping[str, Profile]
    handler: ProfileHandler
    detector: Detector
    shadow: Shadow | None
    parts: Mapping[str, Part]
    """Every plugin of the configuration and every one added, by name."""
    unused: tuple[str, ...]
    """Names of plugins that are declared and referred to by nothing; they take no part."""
    idle: tuple[str, ...] = ()
    """Settings of the configuration that are accepted and change nothing: path and why."""


def strategies() -> list[str]:
    """Names of the built-in configurations."""
    return sorted(each.name.removesuffix(".yaml") for each in _STRATEGIES.iterdir() if each.name.endswith(".yaml"))


def strategy_text(name: str) -> str:
    """The YAML of a built-in configuration. ConfigError names the ones there are."""
    known = strategies()
    if name not in known:
        raise ConfigError("strategy", f"expected one of {', '.join(known)}, got {short(name)}{nearest(name, known)}")
    return (_STRATEGIES / f"{name}.yaml").read_text("utf-8")


def load_strategy(name: str, *, clock: Clock, random: Random) -> Pipeline:
    """The pipeline of a built-in configuration."""
    return load_text(strategy_text(name), clock=clock, random=random, where=f"{name}.yaml")


def load_text(
    text: str | bytes,
    *,
    clock: Clock,
    random: Random,
    where: str = "",
    previous: Pipeline | None = None,
    plugins_from: Sequence[str] | None = None,
) -> Pipeline:
    """The pipeline of an EndpointPickerConfig in YAML. Raises ConfigError: a line for each error, each with `where`.

    `plugins_from`: modules whose classes it may name, besides our own; None: any.
    """
    problems = Problems()
    pipeline = None
    if (config := salvaged(text, problems)) is not None:
        with problems.collect():
            parts = Parts(clock, random, previous.parts if previous else {}, plugins_from)
            pipeline = _load(config, parts, problems)
    if pipeline is None:
        raise placed(ConfigErrors(problems.errors), where)
    return pipeline


def read_file(path: Path) -> bytes:
    """A configuration file's bytes, no more of them than a configuration may have and one. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error


def load_file(path: Path, *, clock: Clock, random: Random, plugins_from: Sequence[str] | None = None) -> Pipeline:
    """The pipeline of an EndpointPickerConfig file, as `load_text`; to follow its changes, see
    `epp.configuration.reload`.
    """
    return load_text(read_file(path), clock=clock, random=random, where=str(path), plugins_from=plugins_from)


def load(config: EndpointPickerConfig, *, clock: Clock, random: Random, previous: Pipeline | None = None) -> Pipeline:
    """The pipeline of a configuration. Raises ConfigError.

    A plugin that `previous` has under the same name, type and parameters is taken over as it is, so that a reload
    forgets neither caches nor requests in flight, except those of the plugins it changes.
    """
    problems = Problems()
    pipeline = _load(config, Parts(clock, random, previous.parts if previous else {}), problems)
    problems.check()
    assert pipeline is not None
    return pipeline


def _load(config: EndpointPickerConfig, parts: Parts, problems: Problems) -> Pipeline | None:
    """The same; what is wrong goes to `problems`, except what follows from an error told already. None: wrong."""
    parts.nameless = any(error.path == "plugins" for error in problems.errors)
    if not config.plugins and not parts.nameless:
        problems.add("plugins", "expected at least one plugin, got none")
    parts.declare(config.plugins, problems)
    _check_built_in(config, parts, problems)
    detector = _detector(config, parts, problems)
    profiles = _profiles(config, parts, problems)
    shadow = None
    with problems.collect():
        shadow = _shadow(config, profiles, parts)
    if parts.incomplete or any(error.path.startswith(("shadow", "schedulingProfiles")) for error in problems.errors):
        return None  # whether the rest fits together, nobody can say
    with problems.collect():
        handler = _handler(profiles, parts)
        unused = _unused(parts, profiles.values(), shadow, handler, detector)
        producers = _producers(parts, unused)
    if problems.errors:
        return None
    plugins = tuple(part.plugin for part in parts.by_name.values() if part.name not in unused)
    return Pipeline(
        plugins, producers, profiles, handler, detector, shadow, parts.by_name, tuple(unused), _idle(config, parts)
    )


def _check_built_in(config: EndpointPickerConfig, parts: Parts, problems: Problems) -> None:
    """Parsers and data sources that sections name: a declared plugin, or the type itself."""
    for path, name in config.built_in:
        if name in parts.built_in or ALIASES.get(name, name) in BUILT_IN or parts.told(name):
            continue
        if name in parts.by_name and parts.by_name[name].type in LISTENERS:
            continue
        if name in parts.by_name:
            problems.add(path, f"{short(name)} is no parser, data source or extractor")
        elif name in MISSING:
            problems.add(path, f"{name} is not there yet: {MISSING[name]}")
        else:
            problems.add(path, f"no plugin is called {short(name)}{nearest(name, [*parts.built_in, *BUILT_IN])}")


def _detector(config: EndpointPickerConfig, parts: Parts, problems: Problems) -> Detector:
    path, name = config.detector
    part = parts.by_name.get(name)
    if part is not None:
        if isinstance(part.plugin, Detector):
            return part.plugin
        problems.add(path, f"{short(name)} is no saturation detector")
    elif name not in ("", "utilization-detector", "concurrency-detector") and not parts.told(name):
        problems.add(path, _no_plugin(name, parts))
    elif name == "concurrency-detector":
        return parts.stock(name, Detector, f"named by {path}")
    return parts.stock("utilization-detector", Detector, "the default")


# --- profiles -------------------------------------------------------------------------------------------------------


def _profiles(config: EndpointPickerConfig, parts: Parts, problems: Problems) -> dict[str, Profile]:
    profiles: dict[str, Profile] = {}
    specs = config.scheduling_profiles or [_default_profile(parts)]
    for i, spec in enumerate(specs):
        path = f"schedulingProfiles[{i}]"
        if spec.name in profiles and not isinstance(spec.name, Wrong):
            problems.add(
                f"{path}.name", f"a profile above is called {short(spec.name)} too; expected a name of its own"
            )
        with problems.collect():
            shadow = config.shadow is not None and config.shadow.profile == spec.name
            profiles[spec.name] = _profile(spec, path, shadow, parts, problems)
    return profiles


def _default_profile(parts: Parts) -> SchedulingProfile:
    """Every filter, scorer and picker. A detector is left out, though it can filter: it was declared to detect."""
    names = [
        part.name
        for part in parts.by_name.values()
        if isinstance(part.plugin, (Filter, Scorer, Picker)) and not isinstance(part.plugin, Detector)
    ]
    return SchedulingProfile("default", [ProfilePlugin(name) for name in names])


def _picker(profile: str, shadow: bool, parts: Parts) -> Picker:
    reason = f"profile {profile} has no picker"
    if not shadow:
        return parts.stock("max-score-picker", Picker, reason)
    return parts.own("max-score-picker", f"{profile}-picker", Picker, reason)


def _profile(spec: SchedulingProfile, path: str, shadow: bool, parts: Parts, problems: Problems) -> Profile:
    filters: list[Filter] = []
    scorers: list[tuple[Scorer, float]] = []
    pickers: list[Picker] = []
    seen: set[str] = set()
    for j, reference in enumerate(spec.plugins):
        where = f"{path}.plugins[{j}]"
        with problems.collect():
            plugin = _in_profile(reference, where, parts, seen)
            if isinstance(plugin, Filter):
                filters.append(plugin)
            if isinstance(plugin, Scorer):
                scorers.append((plugin, 1.0 if reference.weight is None else reference.weight))
            if isinstance(plugin, Picker):
                pickers.append(plugin)
                if len(pickers) > 1:
                    problems.add(f"{where}.pluginRef", f"{plugin.name} is a second picker; expected one for a profile")
    picker = pickers[0] if pickers else _picker(spec.name, shadow, parts)
    return Profile(spec.name, tuple(filters), tuple(scorers), picker)


def _in_profile(reference: ProfilePlugin, path: str, parts: Parts, seen: set[str]) -> Plugin | None:
    name, weight = reference.plugin_ref, reference.weight
    if parts.told(name):
        return None
    if name in seen:
        raise ConfigError(f"{path}.pluginRef", f"{short(name)} is in this profile already; expected it once")
    seen.add(name)
    part = parts.by_name.get(name)
    if part is None:
        raise ConfigError(f"{path}.pluginRef", _no_plugin(name, parts))
    if not isinstance(part.plugin, (Filter, Scorer, Picker)):
        raise ConfigError(f"{path}.pluginRef", f"expected a filter, scorer or picker; {short(name)} is {_kind(part)}")
    if weight is not None and not isinstance(part.plugin, Scorer):
        raise ConfigError(f"{path}.weight", f"expected on scorers only; {short(name)} is {_kind(part)}")
    if weight is not None and weight < 0.0:
        raise ConfigError(f"{path}.weight", f"expected 0 or more, got {short(weight)}")
    return part.plugin


def _no_plugin(name: str, parts: Parts) -> str:
    if name in parts.built_in:
        return f"{short(name)} is built in and always on; expected the name of a plugin that is chosen here"
    named = [part.name for part in parts.by_name.values() if not part.added]
    if same := next((part for part in parts.by_name.values() if part.type == name), None):
        return f"no plugin is called {short(name)}; the one of that type is called {same.name!r}"
    return f"no plugin is called {short(name)}{nearest(name, named) or '; expected one of ' + ', '.join(named)}"


def _kind(part: Part) -> str:
    kinds = {Filter: "filter", Picker: "picker", Producer: "producer", ProfileHandler: "profile handler"}
    kinds[Detector] = "saturation detector"
    return "a " + next(
        (word for kind, word in kinds.items() if isinstance(part.plugin, kind)), "plugin of no such kind"
    )


def _shadow(config: EndpointPickerConfig, profiles: dict[str, Profile], parts: Parts) -> Shadow | None:
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
    costs = [part.plugin for part in parts.by_name.values() if part.type == "expected-ttft"]
    cost = costs[0] if costs else parts.stock("expected-ttft", Cost, "shadow: says what its picks would cost")
    assert isinstance(cost, Cost)
    return Shadow(profile, config.shadow.sample, cost)


def _idle(config: EndpointPickerConfig, parts: Parts) -> tuple[str, ...]:
    found = list(config.idle)
    found += [(path, f"{short(name)} is built in and always on") for name, path in parts.built_in.items()]
    for part in parts.by_name.values():
        for key, idle in IDLE.get(ALIASES.get(part.type, part.type), {}).items():
            if (value := value_at(part.parameters, key)) is not None and value != idle.usual:
                found.append((f"{part.path}.parameters.{key}", idle.why))
    return tuple(f"{path}: {why}" for path, why in found)


# --- what holds them together ---------------------------------------------------------------------------------------


def _handler(profiles: Mapping[str, Profile], parts: Parts) -> ProfileHandler:
    found = [part for part in parts.by_name.values() if isinstance(part.plugin, ProfileHandler)]
    if len(found) > 1:
        raise ConfigError(found[1].path, f"{found[1].name} is a second profile handler; expected one")
    if len(profiles) > 1 and (not found or found[0].type == "single-profile-handler"):
        names = ", ".join(profiles)
        raise ConfigError("schedulingProfiles", f"{names}: several need a profile handler that chooses among them")
    return parts.stock(found[0].name if found else "single-profile-handler", ProfileHandler, "there is one profile")


def _unused(
    parts: Parts, profiles: Iterable[Profile], shadow: Shadow | None, handler: ProfileHandler, detector: Detector
) -> list[str]:
    used: set[int] = {id(handler), id(detector)}
    if shadow is not None:
        profiles = [*profiles, shadow.profile]
        used.add(id(shadow.cost))
    for profile in profiles:
        members = (*profile.filters, *(scorer for scorer, _ in profile.scorers), profile.picker)
        used.update(id(plugin) for plugin in members)
    chosen = (Filter, Scorer, Picker, Detector)  # any other kind works by being declared
    return [p.name for p in parts.by_name.values() if isinstance(p.plugin, chosen) and id(p.plugin) not in used]


def _producers(parts: Parts, unused: list[str]) -> tuple[Producer[Any], ...]:
    """Add the producers that are needed, refuse two of one signal, and order them all."""
    problems = Problems()
    todo = [part for part in parts.by_name.values() if part.name not in unused]
    done: set[str] = set()
    while todo:  # an added producer may need more signals, so look again until nothing new came in
        for part in todo:
            done.add(part.name)
            for signal in part.plugin.needs:
                with problems.collect():
                    parts.producer(signal, part.name, part.path)
        todo = [part for part in parts.by_name.values() if part.name not in done and part.name not in unused]
    by_signal: dict[type[Any], Part] = {}
    for part in parts.by_name.values():
        if isinstance(part.plugin, Producer):
            first = by_signal.setdefault(part.plugin.produces, part)
            if first is not part:
                what = part.plugin.produces.__qualname__
                problems.add(part.path, f"{part.name} and {first.name} both produce {what}; expected one of them")
    problems.check()
    return _in_order(by_signal)


def _in_order(by_signal: Mapping[type[Any], Part]) -> tuple[Producer[Any], ...]:
    ordered: dict[type[Any], Producer[Any]] = {}
    waiting = dict(by_signal)
    while waiting:
        ready = [signal for signal, part in waiting.items() if all(need in ordered for need in part.plugin.needs)]
        if not ready:
            names = ", ".join(part.name for part in waiting.values())
            raise ConfigError(next(iter(waiting.values())).path, f"these need each other's signals: {names}")
        for signal in ready:
            plugin = waiting.pop(signal).plugin
            assert isinstance(plugin, Producer)
            ordered[signal] = plugin
    return tuple(ordered.values())
