"""From configurations to pipelines: samples and strategies, defaults that are added, and what is refused at start."""

from asyncio import run
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epp import protocol
from epp.configuration import builtin, loader
from epp.configuration.schema import parse
from epp.documents.strict import Problems
from epp.errors import ConfigError
from epp.flow.saturation import ConcurrencyDetector, UtilizationDetector
from epp.plugin import InFlight, PrefixMatch
from epp.scheduling.pickers import MaxScorePicker, SingleProfileHandler
from tests.support.plugins import All, Chooser, First, Never, Required, Warm, Watching
from tests.support.scheduling.pipelines import RANDOM, clock, loaded
from tests.support.scheduling.schedulers import ask, fail, pods

SAMPLES = sorted((Path(__file__).parents[3] / "manifests" / "configs").glob("*.yaml"))
HEAD = "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\n"
OURS = "tests.support.plugins"


def config(plugins: str, profiles: str = "", rest: str = "") -> str:
    """`plugins`: classes of tests.support.plugins or built-in types, in words; `profiles`: `name: ref ref*2, name:
    …`.
    """
    lines = [HEAD + "plugins:"]
    for word in plugins.split():
        kind = f"{OURS}.{word}" if word[0].isupper() else word
        lines.append(f"- {{name: {word}, type: {kind}}}")
    if profiles:
        lines.append("schedulingProfiles:")
    for profile in profiles.split(",") if profiles else ():
        name, _, references = profile.partition(":")
        lines.append(f"- name: {name.strip()}\n  plugins:")
        for reference in references.split():
            plugin, _, weight = reference.partition("*")
            lines.append(f"  - {{pluginRef: {plugin}{', weight: ' + weight if weight else ''}}}")
    return "\n".join([*lines, rest])


PROFILE = "schedulingProfiles: [{{name: a, plugins: [{{pluginRef: {}}}]}}]"
TWO_PROFILES = "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}, {name: b}]\n"


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        loaded(text)
    return str(refused.value)


# --- samples and strategies -----------------------------------------------------------------------------------------


def test_there_are_samples_in_every_version() -> None:
    versions = {yaml.safe_load(path.read_text())["apiVersion"] for path in SAMPLES}
    assert versions == set(protocol.CONFIG_VERSIONS)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: str(path.name))
def test_samples_load(path: Path) -> None:
    pipeline = loader.load_file(path, clock=clock, random=RANDOM)
    assert list(pipeline.profiles) == ["default"]
    assert not pipeline.unused


@pytest.mark.parametrize("name", loader.strategies())
def test_strategies_load(name: str) -> None:
    types = {spec["type"] for spec in yaml.safe_load(loader.strategy_text(name))["plugins"]}
    try:
        pipeline = loader.load_strategy(name, clock=clock, random=RANDOM)
    except ConfigError as error:
        if "No module named 'epp.scheduling.cost'" in str(error):
            pytest.skip("epp.scheduling.cost is not there yet")
        raise
    assert types <= {entry.type for entry in pipeline.registry.values()}
    assert not pipeline.unused


def test_strategies_by_name() -> None:
    assert loader.strategies() == ["kv-aware", "least-load", "prefix-aware", "round-robin", "session"]
    assert loader.DEFAULT_STRATEGY in loader.strategies()
    with pytest.raises(ConfigError, match=r"strategy: expected one of .*, got 'sessions'; did you mean 'session'"):
        loader.strategy_text("sessions")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml: cannot be read: No such file"):
        loader.load_file(Path("nowhere.yaml"), clock=clock, random=Random(0))


# --- what is added --------------------------------------------------------------------------------------------------


def test_a_default_profile_of_all_filters_scorers_and_pickers() -> None:
    pipeline = loaded(config("All Warm First concurrency-detector"))
    profile = pipeline.profiles["default"]
    assert [type(each) for each in profile.filters] == [All]
    assert [(type(each), weight) for each, weight in profile.scorers] == [(Warm, 1.0)]
    assert isinstance(profile.picker, First)
    assert isinstance(pipeline.detector, UtilizationDetector)
    assert pipeline.unused == ("concurrency-detector",)


def test_picker_handler_and_detector_by_default() -> None:
    pipeline = loaded(config("All Warm", "main: Warm*2.5 All"))
    profile = pipeline.profiles["main"]
    assert isinstance(profile.picker, MaxScorePicker)
    assert profile.scorers[0][1] == 2.5
    assert isinstance(pipeline.handler, SingleProfileHandler)
    assert isinstance(pipeline.detector, UtilizationDetector)
    added = {entry.name: entry.added for entry in pipeline.registry.values() if entry.added}
    assert added == {
        "utilization-detector": "the default",
        "max-score-picker": "profile main has no picker",
        "single-profile-handler": "there is one profile",
        "approx-prefix-cache-producer": "Warm needs PrefixMatch",
    }
    assert {type(plugin) for plugin in pipeline.plugins} >= {All, Warm, MaxScorePicker}


def test_a_declared_picker_is_used_before_another_is_made() -> None:
    text = HEAD + (
        "plugins:\n- {type: max-score-picker, parameters: {maxNumOfEndpoints: 3}}\n- {type: queue-scorer}\n"
        "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]"
    )
    picker = loaded(text).profiles["a"].picker
    assert isinstance(picker, MaxScorePicker)
    assert picker.max_num_of_endpoints == 3


@pytest.mark.parametrize("section", ["saturationDetector", "flowControl: {saturationDetector"])
def test_the_detector_named(section: str) -> None:
    end = "}" if "{" in section else ""
    stock_one = loaded(config("All", rest=f"{section}: {{pluginRef: concurrency-detector}}{end}"))
    assert isinstance(stock_one.detector, ConcurrencyDetector)
    own = loaded(config("All Never", rest=f"{section}: {{pluginRef: Never}}{end}"))
    assert isinstance(own.detector, Never)
    assert own.detector in own.plugins


def test_a_detector_filters_where_a_profile_names_it() -> None:
    pipeline = loaded(config("utilization-detector", "default: utilization-detector"))
    assert [each.name for each in pipeline.profiles["default"].filters] == [pipeline.detector.name]


def test_producers_come_before_those_who_need_their_signals() -> None:
    pipeline = loaded(
        config("NeedsWeather Station active-request-scorer", "default: NeedsWeather active-request-scorer")
    )
    produced = [producer.produces.__name__ for producer in pipeline.producers]
    assert sorted(produced) == ["InFlight", "PrefixMatch", "Weather"]
    assert produced.index("PrefixMatch") < produced.index("Weather")


def test_cache_room_brings_the_cache_it_is_the_other_half_of() -> None:
    pipeline = loaded(config("approx-cache-room-producer"))
    assert [producer.produces.__name__ for producer in pipeline.producers] == ["PrefixMatch", "CacheRoom"]
    assert pipeline.registry["approx-prefix-cache-producer"].added == "approx-cache-room-producer needs PrefixMatch"


def test_a_users_producer_takes_the_place_of_the_default_one() -> None:
    pipeline = loaded(config("OwnMatch Warm"))
    assert [producer.produces for producer in pipeline.producers] == [PrefixMatch]
    assert "approx-prefix-cache-producer" not in pipeline.registry


def test_unused_plugins_take_no_part_and_plugins_with_hooks_only_do() -> None:
    pipeline = loaded(config("All Warm Watching OwnMatch", "default: All"))
    assert pipeline.unused == ("Warm",)
    assert any(isinstance(plugin, Watching) for plugin in pipeline.plugins)
    assert not any(isinstance(plugin, Warm) for plugin in pipeline.plugins)
    assert InFlight not in [producer.produces for producer in pipeline.producers]


def test_several_profiles_with_a_handler() -> None:
    pipeline = loaded(config("All Warm Chooser", "one: All, two: Warm All"))
    assert list(pipeline.profiles) == ["one", "two"]
    assert isinstance(pipeline.handler, Chooser)


def test_a_dataclass_that_cannot_be_hashed_is_a_plugin_like_any_other() -> None:
    text = HEAD + f"plugins: [{{name: r, type: {OURS}.Required, parameters: {{path: x}}}}]"
    assert isinstance(loaded(text).profiles["default"].scorers[0][0], Required)


def test_a_shadow_is_a_profile_that_takes_no_other_part() -> None:
    text = config("All Warm", "a: All, b: Warm", "shadow: {profile: b, sample: 0.25}")
    pipeline = loaded(text)
    assert list(pipeline.profiles) == ["a"]
    shadow = pipeline.shadow
    assert shadow is not None
    assert (shadow.profile.name, shadow.sample) == ("b", 0.25)
    assert shadow.profile.picker is not pipeline.profiles["a"].picker
    assert {shadow.cost, shadow.profile.picker, *(s for s, _ in shadow.profile.scorers)} <= set(pipeline.plugins)
    assert pipeline.unused == ()


def test_a_shadow_is_priced_by_the_configurations_own_cost() -> None:
    text = config("expected-ttft Warm", "a: expected-ttft, b: Warm", "shadow: {profile: b}")
    pipeline = loaded(text)
    assert pipeline.shadow is not None
    assert pipeline.shadow.cost is pipeline.profiles["a"].scorers[0][0]


def test_a_reload_that_changes_the_shadow_alone_keeps_the_rest() -> None:
    before = loaded(config("All Warm", "a: All, b: Warm", "shadow: {profile: b}"))
    after = loaded(config("All Warm", "a: All, b: Warm", "shadow: {profile: b, sample: 1}"), before)
    without = loaded(config("All Warm", "a: All"), after)
    assert after.plugins == before.plugins
    assert without.shadow is None
    assert set(without.plugins) < set(before.plugins)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plugins", "profiles", "rest", "line"),
    [
        (
            "All",
            "a: Al",
            "",
            "schedulingProfiles[0].plugins[0].pluginRef: no plugin is called 'Al'; did you mean 'All'",
        ),
        ("All", "a: All All", "", "schedulingProfiles[0].plugins[1].pluginRef: 'All' is in this profile already"),
        ("All", "a: All*2", "", "schedulingProfiles[0].plugins[0].weight: expected on scorers only; 'All' is a filter"),
        ("Warm", "a: Warm*-1", "", "schedulingProfiles[0].plugins[0].weight: expected 0 or more, got -1.0"),
        ("First Second", "a: First Second", "", "plugins[1].pluginRef: Second is a second picker; expected one"),
        ("First Second", "", "", "Second is a second picker"),
        ("Station", "a: Station*2", "", "expected a filter, scorer or picker; 'Station' is a producer"),
        ("Never", "a: Never", "", "expected a filter, scorer or picker; 'Never' is a saturation detector"),
        ("Chooser", "a: Chooser", "", "expected a filter, scorer or picker; 'Chooser' is a profile handler"),
        ("Watching", "a: Watching", "", "'Watching' is a plugin of no such kind"),
        ("openai-parser", "a: openai-parser", "", "'openai-parser' is built in and always on"),
        ("All", "a: All, a: All", "", "schedulingProfiles[1].name: a profile above is called 'a' too"),
        ("All", "a: All, b: All", "", "schedulingProfiles: a, b: several need a profile handler"),
        (
            "All single-profile-handler",
            "a: All, b: All",
            "",
            "schedulingProfiles: a, b: several need a profile handler",
        ),
        ("Chooser single-profile-handler", "", "", "single-profile-handler is a second profile handler; expected one"),
        ("NeedsWeather", "", "", "plugins[0]: needs the signal Weather, and no plugin produces it"),
        ("Station OtherStation", "", "", "plugins[1]: OtherStation and Station both produce Weather"),
        ("OwnMatch approx-cache-room-producer", "", "", "ApproximateCacheRoom works only with PrefixCache"),
        ("Circular Station", "", "", "these need each other's signals: Circular, Station"),
        ("All", "a: All, b: All", "shadow: {profile: c}", "shadow.profile: no profile is called 'c'"),
        ("All", "first: All, b: All", "shadow: {profile: frist}", "did you mean 'first'"),
        ("All", "a: All", "shadow: {profile: a}", "shadow.profile: 'a' is the only profile; expected one beside"),
        (
            "First",
            "a: First, b: First",
            "shadow: {profile: b}",
            "shadow.profile: 'b' has the same picker as profile a; expected one of its own",
        ),
        ("All", "a: All, b: All, c: All", "shadow: {profile: c}", "schedulingProfiles: a, b: several need a profile"),
        ("All", "", "saturationDetector: {pluginRef: All}", "saturationDetector.pluginRef: 'All' is no saturation"),
        (
            "All",
            "",
            "saturationDetector: {pluginRef: Neve}",
            "saturationDetector.pluginRef: no plugin is called 'Neve'",
        ),
        ("All", "", "parser: {pluginRef: All}", "parser.pluginRef: 'All' is no parser, data source or extractor"),
        (
            "All",
            "",
            "parser: {pluginRef: request-attribute-reporter}",
            "parser.pluginRef: request-attribute-reporter is not there",
        ),
        (
            "All",
            "",
            "parser: {pluginRef: token-producer}",
            "'token-producer' is no parser; expected one of openai-pars",
        ),
        (
            "All",
            "",
            "parser: {pluginRef: openai-parse}",
            "no plugin is called 'openai-parse'; did you mean 'openai-parser'",
        ),
        (
            "All",
            "",
            "dataLayer: {sources: [{pluginRef: openai-parser, extractors: [{pluginRef: request-attribute-reporter}]}]}",
            "dataLayer.sources[0].extractors[0].pluginRef: request-attribute-reporter is not there yet",
        ),
    ],
)
def test_refused_at_start(plugins: str, profiles: str, rest: str, line: str) -> None:
    assert line in refusal(config(plugins, profiles, rest))


def test_a_reference_by_type_to_a_plugin_with_a_name_of_its_own() -> None:
    reported = refusal(HEAD + "plugins: [{type: queue-scorer, name: q}]\n" + PROFILE.format("queue-scorer"))
    assert reported.endswith("no plugin is called 'queue-scorer'; the one of that type is called 'q'")


TIERED = """
plugins:
- {type: approx-prefix-cache-producer, name: gpu}
- {type: approx-prefix-cache-producer, name: cpu, parameters: {autoTune: false, lruCapacityPerServer: 82000}}
- {type: no-hit-lru-scorer}
- {type: prefix-cache-scorer, name: gpu-scorer, parameters: {prefixMatchInfoProducerName: gpu}}
- {type: prefix-cache-scorer, name: cpu-scorer, parameters: {prefixMatchInfoProducerName: cpu}}
schedulingProfiles:
- name: a
  plugins: [{pluginRef: no-hit-lru-scorer}, {pluginRef: gpu-scorer}, {pluginRef: cpu-scorer}]
"""


def test_each_scorer_reads_the_prefix_producer_that_it_names() -> None:
    pipeline = loaded(HEAD + TIERED)
    assert [producer.name for producer in pipeline.producers] == ["gpu", "cpu"]
    picking = pipeline.scheduler(wall_clock=lambda: 0.0, on_error=fail)
    a, b = pods("ab")
    cpu: Any = pipeline.registry["cpu"].plugin
    request = ask("r", prompt=b"x" * 4096, tokens=1024)
    run(cpu.prepare(request))
    cpu.on_picked(request, b)  # as where the GPU's shadow has lost it and the CPU's has not
    found = picking.choose(run(picking.prepare(ask("s", prompt=b"x" * 4096, tokens=1024))), [a, b])
    shares = {each.name: [*each.scores] for each in found.runs[0].scored if each.name != "no-hit-lru-scorer"}
    assert shares == {"gpu-scorer": [0.0, 0.0], "cpu-scorer": [0.0, 1.0]}


def test_a_second_prefix_producer_that_nobody_names_takes_no_part() -> None:
    pipeline = loaded(HEAD + TIERED.replace("prefixMatchInfoProducerName: cpu", ""))
    assert [producer.name for producer in pipeline.producers] == ["gpu"]
    assert pipeline.unused == ("cpu",)


def test_a_prefix_producer_that_is_named_by_its_type_is_added() -> None:
    text = TIERED.replace(
        "prefixMatchInfoProducerName: cpu", "prefixMatchInfoProducerName: precise-prefix-cache-producer"
    )
    assert {p.name for p in loaded(HEAD + text).producers} == {"gpu", "precise-prefix-cache-producer"}


@pytest.mark.parametrize(
    ("named", "line"),
    [
        ("cpuu", "no plugin is called 'cpuu'; did you mean 'cpu'?"),
        ("gpu-scorer", "no producer of prefix matches is 'gpu-scorer'"),
    ],
)
def test_a_prefix_producer_that_is_not_there_is_refused(named: str, line: str) -> None:
    reported = refusal(
        HEAD + TIERED.replace("prefixMatchInfoProducerName: cpu", f"prefixMatchInfoProducerName: {named}")
    )
    assert reported.startswith(f"plugins[4].parameters.prefixMatchInfoProducerName: {line}")


PARSERS = """
plugins:
- {type: queue-scorer}
- {type: openai-parser, name: mine}
- {type: vllmhttp-parser}
- {type: anthropic-parser}
requestHandler: {parsers: [{pluginRef: mine}, {pluginRef: vllmhttp-parser}]}
"""


def test_parsers_are_those_that_the_configuration_names() -> None:
    pipeline = loaded(HEAD + PARSERS)
    assert pipeline.parsers == ("openai-parser", "vllmhttp-parser")
    (idle,) = pipeline.idle
    assert idle == "plugins[3]: 'anthropic-parser' reads nothing: requestHandler.parsers does not name it"
    assert loaded(HEAD + "plugins: [{type: queue-scorer}]").parsers == ()


DISCOVERY = """
plugins:
- {type: queue-scorer}
- {type: file-discovery, name: files, parameters: {path: /etc/endpoints.yaml, watchFile: true}}
dataLayer: {discovery: {endpoints: {pluginRef: files}}}
"""


def test_a_configuration_may_name_the_file_of_endpoints() -> None:
    assert parse(HEAD + DISCOVERY).endpoints_file == Path("/etc/endpoints.yaml")
    assert parse(HEAD + "plugins: [{type: queue-scorer}]").endpoints_file is None


@pytest.mark.parametrize(
    ("right", "wrong", "line"),
    [
        ("pluginRef: files", "pluginRef: file", "dataLayer.discovery.endpoints.pluginRef: no plugin is called 'file'"),
        ("pluginRef: files", "pluginRef: queue-scorer", "'queue-scorer' finds no endpoints; expected a plugin of type"),
        ("path: /etc/endpoints.yaml, ", "", "plugins[1].parameters.path: missing; expected the path of a file"),
    ],
)
def test_a_discovery_that_finds_nothing_is_refused(right: str, wrong: str, line: str) -> None:
    assert line in refusal(HEAD + DISCOVERY.replace(right, wrong))


def test_no_plugins() -> None:
    assert refusal(HEAD + "plugins: []") == "plugins: expected at least one plugin, got none"
    assert refusal(HEAD) == "plugins: expected at least one plugin, got none"


def test_all_errors_of_a_file_come_at_once_with_its_name() -> None:
    text = (
        HEAD + "plugins: [{type: queue-scorre}, {type: request-attribute-reporter}, {type: max-score-picker, "
        "parameters: {a: 1}}]"
    )
    with pytest.raises(ConfigError) as refused:
        loaded(text, where="my.yaml")
    assert [line.split(": ")[:2] for line in str(refused.value).splitlines()] == [
        ["my.yaml", "plugins[0].type"],
        ["my.yaml", "plugins[1].type"],
        ["my.yaml", "plugins[2].parameters.a"],
    ]


# --- reload ---------------------------------------------------------------------------------------------------------


WRONG_IN_EVERY_WAY = """
apiVersion: llm-d.ai/v9
kind: EndpointPickerConfig
featureGates: [flowcontrol, 5]
plugins:
- {type: queue-scorer, parametrs: {a: 1}}
- {type: kv-cache-scorer}
- {type: prefix-cache-scorer, parameters: {bogus: 1}}
- {type: no_such_module.Nope}
- 5
- {type: utilization-detector, parameters: {headroom: lots}}
- {type: session-affinity-filter, name: x}
- {type: max-score-picker, name: x}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: heavy}
  - {pluginRef: kv-cache-scorer}
  - {pluginRef: x, weight: 2}
- {name: default, plugins: {}}
saturationDetector: {pluginRef: queue-scorer}
flowControl: {maxBytes: lots}
dataLayer: {discovery: {pluginRef: x}}
shadow: {profile: other, sample: 3}
extra: 1
"""


def test_errors_of_every_kind_come_at_once_and_none_that_follows_from_another() -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(WRONG_IN_EVERY_WAY)
    assert [line.split(": ")[0] for line in str(refused.value).splitlines()] == [
        "apiVersion",
        "featureGates[1]",
        "plugins[0].parametrs",
        "plugins[4]",
        "schedulingProfiles[0].plugins[0].weight",
        "schedulingProfiles[1].plugins",
        "flowControl.maxBytes",
        "shadow.sample",
        "extra",
        "featureGates[0]",
        "dataLayer.discovery.pluginRef",
        "plugins[1].type",
        "plugins[2].parameters.bogus",
        "plugins[3].type",
        "plugins[5].parameters.headroom",
        "plugins[7].name",
        "saturationDetector.pluginRef",
        "schedulingProfiles[0].plugins[2].weight",
        "schedulingProfiles[1].name",
    ]


@pytest.mark.parametrize(
    ("plugins", "rest", "only"),
    [
        ("- {type: queue-scorre}\n", PROFILE.format("queue-scorre"), "plugins[0].type"),
        ("- {name: a}\n", PROFILE.format("a"), "plugins[0].type"),
        ("- {typ: queue-scorer}\n- {type: max-score-picker}\n", PROFILE.format("queue-scorer"), "plugins[0].type"),
        (
            "- {type: queue-scorer}\n- {type: multicluster-queue-scorer}\n",
            "parser: {pluginRef: multicluster-queue-scorer}",
            "plugins[1].type",
        ),
        (
            "- {type: request-attribute-reporter}\n",
            "saturationDetector: {pluginRef: request-attribute-reporter}",
            "plugins[0].type",
        ),
        ("- {type: request-attribute-reporter}\n- {type: queue-scorer}\n", TWO_PROFILES, "plugins[0].type"),
        ("- {type: queue-scorer}\n", TWO_PROFILES + "shadow: {profile: 5}", "shadow.profile"),
        ("  queue-scorer", PROFILE.format("queue-scorer"), "plugins"),
    ],
)
def test_what_follows_from_an_error_is_not_reported(plugins: str, rest: str, only: str) -> None:
    reported = [line for line in refusal(HEAD + f"plugins:\n{plugins}\n{rest}").splitlines() if ".typ:" not in line]
    assert [line.split(": ")[0] for line in reported] == [only]


def test_a_document_of_another_kind_is_reported_that_and_no_more() -> None:
    (reported,) = refusal("apiVersion: llm-d.ai/v1\nkind: ConfigMap\ndata: {a: b}").splitlines()
    assert reported.endswith(
        "got 'ConfigMap'; the configuration is a text under its `data`: give that in a file of its own"
    )


def test_a_reload_keeps_what_it_does_not_change() -> None:
    first = loaded(config("All Warm approx-cache-room-producer", "a: All Warm*1"))
    second = loaded(config("Warm All approx-cache-room-producer", "a: Warm*3 All"), previous=first)
    for name in ("All", "Warm", "approx-prefix-cache-producer", "approx-cache-room-producer", "utilization-detector"):
        assert second.registry[name].plugin is first.registry[name].plugin
    assert second.profiles["a"].scorers[0][1] == 3.0


def test_a_reload_makes_anew_what_it_changes_and_what_is_made_of_it() -> None:
    text = (
        HEAD
        + f"plugins: [{{type: {OURS}.Couple, name: c, parameters: {{size: 1}}}}, {{type: {OURS}.OtherHalf, name: o}}]"
    )
    first = loaded(text)
    second = loaded(text.replace("size: 1", "size: 2"), previous=first)
    assert second.registry["c"].plugin is not first.registry["c"].plugin
    half: Any = second.registry["o"].plugin
    assert half is not first.registry["o"].plugin
    assert half.couple is second.registry["c"].plugin


# --- anything at all ------------------------------------------------------------------------------------------------

KEYS = st.sampled_from(
    """apiVersion kind plugins name type parameters featureGates schedulingProfiles pluginRef weight dataLayer sources
    extractors discovery flowControl parser requestHandler parsers saturationDetector x""".split()  # noqa: SIM905
)
WORDS = st.sampled_from(
    [
        *protocol.CONFIG_VERSIONS,
        *builtin.CLASSES,
        *builtin.BUILT_IN,
        "flowControl",
        "no.Such",
        "",
        f"{OURS}.Warm",
        "Warm",
    ]
)
TREES = st.recursive(
    WORDS | st.integers() | st.booleans() | st.floats() | st.none(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(KEYS, children, max_size=4),
    max_leaves=8,
)
PLUGINS = st.lists(st.fixed_dictionaries({"type": WORDS}, optional={"name": WORDS, "parameters": TREES}) | TREES)
REFERENCES = st.lists(st.fixed_dictionaries({"pluginRef": WORDS}, optional={"weight": TREES}), max_size=4)
PROFILES = st.lists(st.fixed_dictionaries({"name": WORDS, "plugins": REFERENCES}) | TREES, max_size=3)
FILES = st.fixed_dictionaries(
    {"apiVersion": st.sampled_from(protocol.CONFIG_VERSIONS), "kind": st.just("EndpointPickerConfig")},
    optional={"plugins": PLUGINS, "schedulingProfiles": PROFILES, "dataLayer": TREES, "flowControl": TREES, "x": TREES},
)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(FILES | TREES)
def test_any_file_is_loaded_or_refused(content: Any) -> None:
    problems = Problems()
    with problems.collect():
        assert loaded(yaml.safe_dump(content)).profiles
    assert all(str(error) for error in problems.errors)
