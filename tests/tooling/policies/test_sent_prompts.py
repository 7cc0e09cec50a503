"""What was sent where: prefixes only, bounded, the tail forgotten first."""

from tests.support.scheduling.policy_requests import ask, pods, text
from tooling.policies.sent_prompts import SentPrompts, chain_of


def test_only_prefixes_match() -> None:
    routed, (a, b) = SentPrompts(128, 100), pods(2)
    routed.add(ask([a, b], text(4)), a)
    assert routed.match(ask([a, b], text(8)), [a, b]) == [0.5, 0.0]
    assert routed.match(ask([a, b], text(4)[128:]), [a, b]) == [0.0, 0.0]
    assert routed.match(ask([a, b], b"short"), [a, b]) == [0.0, 0.0]


def test_other_models_share_nothing() -> None:
    (a,) = pods(1)
    one, same, other = ask([a], text(3)), ask([a], text(3)), ask([a], text(3), model="another")
    assert chain_of(one, 128) == chain_of(same, 128)
    assert not set(chain_of(one, 128)) & set(chain_of(other, 128))


def test_the_tail_of_what_was_sent_longest_ago_goes_first() -> None:
    routed, (a,) = SentPrompts(128, 6), pods(1)
    old, new = ask([a], text({1: 4})), ask([a], text({2: 4}))
    routed.add(old, a)
    routed.add(new, a)
    assert routed.size(a) == 6
    assert routed.match(old, [a]) == [0.5]
    assert routed.match(new, [a]) == [1.0]
    routed.forget(a)
    assert routed.match(new, [a]) == [0.0]
