import asyncio
import io
import json
import re
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
import pytest

from epp.admin import server, turns
from epp.admin.access import Access, Reviewer
from epp.admin.recorder import Decisions, Recorder
from epp.admin.server import MOST, AdminServer, AdminSettings
from epp.errors import ConfigError
from epp.parsing.request import RawRequest
from epp.plugin import Endpoint, Response
from epp.pool.apiserver import ApiError, User
from epp.telemetry import exposition
from epp.telemetry.metrics import Metrics
from tests.support.scheduling.decisions import SECRET, decision, endpoint


@dataclass
class APool:
    name: str
    endpoints: tuple[Endpoint, ...]
    namespace: str = "default"


class Rig:
    """An admin server on a free port, and what it shows."""

    def __init__(self, reviewer: Reviewer | None = None) -> None:
        self.pool = APool("p", (endpoint(1), endpoint(2)))
        self.metrics = Metrics()
        self.metrics.add_pool(self.pool)
        self.decisions = Decisions()
        self.recorder = Recorder("p", self.metrics, self.decisions, wall_clock=lambda: 1.0)
        self.reasons: list[str] = []
        self.server = AdminServer(
            self.metrics,
            [self.pool],
            self.decisions,
            lambda: self.reasons,
            lambda: "pipeline: <default>\n",
            AdminSettings(port=0, profiles=True, access=None if reviewer is None else Access(reviewer, self.metrics)),
        )

    def request(self, request_id: str) -> None:
        made = decision(request_id, self.pool.endpoints, cached=50)
        self.recorder.decided(made, 0.0)
        self.recorder.finished(made, Response(status=200))

    async def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{self.server.port}") as session:
            async with session.request(method, path, headers=headers) as answer:
                return answer.status, answer.content_type, await answer.text()

    async def json(self, path: str, status: int = 200) -> Any:
        got, content_type, text = await self.get(path)
        assert (got, content_type) == (status, "application/json")
        return json.loads(text)


async def test_metrics_come_in_the_format_asked_for() -> None:
    rig = Rig()
    async with rig.server:
        rig.request("r1")
        status, content_type, text = await rig.get("/metrics")
        assert (status, content_type) == (200, "text/plain")
        assert 'warmpath_requests_total{model="m",status="200"} 1.0' in text
        status, content_type, text = await rig.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert (status, content_type) == (200, "application/openmetrics-text")
        assert text.endswith("# EOF\n")


async def test_ready_tells_why_not() -> None:
    rig = Rig()
    async with rig.server:
        assert await rig.json("/ready") == {"ready": True, "reasons": []}
        rig.reasons = ["pool p is not synced", "draining"]
        assert (await rig.json("/ready", 503))["reasons"] == ["pool p is not synced", "draining"]
        assert (await rig.get("/healthz"))[0] == 200


async def test_endpoints_and_decisions_are_shown() -> None:
    rig = Rig()
    async with rig.server:
        for n in range(5):
            rig.request(f"r/{n}")
        pool = (await rig.json("/endpoints"))["pools"][0]
        assert [(e["name"], e["share"]) for e in pool["endpoints"]] == [("default/pod-1", 1.0), ("default/pod-2", 0.0)]
        shown = (await rig.json("/decisions?limit=2"))["decisions"]
        assert [one["request_id"] for one in shown] == ["r/4", "r/3"]
        assert shown[0]["profiles"][0]["endpoints"][0]["bill_ms"] == {"queue": 2.0, "work": 10.0}
        assert (await rig.json("/decisions/r%2F3"))["request_id"] == "r/3"
        assert (await rig.json("/decisions/r/3"))["outcome"]["status"] == 200
        missing = (await rig.json("/decisions/none", 404))["error"]
        assert (missing["type"], missing["param"]) == ("not_found_error", "request_id")


async def test_the_page_shows_them_and_loads_nothing_from_elsewhere() -> None:
    rig = Rig()
    async with rig.server:
        rig.request("r1")
        status, content_type, text = await rig.get("/")
        assert (status, content_type) == (200, "text/html")
        assert "default/pod-2" in text
        assert "<title>queue 2.0, work 10.0 ms</title>" in text
        assert SECRET not in text
        assert "://" not in text
        status, content_type, text = await rig.get("/config")
        assert (status, content_type, text) == (200, "text/plain", "pipeline: <default>\n")


@pytest.mark.parametrize("limit", ["0", "-1", "x", "", "1.5", str(MOST + 1), "9" * 5000, "%C2%B2", "1e3"])
async def test_a_wrong_limit_is_refused_by_name(limit: str) -> None:
    rig = Rig()
    async with rig.server:
        error = (await rig.json(f"/decisions?limit={limit}", 400))["error"]
        assert error["param"] == "limit"
        assert len(error["message"]) < 200


async def test_a_profile_is_made_off_the_loop_and_within_bounds() -> None:
    rig = Rig()
    async with rig.server:
        status, content_type, text = await rig.get("/debug/profile?seconds=1")
        assert (status, content_type) == (200, "text/plain")
        assert "MainThread;" in text
        assert (await rig.json("/debug/profile?seconds=61", 400))["error"]["param"] == "seconds"
        with rig.server._profiler._turn:
            assert (await rig.json("/debug/profile", 429))["error"]["type"] == "rate_limit_error"
    without = AdminServer(rig.metrics, [], rig.decisions, list, str, AdminSettings(port=0))
    async with without, aiohttp.request("GET", f"http://127.0.0.1:{without.port}/debug/profile") as answer:
        assert answer.status == 404


async def test_unknown_paths_and_methods_get_json_errors() -> None:
    rig = Rig()
    async with rig.server:
        assert (await rig.json("/nothing", 404))["error"]["type"] == "invalid_request_error"
        status, _, text = await rig.get("/metrics", "POST")
        assert status == 405
        assert "POST /metrics" in text


async def test_a_port_in_use_is_one_clear_sentence() -> None:
    rig, other = Rig(), Rig()
    async with rig.server:
        other.server.port = rig.server.port
        with pytest.raises(ConfigError, match=rf"^--metrics-port: 127.0.0.1:{rig.server.port} is in use by another"):
            await other.server.__aenter__()


async def test_leaving_closes_the_port_though_a_client_stays() -> None:
    rig = Rig()
    async with rig.server:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"200" in await reader.readline()
    assert (await reader.read()).endswith(b"ok\n")  # and then the end
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", rig.server.port)
    writer.close()


# --- under load -----------------------------------------------------------------------------------------------------


async def test_a_name_that_is_not_ours_is_reported_which_are() -> None:
    rig = Rig()
    async with rig.server:
        for path in ("/", "/metrics", "/endpoints", "/decisions", "/decisions/r1", "/config", "/debug/profile", "/no"):
            status, _, text = await rig.get(path, Host="evil.example.org")
            assert status == 421, path
            error = json.loads(text)["error"]
            assert error["param"] == "Host"
            assert "evil.example.org" in error["message"]
        assert (await rig.get("/healthz", Host="evil.example.org"))[0] == 200
        assert (await rig.get("/metrics", Host="localhost:1"))[0] == 200
    rig = Rig(Gatekeeper())
    async with rig.server:  # whoever has a token may call us what they like
        assert (await rig.get("/metrics", Host="picker.ns.svc", Authorization="Bearer reader"))[0] == 200


async def test_readers_of_metrics_share_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, made = Rig(), 0
    render = exposition.render

    async def counted(*arguments: Any) -> tuple[bytes, str]:
        nonlocal made
        made += 1
        return await render(*arguments)

    monkeypatch.setattr(exposition, "render", counted)
    async with rig.server:
        pages = await asyncio.gather(*(rig.get("/metrics") for _ in range(30)))
        assert {status for status, _, _ in pages} == {200}
        assert made < 10  # connections come one after the other
        rig.request("r1")
        assert 'status="200"' in (await rig.get("/metrics"))[2]  # begun after it was asked for


async def test_others_run_while_a_thousand_decisions_are_shown() -> None:
    rig, ran, done = Rig(), 0, asyncio.Event()
    for n in range(MOST):
        rig.request(f"r{n}")

    async def other() -> None:
        nonlocal ran
        while not done.is_set():
            ran += 1
            await asyncio.sleep(0)

    async with rig.server, asyncio.TaskGroup() as tasks:
        tasks.create_task(other())
        shown = await rig.json(f"/decisions?limit={MOST}")
        done.set()
    assert len(shown["decisions"]) == MOST
    assert shown["left_out"] == 0
    assert ran > MOST


async def test_decisions_are_shown_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_BYTES", 5000)
    rig = Rig()
    async with rig.server:
        for n in range(50):
            rig.request(f"r{n}")
        _, _, text = await rig.get("/decisions?limit=50")
        shown = json.loads(text)
        assert len(text) < 5100
        assert 0 < len(shown["decisions"]) < 50
        assert shown["decisions"][0]["request_id"] == "r49"
        assert shown["left_out"] == 50 - len(shown["decisions"])


async def test_who_waits_too_long_for_a_page_is_sent_away_and_probes_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PATIENCE_S", 0.05)
    rig = Rig()
    async with rig.server:
        async with rig.server._turns.turn():
            for path in ("/", "/metrics", "/endpoints", "/decisions", "/decisions/r", "/config"):
                url = f"http://127.0.0.1:{rig.server.port}{path}"
                async with aiohttp.request("GET", url) as answer:
                    assert (answer.status, answer.headers.get("Retry-After")) == (503, "5"), path
                    assert (await answer.json())["error"]["type"] == "service_unavailable_error"
            for path in ("/ready", "/healthz"):
                assert (await rig.get(path))[0] == 200
        labels = {"reason": "admin-busy"}
        assert rig.metrics.registry.get_sample_value("warmpath_degraded_total", labels) == 6


async def test_a_bug_of_ours_is_reported_in_json_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.reasons = cast(list[str], [object()])
    async with rig.server:
        assert (await rig.json("/ready", 500))["error"]["message"] == "internal error"
    assert "GET /ready failed" in caplog.text


async def test_nothing_is_changed_by_any_method() -> None:
    rig = Rig()
    async with rig.server:
        for path in ("/", "/metrics", "/endpoints", "/decisions", "/config", "/debug/profile"):
            for method in ("POST", "PUT", "PATCH", "DELETE"):
                assert (await rig.get(path, method))[0] == 405, (method, path)


# --- with tokens ----------------------------------------------------------------------------------------------------


class Gatekeeper:
    """Knows `reader`, who may get /metrics and /decisions."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def authenticate(self, token: str) -> User | None:
        if token == "late":
            raise ApiError(0, "away")
        return User(token) if token != "nobody" else None

    async def authorized(self, user: User, path: str) -> bool:
        self.asked.append(path)
        return user.username == "reader" and path in ("/metrics", "/decisions")


async def test_every_page_but_those_of_probes_wants_a_token() -> None:
    rig, gatekeeper = Rig(guarded := Gatekeeper()), guarded
    names = {"{request_id}": "r1", "{path}": "v1/completions", "{file}": "page.css"}
    pages = {
        (route.method, re.sub(r"{\w+}", lambda found: names[found[0]], route.resource.canonical))
        for route in rig.server._runner.app.router.routes()
        if route.resource is not None
    }
    paths = {path for _, path in pages}
    assert {"/", "/metrics", "/endpoints", "/decisions", "/decisions/r1", "/config", "/debug/profile"} <= paths
    assert {("POST", "/explain"), ("POST", "/explain/v1/completions"), ("HEAD", "/")} <= pages
    async with rig.server:
        rig.request("r1")
        for method, path in sorted(pages):
            open_ = path in ("/ready", "/healthz", "/static/page.css")
            assert (await rig.get(path, method))[0] == (200 if open_ else 401), (method, path)
        assert gatekeeper.asked == []


async def test_what_a_reader_is_reported() -> None:
    rig = Rig(gatekeeper := Gatekeeper())

    async def status(path: str, token: str) -> int:
        return (await rig.get(path, Authorization=f"Bearer {token}"))[0]

    async with rig.server:
        rig.request("r1")
        assert await status("/metrics", "reader") == 200
        assert await status("/decisions/r1", "reader") == 200
        assert await status("/decisions/r%2F2", "reader") == 404
        assert gatekeeper.asked == ["/metrics", "/decisions"]  # one decision takes the right to all
        assert await status("/config", "reader") == 403
        assert await status("/metrics", "nobody") == 401
        assert await status("/metrics", "late") == 503
        assert await status("/nothing", "nobody") == 404
        refused = json.loads((await rig.get("/metrics"))[2])["error"]
        assert (refused["type"], refused["param"]) == ("authentication_error", None)
        for accept, scheme in (("*/*", "Bearer"), ("text/html,*/*;q=0.8", "Basic")):
            url = f"http://127.0.0.1:{rig.server.port}/decisions"
            async with aiohttp.request("GET", url, headers={"Accept": accept}) as answer:
                assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, f'{scheme} realm="warmpath"')
        password = aiohttp.encode_basic_auth("whoever", "reader")
        assert (await rig.get("/decisions", Authorization=password))[0] == 200


# --- explanations ---------------------------------------------------------------------------------------------------


async def test_a_request_is_explained_as_a_client_would_send_it() -> None:
    rig = Rig()
    seen: list[tuple[str, RawRequest]] = []

    async def explain(pool: str, raw: RawRequest) -> dict[str, Any]:
        seen.append((pool, raw))
        return {"decision": {}}

    async with rig.server, aiohttp.ClientSession(f"http://127.0.0.1:{rig.server.port}") as session:

        async def post(path: str, body: bytes, **headers: str) -> tuple[int, Any]:
            async with session.post(path, data=io.BytesIO(body), headers=headers) as answer:
                return answer.status, await answer.json()

        assert (await post("/explain", b"{}"))[0] == 404, "nobody explains"
        rig.server.explain_by(explain)
        assert await post("/explain/v1/completions?pool=q", b"{}", Authorization="Bearer t", **{"X-B": "c"}) == (
            200,
            {"decision": {}},
        )
        assert (await post("/explain", b"[]", **{"X-Warmpath-Authorization": "Bearer client"}))[0] == 200
        status, said = await post("/explain", b" " * (server.LARGEST_BODY + 1))
        assert status == 413
        assert (await rig.get("/explain/v1/completions"))[0] == 405
    (pool, raw), (_, bare) = seen
    assert (pool, raw.method, raw.path, raw.body) == ("q", "POST", "/v1/completions", b"{}")
    assert raw.headers["x-b"] == "c"
    assert "authorization" not in raw.headers
    assert (bare.method, bare.path) == ("", "")
    assert bare.headers["authorization"] == "Bearer client"
    assert "x-warmpath-authorization" not in bare.headers
    assert said["error"]["type"] == "invalid_request_error"


async def test_few_requests_to_explain_are_taken_at_once_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "READ_S", 0.2)
    monkeypatch.setattr(server, "EXPLAINING", 1)
    rig = Rig()

    async def explain(pool: str, raw: RawRequest) -> dict[str, Any]:
        return {}

    rig.server.explain_by(explain)
    async with rig.server:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
        writer.write(b"POST /explain HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{")
        await asyncio.sleep(0.05)
        assert (await rig.get("/explain", "POST"))[0] == 503
        assert (await reader.readline()).split()[1] == b"408"
        writer.close()
        assert (await rig.get("/explain", "POST"))[0] == 200
