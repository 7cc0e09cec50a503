import gc
import logging
import tracemalloc
from dataclasses import dataclass
from typing import Any

import pytest

from epp.plugin import Endpoint, Load
from epp.telemetry.metrics import SLICE, Metrics
from epp.telemetry.metrics_table import FAMILIES, MAX_MODELS
from epp.telemetry.series import CANDIDATES, LONGEST_MODEL, FlowFigures, Waits
from tests.support.scheduling.decisions import endpoint

ANSWERS = ("ttft_seconds", "tpot_seconds", "ntpot_seconds", "prompt_tokens", "completion_tokens", "cached_tokens")


@dataclass
class APool:
    name: str
    endpoints: tuple[Endpoint, ...]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def value(metrics: Metrics, name: str, /, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_a_request_is_counted_from_decision_to_end_under_ours_and_the_existing_names() -> None:
    metrics, pod = Metrics(), endpoint(1)
    metrics.add_pool(APool("p", (pod,)))
    metrics.request_decided(pod, "m", 0.0004, 100, 60)

    assert value(metrics, "warmpath_requests_running", model="other") == 1
    assert value(metrics, "inference_objective_running_requests", model_name="other") == 1
    assert value(metrics, "warmpath_endpoint_in_flight", pool="p", endpoint=pod.name) == 1
    assert value(metrics, "warmpath_decision_seconds_bucket", le="0.0002") == 0
    assert value(metrics, "warmpath_decision_seconds_bucket", le="0.0005") == 1
    assert value(metrics, "inference_extension_scheduler_e2e_duration_seconds_count") == 1
    assert value(metrics, "llm_d_epp_prefix_indexer_hit_ratio_sum") == pytest.approx(0.6)

    metrics.request_finished(pod, "m", 200, 2.0, ttft=0.5, prompt=110, completion=31, cached=64, predicted=60)
    both = {"model_name": "m", "target_model_name": "m"}
    assert value(metrics, "warmpath_requests_running", model="m") == 0
    assert value(metrics, "warmpath_endpoint_in_flight", pool="p", endpoint=pod.name) == 0
    assert value(metrics, "warmpath_requests_total", model="m", status="200") == 1
    assert value(metrics, "inference_objective_request_total", **both) == 1
    assert value(metrics, "llm_d_epp_request_total", **both) == 1
    shown = {**both, "source": "answer"}
    assert value(metrics, "inference_objective_request_ttft_seconds_sum", **shown) == 0.5
    assert value(metrics, "warmpath_tpot_seconds_sum", model="m", source="answer") == pytest.approx(1.5 / 30)
    assert value(metrics, "llm_d_epp_request_ntpot_seconds_sum", **shown) == pytest.approx(2.0 / 31)
    assert value(metrics, "llm_d_epp_request_cached_tokens_sum", **shown) == 64
    here = {"pool": "p", "endpoint": pod.name}
    assert value(metrics, "warmpath_endpoint_checked_cached_tokens_total", **here) == 64
    assert value(metrics, "warmpath_endpoint_checked_predicted_tokens_total", **here) == 60


def test_what_an_answer_did_not_tell_is_not_counted() -> None:
    metrics, pod = Metrics(), endpoint(1)
    metrics.request_decided(pod, "m", 0.0, 0, None)
    metrics.request_finished(pod, "m", 0, 1.0)

    assert value(metrics, "warmpath_requests_total", model="other", status="0") == 1
    assert value(metrics, "warmpath_request_duration_seconds_count", model="other") == 1
    for name in ANSWERS:
        assert list(metrics.rows(f"warmpath_{name}")) == []
    assert value(metrics, "warmpath_prefix_hit_ratio_count") == 0


@pytest.mark.parametrize("status", [-1, 600, 10**9])
def test_a_status_that_is_none_makes_no_label(status: int) -> None:
    metrics, pod = Metrics(), endpoint(1)
    metrics.request_decided(pod, "m", 0.0, 0, None)
    metrics.request_finished(pod, "m", status, 1.0)
    assert value(metrics, "warmpath_requests_total", model="other", status="0") == 1


@pytest.mark.parametrize(("status", "label"), [(499, "499"), (529, "529"), (418, "418"), (498, "400"), (599, "500")])
def test_a_status_without_a_meaning_counts_as_the_first_of_its_hundred(status: int, label: str) -> None:
    metrics, pod = Metrics(), endpoint(1)
    metrics.request_decided(pod, "m", 0.0, 0, None)
    metrics.request_finished(pod, "m", status, 1.0)
    assert value(metrics, "warmpath_requests_total", model="other", status=label) == 1


def test_errors_are_those_of_endpoints_and_our_own() -> None:
    metrics, pod = Metrics(), endpoint(1)
    metrics.add_pool(APool("p", (pod,)))
    for status in (200, 404, 503):
        metrics.request_decided(pod, "m", 0.0, 0, None)
        metrics.request_finished(pod, "m", status, 1.0)
    metrics.request_failed(503, "rejected-no-endpoints")
    metrics.request_failed(503, "rejected-ttl-expired")
    metrics.request_failed(400, "invalid_request_error")

    def errors(model: str, code: str) -> float | None:
        labels = {"model_name": model, "target_model_name": model, "error_code": code}
        found = {
            value(metrics, f"{name}_request_error_total", **labels) for name in ("inference_objective", "llm_d_epp")
        }
        assert len(found) == 1
        return found.pop()

    assert [errors("m", code) for code in ("200", "404", "503")] == [None, 1, 1]
    assert [errors("", code) for code in ("400", "503")] == [1, 2]
    assert value(metrics, "warmpath_refused_total", status="503", reason="rejected-no-endpoints") == 1
    attempts = "inference_extension_scheduler_attempts_total"
    assert value(metrics, attempts, status="success", pod_name="pod-1", namespace="default", port="8000") == 3
    assert value(metrics, attempts, status="failure", pod_name="", namespace="", port="") == 2


def sources(metrics: Metrics, name: str) -> dict[str, float]:
    """Of model m: source -> how many values."""
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    return {
        sample.labels["source"]: sample.value
        for sample in samples
        if sample.name == f"{name}_count" and "m" in (sample.labels.get("model"), sample.labels.get("model_name"))
    }


def test_answers_are_told_apart_by_what_is_known_of_them_and_existing_names_show_one() -> None:
    metrics, pod = Metrics(), endpoint(1)
    metrics.engine_answered("m", "ttft", [(0.0, 0.5, 10)], 3.0)
    metrics.engine_answered("m", "prompt", [(100.0, 200.0, 10)], 1500.0)
    metrics.request_decided(pod, "m", 0.0, 0, None)
    metrics.request_finished(pod, "m", 200, 2.0, source="watched", ttft=0.5, prompt=110, completion=31)

    assert sources(metrics, "warmpath_ttft_seconds") == {"watched": 1, "engine": 10}
    assert sources(metrics, "inference_objective_request_ttft_seconds") == {"watched": 1}
    assert sources(metrics, "llm_d_epp_request_input_tokens") == {"engine": 10}
    assert sources(metrics, "llm_d_epp_request_output_tokens") == {"watched": 1}, "engines said nothing of these"
    both = {"model_name": "m", "target_model_name": "m"}
    assert value(metrics, "llm_d_epp_request_input_tokens_sum", **both, source="engine") == 1500.0

    metrics.request_decided(pod, "m", 0.0, 0, None)
    metrics.request_finished(pod, "m", 200, 2.0, ttft=0.5)
    assert sources(metrics, "inference_objective_request_ttft_seconds") == {"answer": 1}
    assert sources(metrics, "llm_d_epp_request_input_tokens") == {"engine": 10}, "no usage in it"


def test_answers_that_are_no_sample_count_in_no_source_and_check_predictions() -> None:
    metrics, pod = Metrics(), endpoint(1)
    metrics.request_decided(pod, "m", 0.0, 0, None)
    metrics.request_finished(
        pod, "m", 200, 2.0, source=None, ttft=0.5, prompt=110, completion=31, cached=80, predicted=90
    )
    for name in ("warmpath_ttft_seconds", "warmpath_tpot_seconds", "llm_d_epp_request_output_tokens"):
        assert sources(metrics, name) == {}
    assert metrics.endpoint(pod).checked_cached == 80
    assert metrics.endpoint(pod).checked_predicted == 90


def test_names_of_engines_are_bounded() -> None:
    metrics = Metrics()
    for n in range(3 * MAX_MODELS):
        metrics.engine_answered(f"model-{n}", "ttft", [(0.0, 1.0, 1)], 0.5)
    metrics.engine_answered("x" * (LONGEST_MODEL + 1), "ttft", [(0.0, 1.0, 1)], 0.5)
    assert len(models(metrics)) == MAX_MODELS + 1
    assert value(metrics, "warmpath_ttft_seconds_count", model="other", source="engine") == 2 * MAX_MODELS + 1


@pytest.mark.parametrize(
    ("counts", "watched", "status", "degraded"),
    [(False, False, 200, True), (None, False, 200, False), (True, False, 200, False), (False, True, 200, False),
     (False, False, 500, False), (False, False, 0, False)],
)  # fmt: skip
def test_answers_of_which_nobody_knows_anything_are_not_passed_over_in_silence(
    counts: bool | None, watched: bool, status: int, degraded: bool
) -> None:
    metrics, pod = Metrics(), endpoint(1)
    if counts is not None:
        metrics.engine_counts_answers(pod, counts=counts)
    if watched:
        metrics.request_decided(pod, "m", 0.0, 0, None)
        metrics.request_finished(pod, "m", 200, 2.0, source="watched", ttft=0.5)
    metrics.request_decided(pod, "m", 0.0, 0, None)
    metrics.request_finished(pod, "m", status, 2.0)
    assert value(metrics, "warmpath_degraded_total", reason="answer-unknown") == (1 if degraded else None)


def answer(metrics: Metrics, model: str, status: int = 200) -> None:
    pod = endpoint(1)
    metrics.request_decided(pod, model, 0.0, 0, None)
    metrics.request_finished(pod, model, status, 1.0)


def models(metrics: Metrics) -> set[str]:
    """Every value of a label that a client can choose."""
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    names = ("model", "model_name", "target_model_name")
    return {value for sample in samples for name, value in sample.labels.items() if name in names} - {""}


@pytest.mark.parametrize("status", [0, 400, 404, 500])
def test_a_model_that_nobody_answered_with_2xx_makes_no_label(status: int) -> None:
    metrics = Metrics()
    for n in range(MAX_MODELS * 3):
        answer(metrics, f"made-up-{n}", status)
    assert models(metrics) == {"other"}
    answer(metrics, "real")
    answer(metrics, "real", 500)
    assert value(metrics, "warmpath_requests_total", model="real", status="200") == 1
    assert value(metrics, "warmpath_requests_total", model="real", status="500") == 1
    assert value(metrics, "warmpath_requests_total", model="other", status=str(status)) == MAX_MODELS * 3


def test_names_an_engine_answers_to_though_they_are_made_up_leave_room_for_the_real_model() -> None:
    clock = Clock()
    metrics = Metrics(clock)
    for n in range(MAX_MODELS * 3):
        answer(metrics, f"made-up-{n}")
        clock.now += 0.01
    for _ in range(5):
        answer(metrics, "real")
    assert value(metrics, "warmpath_requests_total", model="real", status="200") == 4  # the first counts as other
    labels = models(metrics)
    for n in range(MAX_MODELS * 30):
        answer(metrics, f"more-{n}")
        clock.now += 0.01
        if not n % 10:
            answer(metrics, "real")
    assert models(metrics) == labels  # each of them was answered once
    assert len(labels) == MAX_MODELS + 1


def test_a_model_of_long_ago_makes_room() -> None:
    clock = Clock()
    metrics = Metrics(clock)
    for n in range(MAX_MODELS):
        for _ in range(50):
            answer(metrics, f"old-{n}")
    answer(metrics, "old-1")
    answer(metrics, "new")
    assert "new" not in models(metrics)
    clock.now += 24 * 3600
    answer(metrics, "new")
    assert "new" in models(metrics)
    assert "old-1" in models(metrics)
    assert len(models(metrics)) == MAX_MODELS + 1  # the room was another's


def test_what_is_remembered_of_names_is_bounded() -> None:
    clock = Clock()
    metrics = Metrics(clock)

    def attack(start: int, count: int) -> None:
        for n in range(start, start + count):
            answer(metrics, f"{n:0128}")

    attack(0, CANDIDATES + MAX_MODELS + 100)
    tracemalloc.start()
    try:
        attack(10_000, 20_000)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 2 << 20  # 20,000 names are 4 MB, their series 200 MB


def test_running_requests_end_as_they_began_whatever_becomes_of_their_label() -> None:
    metrics, pod = Metrics(), endpoint(1)
    for model in ("m", "m", "made-up"):
        metrics.request_decided(pod, model, 0.0, 0, None)
    assert value(metrics, "warmpath_requests_running", model="other") == 3
    metrics.request_finished(pod, "m", 200, 1.0)
    assert value(metrics, "warmpath_requests_running", model="m") == 1
    assert value(metrics, "warmpath_requests_running", model="other") == 1
    metrics.request_finished(pod, "m", 500, 1.0)
    metrics.request_finished(pod, "made-up", 404, 1.0)
    assert value(metrics, "warmpath_requests_running", model="m") == 0
    assert value(metrics, "warmpath_requests_running", model="other") == 0
    assert metrics._running == {}


@pytest.mark.parametrize("model", ["x" * (LONGEST_MODEL + 1), "other"])
def test_a_long_name_and_the_name_of_all_others_get_no_label_of_their_own(model: str) -> None:
    metrics = Metrics()
    answer(metrics, model)
    assert models(metrics) == {"other"}
    rows = [*metrics.rows("warmpath_requests_total")]
    assert rows == [(("other", "200"), 1)]


def test_a_large_family_comes_in_slices_that_hold_each_series_once() -> None:
    metrics = Metrics()
    for n in range(MAX_MODELS):
        answer(metrics, f"model-{n}")
    families = [*metrics.registry.collect()]
    assert max(len(family.samples) for family in families) <= SLICE
    seen = [(sample.name, *sorted(sample.labels.items())) for family in families for sample in family.samples]
    assert len(seen) == len(set(seen))
    assert (
        value(
            metrics,
            "llm_d_epp_request_duration_seconds_count",
            **dict.fromkeys(("model_name", "target_model_name"), f"model-{MAX_MODELS - 1}"),
        )
        == 1
    )


def test_gauges_are_read_from_the_pool_when_asked() -> None:
    clock = Clock()
    metrics = Metrics(clock)
    pods = [endpoint(1, Load(waiting=4, running=2, kv_usage=0.5, at=998.0)), endpoint(2), endpoint(3)]
    pool = APool("p", tuple(pods))
    metrics.add_pool(pool)
    here = {"pool": "p", "endpoint": pods[0].name}

    assert value(metrics, "warmpath_endpoints", pool="p") == 3
    assert value(metrics, "inference_pool_ready_pods", name="p") == 3
    assert value(metrics, "warmpath_endpoint_waiting", **here) == 4
    assert value(metrics, "inference_pool_per_pod_queue_size", name="p", model_server_pod=pods[0].name) == 4
    assert value(metrics, "warmpath_endpoint_load_age_seconds", **here) == 2.0
    assert value(metrics, "warmpath_endpoint_waiting", pool="p", endpoint=pods[1].name) is None  # never scraped
    assert value(metrics, "inference_pool_average_queue_size", name="p") == 4

    pods[1].load = Load(waiting=8, running=0, kv_usage=0.1, at=1000.0)
    assert value(metrics, "inference_pool_average_queue_size", name="p") == 6
    assert value(metrics, "llm_d_epp_average_kv_cache_utilization", name="p") == pytest.approx(0.3)
    assert value(metrics, "llm_d_epp_std_dev_queue_size", name="p") == 2

    pool.endpoints = (pods[1],)
    assert value(metrics, "warmpath_endpoints", pool="p") == 1
    assert value(metrics, "warmpath_endpoint_waiting", **here) is None
    pool.endpoints = ()
    assert value(metrics, "inference_pool_average_queue_size", name="p") == 0


def test_what_was_counted_for_an_endpoint_is_forgotten_with_it() -> None:
    metrics = Metrics()
    for n in range(50):
        metrics.request_decided(endpoint(n), "m", 0.0, 0, None)
    gc.collect()
    assert len(metrics._endpoints) == 0


def test_plugins_show_their_statistics_pool_by_pool() -> None:
    metrics = Metrics()
    metrics.add_source(lambda: {"prefix": {"blocks": 12.0}}, "a")
    metrics.add_source(lambda: {"prefix": {"blocks": 7.0}}, "b")
    found = [value(metrics, "warmpath_plugin_statistic", pool=p, plugin="prefix", statistic="blocks") for p in "ab"]
    assert found == [12, 7]


def test_plugins_show_what_they_know_of_the_pools_endpoints_alone() -> None:
    metrics, pods = Metrics(), (endpoint(1), endpoint(2))
    metrics.add_pool(APool("a", pods[:1]))
    wrong: Any = {"ttft": {pods[0]: {"speed": 0.5, "mood": "good"}, pods[1]: {"speed": 2.0}}}
    metrics.add_endpoint_source(lambda: wrong, "a")
    rows = [*metrics.rows("warmpath_plugin_endpoint_statistic")]
    assert rows == [(("a", "ttft", "default/pod-1", "speed"), 0.5)]
    assert value(metrics, "warmpath_degraded_total", reason="statistic-no-number")


def test_one_figure_of_endpoints_is_that_of_the_last_plugin_with_a_number() -> None:
    metrics, pods, pool = Metrics(), (endpoint(1), endpoint(2), endpoint(3)), APool("a", ())
    assert metrics.endpoint_figure(pool, "speed") == {}
    first = {pods[0]: {"speed": 0.5}, pods[1]: {"speed": 2.0, "other": 1.0}, pods[2]: {"other": 1.0}}
    wrong: Any = {"first": first, "second": {pods[0]: {"speed": 3}, pods[1]: {"speed": "fast"}}}
    metrics.add_endpoint_source(lambda: wrong, "a")
    assert metrics.endpoint_figure(pool, "speed") == {pods[0]: 3, pods[1]: 2.0}
    assert metrics.endpoint_figure(APool("b", ()), "speed") == {}


def test_requests_are_counted_by_the_stages_that_were_apart_for_llm_ds_dashboards() -> None:
    metrics, pod = Metrics(), endpoint(1)
    metrics.add_handler("p", lambda: ("pd", "disagg-profile-handler"))
    for stages in (("p", "prefill-decode"), ("p", "decode-only"), ("p", "decode-only"), None):
        metrics.request_decided(pod, "m", 0.0, 0, None)
        metrics.request_finished(pod, "m", 200, 1.0, stages=stages)
    whole = {"plugin_name": "pd", "plugin_type": "disagg-profile-handler", "model_name": "m"}
    name = "disagg_decision_total"
    assert value(metrics, f"llm_d_epp_{name}", decision_type="prefill-decode", **whole) == 1
    assert value(metrics, f"llm_d_epp_{name}", decision_type="decode-only", **whole) == 2
    assert value(metrics, f"llm_d_inference_scheduler_{name}", decision_type="decode-only", model_name="m") == 2


def test_what_flow_control_holds_is_shown_as_shares_of_what_may_wait() -> None:
    metrics = Metrics()
    metrics.add_flow("p", lambda: FlowFigures([], 0.5, [(0, 0.25, 0.5), (-1, 1.0, 0.0)], (None, 0.125)))
    metrics.add_flow("off", lambda: None)
    name = "llm_d_epp_flow_control_{}capacity_utilization_{}"
    assert value(metrics, name.format("", "requests"), priority="0", inference_pool="p") == 0.25
    assert value(metrics, name.format("", "requests"), priority="-1", inference_pool="p") == 1
    assert value(metrics, name.format("", "bytes"), priority="0", inference_pool="p") == 0.5
    assert value(metrics, name.format("global_", "requests"), inference_pool="p") is None
    assert value(metrics, name.format("global_", "bytes"), inference_pool="p") == 0.125
    metrics.add_source(lambda: {"full": {"stale_endpoints": 3}, "other": {"x": 1}}, "p")
    assert value(metrics, "llm_d_epp_flow_control_stale_endpoints", detector="full") == 3
    assert value(metrics, "llm_d_epp_flow_control_stale_endpoints", detector="other") is None


def test_what_waits_is_counted_once_for_a_scrape() -> None:
    metrics, looks = Metrics(), 0

    def figures() -> FlowFigures:
        nonlocal looks
        looks += 1
        return FlowFigures([Waits("x", 0, looks, 10, "m")], 0.5, [(0, 0.25, 0.5)], (0.5, 0.125))

    metrics.add_flow("p", figures)
    families = {family.name: family for family in metrics.registry.collect()}
    assert looks == 1
    assert [sample.value for sample in families["warmpath_flow_waiting"].samples] == [1]
    assert value(metrics, "warmpath_flow_waiting", pool="p", fairness_id="x", priority="0", model="m") == 2, (
        "the next one"
    )


def test_what_waits_has_the_labels_of_llm_d_and_gie() -> None:
    metrics, pod = Metrics(), Endpoint("pod", "10.0.0.1:8000")
    rows = [Waits("x", 0, 2, 10, "new"), Waits("x", 0, 1, 5, "m"), Waits("y", 1, 4, 20, "m")]
    series = metrics.add_flow("p", lambda: FlowFigures(rows, 0.5))
    metrics.request_decided(pod, "m", 0.0, 0, None)
    metrics.request_finished(pod, "m", 200, 1.0)
    series.ended("x", 0, "Dispatched", 0.2, "m")
    series.ended("x", 0, "RejectedCapacity", 0.0, "made up")
    flow = {"fairness_id": "x", "priority": "0", "inference_pool": "p"}
    of_m, of_new = ({**flow, "model_name": name, "target_model_name": name} for name in ("m", "new"))
    of_others = {**flow, "model_name": "other", "target_model_name": "other"}
    for family in ("inference_extension", "llm_d_epp"):
        assert value(metrics, f"{family}_flow_control_queue_size", **of_m) == 1
        assert value(metrics, f"{family}_flow_control_queue_size", **of_new) == 2, "nothing answered for it yet"
        assert value(metrics, f"{family}_flow_control_queue_bytes", **of_m) == 5
        waits = f"{family}_flow_control_request_queue_duration_seconds_count"
        assert value(metrics, waits, outcome="Dispatched", **of_m) == 1
        assert value(metrics, waits, outcome="RejectedCapacity", **of_others) == 1, "a name that no endpoint knew"
    assert value(metrics, "warmpath_flow_waiting", pool="p", fairness_id="y", priority="1", model="m") == 4
    name = "llm_d_epp_flow_control_requests_total"
    assert value(metrics, name, outcome="Dispatched", priority="0", inference_pool="p") == 1, "of all models"


def test_ports_of_a_pod_are_added_up_under_its_name() -> None:
    metrics, ports = Metrics(), tuple(Endpoint("default/pod-1", f"10.0.0.1:{8000 + n}") for n in range(2))
    metrics.add_pool(APool("p", ports))
    for port in (*ports, ports[0]):
        metrics.request_decided(port, "m", 0.0, 0, None)
    assert value(metrics, "llm_d_epp_inflight_requests", endpoint_name="pod-1", namespace="default") == 3


def test_failed_scrapes_are_counted_from_nothing_on() -> None:
    metrics = Metrics()
    metrics.add_pool(APool("p", ()))
    assert value(metrics, "warmpath_scrape_failures_total", pool="p") == 0
    metrics.scrape_failed("p")
    assert value(metrics, "warmpath_scrape_failures_total", pool="p") == 1
    for family in ("llm_d_epp", "llm_d_inference_scheduler"):
        assert value(metrics, f"{family}_datalayer_poll_errors_total", source_type="metrics-data-source") == 1


def test_a_shadow_profile_is_counted_by_outcome_and_its_seconds_by_sign() -> None:
    metrics = Metrics()
    for agreed, regret, failed in ((True, 0.0, False), (False, 0.5, False), (False, -0.25, False), (False, 0.0, True)):
        metrics.shadow_compared("p", "new", agreed, regret, failed)
    key = {"pool": "p", "profile": "new"}
    picks = [value(metrics, "warmpath_shadow_picks_total", **key, outcome=o) for o in ("same", "other", "failed")]
    assert picks == [1, 2, 1]
    assert value(metrics, "warmpath_shadow_dearer_seconds_total", **key) == 0.5
    assert value(metrics, "warmpath_shadow_cheaper_seconds_total", **key) == 0.25


def test_a_statistic_that_is_no_number_costs_only_itself() -> None:
    metrics = Metrics()
    wrong: Any = {"mine": {"name": "text", "good": 1.0}}
    metrics.add_source(lambda: wrong)
    assert value(metrics, "warmpath_plugin_statistic", pool="", plugin="mine", statistic="good") == 1
    assert value(metrics, "warmpath_degraded_total", reason="statistic-no-number")


def test_degradations_are_always_counted_and_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    metrics = Metrics(clock)
    with caplog.at_level(logging.WARNING, logger="warmpath"):
        for _ in range(5):
            metrics.degraded("scrape-failed", "10.0.0.1:8000: refused")
        metrics.degraded("tokens-late")
        assert caplog.messages == ["degraded: scrape-failed: 10.0.0.1:8000: refused", "degraded: tokens-late"]
        clock.now += 61
        metrics.degraded("scrape-failed", "x" * 10_000)
        assert caplog.messages[2].endswith("(and 4 more since this was last logged)")
        assert len(caplog.messages[2]) < 1000
        clock.now += 61
        metrics.degraded("scrape-failed")
        assert caplog.messages[3] == "degraded: scrape-failed"
    assert value(metrics, "warmpath_degraded_total", reason="scrape-failed") == 7


def test_a_lasting_degradation_goes_on_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    with caplog.at_level(logging.INFO, logger="warmpath"):
        metrics.recovered("kubernetes-away")
        assert value(metrics, "warmpath_degraded_now", reason="kubernetes-away") is None
        metrics.degraded("kubernetes-away", lasting=True)
        metrics.degraded("scrape-failed")
        assert value(metrics, "warmpath_degraded_now", reason="kubernetes-away") == 1
        assert value(metrics, "warmpath_degraded_now", reason="scrape-failed") is None
        for _ in range(2):
            metrics.recovered("kubernetes-away")
        assert value(metrics, "warmpath_degraded_now", reason="kubernetes-away") == 0
    assert caplog.messages[-1] == "recovered: kubernetes-away"
    assert len(caplog.messages) == 3


def test_two_epps_in_one_process_do_not_meet() -> None:
    one, other = Metrics(), Metrics()
    one.degraded("x")
    assert value(other, "warmpath_degraded_total", reason="x") is None


def test_every_family_of_the_table_is_exported_with_its_existing_names() -> None:
    exported = {family.name: family for family in Metrics().registry.collect()}
    for family in FAMILIES:
        for name in (family.name, *(alias.name for alias in family.aliases)):
            assert exported[name.removesuffix("_total")].type == family.kind
