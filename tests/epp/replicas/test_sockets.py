import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from epp.errors import ConfigError
from epp.replicas import wire
from epp.replicas.sockets import Sockets, keys_of
from tests.support.process.waiting import until

SECRET = b"what all replicas know"
FRAME = wire.LIVE + b"hello"


class End:
    """One side: what it received, which snapshots it was asked for, and why a connection of it was refused."""

    def __init__(self, secret: bytes | None = None) -> None:
        self.received: list[bytes] = []
        self.asked: list[bytes] = []
        self.refused: list[str] = []
        take = lambda address, frame: self.received.append(frame)  # noqa: E731
        self.sockets = Sockets(take, self.asked.append, self.refused.append, secret)
        self.address = f"127.0.0.1:{self.sockets.open('127.0.0.1', 0)}"


@contextmanager
def ends(*secrets: bytes | None) -> Iterator[list[End]]:
    with ExitStack() as stack:
        made = []
        for secret in secrets:
            made.append(End(secret))
            stack.callback(made[-1].sockets.close)
        yield made


async def arrives(source: End, target: End) -> None:
    """Return when what `source` publishes reaches `target`, which has just subscribed."""

    target.received.clear()

    def sent() -> bool:
        source.sockets.publish(FRAME)
        return FRAME in target.received

    await until(sent)


def said(end: End) -> set[str]:
    """Why a connection of it was refused."""
    end.sockets.poll()  # as a group does
    return {*end.refused}


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_frames_arrive_in_order_and_snapshots_are_asked_for(secret: bytes | None) -> None:
    topic = wire.topic_of(wire.SNAPSHOT, 5, 1)
    with ends(secret, secret) as [a, b]:
        b.sockets.subscribe(a.address, wire.LIVE)
        await arrives(a, b)
        b.received.clear()
        frames = [wire.LIVE + n.to_bytes(4, "big") + bytes(n) for n in range(1000)]
        for frame in frames:
            a.sockets.publish(frame)
        await until(lambda: frames[-1] in b.received)
        assert [frame for frame in b.received if frame != FRAME] == frames
        b.sockets.subscribe(a.address, topic)
        await until(lambda: a.asked == [topic])
        a.sockets.publish(topic + b"piece")
        await until(lambda: topic + b"piece" in b.received)
        b.sockets.unsubscribe(a.address, topic)


async def test_topics_that_are_none_of_ours_ask_for_nothing() -> None:
    with ends(None, None) as [a, b]:
        b.sockets.subscribe(a.address, wire.LIVE)
        for topic in (b"S", b"S" + bytes(99), b"X" + bytes(16)):
            b.sockets.subscribe(a.address, topic)
        b.sockets.subscribe(a.address, wire.topic_of(wire.IN_FLIGHT, 5, 1))
        await until(lambda: len(a.asked) == 1)
        assert a.asked == [wire.topic_of(wire.IN_FLIGHT, 5, 1)]


@pytest.mark.parametrize(
    ("secret", "why"),
    [(None, "one side has a secret and the other has none"), (b"what strangers guess", "its secret is another")],
)
async def test_strangers_neither_listen_nor_speak_and_it_is_said(secret: bytes | None, why: str) -> None:
    with ends(SECRET, SECRET, secret) as [a, b, stranger]:
        b.sockets.subscribe(a.address, wire.LIVE)
        await arrives(a, b)

        def received() -> bool:
            """By either: the end that notices first closes the connection, and the other may never hear why."""
            return said(a) | said(stranger) == {why}

        for one, other in ((stranger, a), (a, stranger)):
            one.sockets.subscribe(other.address, wire.LIVE)
            one.sockets.subscribe(other.address, wire.topic_of(wire.SNAPSHOT, 9, 1))
            await until(received)
            stranger.sockets.publish(FRAME)
            await arrives(a, b)
            assert (a.received, a.asked, stranger.received, stranger.asked) == ([], [], [], [])
            one.sockets.disconnect(other.address)
            for end in (a, stranger):
                end.refused.clear()
        assert said(b) == set()


async def test_who_knows_the_public_key_alone_is_refused() -> None:
    """Encryption alone would let in whoever has the server's public key; the client's is checked too."""
    with ends(SECRET, SECRET) as [a, b], zmq.Context() as context, context.socket(zmq.SUB) as stranger:
        stranger.linger = 0
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.curve_serverkey = keys_of(SECRET)[0]
        stranger.subscribe(wire.LIVE)
        stranger.connect(f"tcp://{a.address}")
        b.sockets.subscribe(a.address, wire.LIVE)
        await arrives(a, b)
        with pytest.raises(zmq.Again):
            stranger.recv(zmq.NOBLOCK)


async def test_a_port_in_use_is_an_error_that_names_the_flag() -> None:
    with ends(None) as [a]:
        second = Sockets(lambda address, frame: None, lambda topic: None, lambda why: None, None)
        with pytest.raises(ConfigError, match="--replica-port"):
            second.open("127.0.0.1", int(a.address.rpartition(":")[2]))
        second.close()


async def test_who_does_not_take_what_is_sent_costs_bounded_memory() -> None:
    with ends(None) as [a], zmq.Context() as context, context.socket(zmq.SUB) as slow:
        slow.linger, slow.rcvhwm = 0, 1
        slow.subscribe(wire.LIVE)
        slow.connect(f"tcp://{a.address}")

        def sent() -> bool:
            a.sockets.publish(FRAME)
            return bool(slow.poll(1))

        await until(sent)
        for _ in range(50_000):  # never waits, however many
            a.sockets.publish(wire.LIVE + bytes(1000))
        received = 0
        while slow.poll(200):
            slow.recv()
            received += 1
        assert 0 < received < 50_000, "the rest was dropped"


def test_equal_secrets_have_equal_keys_and_others_not() -> None:
    assert keys_of(SECRET) == keys_of(SECRET)
    assert keys_of(SECRET)[0] != keys_of(b"other")[0]
    assert SECRET not in keys_of(SECRET)[0]


def moving() -> set[int]:
    """The threads that move bytes, which name themselves."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it may end while they are listed
            if (task / "comm").read_text().startswith("ZMQbg/IO"):
                found.add(int(task.name))
    return found


async def test_their_threads_leave_the_event_loop_at_its_work() -> None:
    others = moving()
    with ends(None):
        await until(lambda: bool(moving() - others))
        await until(lambda: {os.sched_getscheduler(thread) for thread in moving() - others} == {os.SCHED_BATCH})
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
