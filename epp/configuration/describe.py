"""A pipeline as text for people: what `warmpath check` prints."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from datetime import timedelta
from math import inf
from typing import Any, Final

from epp.configuration.builtin import NOTES
from epp.configuration.loader import Pipeline, Profile
from epp.configuration.registry import OWN
from epp.documents.strict import parameters_of
from epp.flow.limits import LimitSettings
from epp.plugin import Plugin
from epp.telemetry.text import printable

_LONGEST: Final = 10_000


def describe(pipeline: Pipeline) -> str:
    """The pipeline in the order a request passes it, with every parameter, weight and what was added by default."""
    lines = [("requests", f"read by {', '.join(pipeline.parsers)}")] if pipeline.parsers else []
    if pipeline.endpoints_file is not None:
        lines.append(("endpoints", f"of the file {pipeline.endpoints_file}, where --endpoints names none"))
    lines += [_line("guards", "guard", guard, pipeline) for guard in pipeline.guards]
    lines += _tenants(pipeline.limits)
    lines.append(_line("admission", "detector", pipeline.detector, pipeline))
    asked = [*_flow(pipeline, lines)]
    lines += [_line("signals", f"{p.produces.__name__} from", p, pipeline) for p in pipeline.producers]
    lines.append(_line("profiles", "handler", pipeline.handler, pipeline))
    for name, profile in pipeline.profiles.items():
        lines += _profile(profile, f"profile {name}", pipeline)
    if (shadow := pipeline.shadow) is not None:
        profile, where = shadow.profile, f"shadow {shadow.profile.name}"
        lines.append((where, f"picks for {shadow.sample:g} of the requests, priced by {shadow.cost.name}"))
        lines += _profile(profile, where, pipeline)
    shown = {id(each) for each in (pipeline.detector, pipeline.handler, *pipeline.guards, *pipeline.producers, *asked)}
    for profile in (*pipeline.profiles.values(), *([shadow.profile] if shadow else ())):
        shown |= {id(each) for each in (*profile.filters, *(s for s, _ in profile.scorers), profile.picker)}
    lines += [_line("hooks", "plugin", plugin, pipeline) for plugin in pipeline.plugins if id(plugin) not in shown]
    lines += [_line("not used", "plugin", pipeline.registry[name].plugin, pipeline) for name in pipeline.unused]
    notes = [(name, NOTES[entry.type]) for name, entry in pipeline.registry.items() if entry.type in NOTES]
    lines += [("note", f"{name} {what}") for name, what in notes]
    lines += [("no effect", setting) for setting in pipeline.idle]
    lines += [("runs code", f"of the module {module}: {', '.join(names)}") for module, names in _foreign(pipeline)]
    lines = [(printable(place), printable(text, _LONGEST)) for place, text in lines]
    width = max(len(place) for place, _ in lines)
    return "\n".join(f"{place:<{width}}  {text}" for place, text in lines)


def _tenants(settings: LimitSettings | None) -> Iterator[tuple[str, str]]:
    """The lines of limits: whose a request is, and what each tenant may use."""
    if settings is None:
        return
    source = settings.source
    by = "a guard's word; else all requests are one's" if source is None else f"header {source.header}"
    yield "limits", f"tenant by {by}{f', claim {source.claim}' if source is not None and source.claim else ''}"
    for name, limits in {"each tenant": settings.usual, **{f"tenant {n}": o for n, o in settings.own.items()}}.items():
        counts = {
            "requests a minute": limits.requests_per_minute,
            "tokens a minute": limits.tokens_per_minute,
            "requests at once": limits.concurrent_requests,
            "tokens of a prompt": limits.max_prompt_tokens,
            "tokens of an answer": limits.max_output_tokens,
        }
        said = [f"{limit:.0f} {what}" for what, limit in counts.items() if limit < inf]
        said += [] if limits.models is None else [f"of models {', '.join(limits.models) or 'none'}"]
        yield "limits", f"{name}: {', '.join(said) or 'none'}"


def _flow(pipeline: Pipeline, lines: list[tuple[str, str]]) -> Iterator[Plugin]:
    """Add the lines of flow control to `lines`; the plugins they show."""
    if (flow := pipeline.flow) is None:
        return
    limits = _limits(flow.max_requests, flow.max_bytes)
    ttl, empty = _seconds(flow.ttl), _seconds(flow.no_endpoint_ttl)
    lines.append(("flow control", f"{limits} wait, {ttl} each, {empty} where there is no endpoint"))
    lines.append(_line("flow control", "limit", flow.usage, pipeline))
    yield flow.usage
    if flow.selection is not None:
        lines.append(_line("flow control", "bands", flow.selection, pipeline))
        yield flow.selection
    bands = {f"priority {priority}": flow.bands[priority] for priority in sorted(flow.bands, reverse=True)}
    bands["other priorities"] = flow.usual
    if flow.negative is not flow.usual:
        bands["other negative priorities"] = flow.negative
    for name, band in bands.items():
        own = "" if band.ttl is None else f", {_seconds(band.ttl)} each"
        lines.append((name, f"{_limits(band.max_requests, band.max_bytes)} wait{own}"))
        lines.append(_line(name, "fairness", band.fairness, pipeline))
        lines.append(_line(name, "order", band.ordering, pipeline))
        yield from (band.fairness, band.ordering)


def _limits(requests: float, size: float) -> str:
    said = [f"{requests:.0f} requests"] if requests < inf else []
    said += [f"{size:.0f} bytes"] if size < inf else []
    return f"at most {' and '.join(said)}" if said else "any number of requests"


def _seconds(ttl: float) -> str:
    return f"at most {ttl:g} s" if ttl else "for ever"


def _foreign(pipeline: Pipeline) -> list[tuple[str, list[str]]]:
    """Modules besides our own that the configuration has imported, with its plugins of each."""
    found: dict[str, list[str]] = {}
    for entry in pipeline.registry.values():
        if (module := type(entry.plugin).__module__).partition(".")[0] not in OWN:
            found.setdefault(module, []).append(entry.name)
    return sorted(found.items())


def _profile(profile: Profile, where: str, pipeline: Pipeline) -> list[tuple[str, str]]:
    lines = [_line(where, "filter", plugin, pipeline) for plugin in profile.filters]
    lines += [_line(where, f"scorer, weight {weight:g}:", plugin, pipeline) for plugin, weight in profile.scorers]
    return [*lines, _line(where, "picker", profile.picker, pipeline)]


def _line(place: str, role: str, plugin: Plugin, pipeline: Pipeline) -> tuple[str, str]:
    entry = pipeline.registry[plugin.name]
    text = f"{role} {entry.name}"
    if entry.type != entry.name:
        text += f" ({entry.type})"
    if names := parameters_of(type(plugin)):
        text += " " + ", ".join(f"{name}={shown(getattr(plugin, field.name))}" for name, field in names.items())
    return place, text + (f"  [added: {entry.added}]" if entry.added else "")


def shown(value: Any) -> str:
    """A value as YAML would have it, on one line."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {name: getattr(value, field.name) for name, field in parameters_of(type(value)).items()}
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g}s"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(shown, value)) + "]"
    return "null" if value is None else str(value) if value != "" else "''"
