"""Which endpoint has encoded an item lately."""

import json
from asyncio import run
from typing import Any

import pytest

from epp.plugin import EncoderMatch, Request
from epp.prefix.media import EncoderCaches, EncoderCacheScorer, items_of
from epp.testing import services
from tests.support.scheduling.schedulers import ask, pods, scheduler


def prompt(*urls: str) -> bytes:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "what is this?"}]
    parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return json.dumps([{"role": "user", "content": parts}]).encode()


def asked(*urls: str) -> Request:
    return ask(prompt=prompt(*urls))


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (prompt("http://a/1.png", "data:image/png;base64,AAAA", "http://a/1.png"), 2),
        (b'[{"type": "input_audio", "input_audio": {"data": "UklGR", "format": "wav"}}]', 1),
        (b'[{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBOR"}}]', 1),
        (b'[{"role": "user", "content": "the \\"url\\": \\"x\\" of it"}]', 0),
        (b"", 0),
    ],
)
def test_items_are_what_the_client_sent_each_once(body: bytes, count: int) -> None:
    assert len(items_of(body)) == count


def test_an_endpoint_that_encoded_an_item_is_preferred() -> None:
    caches = EncoderCaches()
    picking = scheduler(EncoderCacheScorer(), producers=[caches])
    a, b = pods("ab")
    first = picking.choose(run(picking.prepare(asked("http://a/1", "http://a/2"))), [b])
    assert [*first.runs[0].totals] == [0.0]
    second = picking.choose(run(picking.prepare(asked("http://a/2", "http://a/3"))), [a, b])
    assert second.endpoint is b
    assert second.request.signal(EncoderMatch) == {a: EncoderMatch(0, 2), b: EncoderMatch(1, 2)}
    assert caches.statistics() == {"items": 3}
    picking.removed(b)
    assert caches.statistics() == {"items": 0}


def test_hashes_of_items_are_nothing_that_a_client_can_work_out() -> None:
    """And another replica with the same seed finds them."""
    request, kept = asked("http://a/1"), []
    for seed in (0, 7, 7):
        caches = EncoderCaches()
        caches.start(services(hash_seed=seed))
        run(caches.prepare(request))
        kept.append(caches._items.get(request))
    assert kept[0] != kept[1] == kept[2]


def test_a_request_without_items_prefers_nobody() -> None:
    picking = scheduler(EncoderCacheScorer(), producers=[EncoderCaches()])
    decision = picking.choose(run(picking.prepare(asked())), pods("ab"))
    assert [*decision.runs[0].totals] == [0.0, 0.0]


def test_items_beyond_the_room_are_forgotten_the_oldest_first() -> None:
    caches = EncoderCaches(cache_size_in_mb_per_server=4)
    (a,) = pods("a")
    for urls in (["1"], ["2"], ["1"], ["3"]):
        request = asked(*urls)
        run(caches.prepare(request))
        caches.on_picked(request, a)
    request = asked("1", "2", "3")
    run(caches.prepare(request))
    assert caches.produce(request, [a])[a] == EncoderMatch(2, 3)
    assert EncoderCaches(cache_size_in_mb_per_server=0).cache_size_in_mb_per_server == 0


def test_replicas_tell_each_other() -> None:
    mine, other, third = EncoderCaches(), EncoderCaches(), EncoderCaches()
    (a,) = pods("a")
    request = asked("1", "2")
    run(mine.prepare(request))
    told = ask("told")
    other.from_peer(told, a, mine.to_peers(request, a))
    other.from_peer(ask("nothing"), a, None)
    for piece in other.snapshot():
        third.restore(piece, {a.name: a})
        third.restore(["gone", 1], {})
    assert third.produce(request, [a])[a].held == 0, "its own slot says nothing of this request"
    run(third.prepare(request))
    assert third.produce(request, [a])[a] == EncoderMatch(2, 2)
