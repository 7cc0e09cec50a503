"""The ids we make beside those of a real vLLM, for every awkward prompt and every family of tokenizers.

vLLM's own renderer answers `/tokenize` and the render endpoints without an engine behind it, so all families are served
at once. `UPDATE=1` writes what it said to the file that the unit tests are held to.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from jinja2 import TemplateError

from epp.plugin import Request
from epp.prefix.tokens.cache import TokenCache
from epp.prefix.tokens.conversation import Unsupported
from epp.prefix.tokens.prompt import prompt_of
from epp.prefix.tokens.tokenizer import ModelTokenizer
from tests.support.prompts.bodies import ANTHROPIC, PROMPTS, USER
from tests.support.prompts.tokenizers import STYLES, make
from tooling.laptop.ports import free_ports
from tooling.laptop.processes import Processes

pytestmark = pytest.mark.asyncio(loop_scope="session")

GOLDEN = Path(__file__).parents[1] / "epp" / "prefix" / "tokens" / "golden" / "vllm-0.32.json"
START_SECONDS = 900.0
# `vllm launch render`, whose command the CPU build of vLLM lacks.
RENDER = """
from vllm.entrypoints.cli.launch import LaunchSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
import sys
parser = FlexibleArgumentParser()
LaunchSubcommand().subparser_init(parser.add_subparsers())
LaunchSubcommand.cmd(parser.parse_args(["launch", "render", *sys.argv[1:]]))
"""
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 2048,
    "max_position_embeddings": 16384,
}
SAID_OTHERWISE: dict[str, tuple[str, dict[str, Any]]] = {
    "reasoning": (
        "chat",
        {
            "messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": "hm"}],
            "add_generation_prompt": False,
        },
    ),
    "effort": ("chat", {"messages": [USER], "reasoning_effort": "none"}),
    "documents": ("chat", {"messages": [USER], "documents": [{"title": "a", "text": "b"}]}),
    "ids": ("completions", {"prompt": [5, 6, 7]}),
    "ids in an array": ("completions", {"prompt": [[5, 6, 7]]}),
}
"""What `/tokenize` cannot be asked."""

RENDERED = {
    "chat": "/v1/chat/completions/render",
    "completions": "/v1/completions/render",
    "messages": "/v1/messages/render",
}

Renderers = dict[str, tuple[str, ModelTokenizer]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def renderers(python: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Renderers]:
    """Style -> vLLM's URL, our tokenizer on the same files."""
    home = tmp_path_factory.mktemp("renderers")
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONPATH": ""}
    found: Renderers = {}
    async with Processes(home) as processes, aiohttp.ClientSession() as http:
        for style, port in zip(STYLES, free_ports(len(STYLES)), strict=True):
            directory = make(style, home / style)
            (directory / "config.json").write_text(json.dumps(MODEL))
            flags = ("--served-model-name", style, "--host", "127.0.0.1", "--port", str(port))
            await processes.start(style, [str(python), "-c", RENDER, str(directory), *flags], quiet, children=True)
            found[style] = f"http://127.0.0.1:{port}", ModelTokenizer.load(directory, TokenCache(1 << 24))
        async with asyncio.timeout(START_SECONDS):
            for url, _ in found.values():
                while not await answers(http, url):
                    assert not (ended := processes.ended()), ended
                    await asyncio.sleep(0.2)
        yield found


async def answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/health") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def asked(url: str, body: dict[str, Any]) -> Any:
    """vLLM's answer, or None where it refuses."""
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
        return await answer.json() if answer.status == 200 else None


def ours(tokenizer: ModelTokenizer, api: Any, body: dict[str, Any]) -> list[int] | None:
    request = Request(id="1", model="m", api=api, body=json.dumps(body).encode())
    try:
        return list(tokenizer.ids(prompt_of(request), 60.0))
    except (TemplateError, Unsupported):
        return None


async def test_every_prompt_has_the_ids_of_tokenize(renderers: Renderers) -> None:
    theirs: dict[str, dict[str, list[int] | None]] = {}
    for style, (url, _) in renderers.items():
        theirs[style] = {}
        for name, (_, body) in PROMPTS.items():
            plain = {key: value for key, value in body.items() if key != "tool_choice"}
            if isinstance(plain.get("prompt"), list):
                plain["prompt"] = plain["prompt"][0]
            answer = await asked(f"{url}/tokenize", {"model": style, **plain})
            theirs[style][name] = None if answer is None else answer["tokens"]
    if os.environ.get("UPDATE"):
        lines = (
            f'"{style}": {{\n'
            + ",\n".join(f"  {json.dumps(n)}: {json.dumps(v, separators=(',', ':'))}" for n, v in ids.items())
            + "\n}"
            for style, ids in theirs.items()
        )
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert theirs == json.loads(GOLDEN.read_text())
    for style, (_, tokenizer) in renderers.items():
        assert {name: ours(tokenizer, api, body) for name, (api, body) in PROMPTS.items()} == theirs[style]


async def test_requests_themselves_become_the_same_ids(renderers: Renderers) -> None:
    """By the endpoints that render a whole request, where more fields count than `/tokenize` has."""
    for style, (url, tokenizer) in renderers.items():
        anthropic = {name: ("messages", {**body, "max_tokens": 4096}) for name, body in ANTHROPIC.items()}
        for name, (api, body) in {**PROMPTS, **SAID_OTHERWISE, **anthropic}.items():
            choice = {"tool_choice": "none"} if body.get("tools") and api == "chat" else {}  # no tool parser runs here
            answer = await asked(f"{url}{RENDERED[api]}", {"model": style, **body, **choice})
            if answer is None:  # refused, whatever we make of it
                continue
            found = answer[0] if isinstance(answer, list) else answer
            assert ours(tokenizer, api, body) == found["token_ids"], (style, name)
