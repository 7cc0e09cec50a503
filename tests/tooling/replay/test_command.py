import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from epp.cli import warmpath
from tests.tooling.replay.test_trace import line


def call(*arguments: object) -> Result:
    return CliRunner().invoke(warmpath, ["replay", *(str(each) for each in arguments)])


def demo(*arguments: object) -> Result:
    return call("demo", "--pods", "3*laptop", "--times", 1, *arguments)


def test_the_table_compares_the_default_policies() -> None:
    result = demo()
    assert result.exit_code == 0, result.output
    for name in ("prefix-aware", "least-load", "round-robin", "oracle", "regret"):
        assert name in result.output


def test_json_has_everything() -> None:
    result = demo("--json", "--policy", "round-robin", "--no-oracle", "--runs", 2)
    found: dict[str, Any] = json.loads(result.stdout)
    assert [run["seed"] for run in found["runs"]] == [0, 1]
    assert found["runs"][0]["requests"] == 107
    assert len(found["runs"][0]["curve"]) == 101


def test_a_page_is_written(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert demo("--html", file, "--policy", "round-robin").exit_code == 0
    assert file.read_text().startswith("<!doctype html>")


def test_a_scorer_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "scorers_for_replay.py").write_text(
        "from epp.plugin import Scorer\n\n\nclass Mine(Scorer):\n"
        "    def score(self, request, endpoints):\n        return [1.0] + [0.0] * (len(endpoints) - 1)\n"
    )
    result = demo("--policy", f"{tmp_path}/scorers_for_replay.py:Mine", "--json", "--no-oracle")
    assert json.loads(result.stdout)["runs"][0]["shares"] == [1.0, 0.0, 0.0]


def test_all_conditions_at_once() -> None:
    result = demo(
        "--replicas", 2, "--exchange", 0.01, "--lean", "--foreign", 0.2, "--fail", "2@3+2", "--scrape", 0.5,
        "--seed", 5, "--slo-ttft", 1, "--slo-tpot", 0.1, "--json", "--policy", "prefix-aware", "--no-oracle",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    run = json.loads(result.stdout)["runs"][0]
    assert run["seed"] == 5
    assert run["requests"] < 107
    assert run["failed"] + run["retried"] > 0


def test_slos_of_a_class_are_given_by_a_flag() -> None:
    asked = ("--rate", 3, "--requests", 60, "--pods", "2*h100-8b", "--policy", "prefix-aware", "--no-oracle", "--json")
    tight = call("chats-and-reports", *asked, "--class-slo", "report=0.001/-")
    assert tight.exit_code == 0, tight.output
    assert json.loads(tight.stdout)["runs"][0]["classes"]["report"]["attained"] == 0.0
    table = call("chats-and-reports", *asked[:-1], "--class-slo", "report=-/9")
    assert "in time" in table.stdout
    assert "100.0" in next(line for line in table.stdout.splitlines() if line.strip().startswith("report"))


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """A trace of two classes, one with an SLO, and of requests without a class."""
    kinds: tuple[dict[str, object], ...] = (
        {"class": "chat", "tenant": "acme", "priority": 1, "slo_ttft_ms": 60_000},
        {"class": "a=b", "tenant": "other", "ttl_ms": 30_000, "session": "s", "adapter": "french"},
        {},
    )
    file = tmp_path / "classes.jsonl"
    file.write_text("\n".join(line(n * 400, ids=(n, 100 + n), more=kinds[n % 3]) for n in range(30)))
    return file


def test_a_traces_classes_are_shown_apart(classes: Path) -> None:
    asked = (classes, "--pods", "2*laptop", "--policy", "prefix-aware", "--policy", "round-robin+flow-control")
    shown = call(*asked, "--no-oracle")
    assert shown.exit_code == 0, shown.output
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert [row[:3] for row in rows if row and row[0] in ("chat", "a=b")] == [
        [label, name, "10"] for label in ("a=b", "chat") for name in ("prefix-aware", "round-robin+flow-control")
    ]


def test_a_traces_classes_are_played_alone_and_given_slos(classes: Path) -> None:
    asked = ("--pods", "2*laptop", "--policy", "prefix-aware", "--no-oracle", "--json")
    alone = json.loads(call(classes, *asked, "--only", "chat").stdout)["runs"][0]
    assert (alone["requests"], list(alone["classes"])) == (10, ["chat"])
    assert alone["classes"]["chat"]["attained"] == 1.0
    tight = json.loads(call(classes, *asked, "--class-slo", "a=b=0.0001/-").stdout)["runs"][0]["classes"]
    assert (tight["a=b"]["attained"], tight["chat"]["attained"]) == (0.0, 1.0)
    assert "only: no request is of class 'chats'; expected one of a=b, chat" in call(classes, "--only", "chats").output


def test_a_trace_that_is_wrong_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "wrong.jsonl"
    file.write_text(line(more={"priority": "high"}))
    result = call(file)
    assert result.exit_code == 1
    assert result.output == f"Error: {file}:1: priority: expected a whole number of 32 bits, got 'high'\n"


def test_tiers_are_simulated_and_reported() -> None:
    result = demo("--l1", "20000@50000", "--l2", 60_000, "--pods-per-node", 2, "--json", "--policy", "round-robin")
    assert result.exit_code == 0, result.output
    hits = json.loads(result.stdout)["runs"][0]["hits"]
    assert list(hits) == ["device", "l1", "l2"]
    assert min(hits.values()) > 0
    assert json.loads(demo("--json", "--policy", "round-robin").stdout)["runs"][0]["hits"] == {}


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (("--load", 0.5, "--rate", 2), "rate: expected one of --load, --rate and --times"),
        (("--pods", "3*laptob"), "did you mean 'laptop'"),
        (("--policy", "oracle", "--policy", "oracle"), "policy: two policies have one name"),
        (("--policy", "fastest"), "policy: expected a strategy"),
        (("--html", "/nowhere/page.html"), "/nowhere/page.html: there is no such directory"),
        (
            ("--fail", "3"),
            "fail: expected POD@AT+SECONDS, as in 3@60+30, or POD@AT+SECONDS:SHARE%, as in 3@60+30:100%, got '3'",
        ),
        (("--fail", "1@2+0"), "fail: expected POD@AT+SECONDS"),
        (("--fail", "1@2+3:50"), "fail: expected POD@AT+SECONDS"),
        (("--fail", "1@2+3:0%"), "fail: expected POD@AT+SECONDS"),
        (("--fail", "1@2+3:101%"), "fail: expected POD@AT+SECONDS"),
        (("--fail", "1@nan+3"), "fail: expected POD@AT+SECONDS"),
        (("--l1", "lots"), "l1: expected TOKENS or TOKENS@TOKENS_PER_SECOND, as in 4000000@300000, got 'lots'"),
        (("--l2", "100"), "l2: expected TOKENS or TOKENS@TOKENS_PER_SECOND"),
        (("--pods", "laptop", "--l2", "9000@0"), "speed: 0.0, expected more than 0"),
        (("--fail", "10@2+1"), "fail: there are 8 pods, so no pod-10"),
        (("--class-slo", "chat"), "class-slo: expected CLASS=TTFT/TPOT in seconds, as in chat=0.5/0.025, got 'chat'"),
        (("--class-slo", "chat=0/1"), "class-slo: expected CLASS=TTFT/TPOT"),
        (("--class-slo", "=1/1"), "class-slo: expected CLASS=TTFT/TPOT"),
        (("--class-slo", "chat=1/1"), "class-slo: no request is of class 'chat'; demo has no classes"),
    ],
)
def test_wrong_flags_are_one_sentence(arguments: tuple[object, ...], reported: str) -> None:
    result = call("demo", *arguments)
    assert result.exit_code == 1
    assert reported in result.output
    assert "Traceback" not in result.output


def test_no_such_trace() -> None:
    result = call("nothing.jsonl")
    assert result.exit_code == 1
    assert "there is no file or workload 'nothing.jsonl'" in result.output


def test_roles_are_compared_with_none() -> None:
    result = call("200-200", "--pods", "laptop", "--roles", "1p2d", "--requests", 60, "--rate", 2)
    assert result.exit_code == 0, result.output
    for name in ("prefix-aware", "always-apart", "never-apart", "apart-from-16-tokens", "without-roles", "apart %"):
        assert name in result.output
    assert "oracle" not in result.output
    assert re.search(r"Roles (pay|do not pay|make no difference) here: an answer takes", result.output)


def test_with_roles_json_says_who_was_apart() -> None:
    result = call(
        "demo",
        "--pods",
        "laptop",
        "--roles",
        "1p1d1b",
        "--times",
        1,
        "--json",
        "--policy",
        "always-apart",
        "--transfer",
        5000,
    )
    (run,) = json.loads(result.stdout)["runs"]
    assert run["apart"] == 1.0
    assert run["stranded"] == 0
    assert run["shares"][0] == 0


@pytest.mark.parametrize(
    ("roles", "pods", "message"),
    [
        ("2p", "laptop", "roles: expected somebody to decode (d or b), got '2p'"),
        ("2p2x", "laptop", "roles: expected numbers of p (prefill), d (decode) and b (both), as 2p2d; got '2p2x'"),
        ("", "laptop", "roles: expected numbers"),
        ("2p2d", "3*laptop", "pods: expected one kind, or 4 pods as --roles says; got 3"),
    ],
)
def test_roles_that_make_no_sense_are_refused(roles: str, pods: str, message: str) -> None:
    result = call("demo", "--roles", roles, "--pods", pods)
    assert result.exit_code == 1
    assert message in result.output
