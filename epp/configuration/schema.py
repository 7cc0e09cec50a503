"""`EndpointPickerConfig`: the YAML that llm-d and GIE configure an endpoint picker with, in its three apiVersions.

Every field of the three schemas is known here. A file says what to do, so nothing in it is passed over: what is not
there yet is refused by name (the sections here, plugin types in `epp.configuration.loader`), unless leaving it out
changes nothing.

Sources: GIE v1.5.0 apix/config/v1alpha1, llm-d-router v0.10 apix/config/v1alpha1, llm-d's configuration page for v1.
One shape holds all three: what llm-d renamed in v1 is in `_RENAMED`, the old names stay valid in the old versions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from epp import protocol
from epp.documents.strict import Problems, Quantity, Wrong, nearest, read, salvage, short, value_at, yaml_name
from epp.errors import ConfigError, ConfigErrors

_RENAMED: Final = {
    "dataLayer.discovery.pluginRef": "dataLayer.discovery.endpoints.pluginRef",
    "dataLayer.crossReplicaSyncerPluginRef": "dataLayer.crossReplica.syncerPluginRef",
    "dataLayer.crossReplicaSyncInterval": "dataLayer.crossReplica.syncInterval",
    "dataLayer.crossReplicaPublishTimeout": "dataLayer.crossReplica.publishTimeout",
}
"""Names before llm-d.ai/v1 -> names in it."""

FILE_DISCOVERY: Final = "file-discovery"
FLOW_CONTROL: Final = "flowControl"
"""The feature gate that has an effect."""


SHARED: Final = "replicas tell each other what they know by themselves: --peers-service, --peers-dns, --peer"


class _Gate(NamedTuple):
    usual: bool
    """What happens here."""
    why: str
    """Why nothing else does."""


_GATES: Final[Mapping[str, _Gate]] = {
    "dataLayer": _Gate(True, "endpoints' metrics are read in one way"),
    "enableLegacyMetrics": _Gate(False, "endpoints' metrics are read in one way"),
    "haPopulateNonLeaderDatastore": _Gate(True, "every replica is active, none leads"),
    "prepareDataPlugins": _Gate(True, "producers always run before the pick"),
}


@dataclass(frozen=True)
class PluginSpec:
    """One plugin: `type` names its class, `name` (its type) is how the rest of the file refers to it."""

    type: str
    """A type of plugins.md, an entry point's name, or `module.Class`."""
    name: str = ""
    """Where nothing is said, its type."""
    parameters: dict[str, Any] | None = None
    """What the plugin has, by plugins.md; an unknown one is refused."""


@dataclass(frozen=True)
class PluginRef:
    plugin_ref: str
    """A name of `plugins`."""


@dataclass(frozen=True)
class ProfilePlugin:
    plugin_ref: str
    """A name of `plugins`: a filter, a scorer or a picker."""
    weight: float | None = None
    """Of a scorer; 1.0 where nothing is said."""


@dataclass(frozen=True)
class SchedulingProfile:
    name: str
    """The profile handler runs it under this name."""
    plugins: list[ProfilePlugin] = field(default_factory=list)
    """Filters run in this order, then scorers, then the picker; without a picker, `max-score-picker`."""


@dataclass(frozen=True)
class DataSource:
    plugin_ref: str
    """A name of `plugins`."""
    extractors: list[PluginRef] = field(default_factory=list)
    """Likewise."""


@dataclass(frozen=True)
class Discovery:
    plugin_ref: str | None = None
    """Before llm-d.ai/v1: a plugin of type `file-discovery`."""
    endpoints: PluginRef | None = None
    """In llm-d.ai/v1: a plugin of type `file-discovery`."""


@dataclass(frozen=True)
class CrossReplica:
    syncer_plugin_ref: str | None = None
    """Without effect: replicas find each other by flags of `serve`."""
    sync_interval: timedelta | None = None
    """Without effect."""
    publish_timeout: timedelta | None = None
    """Without effect."""


@dataclass(frozen=True)
class DataLayer:
    inject_defaults: bool | None = None
    """Without effect: endpoints' metrics are always read."""
    sources: list[DataSource] = field(default_factory=list)
    """Without effect: endpoints' metrics are always read, and who needs KV events listens itself."""
    discovery: Discovery | None = None
    """Endpoints from a file, where `--endpoints` names none."""
    peer_discovery: PluginRef | None = None
    """Without effect: replicas find each other by flags of `serve`."""
    cross_replica: CrossReplica | None = None
    """Without effect."""
    cross_replica_syncer_plugin_ref: str | None = None
    """Without effect."""
    cross_replica_sync_interval: timedelta | None = None
    """Without effect."""
    cross_replica_publish_timeout: timedelta | None = None
    """Without effect."""


@dataclass(frozen=True)
class PriorityBand:
    priority: int | None = None
    """Which band; higher goes first, and below 0 may be refused rather than wait."""
    max_bytes: Quantity | None = None
    """Bytes of bodies that wait in it."""
    max_requests: Quantity | None = None
    """Requests that wait in it."""
    default_request_ttl: timedelta | None = None
    """How long they wait where they do not say it themselves."""
    fairness_policy_ref: str | None = None
    """Which flow goes next: a fairness policy of `plugins`."""
    ordering_policy_ref: str | None = None
    """Which request of a flow goes next: an ordering policy of `plugins`."""


@dataclass(frozen=True)
class SaturationDetector:
    plugin_ref: str | None = None
    """A detector of `plugins`: how full the pool is."""


@dataclass(frozen=True)
class FlowControl:
    max_bytes: Quantity | None = None
    """Bytes of bodies that wait, in all bands."""
    max_requests: Quantity | None = None
    """Requests that wait, in all bands."""
    default_request_ttl: timedelta | None = None
    """How long they wait where neither they nor their band say it."""
    no_endpoint_request_ttl: timedelta | None = None
    """The same while the pool has no endpoint."""
    default_priority_band: PriorityBand | None = None
    """Of priorities that `priorityBands` does not name."""
    default_negative_priority_band: PriorityBand | None = None
    """Of those below 0 among them."""
    priority_bands: list[PriorityBand] | None = None
    """Bands by priority."""
    usage_limit_policy_plugin_ref: str | None = None
    """How much of the pool each priority may fill."""
    band_selection_policy_plugin_ref: str | None = None
    """Which band goes next."""
    saturation_detector: SaturationDetector | None = None
    """As the section of this name above; one of the two."""
    enable_eviction: bool | None = None
    """Refused where true: requests in flight are not evicted."""


@dataclass(frozen=True)
class RequestHandler:
    parsers: list[PluginRef] = field(default_factory=list)
    """Which APIs are read; all where nothing is said."""


@dataclass(frozen=True)
class ShadowSpec:
    """Ours, in no schema: a profile that picks for live requests beside the one whose picks count."""

    profile: str
    """One of `schedulingProfiles`; it takes no other entry."""
    sample: float = 0.1
    """Share of the requests it picks for, above 0 and at most 1: the bound on what it costs."""

    def __post_init__(self) -> None:
        if not 0.0 < self.sample <= 1.0:
            raise ValueError(f"sample: expected more than 0 and at most 1, got {self.sample}")


@dataclass(frozen=True)
class TenantSpec:
    """Ours: where a request says whose it is, see `epp.flow.tenants.TenantSource`."""

    header: str
    """The request header that names the tenant, or holds a JWT."""
    claim: str = ""
    """Where it holds a JWT: the claim that names the tenant, as `org.team`."""


@dataclass(frozen=True)
class TenantLimitsSpec:
    """Ours: what a tenant may use, 0 for any number; see `epp.flow.limits.TenantLimits`."""

    requests_per_minute: Quantity | None = None
    """Requests a minute."""
    tokens_per_minute: Quantity | None = None
    """Tokens of prompts and answers a minute."""
    concurrent_requests: Quantity | None = None
    """Requests at once."""
    max_prompt_tokens: Quantity | None = None
    """Tokens of one prompt."""
    max_output_tokens: Quantity | None = None
    """Tokens of one answer."""
    models: list[str] | None = None
    """Models that may be asked for; none named: all."""


@dataclass(frozen=True)
class LimitsSpec(TenantLimitsSpec):
    """Ours: of each tenant, and of some by name, who have what they do not say from the others."""

    tenant: TenantSpec | None = None
    """Where a request says whose it is; without it all requests are one tenant's."""
    tenants: dict[str, TenantLimitsSpec] = field(default_factory=dict)
    """Limits of some tenants, by name."""


@dataclass(frozen=True)
class EndpointPickerConfig:
    """A file, decoded; refer to the sources above for the meaning of each field, and to `ShadowSpec` and `LimitsSpec`
    for ours.
    """

    api_version: Any = None
    """`llm-d.ai/v1`, `llm-d.ai/v1alpha1` or `inference.networking.x-k8s.io/v1alpha1`."""
    kind: Any = None
    """`EndpointPickerConfig`."""
    plugins: list[PluginSpec] = field(default_factory=list)
    """Every plugin with its parameters."""
    feature_gates: list[str] = field(default_factory=list)
    """`flowControl` turns flow control on; llm-d's others are taken without effect."""
    scheduling_profiles: list[SchedulingProfile] = field(default_factory=list)
    """Which filters, scorers and picker work together."""
    saturation_detector: SaturationDetector | None = None
    """How full the pool is, for admission and flow control."""
    data_layer: DataLayer | None = None
    """llm-d's data sources; endpoints from a file."""
    flow_control: FlowControl | None = None
    """How requests wait, with the gate `flowControl`."""
    request_handler: RequestHandler | None = None
    """Which APIs are read."""
    parser: PluginRef | None = None
    """One parser, as before llm-d.ai/v1."""
    shadow: ShadowSpec | None = None
    """Ours: a profile that picks beside the one that counts."""
    limits: LimitsSpec | None = None
    """Ours: what tenants may ask."""

    @property
    def flow_control_on(self) -> bool:
        """Whether the feature gate is."""
        return any(gate in (FLOW_CONTROL, f"{FLOW_CONTROL}=true") for gate in self.feature_gates)

    @property
    def detector(self) -> tuple[str, str]:
        """(path, name) of the plugin that says how full the pool is; the name is empty where none is named."""
        section = self.saturation_detector or (self.flow_control and self.flow_control.saturation_detector)
        where = "saturationDetector" if self.saturation_detector else "flowControl.saturationDetector"
        return f"{where}.pluginRef", (section.plugin_ref if section else None) or ""

    @property
    def parsers(self) -> list[tuple[str, str]]:
        """(path, name) of the parsers named, in order."""
        named = [("parser.pluginRef", self.parser.plugin_ref)] if self.parser else []
        for i, parser in enumerate(self.request_handler.parsers if self.request_handler else ()):
            named.append((f"requestHandler.parsers[{i}].pluginRef", parser.plugin_ref))
        return named

    @property
    def built_in(self) -> list[tuple[str, str]]:
        """(path, name) of every plugin named for a job that Warmpath has no plugins for: parsing, data sources."""
        named = self.parsers
        for i, source in enumerate(self.data_layer.sources if self.data_layer else ()):
            where = f"dataLayer.sources[{i}]"
            named.append((f"{where}.pluginRef", source.plugin_ref))
            named += [(f"{where}.extractors[{j}].pluginRef", e.plugin_ref) for j, e in enumerate(source.extractors)]
        return named

    @property
    def discovery(self) -> tuple[str, str]:
        """(path, name) of the plugin that says where endpoints come from; the name is empty where none is named."""
        found = self.data_layer.discovery if self.data_layer else None
        if found is None:
            return "", ""
        if found.endpoints is not None:
            return "dataLayer.discovery.endpoints.pluginRef", found.endpoints.plugin_ref
        return "dataLayer.discovery.pluginRef", found.plugin_ref or ""

    @property
    def endpoints_file(self) -> Path | None:
        """The file that the pool's endpoints are in, where the configuration says so (llm-d's `file-discovery`)."""
        _, name = self.discovery
        for plugin in self.plugins:
            if name and name == (plugin.name or plugin.type) and plugin.type == FILE_DISCOVERY:
                path = (plugin.parameters or {}).get("path")
                return Path(path) if isinstance(path, str) and path else None
        return None

    @property
    def idle(self) -> list[tuple[str, str]]:
        """(path, why) of what is taken and changes nothing, plugins' parameters apart."""
        found = []
        for i, each in enumerate(self.feature_gates):
            name, _, state = each.partition("=")
            if name in _GATES and (state != "false") is not _GATES[name].usual:
                found.append((f"featureGates[{i}]", _GATES[name].why))
        if self.flow_control is not None and not self.flow_control_on:
            found += [
                (f"flowControl.{yaml_name(each)}", f"without the feature gate {FLOW_CONTROL} requests do not wait here")
                for each in fields(self.flow_control)
                if each.name != "saturation_detector" and getattr(self.flow_control, each.name) not in (None, False)
            ]
        if self.data_layer and self.data_layer.inject_defaults is False:
            found.append(("dataLayer.injectDefaults", "endpoints' metrics are always read"))
        if self.data_layer:
            found += [
                (f"dataLayer.{yaml_name(each)}", SHARED)
                for each in fields(self.data_layer)
                if each.name.startswith(("peer_", "cross_")) and getattr(self.data_layer, each.name) is not None
            ]
        if self.data_layer and self.data_layer.sources:
            found.append(
                ("dataLayer.sources", "endpoints' metrics are always read, and who needs events listens itself")
            )
        return found


def _check_discovery(config: EndpointPickerConfig, problems: Problems) -> None:
    path, name = config.discovery
    if not name or isinstance(name, Wrong):
        return
    names = [plugin.name or plugin.type for plugin in config.plugins]
    found = next((plugin for plugin, own in zip(config.plugins, names, strict=True) if own == name), None)
    if found is None:
        problems.add(path, f"no plugin is called {short(name)}{nearest(name, names)}")
    elif found.type != FILE_DISCOVERY:
        problems.add(path, f"{short(name)} finds no endpoints; expected a plugin of type {FILE_DISCOVERY}")
    elif config.endpoints_file is None:
        where = f"plugins[{config.plugins.index(found)}].parameters.path"
        problems.add(where, "missing; expected the path of a file with `endpoints:`")


def parse(text: str | bytes, where: str = "") -> EndpointPickerConfig:
    """The configuration in a YAML text. `where` (a file's name) begins every error's path. Raises ConfigError."""
    problems = Problems()
    config = salvaged(text, problems)
    if problems.errors or config is None:
        raise placed(ConfigErrors(problems.errors), where)
    return config


def salvaged(text: str | bytes, problems: Problems) -> EndpointPickerConfig | None:
    """The same, or what is right of it: `decode.salvage`. None where there is nothing more to look at."""
    try:
        content = read(text)
    except ConfigError as error:
        problems.errors.append(error)
        return None
    if not _check_version(content, problems):
        return None
    config = salvage(EndpointPickerConfig, content, "", problems)
    if content.get("apiVersion") in protocol.CONFIG_VERSIONS:
        _check_names(content["apiVersion"], content, problems)
    _check_gates(config, problems)
    _check_sections(config, problems)
    return config


def placed(error: ConfigError, where: str) -> ConfigErrors:
    """The same errors with `where: ` before each path."""
    errors = error.errors if isinstance(error, ConfigErrors) else (error,)
    if where:
        errors = tuple(ConfigError(f"{where}: {e.path}" if e.path else where, e.message) for e in errors)
    return ConfigErrors(errors)


_EXPECTED: Final = "expected an EndpointPickerConfig, which says how to pick"
_MANIFESTS: Final = ("InferencePool", "InferenceObjective", "InferenceModelRewrite", "Gateway", "HTTPRoute")


def _check_version(content: Any, problems: Problems) -> bool:
    """Whether this is meant to be a configuration of ours, so that the rest of it can be looked at."""
    if not isinstance(content, dict):
        got = "nothing: the file is empty" if content is None else short(content)
        problems.add("", f"expected an EndpointPickerConfig (a mapping), got {got}")
        return False
    kind = content.get("kind")
    if kind is None and "apiVersion" not in content and "endpoints" in content:
        problems.add("endpoints", f"a list of endpoints is what --endpoints is given; {_EXPECTED}")
        return False
    if isinstance(kind, str) and kind in _MANIFESTS:
        problems.add("kind", f"got {kind!r}: a manifest, as --endpoints and kubectl are given; {_EXPECTED}")
        return False
    for key, valid in (("apiVersion", protocol.CONFIG_VERSIONS), ("kind", ("EndpointPickerConfig",))):
        if (value := content.get(key)) not in valid:
            near = nearest(value, valid) if isinstance(value, str) else ""
            if value == "ConfigMap":
                near = "; the configuration is a text under its `data`: give that in a file of its own"
            problems.add(key, f"expected {' or '.join(valid)}, got {short(value)}{near}")
    return content.get("kind") in (None, "EndpointPickerConfig")


def _check_names(version: str, content: dict[str, Any], problems: Problems) -> None:
    newest = version == protocol.CONFIG_VERSIONS[0]
    for before, now in _RENAMED.items():
        wrong, right = (before, now) if newest else (now, before)
        if value_at(content, wrong) is not None:
            problems.add(wrong, f"not in {version}; there it is {right}")


def _check_gates(config: EndpointPickerConfig, problems: Problems) -> None:
    for i, gate in enumerate(config.feature_gates):
        path = f"featureGates[{i}]"
        name, _, state = gate.partition("=")
        if isinstance(gate, Wrong):
            continue
        if name not in _GATES and name != FLOW_CONTROL:
            problems.add(path, f"{short(name)} is no feature gate{nearest(name, [*_GATES, FLOW_CONTROL])}")
        elif state not in ("", "true", "false"):
            problems.add(path, f"expected {name}=true or {name}=false, got {short(gate)}")


def _check_sections(config: EndpointPickerConfig, problems: Problems) -> None:
    """Refuse what the rest of Warmpath would have to do and cannot yet."""
    layer, flow = config.data_layer, config.flow_control
    if layer is not None:
        _check_discovery(config, problems)
    if flow is not None:
        if flow.enable_eviction:
            why = "requests that run are never cut off for others; expected false, and a priority-holdback-policy"
            problems.add("flowControl.enableEviction", f"{why} (usageLimitPolicyPluginRef), which keeps room for these")
        if config.saturation_detector and flow.saturation_detector:
            problems.add("saturationDetector", "flowControl.saturationDetector says it too; expected one of them")
