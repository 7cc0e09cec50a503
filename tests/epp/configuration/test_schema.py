"""EndpointPickerConfig in its three apiVersions: shapes that load, shapes that are refused and in which words."""

import re
from collections.abc import Callable

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from epp import protocol
from epp.configuration.schema import SHARED, EndpointPickerConfig, parse, salvaged
from epp.documents.strict import Problems
from epp.errors import ConfigError, ConfigErrors

HEAD = "apiVersion: {version}\nkind: EndpointPickerConfig\nplugins: [{{type: queue-scorer}}]\n"
V1, V1ALPHA1, GIE = protocol.CONFIG_VERSIONS


def parsed(body: str, version: str = V1) -> EndpointPickerConfig:
    return parse(HEAD.format(version=version) + body)


def refusal(body: str, version: str = V1) -> str:
    with pytest.raises(ConfigErrors) as refused:
        parsed(body, version)
    return str(refused.value)


@pytest.mark.parametrize("version", protocol.CONFIG_VERSIONS)
def test_minimal_file(version: str) -> None:
    config = parsed("schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer, weight: 2}]}]", version)
    assert config.plugins[0].type == "queue-scorer"
    assert config.scheduling_profiles[0].plugins[0].weight == 2.0
    assert config.detector == ("flowControl.saturationDetector.pluginRef", "")


@pytest.mark.parametrize("version", protocol.CONFIG_VERSIONS)
@pytest.mark.parametrize(
    "body",
    [
        "featureGates: [dataLayer]",
        "featureGates: [enableLegacyMetrics, flowControl=false, haPopulateNonLeaderDatastore=true]",
        "saturationDetector: {pluginRef: utilization-detector}",
        "flowControl: {saturationDetector: {pluginRef: concurrency-detector}, enableEviction: false}",
        "dataLayer: {sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}]}]}",
        "dataLayer: {injectDefaults: true}",
        "dataLayer: {injectDefaults: false}",
        "parser: {pluginRef: openai-parser}",
        "requestHandler: {parsers: [{pluginRef: openai-parser}, {pluginRef: anthropic-parser}]}",
        "dataLayer:\nflowControl: ~\nfeatureGates: []",
    ],
)
def test_sections_that_load(version: str, body: str) -> None:
    config = parsed(body, version)
    fields = {
        "featureGates": config.feature_gates,
        "saturationDetector": config.saturation_detector,
        "flowControl": config.flow_control,
        "dataLayer": config.data_layer,
        "parser": config.parser,
        "requestHandler": config.request_handler,
    }
    assert {name for name, read in fields.items() if read} == {k for k, given in yaml.safe_load(body).items() if given}


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("featureGates: [flowControl=on]", "featureGates[0]: expected flowControl=true or flowControl=false"),
        ("featureGates: [flowcontrl]", "'flowcontrl' is no feature gate; did you mean 'flowControl'?"),
        ("flowControl: {maxBytes: lots}", "flowControl.maxBytes: expected a quantity such as 5000, 500M or 1Gi"),
        ("flowControl: {maxRequests: -1}", "flowControl.maxRequests: expected a quantity such as 5000"),
        ("flowControl: {defaultRequestTTL: 60}", "flowControl.defaultRequestTTL: expected a duration such as 200ms"),
        (
            "flowControl: {enableEviction: true}",
            "flowControl.enableEviction: requests that run are never cut off for others",
        ),
        ("flowControl: {maxByte: 1}", "flowControl.maxByte: unknown; did you mean 'maxBytes'?"),
        (
            "dataLayer: {discovery: {endpoints: {pluginRef: x}}}",
            "dataLayer.discovery.endpoints.pluginRef: no plugin is called 'x'",
        ),
        (
            "saturationDetector: {pluginRef: a}\nflowControl: {saturationDetector: {pluginRef: b}}",
            "saturationDetector: flowControl.saturationDetector says it too",
        ),
        ("shadow: {sample: 0.5}", "shadow.profile: missing"),
        ("shadow: {profile: a, sample: 0}", "sample: expected more than 0 and at most 1, got 0.0"),
        ("shadow: {profile: a, sample: 2}", "sample: expected more than 0 and at most 1, got 2.0"),
        ("shadow: {profile: a, sample: often}", "shadow.sample: expected a number, got 'often'"),
        ("shadow: {profil: a}", "shadow.profil: unknown; did you mean 'profile'?"),
        ("shadow: new", "shadow: expected"),
        ("schedulingProfile: []", "schedulingProfile: unknown; did you mean 'schedulingProfiles'?"),
        ("schedulingProfiles: [{plugins: []}]", "schedulingProfiles[0].name: missing"),
        (
            "schedulingProfiles: [{name: a, plugins: [{pluginRef: x, weight: heavy}]}]",
            "schedulingProfiles[0].plugins[0].weight: expected a number, got 'heavy'",
        ),
        (
            "schedulingProfiles: [{name: a, plugins: [{pluginRef: x, weigth: 1}]}]",
            "schedulingProfiles[0].plugins[0].weigth: unknown; did you mean 'weight'?",
        ),
    ],
)
def test_sections_that_are_refused(body: str, line: str) -> None:
    assert line in refusal(body)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("discovery: {pluginRef: x}", "discovery: {endpoints: {pluginRef: x}}"),
        ("crossReplicaSyncerPluginRef: x", "crossReplica: {syncerPluginRef: x}"),
        ("crossReplicaSyncInterval: 1s", "crossReplica: {syncInterval: 1s}"),
        ("crossReplicaPublishTimeout: 1s", "crossReplica: {publishTimeout: 1s}"),
    ],
)
def test_names_that_changed_in_v1_belong_to_their_version(before: str, now: str) -> None:
    assert "not in llm-d.ai/v1; there it is" in refusal(f"dataLayer: {{{before}}}", V1)
    assert "not in llm-d.ai/v1alpha1; there it is" in refusal(f"dataLayer: {{{now}}}", V1ALPHA1)
    for body, version in ((before, GIE), (now, V1)):
        problems = Problems()
        salvaged(HEAD.format(version=version) + f"dataLayer: {{{body}}}", problems)
        assert not any("there it is" in error.message for error in problems.errors)


def test_what_replicas_share_is_said_to_be_shared_by_themselves() -> None:
    config = parsed("dataLayer: {peerDiscovery: {pluginRef: x}, crossReplica: {syncerPluginRef: x, syncInterval: 1s}}")
    assert config.idle == [("dataLayer.peerDiscovery", SHARED), ("dataLayer.crossReplica", SHARED)]


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("plugins: [queue-scorer]", "plugins[0]: expected a mapping with type, got 'queue-scorer'"),
        ("plugins:\n- type:queue-scorer", "got 'type:queue-scorer'; a space is missing after the colon"),
        ("plugins: {a: {}}", "plugins: expected a list, got a mapping"),
        ("plugins: []\nplugins: []", "line 4, column 1: the key 'plugins' is here twice; expected it once"),
    ],
)
def test_mistakes_are_reported_with_what_to_do(body: str, line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(f"apiVersion: {V1}\nkind: EndpointPickerConfig\n{body}")
    assert line in str(refused.value)


def test_a_second_document_and_an_empty_file_are_reported() -> None:
    with pytest.raises(ConfigError, match="2 YAML documents; expected one"):
        parse("a: 1\n---\nb: 2\n")
    with pytest.raises(ConfigError, match="got nothing: the file is empty"):
        parse("# nothing\n")


@pytest.mark.parametrize(
    "encode", [lambda text: text.replace("\n", "\r\n").encode(), lambda text: text.encode("utf-8-sig")]
)
def test_line_ends_and_a_byte_order_mark_do_not_matter(encode: Callable[[str], bytes]) -> None:
    assert parse(encode(f"---\napiVersion: {V1}\nkind: EndpointPickerConfig\nplugins: [{{type: a}}]\n")).plugins


def test_wrong_version_and_kind() -> None:
    with pytest.raises(ConfigError) as refused:
        parse("apiVersion: llm-d.ai/v2\nkind: EndpointPicker\nplugins: []", where="a.yaml")
    first, second = str(refused.value).splitlines()
    assert first.startswith("a.yaml: apiVersion: expected llm-d.ai/v1 or llm-d.ai/v1alpha1 or inference.networking")
    assert second == (
        "a.yaml: kind: expected EndpointPickerConfig, got 'EndpointPicker'; did you mean 'EndpointPickerConfig'?"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "endpoints: [{name: a}]",
            "a.yaml: endpoints: a list of endpoints is what --endpoints is given; expected an Endp",
        ),
        (
            "apiVersion: inference.networking.k8s.io/v1\nkind: InferencePool",
            "a.yaml: kind: got 'InferencePool': a manifest, as --endpoints and kubectl are given; expected an Endpoint",
        ),
    ],
)
def test_another_file_of_ours_is_called_by_its_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(text, where="a.yaml")
    [line] = str(refused.value).splitlines()
    assert line.startswith(said)


@pytest.mark.parametrize("text", ["", "[]", "plain", "a: [", "3"])
def test_what_is_no_configuration(text: str) -> None:
    with pytest.raises(ConfigError, match=re.compile("^some.yaml: ")):
        parse(text, where="some.yaml")


def test_all_errors_of_a_file_come_at_once() -> None:
    body = "plugin: []\nfeatureGates: on\nparser: {}"
    assert refusal(body).splitlines() == [
        "plugin: unknown; did you mean 'plugins'?",
        "featureGates: expected a list, got 'on'",
        "parser.pluginRef: missing",
    ]


@given(st.text(max_size=80) | st.binary(max_size=80))
def test_random_text_is_only_ever_refused(text: str | bytes) -> None:
    assume(
        b"EndpointPickerConfig" not in (text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    )  # of our own code
    with pytest.raises(ConfigError):
        parse(text)
