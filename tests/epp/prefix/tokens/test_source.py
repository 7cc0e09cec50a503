"""Ids within a deadline, off the event loop, or a reason why not."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from epp.errors import ConfigError
from epp.plugin import Api, Endpoint, NoTokens, Request
from epp.prefix.tokens import remote
from epp.prefix.tokens.cache import TokenCache
from epp.prefix.tokens.remote import Remote
from epp.prefix.tokens.source import ANY_MODEL, TokenizerFiles, Tokens, load_tokenizers, tokenizer_files
from tests.support.process.waiting import until
from tests.support.prompts.tokenizers import make, panicking, write
from tooling.simulator import tokenizer as sim
from tooling.simulator.server import SimulatedPod

ENDLESS = "{% set xs = range(9999) | list %}" + "{% for x in xs %}" * 3 + "{% endfor %}" * 3
CHAT = {"messages": [{"role": "user", "content": "hello world"}]}

Made = Callable[..., Tokens]


@pytest.fixture
def tokens(tmp_path: Path) -> Iterator[Made]:
    """Makes `Tokens` with a tokenizer for the model `m`."""
    made: list[Tokens] = []

    def make_tokens(
        *,
        template: str | None = None,
        model: str = "m",
        efforts: Mapping[str, str] | None = None,
        deadline: float = 60.0,
        **settings: Any,
    ) -> Tokens:
        directory = tmp_path / f"files-{len(made)}"
        make("llama", directory)
        if template is not None:
            (directory / "chat_template.jinja").write_text(template)
        pieces = TokenCache(1 << 20)
        files = TokenizerFiles(str(directory), reasoning_effort_map=efforts or {})
        made.append(Tokens(load_tokenizers({model: files}, pieces), pieces, deadline=deadline, **settings))
        return made[-1]

    yield make_tokens
    for each in made:
        each.close()


def asked(body: Any, api: Api = "chat", model: str = "m") -> Request:
    return Request(id="1", model=model, api=api, body=json.dumps(body).encode())


async def reason(tokens: Tokens, request: Request) -> str:
    with pytest.raises(NoTokens) as none:
        await tokens.of(request)
    return none.value.reason


async def test_a_request_s_ids_are_found(tokens: Made) -> None:
    reader = tokens(deadline=60.0)
    ids = await reader.of(asked(CHAT))
    assert (ids.typecode, len(ids) > 10) == ("I", True)
    assert ids == await reader.of(asked(CHAT))
    found = reader.statistics()
    assert found["read"] == 2
    assert 0 < found["encoded_bytes"] < 200
    assert found["pieces_bytes"] > 0


async def test_the_loop_runs_while_a_long_prompt_is_read(tokens: Made) -> None:
    reader = tokens(deadline=60.0)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        spinning = group.create_task(turn())
        await reader.of(asked({"prompt": "What of the block, Grüße? " * 8000}, "completions"))
        spinning.cancel()
    assert turns > 20


async def test_a_model_without_a_tokenizer_has_no_tokens(tokens: Made) -> None:
    assert await reason(tokens(), asked(CHAT, model="other")) == "no-tokenizer"


async def test_one_tokenizer_may_serve_every_model(tokens: Made) -> None:
    reader = tokens(model=ANY_MODEL, deadline=60.0)
    assert await reader.of(asked(CHAT, model="adapter")) == await reader.of(asked(CHAT))


async def test_what_is_not_rendered_is_unsupported(tokens: Made) -> None:
    image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    reader = tokens(deadline=60.0)
    assert await reason(reader, asked({"messages": [{"role": "user", "content": image}]})) == "unsupported"
    assert await reason(reader, asked(CHAT, "responses")) == "unsupported"
    assert reader.statistics()["unsupported"] == 2


async def test_a_template_s_refusal_fails_without_a_word_of_the_prompt(tokens: Made) -> None:
    reader = tokens(template="{{ raise_exception('no: ' + messages[0].content) }}", deadline=60.0)
    with pytest.raises(NoTokens) as none:
        await reader.of(asked(CHAT))
    assert none.value.reason == "failed"
    assert "hello" not in str(none.value)


async def test_an_effort_is_read_as_the_engines_of_the_model_read_it(tokens: Made) -> None:
    template = "{{ reasoning_effort }} {{ messages[0].content }}"
    plain, mapped = (tokens(template=template, efforts=each, deadline=60.0) for each in ({}, {"low": "high"}))
    low, high = (asked({**CHAT, "reasoning_effort": effort}) for effort in ("low", "high"))
    assert await mapped.of(low) == await mapped.of(high) == await plain.of(high) != await plain.of(low)


async def test_text_that_no_tokenizer_takes_fails(tokens: Made) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}, CHAT["messages"][0]]}
    assert await reason(tokens(deadline=60.0), asked(body)) == "failed"


async def test_text_of_which_the_library_panics_fails(tmp_path: Path) -> None:
    """A panic is no Exception: unnoticed, one request would end the picker."""
    directory = write(tmp_path / "m", panicking(), {}, "{{ messages[0].content }}")
    pieces = TokenCache(1 << 20)
    reader = Tokens(load_tokenizers({"m": TokenizerFiles(str(directory))}, pieces), pieces, deadline=60.0)
    with closing(reader):
        assert await reason(reader, asked(CHAT)) == "failed"


async def test_an_endless_template_is_late_and_holds_nothing_up(tokens: Made) -> None:
    reader = tokens(template=ENDLESS, deadline=0.05, workers=1, waiting=0)
    assert await reason(reader, asked(CHAT)) == "late"
    ids = None

    async def another() -> None:
        nonlocal ids
        while ids is None:
            try:
                ids = await reader.of(asked({"prompt": "hello"}, "completions"))
            except NoTokens:
                await asyncio.sleep(0.01)

    async with asyncio.timeout(30):  # its only thread comes free by itself
        await another()
    assert ids is not None
    assert len(ids) == 2


async def test_beyond_the_places_nobody_waits(tokens: Made) -> None:
    reader = tokens(template=ENDLESS, deadline=2.0, workers=1, waiting=2)
    waiting = [asyncio.ensure_future(reason(reader, asked(CHAT))) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(NoTokens, match="too many"):
        await reader.of(asked(CHAT))
    assert {await each for each in waiting} == {"late"}
    await until(lambda: reader._places._value == 3, 30.0)


async def test_a_request_that_goes_away_leaves_its_place(tokens: Made) -> None:
    reader = tokens(template=ENDLESS, deadline=0.3, workers=1, waiting=1)
    running, queued = (asyncio.ensure_future(reader.of(asked(CHAT))) for _ in range(2))
    await asyncio.sleep(0)
    queued.cancel()
    running.cancel()
    await asyncio.wait([running, queued])
    assert running.cancelled()
    assert queued.cancelled()
    await until(lambda: reader._places._value == 2, 30.0)


async def test_a_pod_is_asked_for_models_without_files(tokens: Made) -> None:
    async with SimulatedPod() as pod:
        reader = tokens(remote=Remote(lambda: [Endpoint("pod", pod.address)]), deadline=60.0)
        found = await reader.of(asked(CHAT, model="sim"))
        assert list(found) == sim.unpack(sim.render_chat(CHAT["messages"]))
        assert list(await reader.of(asked(CHAT))) != list(found)
        with pytest.raises(NoTokens) as none:
            await reader.of(asked({**CHAT, "messages": []}, model="sim"))
        assert none.value.reason == "unsupported"


async def test_long_prompts_for_a_pod_are_read_in_a_thread(tokens: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def seen(do: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noted(given: Any) -> Any:
            threads.append(threading.current_thread().name)
            return do(given)

        return noted

    for name in ("question", "ids_in"):
        monkeypatch.setattr(f"epp.prefix.tokens.source.{name}", seen(getattr(remote, name)))
    async with SimulatedPod() as pod:
        reader = tokens(remote=Remote(lambda: [Endpoint("pod", pod.address)]), deadline=60.0)
        await reader.of(asked(CHAT, model="sim"))
        assert threads == [threading.current_thread().name] * 2
        text = "hello world " * 10_000
        assert list(await reader.of(asked({"prompt": text}, "completions", "sim"))) == sim.unpack(sim.encode(text))
        assert [name.startswith("tokens") for name in threads[2:]] == [True, True]


async def test_a_pod_that_is_away_or_silent_is_reported(tokens: Made) -> None:
    reader = tokens(remote=Remote(lambda: [Endpoint("pod", "127.0.0.1:1")]), deadline=60.0)
    assert await reason(reader, asked(CHAT, model="x")) == "failed"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        reader = tokens(remote=Remote(lambda: [Endpoint("pod", address)]), deadline=0.05)
        assert await reason(reader, asked(CHAT, model="x")) == "late"


def test_files_that_are_no_good_are_reported_with_their_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer m: .*nowhere: expected a directory"):
        load_tokenizers({"m": TokenizerFiles(str(tmp_path / "nowhere"))}, TokenCache(1000))


def test_a_model_of_the_hub_is_looked_for_in_its_cache_where_there_is_no_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"--tokenizer m: hf:org/name: expected a model on the hub or in its local cache"
    ):
        load_tokenizers({"m": TokenizerFiles("hf:org/name")}, TokenCache(1000))
    home = tmp_path / "models--org--name"
    make("qwen", home / "snapshots" / "abc")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc")
    assert load_tokenizers({"m": TokenizerFiles("hf:org/name")}, TokenCache(1000))["m"].cut


def test_flags_say_where_tokenizers_are_and_what_their_engines_were_reported() -> None:
    arguments = [
        'm=--chat-template=/t.jinja --default-chat-template-kwargs \'{"a": "x=1"}\''
        ' --reasoning-effort-map=\'{"xhigh": "max"}\''
    ]
    assert tokenizer_files(["m=/models/m", "*=hf:org/name@main"], arguments) == {
        "m": TokenizerFiles(
            "/models/m",
            chat_template="/t.jinja",
            chat_template_kwargs={"a": "x=1"},
            reasoning_effort_map={"xhigh": "max"},
        ),
        "*": TokenizerFiles("hf:org/name@main"),
    }
    strings = tokenizer_files(["org/m=d"], ["org/m=--chat-template-content-format string"])
    assert strings["org/m"].chat_template_content_format == "string"


@pytest.mark.parametrize(
    ("tokenizers", "arguments", "reported"),
    [
        (["/models/m"], [], "--tokenizer: expected MODEL=DIRECTORY"),
        (["m="], [], "--tokenizer: expected MODEL=DIRECTORY"),
        (["m=a", "m=b"], [], "--tokenizer: 'm' is given twice"),
        (["llama=a"], ["lama=--chat-template x"], "'lama' has no --tokenizer; did you mean 'llama'?"),
        (["m=a"], ["m=--chat-templates x"], "; did you mean '--chat-template'?"),
        (["m=a"], ["m=--port 1"], "'--port' does not change what a prompt becomes; expected some of --chat-template"),
        (["m=a"], ["m=--chat-template"], "--chat-template: expected a value"),
        (["m=a"], ["m=--chat-template 'x"], "expected words as a shell takes them"),
        (["m=a"], ["m=--chat-template-content-format x"], "expected auto, string or openai, got 'x'"),
        (["m=a"], [f"m=--default-chat-template-kwargs {'[' * 9_000}"], "expected a JSON object"),
        (["m=a"], ["m=--default-chat-template-kwargs [1]"], "expected a JSON object, got '[1]'"),
        (["m=a"], ["m=--reasoning-effort-map [1]"], "expected a JSON object, got '[1]'"),
        (["m=a"], ['m=--reasoning-effort-map \'{"hgih": "max"}\''], "'hgih' is no effort; did you mean 'high'?"),
        (["m=a"], ["m=--reasoning-effort-map '{\"high\": 3}'"], "'high': expected a string, got 3"),
    ],
)
def test_flags_that_are_no_good_are_refused(tokenizers: list[str], arguments: list[str], reported: str) -> None:
    with pytest.raises(ConfigError) as refused:
        tokenizer_files(tokenizers, arguments)
    assert reported in str(refused.value)
