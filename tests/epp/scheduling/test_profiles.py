"""The profile handler of `epp.scheduling.pickers`."""

import pytest

from epp.scheduling.pickers import SingleProfileHandler
from tests.support.scheduling.runs import Runs
from tests.support.scheduling.schedulers import ask, pods


def test_the_one_profile_s_picks_are_the_answer() -> None:
    endpoints = pods("ab")
    run = Runs({"default": endpoints})
    picked = SingleProfileHandler().handle(ask(), ["default"], run)
    assert (picked.endpoints, dict(picked.headers), run.asked) == (endpoints, {}, ["default"])


@pytest.mark.parametrize("profiles", [[], ["prefill", "decode"]])
def test_other_than_one_profile_is_refused(profiles: list[str]) -> None:
    with pytest.raises(ValueError, match="exactly one profile"):
        SingleProfileHandler().handle(ask(), profiles, Runs({"default": pods("a")}))
