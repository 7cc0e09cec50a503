"""Timings made of known parameters."""

from dataclasses import replace
from random import Random
from statistics import median

import pytest

from hack.benches.rig.fit import FEWEST, NAMES, FitError, Fitted, Timing, fit, prefill

TRUE = Fitted(base=12e-3, per_decode=1.5e-3, per_context_token=2e-6, linear=0.5e-3, attention=3e-8, overhead=8e-3)


def design() -> list[Timing]:
    """Single prefills, prefills behind a cached beginning, decodes."""
    timings = []
    for tokens in (32, 128, 512, 1024, 2048, 4096):
        for cached in (0, 1024, 3072):
            fresh, pairs = prefill(fresh=tokens, cached=cached)
            timings.append(Timing(seconds=1, steps=-(-tokens // 2048), prefill=fresh, pairs=pairs, requests=1))
    for streams in (1, 2, 4, 8):
        for context in (128, 1024, 3072):
            timings.append(Timing(seconds=1, steps=20, decodes=20 * streams, context=20 * streams * context))
    return timings


def timed(parameters: Fitted, noise: float = 0.0, seed: int = 0) -> list[Timing]:
    chance = Random(seed)
    return [
        replace(timing, seconds=parameters.seconds(timing) * (1 + chance.gauss(0, noise)))
        for _ in range(3)
        for timing in design()
    ]


def test_exact_timings_give_the_parameters_back() -> None:
    found = fit(timed(TRUE))
    for name in NAMES:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_noise_of_five_percent_moves_predictions_less(seed: int) -> None:
    errors = [abs(error) for error in fit(timed(TRUE, 0.05, seed)).errors(timed(TRUE))]
    assert median(errors) < 0.025
    assert max(errors) < 0.08


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_timings_that_were_disturbed_count_little(seed: int) -> None:
    chance = Random(seed)
    disturbed = [replace(t, seconds=t.seconds * 5) if chance.random() < 0.1 else t for t in timed(TRUE, 0.02, seed)]
    errors = fit(disturbed).errors(timed(TRUE))
    assert max(map(abs, errors)) < 0.1


@pytest.mark.long
@pytest.mark.parametrize("gone", ["per_decode", "per_context_token", "attention", "overhead"])
def test_no_parameter_is_below_zero(gone: str) -> None:
    for seed in range(5):
        found = fit(timed(replace(TRUE, **{gone: 0.0}), 0.05, seed))
        assert all(getattr(found, name) >= 0 for name in NAMES)
        assert max(map(abs, found.errors(timed(replace(TRUE, **{gone: 0.0}))))) < 0.06


def test_too_few_timings_are_refused() -> None:
    with pytest.raises(FitError, match=f"{FEWEST - 1} timings; expected at least {FEWEST}"):
        fit(timed(TRUE)[: FEWEST - 1])


def test_timings_of_prefill_alone_are_refused() -> None:
    with pytest.raises(FitError, match="no timing has anything to do with per_decode"):
        fit([timing for timing in timed(TRUE) if not timing.decodes])


def test_one_context_alone_is_refused() -> None:
    with pytest.raises(FitError, match="too much alike"):
        fit([timing for timing in timed(TRUE) if timing.prefill or timing.context == 1024 * timing.decodes])


def test_a_timing_of_no_time_is_refused() -> None:
    with pytest.raises(FitError, match="more than 0 seconds"):
        fit([replace(timing, seconds=0) for timing in timed(TRUE)])
