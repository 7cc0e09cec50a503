"""Presets against published figures."""

from dataclasses import replace
from pathlib import Path

import pytest

from epp.errors import ConfigError
from tooling.simulator.engine import H100_8B
from tooling.simulator.presets import GPUS, MODELS, PRESETS, derived, lowers, pods, preset, tier, with_l1
from tooling.simulator.tiers import TierParameters


def prefill(name: str) -> float:
    """Tokens a second of a prompt of 4,000 tokens."""
    speed = PRESETS[name].parameters
    return 4000 / (speed.linear * 4000 + speed.attention * 4000**2 / 2)


def decode(name: str, requests: int, context: int) -> float:
    """Seconds of a step."""
    speed = PRESETS[name].parameters
    return speed.base + requests * (speed.per_decode + speed.per_context_token * context)


def test_the_roofline_gives_the_pod_it_is_anchored_in() -> None:
    made = derived(GPUS["h100"], 1, MODELS["8b"])
    for name in ("base", "per_context_token", "linear", "attention", "blocks"):
        assert getattr(made, name) == pytest.approx(getattr(H100_8B, name), rel=0.03), name
    assert made.per_decode == pytest.approx(H100_8B.per_decode, rel=0.1)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("h100-8b", 15e3, 25e3), ("a100-8b", 5e3, 10e3), ("l4-8b", 2e3, 4e3), ("8xh100-70b", 10e3, 20e3)],
)
def test_prefill_is_as_fast_as_published(name: str, low: float, high: float) -> None:
    assert low < prefill(name) < high


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("h100-8b", 7e-3, 10e-3), ("a100-8b", 10e-3, 16e-3), ("l4-8b", 60e-3, 90e-3), ("8xh100-70b", 8e-3, 28e-3)],
)
def test_a_decode_step_is_as_long_as_published(name: str, low: float, high: float) -> None:
    assert low < decode(name, 16, 1000) < high


def test_a_mixture_of_experts_is_as_fast_as_published() -> None:
    """512 and 128 tokens on one of two: 71 ms to the first token and 20 ms a token at 15 requests a second."""
    speed = PRESETS["a100-gpt-oss-120b"].parameters
    decodes = 15 * 128 * 0.02
    per_step = 15 * 512 * 0.02 * speed.linear
    assert decode("a100-gpt-oss-120b", round(decodes), 576) + per_step == pytest.approx(0.02, rel=0.25)


def test_more_memory_holds_more_and_reads_faster() -> None:
    h100, h200 = PRESETS["h100-8b"].parameters, PRESETS["h200-8b"].parameters
    assert h200.blocks > 1.7 * h100.blocks
    assert h200.base < h100.base
    assert h200.linear == pytest.approx(h100.linear, rel=0.01), "the same chip computes"
    assert PRESETS["8xh100-70b"].price == pytest.approx(55.04)


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="141 GB of weights do not fit on 1 GPUs of 80 GiB"):
        derived(GPUS["h100"], 1, MODELS["70b"])


def test_pods_by_name_number_and_speed() -> None:
    kinds = pods("2*h100-8b, l4-8b,h100-8b@0.5")
    assert [kind.name for kind in kinds] == ["h100-8b", "h100-8b", "l4-8b", "h100-8b@0.5"]
    assert kinds[3].parameters.linear == 2 * H100_8B.linear
    assert kinds[3].parameters.blocks == H100_8B.blocks
    assert preset("laptop@2").parameters.base == PRESETS["laptop"].parameters.base / 2


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("h100-8", "no kind of pod is called 'h100-8'; did you mean 'h100-8b'"),
        ("", "no kind of pod is called ''; expected a FILE.yaml or one of h100-8b, "),
        ("0*h100-8b", "expected a number from 1 to 512"),
        ("x*h100-8b", "expected a number from 1 to 512"),
        ("h100-8b@0", "expected a speed of more than 0"),
        ("h100-8b@fast", "expected a speed of more than 0"),
        ("h100-8b@-1", "expected a speed of more than 0"),
    ],
)
def test_what_is_no_pod_is_reported(text: str, reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        pods(text)


GOOD = """
price: 0.5
parameters:
  blockSize: 32
  blocks: 640
  base: 0.01
  perDecode: 1e-3
  perContextToken: 1e-6
  linear: 5e-4
  attention: 1e-8
"""


def test_a_kind_comes_from_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD)
    kind, slower = pods(f"1*{file},{file}@0.5")
    assert (kind.name, kind.price, kind.parameters.capacity) == ("mine", 0.5, 20_480)
    assert (slower.name, slower.parameters.base) == ("mine@0.5", 0.02)


@pytest.mark.parametrize(
    ("before", "after", "reported"),
    [
        ("price: 0.5", "price: -1", r"mine.yaml: price: -1.0, expected 0 or more"),
        ("blocks: 640", "blocks: 0", r"mine.yaml: parameters.blocks: 0, expected at least 1"),
        ("base: 0.01", "base: 0", r"mine.yaml: parameters.base: 0.0, expected more than 0"),
        ("linear: 5e-4", "linear: fast", r"mine.yaml: parameters.linear: expected a number, got 'fast'"),
        ("  base: 0.01\n", "", r"mine.yaml: parameters.base: missing"),
        ("perDecode", "perDecodes", r"mine.yaml: parameters.perDecodes: unknown; did you mean 'perDecode'"),
        (GOOD, "[]", r"mine.yaml: expected a mapping with parameters, got \[\]"),
        (GOOD, "a: [", r"mine.yaml: line 2, column 1: not valid YAML"),
    ],
)
def test_a_wrong_file_is_reported(tmp_path: Path, before: str, after: str, reported: str) -> None:
    file = tmp_path / "mine.yaml"
    assert before in GOOD
    file.write_text(GOOD.replace(before, after))
    with pytest.raises(ConfigError, match=reported):
        pods(str(file))


def test_a_file_tells_of_the_tiers_below_its_pods(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD + "l1: {tokens: 50000, speed: 4000}\nl2: {speed: 300}\n")
    named, preset_ = with_l1(pods(f"{file}@2,laptop"), tier("9000", "l1", 700.0))
    assert named.l1 == TierParameters(tokens=50_000, speed=4000.0), "what it says of itself counts"
    assert preset_.l1 == TierParameters(tokens=9000, speed=700.0)
    (first, mine), (_, other) = lowers([named, preset_], tier("1000@50", "l2", 1.0), 1)
    assert mine is not None
    assert other is not None
    assert (first, mine.l1_speed, mine.l2_speed, other.l2_speed) == ("node-1", 4000.0, 300.0, 50.0)
    assert mine.l2 is other.l2
    assert mine.l1 is not other.l1


@pytest.mark.parametrize(
    ("added", "reported"),
    [
        ("l1: {tokens: 100}", r"mine.yaml: l1.tokens: 100, expected at least one chunk of 256"),
        ("l1: {speed: 100}", r"mine.yaml: l1.tokens: missing"),
        ("l1: {tokens: 1000, sped: 1}", r"mine.yaml: l1.sped: unknown; did you mean 'speed'"),
        ("l2: {speed: 0}", r"mine.yaml: l2.speed: 0.0, expected more than 0"),
        ("l2: {tokens: 1000}", r"mine.yaml: l2.tokens: unknown"),
        ("l3: {}", r"mine.yaml: l3: unknown; expected one of price, parameters, l1, l2"),
    ],
)
def test_wrong_tiers_in_a_file_are_reported(tmp_path: Path, added: str, reported: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD + added + "\n")
    with pytest.raises(ConfigError, match=reported):
        pods(str(file))


@pytest.mark.parametrize("text", ["", "many", "1000@", "1000@fast", "1e6", "-5", "100", "1000@0", "@5", "1000@inf"])
def test_what_is_no_tier_is_reported(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^l2: expected TOKENS or TOKENS@TOKENS_PER_SECOND, as in 4000000@300000"):
        tier(text, "l2", 1.0)


def test_pods_of_a_node_share_its_memory() -> None:
    kinds = with_l1(pods("5*laptop"), tier("9000", "l1", 1.0))
    places = lowers(kinds, None, 2)
    assert [node for node, _ in places] == ["node-1", "node-1", "node-2", "node-2", "node-3"]
    memories = [lower.l1 for _, lower in places if lower is not None]
    assert memories[0] is memories[1] is not memories[2] is memories[3] is not memories[4]
    assert lowers(pods("2*laptop"), None, 2) == [("", None)] * 2
    with pytest.raises(ConfigError, match=r"pods-per-node: pods of a node share its l1; laptop, mine do not say"):
        lowers([kinds[0], replace(kinds[0], name="mine", l1=None)], None, 2)


def test_blocks_that_make_no_chunk_are_refused() -> None:
    odd = replace(PRESETS["laptop"], parameters=replace(PRESETS["laptop"].parameters, block_size=24))
    with pytest.raises(ConfigError, match=r"pods: laptop has blocks of 24 tokens; .* chunks of 256"):
        lowers([odd], tier("9000", "l2", 1.0), 1)


def test_a_file_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml: cannot be read: No such file"):
        pods(f"2*{tmp_path / 'none.yaml'}")
