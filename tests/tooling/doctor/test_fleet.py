"""What has to be the same at every endpoint, and in the picker's own files."""

from typing import Any

import pytest

from tooling.doctor.engine import ProbedEndpoint
from tooling.doctor.fleet import against_files, compare

BLOCK = (1, 2, 3)


def pods(*changes: dict[str, Any]) -> list[ProbedEndpoint]:
    """Equal pods, but for the changes."""
    same: dict[str, Any] = {
        "models": ["m"],
        "bases": ["m"],
        "block_size": 16,
        "algorithm": "sha256_cbor",
        "tokens": {"chat": [1, 2, 3], "text": [4]},
        "hashes": {BLOCK: 7},
    }
    return [ProbedEndpoint(f"pod-{i}", "http://x", "x", True, **{**same, **change}) for i, change in enumerate(changes)]


def test_equal_pods_are_well() -> None:
    assert compare(pods({}, {}, {}), shares=True) == []
    assert compare(pods({}), shares=True) == []
    assert compare([], shares=True) == []


@pytest.mark.parametrize(
    ("change", "check", "fix"),
    [
        ({"block_size": 32}, "block-size", "--block-size 16"),
        ({"algorithm": "sha256"}, "hash-algorithm", "--prefix-caching-hash-algo sha256_cbor"),
        ({"hashes": {BLOCK: 8}}, "hash-seed", "set PYTHONHASHSEED"),
        ({"bases": ["n"]}, "model", "--served-model-name m"),
        ({"tokens": {"chat": [1, 2, 4], "text": [4]}}, "tokenizer", "the same --tokenizer and --chat-template"),
    ],
)
def test_the_odd_one_is_named_with_the_flag_of_the_others(change: dict[str, Any], check: str, fix: str) -> None:
    (finding,) = compare(pods({}, change, {}), shares=True)
    assert (finding.subject, finding.check, finding.level) == ("pod-1", check, "problem")
    assert finding.fix.startswith(fix)
    assert "pod-0" in finding.found


def test_of_two_the_second_is_the_odd_one() -> None:
    (finding,) = compare(pods({"block_size": 32}, {}), shares=False)
    assert (finding.subject, finding.found) == ("pod-1", "16 tokens a block; pod-0: 32")


def test_where_no_tier_is_shared_blocks_may_differ() -> None:
    odd = {"algorithm": "sha256", "block_size": 32, "hashes": {BLOCK: 8}}
    assert {finding.level for finding in compare(pods({}, odd, {}), shares=False)} == {"hint"}


def test_other_hashes_are_expected_of_other_blocks_and_other_algorithms() -> None:
    found = compare(pods({}, {"algorithm": "sha256", "hashes": {BLOCK: 8}}, {}), shares=True)
    assert [finding.check for finding in found] == ["hash-algorithm"]


def test_adapters_may_differ() -> None:
    assert compare(pods({}, {"models": ["m", "tuned"]}), shares=True) == []


def test_xxhash_has_no_seed_in_common_by_itself() -> None:
    (finding,) = compare(pods({"algorithm": "xxhash"}, {"algorithm": "xxhash", "hashes": {BLOCK: 8}}), shares=True)
    assert "xxhash draws a seed" in finding.fix


def test_what_is_not_known_is_not_compared() -> None:
    assert (
        compare(pods({}, {"block_size": None, "algorithm": None, "tokens": {}, "hashes": {}, "bases": []}), shares=True)
        == []
    )


def test_files_that_give_other_tokens_are_reported() -> None:
    (pod,) = pods({})
    assert against_files(pod, {"chat": [1, 2, 3], "text": [4], "other": [1]}) == []
    (finding,) = against_files(pod, {"text": [4], "chat": [1, 2]})
    assert (finding.check, finding.level) == ("tokenizer", "problem")
    assert finding.found == "of a chat it makes 3 tokens, the files 2; they differ from token 2 on"
    assert "--tokenizer-args" in finding.fix
