"""The section `flowControl` as objects: queues, limits and the policies that it names."""

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import Final, TypeVar

from epp.configuration.builtin import CLASSES
from epp.configuration.registry import PluginRegistry
from epp.configuration.schema import FLOW_CONTROL, EndpointPickerConfig, FlowControl, PriorityBand
from epp.documents.strict import Problems, short
from epp.flow.queues import BAND_BYTES, BAND_REQUESTS, TTL, BandSettings, FlowSettings
from epp.plugin import BandSelectionPolicy, Detector, FairnessPolicy, OrderingPolicy, Plugin, UsageLimitPolicy

# mypy: disable-error-code="type-abstract"
# Abstract classes are passed around here to ask with isinstance, never to be made.

P = TypeVar("P", bound=Plugin)


_OWN: Final = FlowControl(
    default_priority_band=PriorityBand(fairness_policy_ref="round-robin-with-room-fairness-policy"),
    usage_limit_policy_plugin_ref="priority-holdback-policy",
)


def with_flow_control(config: EndpointPickerConfig) -> EndpointPickerConfig:
    """The configuration with its feature gate on. Where it says nothing of flow control, tenants take turns, and lower
    priorities and who floods leave room to the others, which llm-d's defaults do not.
    """
    gates = [*config.feature_gates, FLOW_CONTROL]
    return replace(config, feature_gates=gates, flow_control=config.flow_control or _OWN)


def flow_settings(
    config: EndpointPickerConfig, registry: PluginRegistry, detector: Detector, problems: Problems
) -> FlowSettings | None:
    """Queues, limits and policies; None where something is wrong with them."""
    section, path = config.flow_control or FlowControl(), "flowControl"
    usage = _named(
        section.usage_limit_policy_plugin_ref, f"{path}.usageLimitPolicyPluginRef", _USAGE, registry, problems
    )
    selection, band_selection = None, section.band_selection_policy_plugin_ref
    if band_selection is not None:
        where = f"{path}.bandSelectionPolicyPluginRef"
        selection = _named(band_selection, where, _SELECTION, registry, problems)
    usual = _band(section.default_priority_band, f"{path}.defaultPriorityBand", registry, problems)
    negative = usual
    if (below := section.default_negative_priority_band) is not None:
        negative = _band(below, f"{path}.defaultNegativePriorityBand", registry, problems)
    bands: dict[int, BandSettings] = {}
    for i, band in enumerate(section.priority_bands or ()):
        where = f"{path}.priorityBands[{i}]"
        if band.priority is None:
            problems.add(f"{where}.priority", "missing")
            continue
        if band.priority in bands:
            problems.add(f"{where}.priority", f"{band.priority} has a band above; expected each once")
        if (made := _band(band, where, registry, problems)) is not None:
            bands[band.priority] = made
    if usage is None or usual is None or negative is None:
        return None
    ttl = TTL if section.default_request_ttl is None else section.default_request_ttl.total_seconds()
    waits = section.no_endpoint_request_ttl
    return FlowSettings(
        detector,
        usage,
        usual,
        negative,
        bands,
        section.max_requests or inf,
        section.max_bytes or inf,
        ttl,
        ttl if waits is None else waits.total_seconds(),
        selection,
    )


_USAGE: Final = (UsageLimitPolicy, "static-usage-limit-policy", "usage limit policy")
_SELECTION: Final = (BandSelectionPolicy, "strict-band-selection-policy", "band selection policy")
_FAIRNESS: Final = (FairnessPolicy, "global-strict-fairness-policy", "fairness policy")
_ORDERING: Final = (OrderingPolicy, "fcfs-ordering-policy", "ordering policy")


def _band(spec: PriorityBand | None, path: str, registry: PluginRegistry, problems: Problems) -> BandSettings | None:
    spec = spec or PriorityBand()
    fairness = _named(spec.fairness_policy_ref, f"{path}.fairnessPolicyRef", _FAIRNESS, registry, problems)
    ordering = _named(spec.ordering_policy_ref, f"{path}.orderingPolicyRef", _ORDERING, registry, problems)
    if fairness is None or ordering is None:
        return None
    return BandSettings(
        fairness,
        ordering,
        BAND_REQUESTS if spec.max_requests is None else spec.max_requests or inf,
        BAND_BYTES if spec.max_bytes is None else spec.max_bytes or inf,
        None if spec.default_request_ttl is None else spec.default_request_ttl.total_seconds(),
    )


def _named(
    name: str | None, path: str, wanted: tuple[type[P], str, str], registry: PluginRegistry, problems: Problems
) -> P | None:
    """The policy of this name, or of the type of this name; the default where none is named."""
    kind, usual, what = wanted
    if name is None:
        return registry.builtin(usual, kind, "flow control's default")
    entry = registry.by_name.get(name)
    if entry is not None and isinstance(entry.plugin, kind):
        return entry.plugin
    if entry is not None:
        problems.add(path, f"{short(name)} is no {what}")
    elif name in CLASSES:
        with problems.collect():
            return registry.builtin(name, kind, f"named by {path}")
    elif not registry.reported(name):
        problems.add(path, registry.no_plugin(name))
    return None


def policies(flow: FlowSettings | None) -> Iterable[Plugin]:
    """Every plugin that flow control asks, but its detector."""
    if flow is None:
        return ()
    bands = (flow.usual, flow.negative, *flow.bands.values())
    asked = (flow.usage,) if flow.selection is None else (flow.usage, flow.selection)
    return (*asked, *(plugin for band in bands for plugin in (band.fairness, band.ordering)))
