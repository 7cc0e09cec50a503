import asyncio

from prometheus_client import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from epp.telemetry.exposition import render
from epp.telemetry.metrics import Metrics
from tests.support.decisions import endpoint


def counted() -> Metrics:
    metrics, pod = Metrics(), endpoint(1)
    metrics.request_decided(pod, 'a "model"\nwith \\ everything', 0.001, 1, 2, 1)
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
