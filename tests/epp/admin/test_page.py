from html.parser import HTMLParser

from epp.admin.page import page
from epp.admin.recorder import Record
from epp.plugin import Endpoint, Response
from tests.support.scheduling.decisions import decision

HOSTILE = "\"><script>alert(1)</script>&'<img src=x>"


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attributes)))


def test_whatever_a_client_or_a_file_names_is_only_text() -> None:
    pod = Endpoint(HOSTILE, HOSTILE)
    made = decision(HOSTILE, [pod], model=HOSTILE)
    record = Record(made, pod, HOSTILE, HOSTILE, HOSTILE, 0.0, 0.0, 7, None, Response(status=200))
    shown = {
        "name": HOSTILE,
        "namespace": HOSTILE,
        "plugins": {HOSTILE: {HOSTILE: 1.0}},
        "endpoints": [
            {
                "name": HOSTILE,
                "address": HOSTILE,
                "load": None,
                "load_age_seconds": None,
                "in_flight": 1,
                "share": 0.5,
                "predicted_hit_rate": None,
                "plugins": {HOSTILE: {HOSTILE: 1.0}},
                "kv_events": {"state": HOSTILE, "lag_seconds": 0.02, "trust": 1.0},
            }
        ],
        "shadows": [{"profile": HOSTILE, "compared": 2, "failed": 1, "agreed": 0.5, "regret_ms": 1.25}],
    }
    text = page([shown], [record], [HOSTILE])
    tags = Tags(text).seen
    assert not {tag for tag, _ in tags} & {"script", "img"}
    assert "&lt;script&gt;" in text
    for _, attributes in tags:
        assert not {"src", "onerror", "onload"} & set(attributes)
        link = attributes.get("href") or "/"
        assert link.startswith("/")
        assert "<" not in link


def test_figures_of_plugins_and_kv_events_are_reported_in_words() -> None:
    entry: dict[str, object] = {"name": "a", "address": "a", "load": None, "load_age_seconds": None, "in_flight": 0}
    entry |= {"share": None, "predicted_hit_rate": None, "plugins": {}}
    states = [
        {"state": "live", "lag_seconds": 0.021, "trust": 0.95},
        {"state": "lost", "lag_seconds": None, "trust": 1.0},
    ]
    endpoints = [{**entry, "kv_events": state} for state in (*states, None)]
    said = {"expected-ttft": {"prefill_seconds_per_token": 4.9e-5, "prefill_error": 0.03}, "quiet": {}}
    text = page([{"name": "p", "namespace": "n", "plugins": said, "endpoints": endpoints, "shadows": []}], [], [])
    assert "<p>expected-ttft: prefill_seconds_per_token 4.9e-05, prefill_error 0.03</p>" in text
    assert "quiet" not in text
    assert "<td>live, 21 ms behind, trust 95 %</td>" in text
    assert "<td>lost, trust 100 %</td>" in text


def test_an_empty_house_has_a_page() -> None:
    text = page([], [], [])
    assert "Ready." in text
    assert "None." in text
