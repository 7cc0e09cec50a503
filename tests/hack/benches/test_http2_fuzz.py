"""`hack/bench http2_fuzz` on a few thousand streams: nothing breaks, nothing stays, and h2 saw the same."""

import random

import pytest

from hack.benches.http2_fuzz import conversation, judged, pieces, throw


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
async def test_mutated_streams_break_nothing_and_leave_nothing(seed: int) -> None:
    reported: list[str] = []
    found = await throw(1500, seed, 4, reported.append)
    assert found["requests routed, and left"] > 200
    assert found["went on to the end"] > 50
    assert sum(count for what, count in found.items() if what.startswith("ended by error")) > 100
    assert found["both took it"] > 10


def test_a_good_conversation_is_seen_as_h2_sees_it() -> None:
    chance = random.Random(3)
    for _ in range(50):
        data, streams = conversation(chance)
        assert streams >= 1
        assert judged(data) == "both took it"
        assert b"".join(pieces(data, chance)) == data
