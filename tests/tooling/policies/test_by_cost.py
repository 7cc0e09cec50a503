"""Formulas of Dynamo and LMetric, with numbers worked out by hand."""

import pytest

from epp.plugin import Response
from tests.support.scheduling.policy_requests import ask, pods, send, text, winners
from tooling.policies import DynamoKv, Lmetric


def test_dynamo_adds_prefill_and_blocks_in_use() -> None:
    policy, (a, b) = DynamoKv(), pods(2)
    # 64 tokens are 4 blocks. a: 4 - 2 held + 4 = 6; b: 4 + 1 waiting + 4 = 9.
    assert policy.score(ask([a, b], text(2), in_flight=[(0, 0), (1, 16)], held=[32, 0]), [a, b]) == [1.0, 0.0]
    # a: 4 + 3 waiting - 3 held + 4 = 8; b: 4 + 4 = 8.
    assert winners(policy, ask([a, b], text(2), in_flight=[(1, 48)], held=[48, 0]), [a, b]) == {0, 1}


def test_dynamo_counts_blocks_of_prompts_in_flight_once() -> None:
    policy, (a, b) = DynamoKv(), pods(2)
    first, second = ask([a, b], text(8)), ask([a, b], text(8))
    send(policy, first, a)
    send(policy, second, a)
    assert len(policy._used[a]) == 4  # 1,024 bytes in steps of four blocks of 64
    # The same prompt again adds nothing at a, and as much as a has at b: equal, until a's other 16 tokens decide.
    assert winners(policy, ask([a, b], text(8)), [a, b]) == {0, 1}
    assert winners(policy, ask([a, b], text(8), held=[16]), [a, b]) == {0}
    assert winners(policy, ask([a, b], text({9: 8})), [a, b]) == {1}
    policy.on_finished(first, a, Response())
    assert len(policy._used[a]) == 4
    policy.on_finished(second, a, Response())
    assert not policy._used


def test_dynamo_takes_prompts_shorter_than_what_it_tells_apart() -> None:
    policy, (a, _) = DynamoKv(), pods(2)
    requests = [ask([a], text(each)) for each in (1, 1, 8, 1)]
    for request in requests:
        send(policy, request, a)
    for request in requests:
        policy.on_finished(request, a, Response())
    assert not policy._used


def test_dynamo_never_counts_prefill_below_nothing() -> None:
    policy, (a, b) = DynamoKv(overlap_weight=2.0), pods(2)
    assert winners(policy, ask([a, b], text(2), held=[64, 32]), [a, b]) == {0, 1}


@pytest.mark.parametrize(("queued", "wanted"), [(True, {1}), (False, {0})])
def test_lmetric_multiplies(queued: bool, wanted: set[int]) -> None:
    a, b = pods(2)
    # With the queue: a (100 - 80 + 200) * 2 = 440, b 100 * 4 = 400. Without: a 20 * 2 = 40, b 100 * 4 = 400.
    request = ask([a, b], tokens=100, in_flight=[(1, 200), (3, 0)], held=[80, 0])
    assert winners(Lmetric(queued), request, [a, b]) == wanted


def test_lmetric_has_ties() -> None:
    a, b = pods(2)
    # a (100 - 50) * 2 = 100, b 100 * 1 = 100.
    assert winners(Lmetric(), ask([a, b], tokens=100, in_flight=[(1, 0)], held=[50]), [a, b]) == {0, 1}
