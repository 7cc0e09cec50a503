"""`endpoint-attribute-filter`, `endpoint-attribute-scorer` and `dcgm-data-source`; numbers by the formulas of llm-d."""

from collections.abc import Mapping, Sequence

import pytest

from epp.errors import ConfigError
from epp.plugin import Endpoint, Load, Request
from epp.scheduling.attributes import DcgmDataSource, EndpointAttributeFilter, EndpointAttributeScorer
from epp.testing import services
from tests.support.process.waiting import beside, until
from tests.support.scheduling.pipelines import loaded

REQUEST = Request(id="r", model="m")
PLUGINS = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: core-metrics-extractor
  parameters:
    engineConfigs:
    - name: vllm
      queuedRequestsSpec: "vllm:num_requests_waiting"
      customMetrics: [{attributeKey: depth, metricSpec: "my_depth{tier=gold}"}]
- {type: endpoint-attribute-filter, name: f, parameters: {attribute: depth, %s}}
- {type: endpoint-attribute-scorer, name: s, parameters: {attributeKey: depth, %s}}
- {type: max-score-picker}
"""
THRESHOLD = "algorithm: {type: threshold, threshold: {operator: LessThanOrEqual, value: 5}}"
LOWER = "algorithm: {type: linear_lower_is_better}"


def endpoint(name: str, **custom: float) -> Endpoint:
    return Endpoint(f"default/{name}", f"10.0.0.{len(name)}:8000", load=Load(custom=custom))


def plugins(filters: str = THRESHOLD, scores: str = LOWER) -> tuple[EndpointAttributeFilter, EndpointAttributeScorer]:
    registry = loaded(PLUGINS % (filters, scores)).registry
    filter_, scorer = registry["f"].plugin, registry["s"].plugin
    assert isinstance(filter_, EndpointAttributeFilter)
    assert isinstance(scorer, EndpointAttributeScorer)
    return filter_, scorer


A, BB, CCC, NONE = endpoint("a", depth=2), endpoint("bb", depth=5), endpoint("ccc", depth=10), endpoint("none")


@pytest.mark.parametrize(
    ("operator", "kept"),
    [
        ("LessThan", [A]),
        ("LessThanOrEqual", [A, BB]),
        ("GreaterThan", [CCC]),
        ("GreaterThanOrEqual", [BB, CCC]),
        ("Equal", [BB]),
        ("NotEqual", [A, CCC]),
    ],
)
def test_endpoints_on_the_right_side_of_a_threshold(operator: str, kept: list[Endpoint]) -> None:
    text = f"onMissing: Fail, algorithm: {{type: threshold, threshold: {{operator: {operator}, value: 5}}}}"
    assert plugins(text)[0].filter(REQUEST, [A, BB, CCC, NONE]) == kept


def test_who_has_no_such_figure_is_kept_and_all_are_where_none_would_be_left() -> None:
    assert plugins()[0].filter(REQUEST, [CCC, NONE]) == [NONE]
    assert plugins()[0].filter(REQUEST, [CCC]) == []
    assert plugins("fallbackOnEmpty: true, " + THRESHOLD)[0].filter(REQUEST, [CCC]) == [CCC]


@pytest.mark.parametrize(
    ("algorithm", "scores"),
    [
        ("{type: linear_lower_is_better}", [1.0, 0.625, 0.0, 0.0]),
        ("{type: linear_higher_is_better, normalization: {adaptiveRange: {}}}", [0.0, 0.375, 1.0, 0.0]),
        ("{type: linear_lower_is_better, normalization: {fixedRange: {min: 4, max: 8}}}", [1.0, 0.75, 0.0, 0.0]),
    ],
)
def test_scores(algorithm: str, scores: list[float]) -> None:
    assert plugins(scores=f"algorithm: {algorithm}")[1].score(REQUEST, [A, BB, CCC, NONE]) == scores


def test_equal_figures_score_one_and_no_figure_none() -> None:
    scorer = plugins()[1]
    assert scorer.score(REQUEST, [A, A, NONE]) == [1.0, 1.0, 0.0]
    assert scorer.score(REQUEST, [NONE]) == [0.0]


@pytest.mark.parametrize(
    ("filters", "scores", "line"),
    [
        (THRESHOLD + ", producer: other", LOWER, "producer: expected core-metrics-extractor or dcgm-extractor"),
        (
            THRESHOLD + ", producer: dcgm-extractor",
            LOWER,
            "attribute: dcgm-extractor finds GPUUtilization, got 'depth'",
        ),
        (THRESHOLD.replace("LessThanOrEqual", "Least"), LOWER, "operator: expected one of LessThan, LessThanOrEqual"),
        (THRESHOLD.replace("threshold,", "topK,"), LOWER, "algorithm.type: expected threshold, got 'topK'"),
        (THRESHOLD, "algorithm: {type: linear}", "expected linear_lower_is_better or linear_higher_is_better"),
        (
            THRESHOLD,
            "algorithm: {type: linear_lower_is_better, normalization: {fixedRange: {min: 1, max: 1}}}",
            "expected more than min (1), got 1",
        ),
    ],
)
def test_what_is_wrong_is_refused(filters: str, scores: str, line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(PLUGINS % (filters, scores))
    assert line in str(refused.value)


# --- GPUs -----------------------------------------------------------------------------------------------------------

GPU = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: dcgm-data-source, parameters: {port: 9401, interval: 50ms}}
- {type: dcgm-extractor}
- type: endpoint-attribute-scorer
  parameters:
    attributeKey: GPUUtilization
    producer: dcgm-extractor
    algorithm: {type: linear_lower_is_better, normalization: {fixedRange: {min: 0, max: 1}}}
dataLayer:
  sources: [{pluginRef: dcgm-data-source, extractors: [{pluginRef: dcgm-extractor}]}]
"""


class Exporter:
    """Answers `Services.samples`; `utilization` by pod, "" for all."""

    def __init__(self, utilization: Mapping[str, float]) -> None:
        self.utilization = utilization
        self.asked: list[tuple[str, str, str]] = []
        self.reported: list[str] = []

    async def samples(self, *asked: str) -> Sequence[tuple[Mapping[str, str], float]]:
        self.asked.append((asked[0], asked[1], asked[2]))
        if not self.utilization:
            raise OSError("nobody there")
        return [({"gpu": "0", **({"pod": pod} if pod else {})}, value) for pod, value in self.utilization.items()]

    def degraded(self, reason: str, detail: str = "", *, lasting: bool = False) -> None:
        self.reported.append(f"{reason}: {detail}")


def gpu_plugins(text: str = GPU) -> tuple[DcgmDataSource, EndpointAttributeScorer]:
    found = [entry.plugin for entry in loaded(text).registry.values()]
    (source,) = [plugin for plugin in found if isinstance(plugin, DcgmDataSource)]
    (scorer,) = [plugin for plugin in found if isinstance(plugin, EndpointAttributeScorer)]
    return source, scorer


async def followed(source: DcgmDataSource, exporter: Exporter, endpoint: Endpoint) -> None:
    await source.run(services([endpoint], samples=exporter.samples, degraded=exporter.degraded))


async def test_the_busiest_gpu_of_the_pod_counts_until_it_is_old() -> None:
    source, scorer = gpu_plugins()
    now = [100.0]
    source.clock = lambda: now[0]
    exporter = Exporter({"": 25.0, "a": 75.0, "other": 100.0})
    async with beside(followed(source, exporter, A)):
        await until(lambda: source.value(A) is not None, 60)
        assert scorer.score(REQUEST, [A, BB]) == [0.25, 0.0]
        assert exporter.asked[0] == ("10.0.0.1:9401", "/metrics", "DCGM_FI_DEV_GPU_UTIL")
        assert source.endpoint_statistics() == {A: {"gpu_utilization": 0.75}}
        assert not exporter.reported
        exporter.utilization = {}
        now[0] += 5.1
        assert source.value(A) is None
        await until(lambda: bool(exporter.reported), 60)
    assert exporter.reported[0] == "gpu-metrics: default/a: 10.0.0.1:9401/metrics: nobody there"
    source.on_removed(A)
    assert not source.endpoint_statistics()


async def test_the_exporter_of_a_node_is_asked_by_the_nodes_address() -> None:
    source, _ = gpu_plugins(GPU.replace("port: 9401", "port: 9401, useNodeAddress: true"))
    exporter = Exporter({"rank": 50.0, "a": 10.0})
    here = Endpoint("default/rank-rank-1", "10.0.0.9:8001", node="n", node_address="192.168.0.1")
    async with beside(followed(source, exporter, here)):
        await until(lambda: source.value(here) is not None, 60)
    assert (exporter.asked[0][0], source.value(here)) == ("192.168.0.1:9401", 0.5)


def test_a_source_is_added_where_none_is_declared() -> None:
    text = "\n".join(line for line in GPU.splitlines() if "dcgm-" not in line or "producer" in line)
    text = text.replace("dataLayer:", "")
    source, scorer = gpu_plugins(text)
    assert source.port == 9400
    assert scorer.score(REQUEST, [A]) == [0.0]
