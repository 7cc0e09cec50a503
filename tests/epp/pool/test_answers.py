"""Pages are written by prometheus_client, as vLLM's are."""

from collections.abc import Mapping

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from epp.pool.answers import EVERY, EngineAnswers
from epp.pool.engines import ENGINES, Places, parse
from epp.telemetry.metrics import Metrics
from tests.support.scheduling.decisions import endpoint

BOUNDS: Mapping[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": (0.1, 0.4, 1.0),
    "request_time_per_output_token_seconds": (0.01, 0.1),
    "e2e_request_latency_seconds": (1.0, 10.0),
    "request_prompt_tokens": (64.0, 1024.0),
    "request_generation_tokens": (64.0, 1024.0),
    "iteration_tokens_total": (1.0, 8.0),
}


class Server:
    """What a server of `engines` data-parallel engines counts; each answers all that is asked."""

    def __init__(self, engines: int = 1, model: str = "m") -> None:
        self.registry = CollectorRegistry()
        self.of = [{"engine": str(n), "model_name": model} for n in range(engines)]
        self.histograms = [
            Histogram(f"vllm:{name}", "About it.", ["engine", "model_name"], buckets=bounds, registry=self.registry)
            for name, bounds in BOUNDS.items()
        ]
        self.cached = Counter("vllm:prompt_tokens_cached", "Found.", ["engine", "model_name"], registry=self.registry)
        for labels in self.of:
            for histogram in self.histograms:
                histogram.labels(**labels)
            self.cached.labels(**labels)

    def answers(self, ttft: float, tpot: float, duration: float, prompt: int, completion: int, cached: int) -> None:
        for labels in self.of:
            for histogram, value in zip(self.histograms, (ttft, tpot, duration, prompt, completion, 1), strict=True):
                histogram.labels(**labels).observe(value)
            self.cached.labels(**labels).inc(cached)

    def page(self) -> bytes:
        return b"vllm:num_requests_running 0\n" + generate_latest(self.registry)


class Reader:
    """Looks at a server's pages as the scraper does."""

    def __init__(self, engine: str = "vllm") -> None:
        self.metrics = Metrics()
        self.answers = EngineAnswers(endpoint(1), ENGINES[engine], self.metrics)
        self.places = Places()
        self.now = 0.0

    def look(self, page: bytes, *, differs: bool = True) -> None:
        self.answers.look(page, self.places, self.now, differs=differs)
        self.now += EVERY

    def value(self, name: str, model: str = "m", **more: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"warmpath_{name}", {"model": model, "source": "engine", **more})


@pytest.mark.parametrize("engines", [1, 3])
def test_what_an_engine_counts_between_two_looks_is_counted(engines: int) -> None:
    server, reader = Server(engines), Reader()
    server.answers(0.3, 0.05, 3.0, 900, 50, 800)
    reader.look(server.page())
    assert reader.value("ttft_seconds_count") is None, "it was answered before anybody looked"
    for ttft in (0.3, 0.6):
        server.answers(ttft, 0.05, 3.0, 900, 50, 600)
    reader.look(server.page())
    assert reader.value("ttft_seconds_sum") == pytest.approx(engines * 0.9)
    assert reader.value("ttft_seconds_count") == 2 * engines
    assert reader.value("ttft_seconds_bucket", le="0.4") == engines
    assert reader.value("tpot_seconds_sum") == pytest.approx(engines * 0.1)
    assert reader.value("prompt_tokens_sum") == engines * 1800
    assert reader.value("completion_tokens_sum") == engines * 100
    assert reader.value("cached_tokens_sum") == engines * 1200
    assert reader.value("cached_tokens_bucket", le="1024.0") == 2 * engines
    assert reader.value("cached_tokens_bucket", le="512.0") == 0
    assert reader.value("ntpot_seconds_sum") == pytest.approx(2 * engines * 6.0 / 100)


def test_what_data_parallel_engines_count_is_added_up() -> None:
    server = Server(engines=3)
    server.answers(0.3, 0.05, 3.0, 900, 50, 800)
    load = parse(server.page(), ENGINES["vllm"], 0.0, Places())
    assert load is not None
    assert (load.first_tokens, load.steps) == (3, 3)


def test_a_page_is_looked_at_once_in_a_while() -> None:
    server, reader = Server(), Reader()
    reader.look(server.page())
    server.answers(0.3, 0.05, 3.0, 900, 50, 600)
    reader.now -= EVERY / 2
    reader.look(server.page())
    assert reader.value("ttft_seconds_count") is None
    reader.look(server.page())
    assert reader.value("ttft_seconds_count") == 1


def test_what_came_since_the_last_look_is_counted_though_nothing_comes_any_more() -> None:
    server, reader = Server(), Reader()
    reader.look(server.page())
    server.answers(0.3, 0.05, 3.0, 900, 50, 600)
    reader.now -= EVERY / 2
    reader.look(server.page())
    reader.look(server.page(), differs=False)
    assert reader.value("ttft_seconds_count") == 1
    reader.look(b"not to be looked at", differs=False)
    server.answers(0.3, 0.05, 3.0, 900, 50, 600)
    reader.look(server.page())
    assert reader.value("ttft_seconds_count") == 2


def test_of_an_engine_that_was_restarted_all_is_new() -> None:
    server, reader = Server(), Reader()
    for _ in range(5):
        server.answers(0.3, 0.05, 3.0, 900, 50, 600)
    reader.look(server.page())
    again = Server()
    again.answers(0.6, 0.05, 3.0, 900, 50, 600)
    reader.look(again.page())
    assert reader.value("ttft_seconds_sum") == pytest.approx(0.6)
    assert reader.value("ttft_seconds_count") == 1


def test_values_beyond_the_last_bound_count_as_that() -> None:
    server, reader = Server(), Reader()
    reader.look(server.page())
    server.answers(50.0, 0.05, 60.0, 900, 50, 600)
    reader.look(server.page())
    assert reader.value("ttft_seconds_bucket", le="0.8") == 0
    assert reader.value("ttft_seconds_bucket", le="1.0") == 1
    assert reader.value("ttft_seconds_sum") == 50.0, "the sum is exact"


def test_a_page_without_histograms_says_so() -> None:
    reader = Reader()
    reader.look(b"vllm:num_requests_running 0\n")
    assert reader.metrics.endpoint(reader.answers._endpoint).counts_answers is False
    reader.look(Server().page())
    assert reader.metrics.endpoint(reader.answers._endpoint).counts_answers is True


@pytest.mark.parametrize(
    "page",
    [
        b'vllm:time_to_first_token_seconds_bucket{le="x"} 1\n',
        b'vllm:time_to_first_token_seconds_bucket{le="NaN"} 1\nvllm:time_to_first_token_seconds_sum NaN\n',
        b'vllm:time_to_first_token_seconds_bucket{le="1.0"} 9\nvllm:time_to_first_token_seconds_bucket{le="+Inf"} 1\n',
        b'vllm:time_to_first_token_seconds_bucket{le="-1"} 1\n',
        b'vllm:time_to_first_token_seconds_bucket{le="1.0"} 1e308\n',
    ],
)
def test_a_page_gone_wrong_counts_nothing_wrong(page: bytes) -> None:
    reader = Reader()
    for _ in range(3):
        reader.look(page)
        reader.look(Server(model="").page())
    for row, histogram in reader.metrics.rows("warmpath_ttft_seconds"):
        assert min(histogram.counts) >= 0, row  # type: ignore[union-attr]


def test_names_of_models_are_bounded_and_read_whole() -> None:
    reader = Reader()
    for n in (0, 1):
        lines = "".join(
            f'vllm:time_to_first_token_seconds_bucket{{model_name="a\\"{m}",le="+Inf"}} {n}\n' for m in range(100)
        )
        reader.look(lines.encode())
    assert reader.value("ttft_seconds_count", model='a"0') == 1
    assert len(list(reader.metrics.rows("warmpath_ttft_seconds"))) == 8


def test_of_sglang_first_tokens_of_answers_that_are_not_streamed_do_not_count() -> None:
    """It sees the first of those when 50 tokens are done, or all (0.5.23)."""
    registry, reader = CollectorRegistry(), Reader("sglang")
    labels = {"model_name": "m", "engine_type": "unified"}
    names = ("time_to_first_token_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds")
    streamed = [
        Histogram(f"sglang:{name}", "x", [*labels, "is_streaming"], buckets=(0.1, 1.0), registry=registry)
        for name in names
    ]
    tokens = [
        Histogram(f"sglang:{name}_tokens_histogram", "x", labels, buckets=(64.0, 1024.0), registry=registry)
        for name in ("prompt", "generation")
    ]
    cached = Counter("sglang:cached_tokens", "x", [*labels, "cache_source"], registry=registry)

    def answer(streaming: str, ttft: float, tpot: float) -> None:
        for histogram, value in zip(streamed, (ttft, tpot, 3.0), strict=True):
            histogram.labels(**labels, is_streaming=streaming).observe(value)
        for histogram, value in zip(tokens, (900.0, 50.0), strict=True):
            histogram.labels(**labels).observe(value)
        cached.labels(**labels, cache_source="device").inc(500)
        cached.labels(**labels, cache_source="host").inc(100)

    answer("true", 9.0, 9.0)
    answer("false", 9.0, 9.0)
    reader.look(generate_latest(registry))
    for _ in range(2):
        answer("true", 0.5, 0.05)
    answer("false", 2.5, 0.01)
    reader.look(generate_latest(registry))
    assert reader.value("ttft_seconds_count") == reader.value("tpot_seconds_count") == 2
    assert reader.value("ttft_seconds_sum") == pytest.approx(1.0)
    assert reader.value("tpot_seconds_sum") == pytest.approx(0.1)
    assert (reader.value("prompt_tokens_sum"), reader.value("completion_tokens_sum")) == (2700, 150)
    assert (reader.value("cached_tokens_count"), reader.value("cached_tokens_sum")) == (3, 1800)
    assert reader.value("ntpot_seconds_sum") == pytest.approx(3 * 9.0 / 150)
