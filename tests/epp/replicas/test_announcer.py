from epp.plugin import Response
from epp.replicas import wire
from tests.support.scheduling.replicas import Network, together


def recorded(network: Network, source: str) -> list[wire.AnyMessage]:
    """What a replica publishes from now on, beats left out."""
    messages: list[wire.AnyMessage] = []

    def lose(frame: bytes) -> bool:
        [message] = wire.decode(frame, 1).messages
        if not isinstance(message, wire.Beat):
            messages.append(message)
        return False

    network.loses = lose
    return messages


async def test_one_message_for_each_decision_first_token_and_end() -> None:
    network, (a, _) = together(2)
    messages = recorded(network, a.address)
    a.answer(await a.ask())
    network.deliver()
    assert [type(message) for message in messages] == [wire.Decided, wire.FirstToken, wire.Finished]


async def test_a_retry_elsewhere_is_an_end_and_a_decision() -> None:
    network, (a, b) = together(2)
    decision = await a.ask()
    elsewhere = next(endpoint for endpoint in a.endpoints if endpoint is not decision.endpoint)
    network.deliver()
    messages = recorded(network, a.address)
    a.scheduler.moved(decision, elsewhere, Response(status=200, served=elsewhere.address))
    network.deliver()
    assert [type(message) for message in messages] == [wire.Finished, wire.Decided]
    assert b.holds(a.chain(decision)) == a.holds(a.chain(decision)) == [(elsewhere.name, 16)]
    a.answer(decision)
    network.deliver()
    assert b.exchange.open == 0


async def test_whose_fault_an_error_is_is_told() -> None:
    network, (a, _) = together(2)
    decision = await a.ask()
    network.deliver()
    messages = recorded(network, a.address)
    a.scheduler.finished(decision, Response(status=502, prefill_failed=True))
    network.deliver()
    [end] = messages
    assert isinstance(end, wire.Finished)
    assert (end.status, end.prefill_failed) == (502, True)


async def test_what_peers_told_is_not_told_again() -> None:
    network, (a, b) = together(2)
    messages = recorded(network, b.address)
    a.answer(await a.ask())
    network.deliver()
    assert len(messages) == 3, "from the first alone"
    assert b.exchange._own == {}
