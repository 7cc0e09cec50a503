import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

from tests.tooling.replay.test_runs import plan
from tooling.replay.page import page
from tooling.replay.replay import Conditions, Failure
from tooling.replay.runs import compare, with_oracle


def made() -> str:
    wanted = plan(
        seeds=(0, 1),
        conditions=Conditions(replicas=2, foreign=0.1, failures=(Failure(1, 3.0, 2.0),), sees_answer=False),
    )
    wanted = wanted.__class__(**{**wanted.__dict__, "policies": with_oracle(wanted.policies)})
    return page(wanted, compare(wanted, lambda *reported: None))


class Balanced(HTMLParser):
    """Every tag that is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_one_file_with_plots_and_the_table_and_nothing_from_elsewhere() -> None:
    text = made()
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert not parser.seen & {"script", "link", "img", "iframe"}
    assert not re.search(r"https?://|url\(|@import", text)
    pictures = re.findall(r"<svg.*?</svg>", text)
    assert len(pictures) == 8
    for picture in pictures:
        ElementTree.fromstring(picture)
    assert text.count("<tr>") == 1 + 3


def test_it_says_under_which_conditions() -> None:
    text = made()
    for said in (
        "2 picker(s)", "exchange after", "10% of the requests pass the picker by", "pod-2 dead from 3 s for 2 s",
        "answers not shown", "2 runs", "3 laptop", "trust order and ratios more than seconds",
    ):  # fmt: skip
        assert said in text


def test_what_a_file_or_a_flag_names_is_only_text() -> None:
    wanted = plan(seeds=(0,))
    results = compare(wanted, lambda *reported: None)
    text = page(wanted, replace(results, trace="<img src=x>"))
    assert "<img" not in text
    assert "warmpath replay: &lt;img src=x&gt;" in text
