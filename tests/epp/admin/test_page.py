from html.parser import HTMLParser
from typing import Any

import pytest
from msgspec.structs import replace

from epp.admin import page
from epp.admin.drawing import line
from epp.admin.overview import COLUMNS, Tile
from epp.admin.recorder import Record
from epp.plugin import Response
from tests.support.scheduling.decisions import SECRET, decision, endpoint

HOSTILE = "\"><script>alert(1)</script>&'<img src=x>"


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text.append(data.strip())


def record(name: str = "r", status: int | None = 200, pods: int = 2) -> Record:
    made = decision(name, [endpoint(n) for n in range(1, pods + 1)], model=name)
    response = None if status is None else Response(status=status)
    return Record(made, made.endpoint, name, "default", name, 0.0, 0.0, 7, 50, response)


def glance(**pool: Any) -> dict[str, Any]:
    flow = {"priority": 5, "flow": HOSTILE, "requests": 3, "kilobytes": 1, "bar": line([1.0], HOSTILE)}
    shown = {
        "name": HOSTILE,
        "endpoints": 1,
        "tiles": [Tile(HOSTILE, HOSTILE, line([1.0], HOSTILE), [(HOSTILE, 1)])],
        "map": line([1.0], HOSTILE),
        "roles": [{"role": HOSTILE, "endpoints": 1, "in_flight": 1, "kv": "1 %", "bar": line([1.0], HOSTILE)}],
        "states": HOSTILE,
        "flow": {"saturation": "93 %", "waiting": 3, "rows": [flow], "more": 2},
    }
    peer = {"address": HOSTILE, "state": HOSTILE, "lag": None, "in_flight": 1, "agreement": "1 %", "bar": None}
    return {
        "reasons": [HOSTILE],
        "degraded": [HOSTILE],
        "tiles": [],
        "replicas": [peer],
        "pools": [{**shown, **pool}],
    }


def whole(identity: dict[str, str], row: tuple[Any, ...], said: dict[str, Any]) -> str:
    table = page.endpoint_table(0, 8, [page.endpoint_rows([(identity, row, {"requests": "0,0", "kv": ""})])])
    drawn = page.DecisionTable().drawn([record(HOSTILE)])
    return page.overview(glance(), [table], [said], drawn, page.Live("/?live", "1-2", 3))


def test_whatever_a_client_or_a_file_names_is_only_text() -> None:
    identity = dict.fromkeys(("name", "address", "role", "node"), HOSTILE)
    shadow = {"profile": HOSTILE, "compared": 2, "failed": 1, "agreed": 0.5, "regret_ms": 1.25}
    said = page.said({HOSTILE: {HOSTILE: 1.0}}, [shadow])
    shown = record(HOSTILE).as_dict()
    found = {**shown, "prefill": [HOSTILE], "ways_ms": {HOSTILE: 1.0}, "opaque": HOSTILE}
    found["profiles"][0]["dropped"] = [{"filter": HOSTILE, "endpoints": [HOSTILE]}]
    form = {"text": HOSTILE, "model": HOSTILE, "pool": HOSTILE, "models": [HOSTILE], "pools": [HOSTILE, "b"], "most": 9}
    answer = {"pool": HOSTILE, "waiting": 3, "decision": found}
    hostile = record(HOSTILE)
    hostile.decision.runs[0].scored[0].meanings = {"work": HOSTILE}
    for text in (
        whole(identity, tuple(HOSTILE for _ in COLUMNS), said),
        page.decisions(page.DecisionTable().drawn([hostile]), 20, "/decisions"),
        page.decision(found),
        page.explain(form, answer),
        page.explain(form, None, HOSTILE),
    ):
        seen = Tags(text).seen
        assert [attributes for tag, attributes in seen if tag == "script"] == [
            {"src": "/static/page.js", "defer": None}
        ]
        assert "img" not in {tag for tag, _ in seen}
        assert "&lt;script&gt;" in text
        for tag, attributes in seen:
            assert not {"onerror", "onload", "style"} & set(attributes), tag
            link = attributes.get("href") or "/"
            assert link[0] in "/?#"
            assert "<" not in link
        assert SECRET not in text


def test_an_endpoint_is_a_row_with_its_figures() -> None:
    identity = {"name": "ns/pod-1", "address": "10.0.0.1:8000", "role": "decode", "node": "n1"}
    values = (3, 0, 7, 7, 42, 84, None, 50, 0.88, 95, "live", 0, 1.7)
    text = whole(identity, values, page.said({}, []))
    tags = Tags(text)
    body = tags.text[tags.text.index("ns/pod-1") :]
    shown = [each for each in body if each][:14]
    figures = ["3", "0", "7", "42 %", "–", "50 %", "0.88", "95 %", "live", "0", "1.7 s"]
    assert shown == ["ns/pod-1", "10.0.0.1:8000 · decode · n1", *figures, "Last decisions"]
    assert {"width": "42", "height": "8"} in [attributes for tag, attributes in tags.seen if tag == "rect"]
    assert [attributes["data-v"] for _, attributes in tags.seen if "data-v" in attributes][:5] == [*"307", "42", ""]


def test_what_plugins_and_shadow_profiles_say_is_in_words() -> None:
    shadow = {"profile": "new", "compared": 4, "failed": 0, "agreed": 0.75, "regret_ms": -1.25}
    none = {**shadow, "compared": 0, "failed": 2}
    told = page.said({"expected-ttft": {"step_seconds": 4.9e-5, "error": 0.03}, "quiet": {}}, [shadow, none])
    assert told["said"] == ["expected-ttft: step_seconds 4.9e-05, error 0.03"]
    assert told["shadows"] == [
        "Shadow profile new: of 4 picks 75 % the same; on average its picks would have cost -1.2 ms.",
        "Shadow profile new: nothing compared yet, failed 2 times.",
    ]


def test_what_the_colours_of_bills_mean_stands_above_them_in_their_order() -> None:
    first, second = record("first"), record("second")
    first.decision.runs[0].scored[0].bills = [(0.0, 1.0), (0.0, 2.0)]
    second.decision.runs[0].scored[0].bills = [(1.0, 0.0), (2.0, 0.0)]
    drawn = page.DecisionTable().drawn([first, second])
    assert [word for word in Tags(drawn.terms).text if word] == ["Terms of a bill:", "queue", "work"]
    text = page.decisions(drawn, 20, "/decisions")
    assert 0 <= text.index('<p class="keys">') < text.index('<table class="decisions">')


def test_the_colours_of_bills_open_to_what_the_terms_are() -> None:
    one = record()
    one.decision.runs[0].scored[0].meanings = {"work": "prefill of what is not cached"}
    terms = page.DecisionTable().drawn([one]).terms
    seen = Tags(terms)
    assert [tag for tag, _ in seen.seen if tag in ("details", "summary", "dt", "dd")] == [
        "details", "summary", "dt", "dd", "dt", "dd",
    ]  # fmt: skip
    assert [attributes for tag, attributes in seen.seen if tag == "span"] == [
        {},
        {"title": "prefill of what is not cached"},
    ]
    assert '<dt><i class="key k1"></i>work</dt><dd>prefill of what is not cached</dd>' in terms
    assert "queue</dt><dd>–</dd>" in terms


def test_a_row_of_a_decision_is_drawn_once_until_it_has_ended() -> None:
    table, one = page.DecisionTable(), record("first", None)
    before = table.drawn([one]).table
    assert "under way" in before
    known = table._drawn[one]
    table.drawn([one])
    assert table._drawn[one] is known
    one.response = Response(status=503)
    after = table.drawn([one]).table
    assert "under way" not in after
    assert "503" in after
    assert "default/pod-1" in after
    for at in range(3 * page.HELD):
        table.drawn([record(f"r{at}"), one])
    assert len(table._drawn) <= page.HELD + 2


def test_one_decision_has_its_facts_and_every_endpoint() -> None:
    text = page.decision(record("r/1", pods=3).as_dict())
    seen = Tags(text)
    assert "Request r/1" in seen.text
    assert [each for each in seen.text if each.startswith("default/pod-") and " " not in each] == [
        f"default/pod-{n}" for n in (1, 2, 3)
    ]
    assert ("a", {"href": "/decisions/r%2F1?format=json"}) in seen.seen
    assert "50 tokens" in seen.text
    assert "200, all 0.0 ms" in seen.text


@pytest.mark.parametrize("watched", ["", "sampled", "asked"])
def test_a_decision_says_why_its_answer_is_watched(watched: Any) -> None:
    shown = record()
    shown.decision.request = replace(shown.decision.request, watched=watched)
    said = Tags(page.decision(shown.as_dict())).text
    assert [text for text in said if text.startswith("watched")] == ([page._WATCHED[watched]] if watched else [])


def test_an_explanation_says_where_it_would_go() -> None:
    form = {"text": "Why?", "model": "m", "pool": "", "models": [], "pools": ["a"], "most": 9}
    shown = record().as_dict()
    seen = Tags(page.explain(form, {"pool": "ns/p", "waiting": 4, "decision": shown}))
    assert "It would go to default/pod-1" in seen.text
    assert "Why?" in seen.text
    assert [seen.text[at + 1] for at, each in enumerate(seen.text) if each.startswith("wait in")] == ["4"]
    empty = Tags(page.explain(form))
    assert not [each for each in empty.text if each.startswith("It would")]


@pytest.mark.parametrize("file", [*page.STATIC])
def test_what_the_pages_load_is_ours_and_loads_nothing_else(file: str) -> None:
    text = page.static(file).decode()
    assert "http:" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in text
    assert "url(" not in text
    assert "@import" not in text


def test_an_empty_pool_has_a_page() -> None:
    shown = glance(endpoints=0, roles=[], flow=None, tiles=[])
    shown |= {"reasons": [], "degraded": [], "replicas": None}
    text = page.overview(
        shown, [page.endpoint_table(0, 8, [])], [page.said({}, [])], page.DecisionTable().drawn([]), page.NOT_LIVE
    )
    assert "Ready for traffic." in text
    assert "No request yet." in text
    assert "data-live" not in text
