"""The profile handler of `epp.scheduling.pickers`."""

from collections.abc import Sequence

import pytest

from epp.plugin import Endpoint
from epp.scheduling.pickers import SingleProfileHandler
from tests.support.scheduling.schedulers import ask, pods


def test_the_one_profile_s_picks_are_the_answer() -> None:
    endpoints = pods("ab")
    asked: list[str] = []

    def run(profile: str) -> Sequence[Endpoint]:
        asked.append(profile)
        return endpoints

    picked = SingleProfileHandler().handle(ask(), ["default"], run)
    assert (picked.endpoints, dict(picked.headers), asked) == (endpoints, {}, ["default"])


@pytest.mark.parametrize("profiles", [[], ["prefill", "decode"]])
def test_other_than_one_profile_is_refused(profiles: list[str]) -> None:
    with pytest.raises(ValueError, match="exactly one profile"):
        SingleProfileHandler().handle(ask(), profiles, lambda profile: pods("a"))
