import pytest

from epp.errors import NoEndpoint
from tests.support.ext_proc.server import Route, ext_proc_server, failing
from tooling.conformance import wire
from tooling.conformance.replies import Refused
from tooling.conformance.talk import asked, routed, talk
from tooling.conformance.target import ConformanceOptions, reach
from tooling.conformance.verdict import Failed, Skipped

CHAT = wire.chat("m")


def options(port: int) -> ConformanceOptions:
    return ConformanceOptions(f"127.0.0.1:{port}", reply_timeout=2, quiet=0.05, headers={"x-team": "a"})


async def test_a_whole_exchange() -> None:
    route = Route("10.0.0.1:80")
    async with ext_proc_server(route) as made, reach(options(made.ports[0])) as target, talk(target) as one:
        await one.ask(CHAT[:5], CHAT[5:])
        forwarded = await one.forwarded()
        assert (forwarded.destination, forwarded.body) == ("10.0.0.1:80", CHAT)
        await one.answer({":status": "200"}, served="10.0.0.1:80")
        await one.send(wire.answer_body(b"hi"), wire.answer_body(b"", end=True))
        assert b"".join(await one.answer_chunks()) == b"hi"
        await one.silence("nothing more")
        await one.half_close()
        await one.end()
        headers = (await route.way()).raw.headers
        assert headers["x-team"] == "a"
        assert headers["content-length"] == str(len(CHAT))


async def test_without_a_body_it_is_a_get() -> None:
    route = Route()
    async with ext_proc_server(route) as made, reach(options(made.ports[0])) as target:
        assert (await routed(target)).body == b""
        assert (await route.way()).raw.method == "GET"


async def test_a_refusal_is_an_outcome_and_no_destination() -> None:
    async with ext_proc_server(failing(NoEndpoint("gone"))) as made, reach(options(made.ports[0])) as target:
        outcome = await asked(target, CHAT)
        assert isinstance(outcome, Refused)
        assert outcome.status == 503
        with pytest.raises(Failed, match="expected a destination; got an ImmediateResponse 503"):
            await routed(target, CHAT)


async def test_what_does_not_come_and_what_comes_too_early_are_failures() -> None:
    async with ext_proc_server(Route()) as made, reach(options(made.ports[0])) as target:
        async with talk(target) as one:
            await one.send(wire.request_headers(one.headers()))
            await one.silence("nothing yet")
            await one.half_close()
            with pytest.raises(Failed, match="expected a word; got the end of the stream"):
                await one.reply("a word")
        async with talk(target) as one:
            await one.ask(CHAT)
            with pytest.raises(Failed, match="got a reply to the request's headers"):
                await one.silence("nothing yet")
            with pytest.raises(Failed, match="got a reply to the request's body"):
                await one.end()
            await one.half_close()
            await one.over()


async def test_a_stream_that_ends_in_order_before_the_answer_is_no_failure_of_the_answer() -> None:
    async with ext_proc_server(Route()) as made, reach(options(made.ports[0])) as target, talk(target) as one:
        await one.half_close()
        with pytest.raises(Skipped, match="ends its stream"):
            await one.answer({":status": "200"})
