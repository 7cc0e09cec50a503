"""HTTPRoutes, weights, filters and pools through a real Envoy, with real ext_proc servers."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any, get_args

import pytest

from epp import protocol
from epp.errors import Rejected
from gateway.translate import FORGED, TranslateOptions
from gateway.wiring import Wiring
from tests.support.gateway.rig import Rig, rig, to
from tests.support.process.waiting import until

pytestmark = pytest.mark.envoy

ALL_TO_A: list[dict[str, Any]] = [{"backendRefs": to("a")}]


@pytest.fixture
async def chain(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(tmp_path, ALL_TO_A) as made:
        yield made


def rule(pool: str, **match: Any) -> dict[str, Any]:
    return {"matches": [match], "backendRefs": to(pool)}


async def test_the_closest_match_wins_whatever_the_order(chain: Rig) -> None:
    header = {"name": "x-tier", "value": "gold"}
    await chain.use(
        [
            rule("a", path={"type": "PathPrefix", "value": "/"}),
            rule("b", path={"type": "PathPrefix", "value": "/v1"}),
            rule("a", path={"type": "PathPrefix", "value": "/v1"}, headers=[header]),
            rule("a", path={"type": "Exact", "value": "/v1/exact"}),
            rule("b", path={"type": "RegularExpression", "value": "/re/[0-9]+"}),
            rule("b", method="GET"),
            rule("b", queryParams=[{"name": "pool", "value": "b"}]),
        ]
    )
    assert await chain.served("/") == "a-0"
    assert await chain.served("/v1") == "b-0"
    assert await chain.served("/v1/chat?x=1") == "b-0"
    assert await chain.served("/v1beta") == "a-0", "a prefix ends where a segment ends"
    assert await chain.served("/v1/chat", headers={"x-tier": "gold"}) == "a-0"
    assert await chain.served("/v1/chat", headers={"x-tier": "golden"}) == "b-0"
    assert await chain.served("/v1/exact") == "a-0"
    assert await chain.served("/v1/exact/not") == "b-0"
    assert await chain.served("/re/12") == "b-0"
    assert await chain.served("/re/12x") == "a-0"
    assert await chain.served("/other", method="GET") == "b-0"
    assert await chain.served("/other?pool=b") == "b-0"


async def test_weights_choose_the_pool_and_its_picker_together(chain: Rig) -> None:
    await chain.use([{"backendRefs": to(("a", 70), ("b", 30))}])
    count = 400
    pools = Counter([(await chain.served())[0] for _ in range(count)])
    assert 0.2 < pools["b"] / count < 0.4
    await chain.use([{"backendRefs": to(("a", 0), ("b", 1))}])
    assert {await chain.served() for _ in range(10)} == {"b-0"}
    await chain.use([{"backendRefs": to(("a", 0))}])
    status, _, said = await chain.ask()
    assert (status, said["error"]["message"]) == (500, "Every backend of this route has weight 0.")


async def test_headers_are_changed_on_the_way_in_and_out(chain: Rig) -> None:
    asked = {
        "set": [{"name": "x-set", "value": "50%"}],
        "add": [{"name": "x-add", "value": "two"}],
        "remove": ["x-gone"],
    }
    answered = {"set": [{"name": "x-pod", "value": "hidden"}], "remove": ["content-language"]}
    filters = [
        {"type": "RequestHeaderModifier", "requestHeaderModifier": asked},
        {"type": "ResponseHeaderModifier", "responseHeaderModifier": answered},
    ]
    await chain.use([{"filters": filters, "backendRefs": to("a")}])
    _, headers, said = await chain.ask(headers={"x-set": "1", "x-add": "one", "x-gone": "1", "x-kept": "1"})
    got = {name.lower(): value for name, value in said["headers"].items()}
    assert (got["x-set"], got["x-kept"], got.get("x-gone")) == ("50%", "1", None)
    assert got["x-add"] in ("one,two", "one")  # aiohttp's dict keeps the first of two lines
    assert headers["x-pod"] == "hidden"


@pytest.mark.parametrize(
    ("prefix", "path", "asked", "got"),
    [
        ("/api", {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/v1"}, "/api/chat?q=1", "/v1/chat?q=1"),
        ("/api", {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}, "/api/chat", "/chat"),
        ("/api", {"type": "ReplacePrefixMatch", "replacePrefixMatch": ""}, "/api", "/"),
        ("/", {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/v1"}, "/chat", "/v1/chat"),
        ("/api", {"type": "ReplaceFullPath", "replaceFullPath": r"/one\1"}, "/api/a/b?q=1", r"/one\1?q=1"),
    ],
)
async def test_paths_and_hosts_are_rewritten(
    tmp_path: Path, prefix: str, path: dict[str, str], asked: str, got: str
) -> None:
    rewrite = {"type": "URLRewrite", "urlRewrite": {"hostname": "inside.example", "path": path}}
    match = {"path": {"type": "PathPrefix", "value": prefix}}
    async with rig(tmp_path, [{"matches": [match], "filters": [rewrite], "backendRefs": to("a")}]) as chain:
        _, _, said = await chain.ask(asked)
        assert (said["path"], said["headers"]["Host"]) == (got, "inside.example")


async def test_redirects_answer_without_a_picker(chain: Rig) -> None:
    path = {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/new"}
    redirect = {"scheme": "https", "hostname": "other.example", "path": path, "statusCode": 301}
    match = {"path": {"type": "PathPrefix", "value": "/old"}}
    await chain.use([{"matches": [match], "filters": [{"type": "RequestRedirect", "requestRedirect": redirect}]}])
    status, headers, _ = await chain.ask("/old/x?q=1")
    assert status == 301
    assert headers["location"].replace(":443", "") == "https://other.example/new/x?q=1"
    assert chain.pickers["a"].entered == 0


async def test_what_no_route_matches_is_not_found_in_json(chain: Rig) -> None:
    await chain.use([rule("a", path={"type": "Exact", "value": "/only"})])
    status, headers, said = await chain.ask("/other")
    assert (status, headers["content-type"]) == (404, "application/json")
    assert said["error"]["type"] == "invalid_request_error"
    assert chain.pickers["a"].entered == 0


async def test_a_forged_destination_has_no_effect(chain: Rig) -> None:
    forged = dict.fromkeys(FORGED, chain.upstreams["b-1"].address)
    for _ in range(4):
        assert await chain.served(headers=forged) == "a-0"
    way = await chain.pickers["a"].way()
    assert not set(FORGED) & {name.lower() for name in way.raw.headers}


async def test_the_fallback_list_is_walked_and_the_picker_reported_who_served(chain: Rig) -> None:
    first, second = chain.upstreams["a-0"], chain.upstreams["a-1"]
    first.status = 503
    chain.pickers["a"].destination = f"{first.address},{second.address}"
    assert await chain.served() == "a-1"
    assert first.asked == 1
    way = await chain.pickers["a"].way()
    await until(lambda: bool(way.seen))
    assert way.seen[0].served == second.address  # type: ignore[union-attr]
    chain.pickers["a"].destination = f"127.0.0.1:1,{second.address}"
    assert await chain.served() == "a-1", "an address outside the pool is passed over"


async def test_answers_of_endpoints_and_pickers_stay_as_they_are(chain: Rig) -> None:
    chain.upstreams["a-0"].status = chain.upstreams["a-1"].status = 503
    status, _, said = await chain.ask()
    assert (status, said["name"][0]) == (503, "a")
    chain.upstreams["a-0"].status = 404
    status, _, said = await chain.ask()
    assert (status, said["name"]) == (404, "a-0")
    chain.pickers["a"].error = Rejected("too much at once")
    status, headers, said = await chain.ask()
    assert (status, said["error"]["message"]) == (429, "too much at once")
    assert headers[protocol.DROP_REASON] == protocol.DROP_SATURATED


async def test_without_an_endpoint_the_answer_is_json(chain: Rig) -> None:
    chain.members["a"] = []
    await chain.use(ALL_TO_A)
    status, _, said = await chain.ask()
    assert (status, said["error"]["type"]) == (503, "service_unavailable_error")
    assert said["error"]["message"] == "No endpoint is ready to serve this request."


async def test_an_endpoint_that_does_not_listen_is_said_so(chain: Rig) -> None:
    chain.members["a"], chain.upstreams["a-0"].address = ["a-0"], "127.0.0.1:1"
    await chain.use(ALL_TO_A)
    status, _, said = await chain.ask()
    assert (status, said["error"]["type"]) == (503, "service_unavailable_error")
    why = "No connection to the endpoint; expected a server that listens at the pool's target port."
    assert said["error"]["message"] == why


async def test_a_path_of_no_rule_is_said_so(chain: Rig) -> None:
    await chain.use([{"matches": [{"path": {"value": "/v1"}}], "backendRefs": to("a")}])
    status, _, said = await chain.ask("/metrics")
    assert (status, said["error"]["type"]) == (404, "invalid_request_error")
    assert said["error"]["message"].endswith("expected the host, path, method and headers of an HTTPRoute's rule.")


async def test_a_route_may_limit_the_time(chain: Rig) -> None:
    await chain.use([{"backendRefs": to("a"), "timeouts": {"request": "100ms"}}])
    chain.upstreams["a-0"].silent = asyncio.Event()
    status, _, said = await chain.ask()
    chain.upstreams["a-0"].silent.set()
    assert (status, said["error"]["message"]) == (504, "The request took longer than its route allows.")


@pytest.mark.parametrize("failure_mode", ["FailOpen", "FailClose"])
async def test_without_a_picker_the_failure_mode_decides(tmp_path: Path, failure_mode: str) -> None:
    async with rig(tmp_path, ALL_TO_A, failure_mode=failure_mode) as chain:
        assert await chain.served() == "a-0"
        [server] = chain.servers["a"]
        await server.drain(0)
        await chain.healthy("a", 0)
        for size in (0, 30, 100_000):
            status, _, said = await chain.ask(data=b"x" * size)
            if failure_mode == "FailOpen":
                assert (status, said["size"]) == (200, size)
            else:
                assert (status, said["error"]["message"]) == (503, "The endpoint picker did not answer.")


async def test_an_endpoint_that_fails_is_left_by_envoy_itself_but_not_where_the_picker_names_it(tmp_path: Path) -> None:
    async with rig(tmp_path, ALL_TO_A, failure_mode="FailOpen") as chain:
        ill, well = chain.upstreams["a-0"], chain.upstreams["a-1"]
        ejected = "cluster.pool.default.a.outlier_detection.ejections_active"

        async def is_ejected() -> bool:
            return (await chain.envoy.stats(f"^{ejected}$"))[ejected] == 1

        async def eject() -> None:
            while not await is_ejected():
                await chain.ask()

        ill.status = 500
        await eject()
        assert (await chain.ask())[0] == 500, "the picker names it"
        [server] = chain.servers["a"]
        await server.drain(0)
        await chain.healthy("a", 0)
        served: list[int] = []
        while not served:  # an ejection that ends meanwhile says nothing
            await eject()
            asked = [(await chain.ask())[0] for _ in range(6)]
            served = asked if await is_ejected() else []
        assert served == [200] * 6
        well.status = 500
        before = ill.asked, well.asked
        for _ in range(40):
            assert (await chain.ask())[0] == 500
        assert ill.asked + well.asked - sum(before) == 40, "somebody is always asked"


@pytest.mark.parametrize("wiring", get_args(Wiring))
async def test_every_wiring_carries_requests(tmp_path: Path, wiring: Wiring) -> None:
    async with rig(tmp_path, ALL_TO_A, options=TranslateOptions(wiring=wiring)) as chain:
        chain.pickers["a"].destination = chain.upstreams["a-1"].address
        for size in (1, 30, 100_000, 3_000_000):
            status, _, said = await chain.ask(data=BytesIO(b"x" * size))
            assert (status, said["name"], said["size"]) == (200, "a-1", size)
        assert await chain.served(method="GET") == "a-1"
        picker = chain.pickers["a"]
        await picker.until(lambda: picker.left == picker.entered)


async def test_routes_and_endpoints_change_under_load_without_a_lost_request(chain: Rig) -> None:
    answers: Counter[int] = Counter()
    done = asyncio.Event()

    async def client() -> None:
        while not done.is_set():
            status, _, _ = await chain.ask("/v1/chat")
            answers[status] += 1

    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(client()) for _ in range(4)]
        for turn in range(4):
            for pool in "ab":
                member = f"{pool}-{turn % 2}"
                chain.members[pool] = [member]
                await chain.use([{"backendRefs": to(pool)}])
                before = chain.upstreams[member].asked
                await until(lambda upstream=chain.upstreams[member], before=before: upstream.asked > before)  # type: ignore[misc]
        done.set()
        await asyncio.wait(clients)
    assert set(answers) == {200}
    cx = f"http.port-{chain.port}.downstream_cx_total"
    assert (await chain.envoy.stats(f"^{cx}$"))[cx] == 4


async def test_one_of_two_pickers_leaves_under_load_without_a_lost_request(tmp_path: Path) -> None:
    async with rig(tmp_path, ALL_TO_A, replicas=2) as chain:
        answers: Counter[int] = Counter()
        done = asyncio.Event()

        async def client() -> None:
            while not done.is_set():
                status, _, _ = await chain.ask("/v1/chat")
                answers[status] += 1

        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(client()) for _ in range(4)]
            await until(lambda: answers[200] > 20)
            await chain.servers["a"][0].drain(1)
            after = answers[200]
            await until(lambda: answers[200] > after + 50)
            done.set()
            await asyncio.wait(clients)
        assert set(answers) == {200}
