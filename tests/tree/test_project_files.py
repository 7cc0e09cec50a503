"""What a stranger looks for first is there and agrees: licence, version, changelog, how to contribute and to report."""

import re
import tomllib
from datetime import date
from pathlib import Path

import pytest
from click.testing import CliRunner

from epp import __version__
from epp.cli import serve, warmpath
from epp.extproc.server import Settings

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
RELEASE = re.compile(r"^## (\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)$", re.MULTILINE)
RAW_RESULTS = {".jsonl", ".csv", ".json", ".parquet"}


def test_the_licence_is_the_one_that_the_metadata_name() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE", "NOTICE"]
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert re.findall(r"^   (\d)\. \w", text, re.MULTILINE) == [str(number) for number in range(1, 10)]
    assert "APPENDIX: How to apply the Apache License to your work." in text
    [author] = PROJECT["authors"]
    assert re.fullmatch(
        rf"Warmpath\nCopyright \d{{4}} {author['name']}\n", (ROOT / "NOTICE").read_text(encoding="utf-8")
    )


def test_the_newest_release_in_the_changelog_is_this_version() -> None:
    headings = re.findall(r"^## (.+)$", CHANGELOG, re.MULTILINE)
    releases = RELEASE.findall(CHANGELOG)
    assert headings == ["Unreleased", *(f"{version} - {day}" for version, day in releases)]
    assert releases[0][0] == __version__
    days = [date.fromisoformat(day) for _, day in releases]
    assert days == sorted(days, reverse=True)


def test_every_release_groups_its_changes() -> None:
    for section in re.split(RELEASE, CHANGELOG)[3::3]:
        groups = re.findall(r"^### (.+)$", section, re.MULTILINE)
        assert groups
        assert set(groups) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_documents_hold_no_raw_results() -> None:
    raw = [path.name for path in (ROOT / "docs").rglob("*") if path.suffix in RAW_RESULTS]
    assert raw == []


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_flags_and_commands_are_there(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    help_ = CliRunner().invoke(warmpath, ["serve", "--help"], terminal_width=200).output
    assert set(re.findall(r"`(--[a-z-]+)", text)) <= set(re.findall(r"--[a-z-]+", help_))
    assert [path for path in re.findall(r"\bhack/[a-z-]+", text) if not (ROOT / path).exists()] == []


def test_the_defaults_that_protect_are_the_defaults() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    options = {each.name: each.default for each in serve.params}
    for sentence in (
        f"at most {options['max_body']} MiB (`--max-body`), complete within {options['request_timeout']} ",
        f"| {options['max_streams']:,} (`--max-streams`) and {Settings.max_held >> 30} GiB of them |",
        f"the process ends after {options['stall_limit']} ",
    ):
        assert sentence.replace("30s ", "30 s ").replace("5s ", "5 s ") in text
    assert (options["host"], options["trust_client_headers"]) == ("127.0.0.1", False)
