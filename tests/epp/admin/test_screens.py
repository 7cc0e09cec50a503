import asyncio
import json
import random
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest

from epp.admin import screens, turns
from epp.admin.overview import COLUMNS
from epp.admin.recorder import Decisions, Recorder
from epp.admin.server import AdminServer, AdminSettings
from epp.errors import NoEndpoint
from epp.parsing.request import RawRequest
from epp.plugin import Endpoint, Response
from epp.pool.store import Pool, ServedModel
from epp.telemetry.metrics import Metrics
from tests.support.scheduling.decisions import SECRET, decision, endpoint

BROWSER = "text/html,application/xhtml+xml,*/*;q=0.8"
HTML, JSON = ("text/html", "utf-8"), ("application/json", None)


class Rig:
    """An admin server with a pool, and a browser's view of it."""

    def __init__(self, endpoints: int = 2) -> None:
        self.pool = Pool("p", random=random.Random(1))
        self.pool.replace(map(endpoint, range(1, endpoints + 1)))
        self.metrics = Metrics()
        self.decisions = Decisions()
        self.recorder = Recorder("p", self.metrics, self.decisions, wall_clock=lambda: 1.0)
        self.server = AdminServer(self.metrics, [self.pool], self.decisions, list, lambda: "", AdminSettings(port=0))
        self.asked: list[tuple[str, RawRequest]] = []
        self.server.explain_by(self.explain)

    async def explain(self, pool: str, raw: RawRequest) -> dict[str, Any]:
        self.asked.append((pool, raw))
        if not self.pool.endpoints:
            raise NoEndpoint("pool p has no ready endpoint")
        return {"pool": "default/p", "waiting": None, "decision": decision("", self.pool.endpoints).as_dict()}

    def request(self, name: str) -> None:
        made = decision(name, self.pool.endpoints, cached=50)
        self.recorder.decided(made, 0.0)
        self.recorder.finished(made, Response(status=200))

    async def get(
        self, path: str, accept: str = BROWSER, status: int = 200, kind: tuple[str, str | None] = HTML
    ) -> str:
        url = f"http://127.0.0.1:{self.server.port}{path}"
        async with aiohttp.request("GET", url, headers={"Accept": accept}) as answer:
            text = await answer.text()
            assert (answer.status, answer.content_type, answer.charset) == (status, *kind), text[:500]
            return text

    async def live(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self.get(path, kind=JSON))
        return found

    async def post(self, fields: dict[str, str], **headers: str) -> tuple[int, str, str]:
        sent = {"Accept": BROWSER, "Content-Type": "application/x-www-form-urlencoded", **headers}
        url = f"http://127.0.0.1:{self.server.port}/explain"
        async with aiohttp.request("POST", url, headers=sent, data=urlencode(fields)) as answer:
            return answer.status, answer.content_type, await answer.text()


@pytest.fixture(autouse=True)
def always_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "RECENT_S", 0.0)


async def test_browsers_get_pages_and_everybody_else_json() -> None:
    rig = Rig()
    async with rig.server:
        rig.request("r1")
        for path in ("/decisions", "/decisions/r1"):
            assert "default/pod-1" in await rig.get(path)
            assert "default/pod-1" in await rig.get(f"{path}?format=html", "*/*")
            json.loads(await rig.get(path, "*/*", kind=JSON))
            json.loads(await rig.get(f"{path}?format=json", kind=JSON))
            wrong = json.loads(await rig.get(f"{path}?format=xml", status=400, kind=("application/json", None)))
            assert wrong["error"]["param"] == "format"
        json.loads(await rig.get("/decisions/none", status=404, kind=JSON))


async def test_no_page_shows_a_prompt_or_runs_what_is_in_it() -> None:
    rig = Rig()
    async with rig.server:
        rig.request("r1")
        for path in ("/", "/decisions", "/decisions/r1", "/explain"):
            text = await rig.get(path)
            assert SECRET not in text
            assert text.count("<script") == 1
            assert " style=" not in text
            url = f"http://127.0.0.1:{rig.server.port}{path}"
            async with aiohttp.request("GET", url, headers={"Accept": BROWSER}) as answer:
                policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
            assert "unsafe" not in policy


async def test_what_is_refreshed_fits_the_page() -> None:
    rig = Rig(endpoints=45)
    async with rig.server:
        rig.request("r1")
        text, live = await rig.get("/"), await rig.live("/?live")
        assert f'data-version="{live["version"]}" data-step="{live["step"]}"' in text
        assert [*live["parts"]] == ["state", "part0", "terms", "decisions"]
        assert all(f'id="{part}"' in text for part in live["parts"])
        assert [[*map(len, columns)] for columns in live["columns"]] == [[45] * len(COLUMNS)]
        assert text.count('<th scope="row">default/pod-') == 45
        assert f'data-scale="{live["scales"][0]}"' in text
        assert live["parts"]["decisions"] in text
        rig.pool.replace([*rig.pool.endpoints[:3]])
        fewer = await rig.live("/?live")
        assert fewer["version"] != live["version"]
        assert [[*map(len, columns)] for columns in fewer["columns"]] == [[3] * len(COLUMNS)]


async def test_endpoints_that_leave_while_a_page_is_drawn_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(endpoints=60)
    async with rig.server:
        real = asyncio.sleep

        async def leaving(seconds: float, *result: Any) -> None:
            rig.pool.replace([*rig.pool.endpoints[:-1]] if len(rig.pool.endpoints) > 1 else [endpoint(9)])
            await real(seconds, *result)

        monkeypatch.setattr("epp.telemetry.pace.asyncio.sleep", leaving)
        monkeypatch.setattr("epp.admin.overview.SLICE", 7)
        assert 1 < (await rig.get("/")).count('<th scope="row">default/pod-') <= 60
        assert len(rig.pool.endpoints) < 60  # some did leave
        [columns] = (await rig.live("/?live"))["columns"]
        [length] = {*map(len, columns)}  # of all columns the same
        assert 0 < length < 60


async def test_the_list_of_decisions_is_refreshed_too() -> None:
    rig = Rig()
    async with rig.server:
        for n in range(25):
            rig.request(f"r{n}")
        text = await rig.get("/decisions")
        assert 'data-live="/decisions?format=html&amp;live&amp;limit=20"' in text
        live = await rig.live("/decisions?format=html&live&limit=20")
        assert live["parts"]["decisions"] in text
        assert live["parts"]["decisions"].count('<td class="when">') == 20
        longer = await rig.get("/decisions?limit=21")
        assert longer.count('<td class="when">') == 25


async def test_viewers_share_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "RECENT_S", 60.0)
    rig, drawn = Rig(), 0
    glance = rig.server._overview.glance

    def counted() -> dict[str, Any]:
        nonlocal drawn
        drawn += 1
        return glance()

    monkeypatch.setattr(rig.server._overview, "glance", counted)
    async with rig.server:
        seen = await asyncio.gather(*(rig.get("/?live", kind=JSON) for _ in range(20)))
        assert len({*seen}) <= 2  # who came while the first was drawn got the next
        assert drawn <= 2


async def test_a_form_is_explained_like_the_request_it_stands_for() -> None:
    rig = Rig()
    served = ServedModel("llama", "", b"{}")
    rig.pool.endpoints[0].models = (served, served)
    body = '{"model": "m", "prompt": "p"}'
    async with rig.server:
        assert '<option value="llama">' in await rig.get("/explain")
        status, kind, text = await rig.post({"text": f"\r\n{body}", "pool": "p"})
        assert (status, kind) == (200, "text/html")
        assert "It would go to default/pod-1" in text
        await rig.post({"text": "first\r\nsecond", "model": "llama"})
        await rig.post({"text": f"curl http://gw/v1/completions -H 'X-Team: a' -H 'Host: gw' -d '{body}'"})
    (pool, first), (_, second), (_, third) = rig.asked
    assert (pool, first.method, first.path, first.body) == ("p", "POST", "/v1/completions", body.encode())
    assert json.loads(second.body)["messages"][0]["content"] == "first\nsecond"
    assert (third.path, third.headers) == ("/v1/completions", {"x-team": "a"})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "request: got nothing"),
        ({"text": "Why?"}, "model: missing; expected the model"),
        ({"text": "curl gw -d @/etc/hostname"}, "got @/etc/hostname, a file of yours"),
        ({"text": "<script>alert(1)"}, "&lt;script&gt;alert(1)"),
    ],
)
async def test_a_form_that_asks_nothing_is_shown_again_with_the_reason(fields: dict[str, str], said: str) -> None:
    rig = Rig()
    async with rig.server:
        status, kind, text = await rig.post(fields)
        assert (status, kind) == (400, "text/html")
        assert said in text
        assert rig.asked == []


async def test_a_refusal_is_shown_as_what_it_would_be() -> None:
    rig = Rig(endpoints=0)
    async with rig.server:
        status, _, text = await rig.post({"text": "Why?", "model": "m"})
        assert status == 503
        assert "It would be refused with 503: pool p has no ready endpoint" in text


async def test_forms_have_bounds_and_come_from_our_own_page(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    fields = {"text": "Why?", "model": "m"}
    async with rig.server:
        for site in ("cross-site", "same-site"):
            assert (await rig.post(fields, **{"Sec-Fetch-Site": site}))[0] == 403
        assert (await rig.post({str(n): "x" for n in range(screens.FIELDS + 1)}))[0] == 400
        monkeypatch.setattr(screens, "LARGEST_FORM", 100)
        assert (await rig.post({"text": "x" * 200}))[0] == 413
        assert rig.asked == []
        assert (await rig.post(fields, **{"Sec-Fetch-Site": "same-origin"}))[0] == 200


async def test_a_body_that_curl_sends_without_a_type_is_still_a_request() -> None:
    rig = Rig()
    async with rig.server:
        url = f"http://127.0.0.1:{rig.server.port}/explain"
        headers = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "*/*"}
        async with aiohttp.request("POST", url, headers=headers, data='{"prompt": "p"}') as answer:
            assert (answer.status, answer.content_type) == (200, "application/json")
    assert rig.asked[0][1].body == b'{"prompt": "p"}'


async def test_what_pages_load_is_served_and_nothing_beside_it() -> None:
    rig = Rig()
    async with rig.server:
        for file, kind in (("page.css", "text/css"), ("page.js", "text/javascript"), ("icon.svg", "image/svg+xml")):
            assert await rig.get(f"/static/{file}", kind=(kind, None))
        for file in ("page.py", "..%2Fserver.py", "%2e%2e%2fserver.py"):
            await rig.get(f"/static/{file}", status=404, kind=JSON)


async def test_two_pools_have_a_table_each() -> None:
    rig = Rig()
    other = Pool("q", random=random.Random(1))
    other.replace([Endpoint("default/other", "10.0.1.1:8000")])
    rig.server = AdminServer(rig.metrics, [rig.pool, other], rig.decisions, list, str, AdminSettings(port=0))
    async with rig.server:
        text, live = await rig.get("/"), await rig.live("/?live")
        assert text.count('<table class="endpoints"') == 2
        assert [[*map(len, columns)] for columns in live["columns"]] == [[2] * len(COLUMNS), [1] * len(COLUMNS)]
        assert "<option>default/q</option>" in await rig.get("/explain")
