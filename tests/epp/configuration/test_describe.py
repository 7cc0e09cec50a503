"""What `warmpath check` prints: the pipeline in order, every parameter, what was added."""

import pytest

from epp.configuration.describe import describe
from epp.errors import ConfigError
from tests.support.scheduling.pipelines import loaded

CONFIG = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- {name: warm, type: tests.support.plugins.Warm, parameters: {wait: 200ms, names: [a], steps: [{at: 1}]}}
- {type: tests.support.plugins.All, name: all}
- {type: tests.support.plugins.OwnMatch, name: match}
- {type: tests.support.plugins.Watching, name: watching}
- {type: queue-scorer}
schedulingProfiles:
- name: main
  plugins: [{pluginRef: warm, weight: 2.5}, {pluginRef: all}]
"""

EXPECTED = """\
admission     detector utilization-detector queueDepthThreshold=5, kvCacheUtilThreshold=0.8, \
metricsStalenessThreshold=5s, stalenessPolicy=ignore, headroom=0.0  [added: the default]
signals       PrefixMatch from match (tests.support.plugins.OwnMatch)
profiles      handler single-profile-handler  [added: there is one profile]
profile main  filter all (tests.support.plugins.All)
profile main  scorer, weight 2.5: warm (tests.support.plugins.Warm) floor=0.1, count=1, strict=false, mode=fast, \
wait=0.2s, names=[a], labels={}, steps=[{at: 1.0, label: none}], maxTTFTMs=null
profile main  picker max-score-picker maxNumOfEndpoints=1  [added: profile main has no picker]
hooks         plugin watching (tests.support.plugins.Watching)
not used      plugin queue-scorer
runs code     of the module tests.support.plugins: warm, all, match, watching"""


IDLE = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [dataLayer, enableLegacyMetrics, haPopulateNonLeaderDatastore=false, flowControl=false]
plugins:
- {type: openai-parser}
- {type: metrics-data-source}
- type: precise-prefix-cache-producer
  parameters:
    indexerConfig: {anything: goes}
    tokenProcessorConfig: {blockSize: 64}
    speculativeIndexing: false
    kvEventsConfig: {concurrency: 8, podDiscoveryConfig: {podLabelSelector: a=b, podNamespace: x}}
- {type: active-request-scorer, parameters: {requestTimeout: 2m}}
- {type: no-hit-lru-scorer, parameters: {prefixPluginType: a, prefixPluginName: b}}
- {type: concurrency-detector, parameters: {inFlightLoadProducerName: c}}
- {type: session-affinity-scorer, parameters: {strategy: session_id, sessionIdConfig: {evictionsweepseconds: 5}}}
- {type: token-producer, parameters: {modelName: m, vllm: {url: x}, estimate: {image: {mode: static}}}}
- {type: file-discovery, parameters: {path: /x, watchFile: false}}
- {type: burst-prefix-cache-producer, parameters: {windowDurationMs: 50, maxPerReplica: -1}}
dataLayer: {injectDefaults: false, sources: [{pluginRef: metrics-data-source}]}
"""


def test_every_setting_without_effect_is_reported_with_why() -> None:
    reported = [
        line.split(maxsplit=2)[2] for line in describe(loaded(IDLE)).splitlines() if line.startswith("no effect")
    ]
    assert [line.split(": ")[0] for line in reported] == [
        "featureGates[1]",
        "featureGates[2]",
        "dataLayer.injectDefaults",
        "dataLayer.sources",
        "plugins[0]",
        "plugins[1]",
        "plugins[7]",
        "plugins[8]",
        "plugins[7].parameters.modelName",
        "plugins[7].parameters.vllm",
        "plugins[7].parameters.estimate",
        "plugins[8].parameters.watchFile",
        "plugins[2].parameters.indexerConfig",
        "plugins[2].parameters.tokenProcessorConfig",
        "plugins[2].parameters.speculativeIndexing",
        "plugins[2].parameters.kvEventsConfig.concurrency",
        "plugins[2].parameters.kvEventsConfig.podDiscoveryConfig.podLabelSelector",
        "plugins[2].parameters.kvEventsConfig.podDiscoveryConfig.podNamespace",
        "plugins[3].parameters.requestTimeout",
        "plugins[4].parameters.prefixPluginType",
        "plugins[4].parameters.prefixPluginName",
        "plugins[5].parameters.inFlightLoadProducerName",
        "plugins[6].parameters.sessionIdConfig.evictionSweepSeconds",
        "plugins[9].parameters.windowDurationMs",
    ]
    assert "featureGates[1]: endpoints' metrics are read in one way" in reported


def test_what_asks_for_what_happens_anyway_is_not_reported() -> None:
    text = CONFIG.replace("plugins:", "featureGates: [dataLayer, flowControl=false]\nplugins:", 1)
    assert "no effect" not in describe(loaded(text + "dataLayer: {injectDefaults: true}"))


def test_names_cannot_steer_a_terminal() -> None:
    assert (
        describe(
            loaded(
                CONFIG.replace("name: warm,", 'name: "w\\e[2Jx",').replace("pluginRef: warm", 'pluginRef: "w\\e[2Jx"')
            )
        ).count(r"w\x1b[2Jx")
        == 2
    )


TTFT = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins: [{{type: expected-ttft, parameters: {{{}}}}}]
schedulingProfiles: [{{name: main, plugins: [{{pluginRef: expected-ttft}}]}}]
"""


@pytest.mark.parametrize(
    ("short", "name", "value"),
    [
        ("g", "workWeight", "2.5"),
        ("s", "stallWeight", "0.3"),
        ("lin", "prefillSecondsPerToken", "0.001"),
        ("att", "attentionSecondsPerTokenPair", "2e-08"),
        ("base", "stepSeconds", "0.01"),
        ("c", "stepSecondsPerDecode", "0.002"),
        ("d", "stepSecondsPerContextToken", "3e-08"),
        ("chunk", "maxNumBatchedTokens", "2048"),
        ("l1Speed", "l1TokensPerSecond", "1000.0"),
        ("l2Speed", "l2TokensPerSecond", "100.0"),
        ("residence", "residenceSeconds", "20.0"),
        ("failure", "failureSeconds", "3.0"),
    ],
)
def test_a_constant_of_the_cost_is_shown_by_its_readable_name(short: str, name: str, value: str) -> None:
    by_short, by_name = (describe(loaded(TTFT.format(f"{key}: {value}"))) for key in (short, name))
    assert by_short == by_name
    assert f" {name}={value}," in by_name
    with pytest.raises(ConfigError, match=rf"parameters\.{name}: the same parameter as '{short}', which is given too"):
        loaded(TTFT.format(f"{short}: {value}, {name}: {value}"))


SHADOW = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins: [{type: expected-ttft}, {type: queue-scorer}]
schedulingProfiles:
- {name: main, plugins: [{pluginRef: expected-ttft}]}
- {name: new, plugins: [{pluginRef: queue-scorer}]}
shadow: {profile: new, sample: 0.5}
"""


def test_a_shadow_in_words() -> None:
    text = SHADOW
    lines = [line for line in describe(loaded(text)).splitlines() if line.startswith("shadow new")]
    assert lines == [
        "shadow new    picks for 0.5 of the requests, priced by expected-ttft",
        "shadow new    scorer, weight 1: queue-scorer",
        "shadow new    picker new-picker (max-score-picker) maxNumOfEndpoints=1  [added: profile new has no picker]",
    ]


def test_a_pipeline_in_words() -> None:
    assert describe(loaded(CONFIG)) == EXPECTED
