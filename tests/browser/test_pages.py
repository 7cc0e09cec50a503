"""What people do with the pages, in a real Chromium, at 300 endpoints."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, expect

from epp.admin.server import AdminServer, AdminSettings
from epp.parsing.request import RawRequest
from epp.plugin import Endpoint, Load
from epp.pool.store import Pool
from epp.scheduling.cost import ExpectedTtft
from epp.telemetry.series import FlowFigures, Waits
from tests.browser.conftest import ENDPOINTS, Shown
from tests.support.scheduling.decisions import SECRET, decision

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROWS = "table.endpoints tbody tr:not(.group):visible"


async def refreshed(page: Page) -> None:
    """Wait for the next refresh but one: the next may be under way."""
    for _ in range(2):
        seen = await page.locator("body").get_attribute("data-refreshed") or "0"
        await expect(page.locator("body")).not_to_have_attribute("data-refreshed", seen)
        await expect(page.locator("body")).to_have_attribute("data-refreshed", re.compile(r"\d+"))


async def first_names(page: Page, count: int = 2) -> list[str]:
    rows = page.locator(ROWS)
    return [await rows.nth(at).evaluate("row => row.cells[0].firstChild.data") for at in range(count)]


async def test_figures_follow_the_pool_without_a_reload(shown: Shown, page: Page) -> None:
    await page.goto(shown.url)
    await page.evaluate("window.kept = true")
    cell = page.locator("#endpoints0 tbody tr").nth(7).locator("td").nth(4)
    await expect(cell).to_have_text("2 %")
    shown.load(7, kv_usage=0.93)
    shown.request("a-new-one")
    await expect(cell).to_have_text("93 %")
    await expect(cell.locator("rect")).to_have_attribute("width", "93")
    await expect(page.locator("#decisions")).to_contain_text("a-new-one")
    shown.look()
    chart = page.locator("#endpoints0 tbody tr").nth(7).locator("polyline").nth(1)
    await expect(chart).to_have_attribute("points", re.compile(r" 59,2$"))
    assert await page.evaluate("window.kept") is True


async def test_other_endpoints_are_drawn_by_the_server_and_what_was_typed_stays(shown: Shown, page: Page) -> None:
    await page.goto(shown.url)
    await page.get_by_label("Filter").fill("pod-00")
    await expect(page.locator(ROWS)).to_have_count(10)
    shown.pool.replace(shown.pool.endpoints[5:])
    await expect(page.locator(ROWS)).to_have_count(5)
    assert await page.get_by_label("Filter").input_value() == "pod-00"


async def test_figures_of_two_pools_follow_each_its_own(shown: Shown, page: Page) -> None:
    other = Pool("other", random=random.Random(1))
    other.replace(
        Endpoint(f"default/other-{n}", f"10.9.0.{n + 1}:8000", {}, Load(waiting=n, kv_usage=0.5, at=0.0))
        for n in range(3)
    )
    pools = [shown.pool, other]
    async with AdminServer(shown.metrics, pools, shown.decisions, list, str, AdminSettings(port=0)) as server:
        await page.goto(f"http://127.0.0.1:{server.port}")
        await page.evaluate("window.kept = true")
        first, second = page.locator("#endpoints0 tbody tr"), page.locator("#endpoints1 tbody tr")
        await page.locator("#endpoints1 thead th", has_text="queue").locator("button").click()
        await page.mouse.move(5, 5)
        await expect(second.first).to_contain_text("default/other-2")
        shown.load(0, waiting=77)
        other.endpoints[0].load = Load(waiting=44, kv_usage=0.25, at=0.0)
        await expect(first.first.locator("td").nth(1)).to_have_text("77")
        await expect(second.first).to_contain_text("default/other-0")
        await expect(second.first.locator("td").nth(1)).to_have_text("44")
        await expect(second.first.locator("td").nth(4)).to_have_text("25 %")
        await expect(second.nth(1).locator("td").nth(4)).to_have_text("50 %")
        assert await page.evaluate("window.kept") is True
        other.replace(other.endpoints[1:])
        await expect(second).to_have_count(2)
        assert await page.evaluate("window.kept") is None
        await expect(page.locator("#endpoints1 thead th", has_text="queue")).to_have_attribute(
            "aria-sort", "descending"
        )
        await expect(second.first).to_contain_text("default/other-2")


async def test_the_page_goes_on_with_a_picker_that_was_started_again(shown: Shown, browser: Browser) -> None:
    context = await browser.new_context()  # of its own: that it could not be reached stands in its console
    page = await context.new_page()

    def picker(port: int) -> AdminServer:
        return AdminServer(shown.metrics, [shown.pool], shown.decisions, list, str, AdminSettings(port=port))

    async with picker(0) as server:
        await page.goto(f"http://127.0.0.1:{server.port}")
        await page.get_by_label("Filter").fill("pod-00")
        await refreshed(page)
    await expect(page.locator("#stale")).to_contain_text("not refreshed")
    await expect(page.locator(ROWS)).to_have_count(10)
    async with picker(server.port):
        shown.load(7, waiting=99)
        await expect(page.locator("#stale")).to_be_empty()
        await expect(page.locator(ROWS)).to_have_count(10)
        await expect(page.locator(ROWS).nth(7).locator("td").nth(1)).to_have_text("99")
        assert await page.get_by_label("Filter").input_value() == "pod-00"
    await context.close()


async def test_the_table_is_sorted_filtered_and_grouped_by_keyboard(shown: Shown, page: Page) -> None:
    await page.goto(shown.url)
    await expect(page.locator(".shown")).to_have_text(f"{ENDPOINTS} endpoints")
    head = page.locator("#endpoints0 thead th", has_text="KV use")
    await head.locator("button").focus()
    await page.keyboard.press("Enter")
    await expect(head).to_have_attribute("aria-sort", "descending")
    assert await first_names(page, 1) == ["default/pod-299"]  # the only one at 100 %
    await page.keyboard.press("Enter")
    assert await first_names(page) == ["default/pod-000", "default/pod-001"]
    await page.locator("body").click(position={"x": 5, "y": 5})
    await page.keyboard.press("/")
    await page.keyboard.type("node-3")
    await expect(page.locator(".shown")).to_have_text("68 of 300 endpoints")  # node-3 and node-30 to node-37
    await page.keyboard.press("Escape")
    await expect(page.locator(ROWS)).to_have_count(ENDPOINTS)
    await page.get_by_label("Group by").select_option("role")
    groups = page.locator("tr.group th")
    await expect(groups).to_have_count(2)
    await expect(groups.first).to_contain_text("role decode: 200 endpoints")
    await refreshed(page)
    await expect(groups).to_have_count(2)


async def test_it_can_be_paused(shown: Shown, page: Page) -> None:
    await page.clock.install()
    await page.goto(shown.url)
    await page.keyboard.press("p")
    button = page.get_by_role("button", name="Go on")
    await expect(button).to_have_attribute("aria-pressed", "true")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "?live" in request.url else None)
    await page.clock.run_for(10_000)
    assert asked == []
    await button.click()
    await page.clock.run_for(2_000)
    await expect(page.locator("body")).to_have_attribute("data-refreshed", re.compile(r"\d+"))
    assert asked


async def test_what_has_the_focus_is_not_drawn_anew(shown: Shown, page: Page) -> None:
    shown.request("r1")
    await page.goto(f"{shown.url}/decisions")
    link = page.get_by_role("link", name="r1")
    await link.focus()
    shown.request("r2")
    await refreshed(page)
    await expect(link).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", level=1)).to_have_text("Request r1")
    assert SECRET not in await page.content()
    await expect(page.locator("table.profile svg.bar").first).to_be_visible()


async def test_a_prompt_is_explained_from_the_form(shown: Shown, page: Page) -> None:
    asked: list[RawRequest] = []

    async def explain(pool: str, raw: RawRequest) -> dict[str, Any]:
        asked.append(raw)
        return {"pool": "default/llama", "waiting": None, "decision": decision("", shown.pool.endpoints).as_dict()}

    shown.server.explain_by(explain)
    await page.goto(f"{shown.url}/explain")
    await page.keyboard.press("/")
    await page.keyboard.type("""curl http://gw/v1/completions -d '{"model": "m", "prompt": "<b>two</b>"}'""")
    await page.get_by_role("button", name="Explain").click()
    await expect(page.locator("h2.answer")).to_have_text("It would go to default/pod-000")
    await expect(page.locator("table.profile tbody tr")).to_have_count(100)
    assert asked[0].body == b'{"model": "m", "prompt": "<b>two</b>"}'


async def test_without_script_everything_can_be_read(shown: Shown, browser: Browser) -> None:
    shown.request("r1")
    context = await browser.new_context(java_script_enabled=False)
    page = await context.new_page()
    await page.goto(shown.url)
    await expect(page.locator("#endpoints0 tbody tr")).to_have_count(ENDPOINTS)
    await expect(page.get_by_text("default/pod-299")).to_be_visible()
    await expect(page.locator("#decisions svg.bar").first).to_be_visible()
    assert not await page.get_by_label("Filter").is_visible()
    await expect(page.get_by_role("button", name="Pause")).to_be_hidden()
    await context.close()


async def test_a_narrow_window_scrolls_tables_and_not_the_page(shown: Shown, page: Page) -> None:
    shown.billed("r1")
    shown.metrics.add_flow("llama", lambda: FlowFigures([Waits("tenant", 0, 3, 10)], 0.5))
    await page.set_viewport_size({"width": 400, "height": 900})
    for path in ("/", "/decisions", "/decisions/r1", "/explain"):
        await page.goto(f"{shown.url}{path}")
        assert await page.evaluate("document.documentElement.scrollWidth") <= 400, path


TERMS = ExpectedTtft.meanings


async def test_endpoints_are_grouped_by_node_by_keyboard(shown: Shown, page: Page) -> None:
    shown.pool.replace([*shown.pool.endpoints, Endpoint("default/new", "10.9.9.9:8000", {}, Load())])
    await page.goto(shown.url)
    await page.get_by_label("Group by").focus()
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("ArrowDown")
    groups = page.locator("tr.group:visible th")
    await expect(groups).to_have_count(39)
    titles = await groups.all_inner_texts()
    assert [title.split(":")[0] for title in titles] == ["no node", *(f"node node-{n}" for n in range(38))]
    assert titles[0] == "no node: 1 endpoint, 0 in flight, 0 queued, KV use –"
    assert titles[1] == "node node-0: 8 endpoints, 0 in flight, 13 queued, KV use 1 %"
    await page.locator("#endpoints0 thead th", has_text="KV use").locator("button").focus()
    await page.keyboard.press("Enter")
    assert await first_names(page, 3) == ["default/new", "default/pod-005", "default/pod-006"]  # 2 %
    await page.get_by_label("Filter").fill("decode")
    await expect(groups).to_have_count(38)
    await expect(groups.first).to_have_text("node node-0: 5 endpoints, 0 in flight, 9 queued, KV use 1 %")
    await page.locator(ROWS).first.hover()
    shown.load(1, waiting=51)
    await expect(groups.first).to_have_text("node node-0: 5 endpoints, 0 in flight, 59 queued, KV use 1 %")
    shown.pool.replace(shown.pool.endpoints[8:])
    await expect(groups).to_have_count(37)
    assert await page.get_by_label("Group by").input_value() == "node"


async def test_the_order_follows_the_figures_while_a_column_has_the_focus(shown: Shown, page: Page) -> None:
    await page.goto(shown.url)
    button = page.locator("#endpoints0 thead th", has_text="queue").locator("button")
    await button.focus()
    await page.keyboard.press("Enter")
    assert await first_names(page, 1) == ["default/pod-004"]
    shown.load(200, waiting=99)
    await expect(page.locator(ROWS).first).to_contain_text("default/pod-200")
    await expect(button).to_be_focused()


async def test_columns_appear_when_something_is_known_of_them(shown: Shown, page: Page) -> None:
    for number in range(ENDPOINTS):
        shown.load(number, at=None)
    await page.goto(shown.url)
    head = page.locator("#endpoints0 thead th", has_text="queue")
    await expect(head).to_be_hidden()
    shown.load(0, at=1.0)
    await expect(head).to_be_visible()
    await expect(page.locator("#endpoints0 tbody tr").first.locator("td").nth(1)).to_be_visible()
    unknown = await page.locator("#endpoints0 thead th[hidden]").all_text_contents()
    assert unknown == ["hits", "share", "speed", "trust", "events"]


async def test_terms_are_explained_to_who_points_and_to_who_has_a_keyboard(shown: Shown, page: Page) -> None:
    shown.billed("r1")
    await page.goto(shown.url)
    segments = page.locator("#decisions li").first.locator("svg.bar rect title")
    assert await segments.all_text_contents() == [f"{term} {n}.0 ms: {TERMS[term]}" for n, term in enumerate(TERMS, 1)]
    terms = page.locator("#terms")
    keys = terms.locator("summary span")
    assert [await key.get_attribute("title") for key in await keys.all()] == [*TERMS.values()]
    await expect(terms.locator("dl")).to_be_hidden()
    await terms.locator("summary").focus()
    await page.keyboard.press("Enter")
    assert await terms.locator("dt").all_inner_texts() == [*TERMS]
    assert await terms.locator("dd").all_inner_texts() == [*TERMS.values()]
    await page.keyboard.press("Tab")
    shown.request("r2")  # its bill has terms of another plugin
    await expect(terms.locator("dt")).to_have_count(len(TERMS) + 2)
    await expect(terms.locator("dl")).to_be_visible()
    await page.goto(f"{shown.url}/decisions/r1")
    heads = page.locator("table.profile thead th[title]")
    assert [await head.get_attribute("title") for head in await heads.all()] == [*TERMS.values()]


# --- contrast

CONTRASTS = (Path(__file__).parent / "contrasts.js").read_text(encoding="utf-8")
COLOURS = {f"a{number}" for number in range(10)} | {f"k{number}" for number in range(10)}


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_and_graphics_stand_out_in_the_dark_and_in_the_light(
    shown: Shown, browser: Browser, scheme: Any
) -> None:
    async def explain(pool: str, raw: RawRequest) -> dict[str, Any]:
        return {"pool": "default/llama", "waiting": None, "decision": decision("", shown.pool.endpoints[:5]).as_dict()}

    shown.server.explain_by(explain)
    shown.metrics.add_flow("llama", lambda: FlowFigures([Waits("tenant", 0, 3, 10)], 0.5))
    shown.billed("r1")
    shown.look()
    context = await browser.new_context(color_scheme=scheme)
    page = await context.new_page()
    seen = await contrasts(page, shown.url)
    assert {name for each in seen for name in each["name"].split()} >= COLOURS
    assert {"polyline", "path.line", "input::placeholder", "button border"} <= {each["name"] for each in seen}
    await page.locator("summary").last.click()
    await page.get_by_label("Group by").select_option("node")
    await page.locator(ROWS).first.hover()
    assert any(each["name"] == "tr.group th" for each in await contrasts(page))
    await contrasts(page, f"{shown.url}/decisions")
    await contrasts(page, f"{shown.url}/decisions/r1")
    await page.goto(f"{shown.url}/explain")
    await page.get_by_role("button", name="Explain").focus()
    await contrasts(page)
    await page.fill("#text", "hello")
    await page.get_by_role("button", name="Explain").click()
    await expect(page.locator("p.bad")).to_be_visible()  # no model
    await contrasts(page)
    await page.get_by_label("Model").fill("m")
    await page.get_by_role("button", name="Explain").click()
    await expect(page.locator("h2.answer")).to_be_visible()
    await contrasts(page)
    ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
    await context.close()


async def contrasts(page: Page, url: str = "") -> list[dict[str, Any]]:
    """Of all that is seen, with the least that WCAG 2.2 asks for (1.4.3, 1.4.11); AssertionError where it is less."""
    if url:
        await page.goto(url)
    seen: list[dict[str, Any]] = await page.evaluate(CONTRASTS)
    assert [each for each in seen if each["ratio"] < each["least"]] == []
    return seen
