"""An LMCache server's and a coordinator's pages, as 0.5.6 writes them. The real ones, made ill: tests/engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.support.process import web_server
from tooling.doctor.engine import ProbedEndpoint
from tooling.doctor.http import HttpClient
from tooling.doctor.lmcache import Stores, examine_coordinator, examine_server, findings_of, stores, stuck

URL = "http://127.0.0.1:8591"
ADAPTER = {"host": "127.0.0.1", "port": 6391, "num_workers": 2, "shared": True}
METRICS = b"""\
# TYPE lmcache_mp_l2_store_submitted_requests_total counter
lmcache_mp_l2_store_submitted_requests_total{otel_scope_name="lmcache.l2",otel_scope_version=""} 5.0
lmcache_mp_l2_store_submitted_objects_chunks_total{otel_scope_name="lmcache.l2",otel_scope_version=""} 15.0
lmcache_mp_l2_store_completed_requests_total{l2_name="resp",otel_scope_name="lmcache.l2"} 3.0
lmcache_mp_l2_store_completed_requests_total{l2_name="fs",otel_scope_name="lmcache.l2"} 2.0
lmcache_mp_l2_store_completed_objects_chunks_total{l2_name="resp",otel_scope_name="lmcache.l2"} 3.0
"""


def config(chunk: int = 32, algorithm: str = "sha256_cbor", adapters: Any = (ADAPTER,), **coordinator: Any) -> Any:
    reports = {"url": "http://127.0.0.1:9391", "event_reporting": True, **coordinator}
    l2 = {"l2_adapter_config": {"adapters": list(adapters)}}
    return {"mp": {"chunk_size": chunk, "hash_algorithm": algorithm}, "storage_manager": l2, "coordinator": reports}


def status(block: int = 32, **changes: Any) -> Any:
    groups = [{"kernel_group_idx": 0, "tokens_per_block": block}]
    meta = {"418": {"model_name": "m", "kv_cache_layout": {"kernel_groups": groups}}}
    events = {"enabled": True, "unbound_stores": 0}
    said = {"registered_gpu_ids": [418], "cache_context_meta": meta, "registered_non_cuda_instance_ids": []}
    return {**said, "kv_events": events, **changes}


def pod(algorithm: str = "sha256_cbor") -> ProbedEndpoint:
    return ProbedEndpoint("pod", "http://x", "x", True, block_size=32, algorithm=algorithm)


def found(config: Any, status: Any, *pods: ProbedEndpoint) -> list[tuple[str, str, str]]:
    return [(each.check, each.level, each.fix) for each in findings_of(URL, config, status, pods or [pod()])]


def test_a_server_that_is_well() -> None:
    assert found(config(), status()) == []


@pytest.mark.parametrize(
    ("said", "state", "check", "level", "fix"),
    [
        (config(chunk=256), status(), "lmcache-chunk", "problem", "--chunk-size 32"),
        (config(chunk=48), status(), "lmcache-chunk", "problem", "--chunk-size 32"),
        (config(chunk=16), status(block=16), "", "", ""),
        (config(algorithm="blake3"), status(), "lmcache-hash", "hint", "--hash-algorithm sha256_cbor"),
        (config(algorithm="sha256"), status(), "lmcache-hash", "problem", "--hash-algorithm blake3 or sha256_cbor"),
        (config(adapters=[{**ADAPTER, "shared": False}]), status(), "l2-shared", "problem", '"shared": true'),
        (config(adapters=[]), status(), "l2-shared", "hint", "--l2-adapter"),
        (config(url=""), status(), "coordinator-unset", "hint", "--coordinator-url URL"),
        (config(event_reporting=False), status(), "coordinator-unset", "problem", "--coordinator-event-reporting"),
        (config(), status(registered_non_cuda_instance_ids=[7]), "lmcache-transfer", "problem", "lmcache_driven"),
        (config(), status(kv_events={"unbound_stores": 3}), "", "", ""),  # what it takes from L2 has no tokens either
        (config(), status(registered_gpu_ids=[]), "lmcache-engines", "hint", "LMCacheMPConnector"),
    ],
)
def test_what_is_wrong_is_reported_with_its_flag(said: Any, state: Any, check: str, level: str, fix: str) -> None:
    reported = found(said, state)
    if not check:
        assert reported == []
        return
    ((found_check, found_level, found_fix),) = reported
    assert (found_check, found_level) == (check, level)
    assert fix in found_fix


def test_without_an_engine_the_pods_say_what_a_block_is() -> None:
    state = status(registered_gpu_ids=[], cache_context_meta={})
    assert [check for check, _, _ in found(config(chunk=256), state)] == ["lmcache-engines", "lmcache-chunk"]
    assert [check for check, _, _ in found(config(chunk=256), state, ProbedEndpoint("pod", "", ""))] == [
        "lmcache-engines"
    ]


def test_pages_without_what_is_looked_for_are_borne() -> None:
    assert found({}, {}, ProbedEndpoint("pod", "", ""))
    assert found({"mp": 1, "storage_manager": [], "coordinator": None}, {"cache_context_meta": [], "kv_events": 1})


def test_stores_are_added_up_over_adapters() -> None:
    assert stores(METRICS) == Stores(begun=5, chunks=15, ended=5, arrived=3)
    assert stores(b"") == Stores()


@pytest.mark.parametrize(
    ("before", "after", "level"),
    [
        (Stores(5, 15, 5, 3), Stores(7, 21, 7, 3), "problem"),  # Redis went away and came back
        (Stores(5, 15, 5, 3), Stores(5, 15, 5, 3), "hint"),  # it lost some; whether it still does was not seen
        (Stores(5, 15, 5, 3), Stores(7, 21, 7, 9), ""),  # it lost some once
        (Stores(5, 15, 5, 15), Stores(7, 21, 7, 21), ""),
        (Stores(5, 15, 5, 15), Stores(7, 21, 6, 15), ""),  # still at it
        (None, Stores(7, 21, 7, 3), ""),
        (Stores(), None, ""),
    ],
)
def test_chunks_that_never_arrive_are_reported(before: Stores | None, after: Stores | None, level: str) -> None:
    assert [finding.level for finding in stuck(URL, before, after)] == ([level] if level else [])


@asynccontextmanager
async def serving(pages: dict[str, Any]) -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        page = pages.get(request.path)
        if page is None:
            raise web.HTTPNotFound
        return web.Response(body=page) if isinstance(page, bytes) else web.json_response(page)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with web_server.serving(app) as address:
        yield f"http://{address}"


async def test_a_server_is_asked_for_its_pages() -> None:
    pages = {"/config": config(), "/status": status(), "/metrics": METRICS}
    async with serving(pages) as url, HttpClient(5.0) as ask:
        assert [each.check for each in await examine_server(url, ask, [pod()], Stores(4, 12, 4, 3))] == ["l2-stuck"]
        del pages["/metrics"]
        assert await examine_server(url, ask, [pod()], Stores()) == []
        del pages["/status"]
        (finding,) = await examine_server(url, ask, [pod()], Stores())
        assert (finding.check, finding.level) == ("lmcache-unreachable", "problem")


async def test_a_coordinator_is_asked_whom_it_knows() -> None:
    pages = {
        "/healthz": {"status": "healthy"},
        "/instances": {"instances": [{"instance_id": "a", "ip": "127.0.0.1", "http_port": 8591}]},
    }
    async with serving(pages) as url, HttpClient(5.0) as ask:
        assert await examine_coordinator(url, ask, [URL], [pod()], 1.0) == []
        (finding,) = await examine_coordinator(url, ask, ["http://127.0.0.1:8592"], [], 1.0)
        assert (finding.check, finding.level) == ("coordinator-unreachable", "problem")
        assert "127.0.0.1:8591" in finding.found
    async with HttpClient(5.0) as ask:
        (finding,) = await examine_coordinator("http://127.0.0.1:1", ask, [], [], 1.0)
        assert (finding.subject, finding.check) == ("http://127.0.0.1:1", "coordinator-unreachable")


@pytest.mark.parametrize(
    ("looked_up", "waiting", "checks"),
    [(2, 2, ["l2-stuck"]), (8, 8, ["l2-stuck"]), (3, 2, []), (2, 0, []), (0, 0, []), (2, None, [])],
)
async def test_prompts_that_all_wait_for_l2_are_reported(
    looked_up: int, waiting: int | None, checks: list[str]
) -> None:
    page = f'lmcache_mp_l2_prefetch_lookup_requests_total{{otel_scope_name="lmcache.l2"}} {looked_up}.0\n'
    state = status(storage_manager={"prefetch_controller": {"lookup_phase_count": waiting}})
    pages = {"/config": config(), "/status": state, "/metrics": page.encode()}
    async with serving(pages) as url, HttpClient(5.0) as ask:
        assert [each.check for each in await examine_server(url, ask, [pod()], Stores())] == checks
        pages["/metrics"] = page.replace(".0", ".0.0").encode()  # no number
        assert await examine_server(url, ask, [pod()], Stores()) == []
