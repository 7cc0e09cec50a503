"""Messages that are missing, repeated, out of another process, or never come back."""

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.plugin import Endpoint
from epp.prefix.events.engine_cache import EngineCache, KvEventIndex
from epp.prefix.events.stream import EventStream
from tests.support.engines.kv_events import SIZE, batch, block_stored, depth, removed, stored

IDS = list(range(64))
LARGEST = 200_000
PROMPTS = [[100 * i + j for j in range(16)] for i in range(1, 9)]


class Line:
    """A stream and a publisher that may be asked for what it said."""

    def __init__(self, *, replays: bool = True) -> None:
        self.faults = Counter[str]()
        self.cache = EngineCache(Endpoint("a", "10.0.0.1:8000"), KvEventIndex(10_000))
        self.stream = EventStream(
            self.cache, lambda fault: self.faults.update([fault]), replays=replays, largest=LARGEST
        )
        self.said: list[bytes] = []
        self.answers = True
        self.first = 0
        """Number of the first message the publisher still has."""

    def connect(self) -> None:
        if self.stream.connected():
            self.replay()

    def say(self, *events: object, lost: bool = False) -> None:
        self.said.append(batch(*events))
        if not lost:
            self.hear(len(self.said) - 1)

    def hear(self, number: int) -> None:
        if not self.stream.receive(number, self.said[number]):
            if self.stream.replays:
                self.replay()
            self.stream.settle(number, self.said[number])

    def replay(self, drops: frozenset[int] = frozenset()) -> None:
        if not self.answers:
            self.stream.gave_up()
            return
        replay = self.stream.replay()
        while True:
            for number in range(max(replay.start, self.first), len(self.said)):
                if number not in drops:
                    replay.take(number, self.said[number])
            drops = frozenset()
            if replay.done():
                return

    def restart(self) -> None:
        self.said.clear()
        self.first = 0

    def knows(self, *prompts: list[int]) -> bool:
        return [depth(self.cache, ids) for ids in PROMPTS] == [4 if ids in prompts else 0 for ids in PROMPTS]


@pytest.mark.parametrize("replays", [True, False])
def test_what_is_said_is_known(replays: bool) -> None:
    line = Line(replays=replays)
    line.connect()
    line.say(stored(PROMPTS[0]))
    line.say(removed(PROMPTS[0], 3), stored(PROMPTS[1]))
    assert (depth(line.cache, PROMPTS[0]), depth(line.cache, PROMPTS[1])) == (3, 4)
    assert not line.faults


def test_a_late_listener_hears_all_from_the_beginning() -> None:
    line = Line()
    line.say(stored(PROMPTS[0]), lost=True)
    line.say(stored(PROMPTS[1]), lost=True)
    line.connect()
    assert line.knows(*PROMPTS[:2])
    line.say(stored(PROMPTS[2]))
    assert line.knows(*PROMPTS[:3])
    assert not line.faults


def test_a_gap_is_filled() -> None:
    line = Line()
    line.connect()
    line.say(stored(PROMPTS[0]))
    line.say(stored(PROMPTS[1]), lost=True)
    line.say(stored(PROMPTS[2]))
    assert line.knows(*PROMPTS[:3])
    assert line.faults == {"gap": 1}


def test_what_a_replay_brought_already_is_not_counted_twice() -> None:
    line = Line()
    line.connect()
    line.say(stored(PROMPTS[0]))
    line.say(stored(PROMPTS[1]), lost=True)
    line.say(stored(PROMPTS[2]), lost=True)
    line.connect()
    line.hear(1)
    line.hear(2)
    line.say(*(removed(PROMPTS[1], block) for block in range(4)))
    assert line.knows(PROMPTS[0], PROMPTS[2])


def test_a_gap_without_anybody_to_ask_leaves_only_what_is_live_now() -> None:
    for line in (Line(replays=False), Line()):
        line.connect()
        line.say(stored(PROMPTS[0]))
        line.say(removed(PROMPTS[0], 0), lost=True)
        line.answers = False
        line.say(stored(PROMPTS[2]))
        assert line.knows(PROMPTS[2])
        assert line.faults == {"gap": 1, "lost": 1}


def test_what_the_publisher_has_forgotten_is_forgotten() -> None:
    line = Line()
    line.connect()
    line.say(stored(PROMPTS[0]))
    for prompt in PROMPTS[1:4]:
        line.say(stored(prompt), lost=True)
    line.first = 2
    line.say(stored(PROMPTS[4]))
    assert line.knows(*PROMPTS[2:5])
    assert line.faults == {"gap": 1, "restart": 1}


@pytest.mark.parametrize("said", range(4))
@pytest.mark.parametrize("seen", [True, False], ids=["connection lost", "connection kept"])
def test_a_new_process_is_noticed_however_far_it_has_counted(said: int, seen: bool) -> None:
    line = Line()
    line.connect()
    line.say(stored(PROMPTS[0]))
    line.say(stored(PROMPTS[1]))
    line.restart()
    for prompt in PROMPTS[2 : 2 + said]:
        line.say(stored(prompt), lost=True)
    if seen:
        line.connect()
        assert line.knows(*PROMPTS[2 : 2 + said])
    line.say(stored(PROMPTS[6]))
    if said == 2 and not seen:
        return  # it goes on counting where the old one ended: only the lost connection tells
    assert line.knows(*PROMPTS[2 : 2 + said], PROMPTS[6])
    assert line.faults["restart"] == 1


def test_a_replay_with_holes_is_asked_for_again() -> None:
    line = Line()
    for prompt in PROMPTS[:6]:
        line.say(stored(prompt), lost=True)
    assert line.stream.connected()
    line.replay(drops=frozenset({2, 4}))
    assert line.knows(*PROMPTS[:6])
    assert line.faults == {"gap": 1}


def test_a_publisher_that_never_gets_it_right_is_given_up() -> None:
    line = Line()
    line.connect()
    line.say(stored(PROMPTS[0]))
    replay, asked = line.stream.replay(), 0
    while True:
        asked += 1
        replay.take(replay.start, line.said[0])
        replay.take(7, batch(stored(PROMPTS[1])))
        if replay.done():
            break
    assert asked == 5
    assert line.knows()


def test_a_message_that_cannot_be_read_costs_itself_alone() -> None:
    line = Line()
    line.connect()
    line.say(stored(PROMPTS[0]))
    line.said.append(b"\xc1")
    line.hear(1)
    line.say(stored(PROMPTS[1]))
    assert line.knows(*PROMPTS[:2])
    assert line.faults == {"malformed": 1}


def long_prompt(first: int, blocks: int = 5000) -> tuple[list[int], bytes]:
    """A prompt and the message that stores it, of several parts."""
    ids = list(range(first, first + SIZE * blocks))
    return ids, batch(block_stored(ids, range(1, blocks + 1), 0, SIZE))


def test_a_large_message_is_taken_over_a_part_at_a_time() -> None:
    line = Line()
    line.connect()
    ids, message = long_prompt(1000)
    line.said.append(message)
    line.hear(0)
    depths = [depth(line.cache, ids)]
    while line.stream.step():
        depths.append(depth(line.cache, ids))
    assert depths[-1] == 5000
    assert max(after - before for before, after in pairwise([0, *depths])) <= 512


def test_what_follows_a_large_message_finds_it_done() -> None:
    line = Line()
    line.connect()
    ids, message = long_prompt(1000)
    line.said.append(message)
    line.hear(0)
    assert depth(line.cache, ids) < 5000
    line.say(["BlockRemoved", [5000]])
    assert depth(line.cache, ids) == 4999
    assert not line.stream.step()


def test_an_event_that_moves_a_whole_cache_is_taken_over_a_part_at_a_time() -> None:
    """The block all others are behind goes and comes back, again and again in one message."""
    line = Line()
    line.cache = EngineCache(Endpoint("a", "10.0.0.1:8000"), KvEventIndex(10**6))
    line.stream = EventStream(line.cache, lambda fault: None, replays=True, largest=1 << 22)
    line.connect()
    ids, message = long_prompt(0, 60_000)
    back = block_stored(ids[:SIZE], [1], 0, SIZE)
    gone = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": 0}
    line.said += [message, batch(*[gone, back] * 10, gone)]
    line.hear(0)
    while line.stream.step():
        pass
    index, most = line.cache.tiers["device"].index, 0
    line.hear(1)
    before, steps = index.holdings, 1
    while line.stream.step():
        most, before, steps = max(most, abs(index.holdings - before)), index.holdings, steps + 1
    assert (most, index.holdings) == (4096, 0)
    assert steps > 21 * 60_000 // 4096


def test_what_is_left_of_a_message_goes_with_the_process_that_sent_it() -> None:
    line = Line()
    line.connect()
    ids, message = long_prompt(1000)
    line.said += [message, message]
    line.hear(0)
    line.restart()
    line.say(stored(PROMPTS[0]), lost=True)
    line.hear(0)
    assert not line.stream.step()
    assert depth(line.cache, ids) == 0
    assert line.knows(PROMPTS[0])


def test_a_message_that_is_too_large_is_not_read_and_costs_what_was_known() -> None:
    line = Line()
    line.connect()
    line.say(stored(PROMPTS[0]))
    line.said.append(bytes(LARGEST + 1))
    line.hear(1)
    assert (line.knows(), line.cache.partial, line.faults) == (True, True, {"too-large": 1})
    line.say(stored(PROMPTS[1]))
    assert (line.knows(PROMPTS[1]), line.cache.partial) == (True, True)
    line.say({"type": "AllBlocksCleared"})
    assert (line.knows(), line.cache.partial) == (True, False)


def test_a_replay_may_have_a_message_that_is_too_large() -> None:
    line = Line()
    line.said += [batch(stored(PROMPTS[0])), bytes(LARGEST + 1), batch(stored(PROMPTS[1]))]
    line.connect()
    assert line.knows(PROMPTS[1])
    assert line.cache.partial
    line.restart()
    line.say(stored(PROMPTS[2]), lost=True)
    line.connect()
    assert (line.knows(PROMPTS[2]), line.cache.partial) == (True, False)


def test_a_replay_that_was_broken_off_goes_on_where_it_was() -> None:
    line = Line()
    for prompt in PROMPTS:
        line.say(stored(prompt), lost=True)
    assert line.stream.connected()
    replay, starts = line.stream.replay(), []
    for _ in range(4):
        starts.append(replay.start)
        for number in range(replay.start, min(replay.start + 3, len(line.said))):
            replay.take(number, line.said[number])
        replay.broken_off()
    assert starts == [0, 2, 4, 6]
    assert line.knows(*PROMPTS)
    assert not line.faults


@settings(max_examples=80)
@given(st.integers(0, 2**32))
def test_after_any_history_the_next_connection_makes_it_true(seed: int) -> None:
    """Losses, restarts and lost connections in any order; a restart always costs the connection, as it does in TCP."""
    draw = random.Random(seed)
    line = Line()
    line.connect()
    held: set[int] = set()
    for _ in range(60):
        event = draw.random()
        if event < 0.1:
            line.connect()
        elif event < 0.15:
            line.restart()
            held.clear()
            line.connect()
        else:
            which = draw.randrange(8)
            lost = draw.random() < 0.3
            if which in held:
                held.discard(which)
                line.say(*(removed(PROMPTS[which], block) for block in range(3, -1, -1)), lost=lost)
            else:
                held.add(which)
                line.say(stored(PROMPTS[which]), lost=lost)
            if not lost:
                assert line.knows(*(PROMPTS[each] for each in held))
    line.connect()
    assert line.knows(*(PROMPTS[each] for each in held))


def test_a_replay_that_failed_is_owed_and_what_came_since_is_kept_until_it_comes() -> None:
    line = Line()
    line.say(stored(PROMPTS[0]), stored(PROMPTS[1]), lost=True)
    line.answers = False
    line.connect()
    line.say(removed(PROMPTS[1], 0), stored(PROMPTS[2]))
    line.replay()
    assert line.knows(PROMPTS[2])
    assert (line.stream.owed, line.cache.partial) == (True, True)
    line.answers = True
    line.replay()
    line.say(stored(PROMPTS[3]))
    assert line.knows(PROMPTS[0], PROMPTS[2], PROMPTS[3])
    assert (line.stream.owed, line.cache.partial, line.faults) == (False, False, {})


def test_a_gap_that_is_not_filled_is_owed() -> None:
    line = Line()
    line.connect()
    line.say(stored(PROMPTS[0]))
    line.say(stored(PROMPTS[1]), lost=True)
    line.answers = False
    line.say(stored(PROMPTS[2]))
    line.say(stored(PROMPTS[3]), lost=True)
    line.say(stored(PROMPTS[4]))
    assert line.stream.owed
    assert line.knows(PROMPTS[4])
    assert line.faults == {"gap": 2, "lost": 2}
    line.answers = True
    line.replay()
    assert line.knows(*PROMPTS[:5])
    assert not line.cache.partial


def test_nothing_is_owed_of_a_process_that_is_gone_nor_of_a_cache_that_was_cleared() -> None:
    for after in ("restart", "clear"):
        line = Line()
        line.say(stored(PROMPTS[0]), lost=True)
        line.answers = False
        line.connect()
        line.say(stored(PROMPTS[1]))
        assert line.stream.owed
        if after == "restart":
            line.restart()
            line.say(stored(PROMPTS[2]))
        else:
            line.say({"type": "AllBlocksCleared"})
        assert not line.stream.owed
        assert line.knows(*PROMPTS[2:3] if after == "restart" else ())
