import asyncio
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from epp.telemetry.exposition import render
from epp.telemetry.metrics import Metrics
from tests.support.scheduling.decisions import endpoint


def counted() -> Metrics:
    metrics, pod = Metrics(), endpoint(1)
    metrics.request_decided(pod, 'a "model"\nwith \\ everything', 0.001, 2, 1)
    metrics.request_finished(pod, 'a "model"\nwith \\ everything', 200, 1.0, ttft=0.1, prompt=2, completion=2, cached=0)
    return metrics


async def test_text_is_what_the_library_itself_would_write() -> None:
    metrics = counted()
    page, content_type = await render(metrics.registry, "")
    assert content_type.startswith("text/plain; version=0.0.4")

    def ours(text: bytes) -> list[bytes]:
        return [line for line in text.splitlines() if not line.startswith(b"process_")]

    assert ours(page) == ours(generate_latest(metrics.registry))
    parsed = {family.name: family for family in parse_text(page.decode())}
    labels = parsed["warmpath_requests"].samples[0].labels
    assert labels == {"model": 'a "model"\nwith \\ everything', "status": "200"}


async def test_openmetrics_is_one_valid_page() -> None:
    page, content_type = await render(counted().registry, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert page.count(b"# EOF") == 1
    families = parse_openmetrics(page.decode())  # type: ignore[no-untyped-call]  # the library's own gap
    assert {"warmpath_requests", "inference_objective_request"} <= {family.name for family in families}


async def test_others_run_while_a_page_is_made() -> None:
    turns = 0
    done = asyncio.Event()

    async def other() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(other())
        await render(counted().registry, "")
        done.set()
    assert turns > 20


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
async def test_a_family_in_slices_is_one_family_on_the_page(accept: str) -> None:
    metrics, pod = Metrics(), endpoint(1)
    for n in range(40):
        metrics.request_decided(pod, f"model-{n}", 0.001, 2, 1)
        metrics.request_finished(pod, f"model-{n}", 200, 1.0)
    page, _ = await render(metrics.registry, accept)
    heads = [line for line in page.decode().splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))
    parse: Any = parse_openmetrics if accept else parse_text
    parsed = [sample for family in parse(page.decode()) for sample in family.samples]
    whole = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert len(parsed) == len(whole)
    for name in ("warmpath_request_duration_seconds_count", "inference_objective_request_total"):
        assert sum(sample.name == name for sample in parsed) == 40


@pytest.mark.parametrize("version", ["zz", "1.0.x", "", "1.0.0.0.0", "-1"])
@pytest.mark.parametrize("kind", ["text/plain", "application/openmetrics-text"])
async def test_a_version_nobody_knows_gets_a_page_all_the_same(kind: str, version: str) -> None:
    page, content_type = await render(counted().registry, f"{kind}; version={version}")
    assert b"warmpath_requests_total" in page
    assert content_type.startswith(("text/plain", "application/openmetrics-text"))
