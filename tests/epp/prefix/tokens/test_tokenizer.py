"""A model's tokenizer: exact ids, cut or not, and only new text is tokenized."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer, models, normalizers

from epp.errors import ConfigError
from epp.plugin import Request
from epp.prefix.tokens.cache import TokenCache
from epp.prefix.tokens.conversation import Unsupported
from epp.prefix.tokens.prompt import Text, prompt_of
from epp.prefix.tokens.sandbox import TemplateTooLong
from epp.prefix.tokens.tokenizer import LONGEST_PIECE, LONGEST_TEXT, LibraryPanic, ModelTokenizer, TooLate
from tests.support.prompts.bodies import PROMPTS
from tests.support.prompts.tokenizers import QWEN, STYLES, make, panicking, write

Load = Callable[[str], tuple[ModelTokenizer, Tokenizer]]
GOLDEN = Path(__file__).parent / "golden" / "vllm-0.32.json"
"""Style -> prompt -> the ids vLLM 0.32's `/tokenize` gave, or null where it refused. `tests/engine` asks it again."""


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A style's tokenizer with nothing remembered, and the library's own on the same file."""
    home = tmp_path_factory.mktemp("tokenizers")

    def loaded(style: str) -> tuple[ModelTokenizer, Tokenizer]:
        directory = home / style
        if not directory.exists():
            make(style, directory)
        tokenizer = ModelTokenizer.load(directory, TokenCache(1 << 24))
        return tokenizer, Tokenizer.from_file(str(directory / "tokenizer.json"))

    return loaded


def asked(api: str, body: dict[str, Any]) -> Request:
    return Request(id="1", model="m", api=api, body=json.dumps(body).encode())  # type: ignore[arg-type]


def ids_of(tokenizer: ModelTokenizer, api: str, body: dict[str, Any]) -> list[int]:
    return list(tokenizer.ids(prompt_of(asked(api, body)), 60.0))


@pytest.mark.parametrize("style", STYLES)
def test_ids_are_those_of_vllm(load: Load, style: str) -> None:
    tokenizer, _ = load(style)
    golden: dict[str, list[int] | None] = json.loads(GOLDEN.read_text())[style]
    found: dict[str, list[int] | None] = {}
    for name, (api, body) in PROMPTS.items():
        try:
            found[name] = ids_of(tokenizer, api, body)
        except (TemplateError, Unsupported):
            found[name] = None
    assert found == golden


@pytest.mark.parametrize("style", STYLES)
def test_only_a_tokenizer_whose_tokens_stand_alone_is_cut(load: Load, style: str) -> None:
    assert load(style)[0].cut is (style != "uncut")


@pytest.mark.parametrize("style", STYLES)
def test_any_text_gives_what_the_library_gives(load: Load, style: str) -> None:
    tokenizer, library = load(style)
    draw = random.Random(style)
    added = [token.content for token in library.get_added_tokens_decoder().values()]
    words = [
        *added[:12],
        "hello",
        " the",
        "\n\n",
        "  ",
        "\n",
        "é",
        "e\u0301",
        "你",
        "👩‍👩‍👧",
        "▁",
        "12345",
        "<|im",
        "'s",
        "word",
        "\t",
    ]
    for _ in range(300):
        text = "".join(draw.choices(words, k=draw.randrange(1, 30)))
        wanted = library.encode(text, add_special_tokens=False).ids
        assert list(tokenizer.ids(Text(text, special=False), 60.0)) == wanted, repr(text)


def chat(turns: int) -> dict[str, Any]:
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{turn} " + "What of the block and the prefix? " * 200})
        messages.append({"role": "assistant", "content": f"It is {turn} times in the cache. " * 200})
    return {"messages": messages[:-1]}


@pytest.mark.parametrize("style", [style for style in STYLES if style != "uncut"])
def test_a_conversation_s_next_turn_tokenizes_that_turn_alone(load: Load, style: str) -> None:
    directory_pieces = TokenCache(1 << 24)
    tokenizer = load(style)[0]
    tokenizer._pieces = directory_pieces
    ids_of(tokenizer, "chat", chat(9))
    first = directory_pieces.encoded
    ids = ids_of(tokenizer, "chat", chat(10))
    size = len(json.dumps(chat(10)["messages"][-2:]))
    assert first > 8 * size
    assert 0 < directory_pieces.encoded - first < 1.2 * size
    assert ids == ids_of(load(style)[0], "chat", chat(10))


def test_the_same_prompt_again_tokenizes_nothing(load: Load) -> None:
    for style in STYLES:
        tokenizer, _ = load(style)
        once = ids_of(tokenizer, "chat", chat(3))
        encoded = tokenizer._pieces.encoded
        assert ids_of(tokenizer, "chat", chat(3)) == once
        assert tokenizer._pieces.encoded == encoded


def test_what_is_remembered_is_each_tokenizer_s_own(tmp_path: Path) -> None:
    pieces = TokenCache(1 << 20)
    one = ModelTokenizer.load(make("llama", tmp_path / "llama"), pieces)
    other = ModelTokenizer.load(make("gemma", tmp_path / "gemma"), pieces)
    text = Text("hello world", special=False)
    assert one.ids(text, 9.0) != other.ids(text, 9.0)


def test_time_that_is_over_ends_the_reading_and_what_was_read_is_kept(load: Load) -> None:
    tokenizer, _ = load("llama")
    prompt = prompt_of(asked("chat", chat(3)))
    with pytest.raises(TemplateTooLong):
        tokenizer.ids(prompt, 0.0)
    text = Text("a" * 50 + "<|eot_id|>" + "b" * 50)
    with pytest.raises(TooLate):
        tokenizer.ids(text, 0.0)
    assert tokenizer._pieces.encoded == 50
    with pytest.raises(TooLate, match="characters"):
        tokenizer.ids(Text("a" * (LONGEST_TEXT + 1)), 60.0)


def test_long_pieces_are_not_tokenized_and_long_texts_of_short_ones_are(load: Load) -> None:
    tokenizer, _ = load("llama")
    for text in ("a" * (LONGEST_PIECE + 1), "你" * (LONGEST_PIECE // 3 + 1)):
        with pytest.raises(TooLate, match=f"expected at most {LONGEST_PIECE}"):
            tokenizer.ids(Text(text), 60.0)
    assert tokenizer._pieces.encoded == 0
    assert len(tokenizer.ids(Text(("hello " * 1000 + "<|eot_id|>") * 300), 60.0)) > LONGEST_PIECE // 10


ATTACK = """
import asyncio, json, resource, sys
from pathlib import Path
from epp.plugin import Request
from epp.prefix.tokens.cache import TokenCache
from epp.plugin import NoTokens
from epp.prefix.tokens.source import TokenizerFiles, Tokens, load_tokenizers

pieces = TokenCache(1 << 20)
tokens = Tokens(load_tokenizers({"m": TokenizerFiles(sys.argv[1])}, pieces), pieces, deadline=30.0)
body = json.dumps({"prompt": "What of it, hello? " * 200_000}).encode()
request = Request(id="1", model="m", api="completions", body=body)

async def ask():
    try:
        await tokens.of(request)
    except NoTokens as none:
        return none.reason

async def main():
    return await asyncio.gather(ask(), ask())

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
reasons = asyncio.run(main())
print(json.dumps([reasons, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before]))
"""


def test_prompts_of_4_mb_take_no_memory_worth_mentioning(tmp_path: Path) -> None:
    make("llama", tmp_path / "m")
    command = [sys.executable, "-c", ATTACK, str(tmp_path / "m")]
    reasons, grown = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert reasons == ["late", "late"]
    assert grown < 150_000  # KB; two that are tokenized at a time take some 900 MB


def test_a_prompt_that_begins_with_an_added_token_written_longer_is_cut_at_the_longer(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "<": 2, ">": 3}, []))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<a>", "<a>b", "b<")])
    loaded = ModelTokenizer.load(write(tmp_path / "m", tokenizer, {}, None), TokenCache(10_000))
    assert loaded.cut
    for text in ("<a>b<a>", "a<a>bb<a>", "b<<a>b<"):
        assert list(loaded.ids(Text(text), 9.0)) == tokenizer.encode(text).ids


def test_a_tokenizer_that_reads_over_its_special_tokens_is_not_cut(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "x": 2}, []))
    tokenizer.add_special_tokens([AddedToken("<a>", normalized=False)])
    directory = write(tmp_path / "m", tokenizer, {"split_special_tokens": True}, None)
    loaded = ModelTokenizer.load(directory, TokenCache(10_000))
    assert not loaded.cut
    assert list(loaded.ids(Text("<a>b"), 9.0)) == [0, 1]


def test_a_normalizer_that_joins_what_a_cut_parts_is_found_at_load(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "H": 2}, []))
    tokenizer.normalizer = normalizers.Strip()
    tokenizer.add_special_tokens([AddedToken("<a>", normalized=False)])
    loaded = ModelTokenizer.load(write(tmp_path / "m", tokenizer, {}, None), TokenCache(10_000))
    for text in (" a <a> b ", "<a> <a>a"):
        assert list(loaded.ids(Text(text), 9.0)) == tokenizer.encode(text).ids


def test_what_the_engine_was_reported_by_flags_counts(tmp_path: Path) -> None:
    directory = make("llama", tmp_path / "m")
    (tmp_path / "other.jinja").write_text(
        "{{ greeting }}{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
    )
    given = ModelTokenizer.load(
        directory,
        TokenCache(10_000),
        chat_template=tmp_path / "other.jinja",
        chat_template_kwargs={"greeting": "hello "},
    )
    plain = ModelTokenizer.load(directory, TokenCache(10_000))
    body = {"messages": [{"role": "user", "content": "world"}]}
    assert ids_of(given, "chat", body) == list(plain.ids(Text("hello world", special=False), 9.0))
    body["chat_template_kwargs"] = {"greeting": "my "}  # type: ignore[assignment]
    assert ids_of(given, "chat", body) == list(plain.ids(Text("my world", special=False), 9.0))
    strings = ModelTokenizer.load(
        directory, TokenCache(10_000), chat_template=tmp_path / "other.jinja", content_format="string"
    )
    assert ids_of(strings, "chat", body) == list(plain.ids(Text("my ", special=False), 9.0))


def test_requests_with_tools_get_the_template_for_tools(tmp_path: Path) -> None:
    directory = make("llama", tmp_path / "m")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "hello"}, {"name": "tool_use", "template": "world"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": named}))
    tool = {"type": "function", "function": {"name": "f"}}
    for as_files in (False, True):
        if as_files:
            _as_files(directory)
        tokenizer = ModelTokenizer.load(directory, TokenCache(10_000))
        plain, tools = ({"messages": [{"role": "user", "content": "x"}], **more} for more in ({}, {"tools": [tool]}))
        assert ids_of(tokenizer, "chat", plain) == list(tokenizer.ids(Text("hello", special=False), 9.0))
        assert ids_of(tokenizer, "chat", tools) == list(tokenizer.ids(Text("world", special=False), 9.0))


def _as_files(directory: Path) -> None:
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text("hello")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("world")


def test_a_chat_without_a_template_is_not_rendered(tmp_path: Path) -> None:
    directory = make("qwen", tmp_path / "m")
    (directory / "chat_template.jinja").unlink()
    tokenizer = ModelTokenizer.load(directory, TokenCache(10_000))
    with pytest.raises(Unsupported, match="no chat template"):
        ids_of(tokenizer, "chat", chat(1))
    assert ids_of(tokenizer, "completions", {"prompt": "hello"})


def test_a_last_message_that_cannot_be_continued_is_reported(tmp_path: Path) -> None:
    directory = make("qwen", tmp_path / "m")
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    (directory / "chat_template.jinja").write_text("{{ messages | length }}")
    with pytest.raises(TemplateError, match="last message"):
        ids_of(ModelTokenizer.load(directory, TokenCache(10_000)), "chat", body)
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}"
    )
    body["messages"] = [{"role": "user", "content": []}]
    with pytest.raises(Unsupported, match="no text"):
        ids_of(ModelTokenizer.load(directory, TokenCache(10_000)), "chat", body)


def _break(name: str, content: str | bytes | None) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        if content is None:
            (directory / name).unlink()
        else:
            (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (_break("tokenizer.json", None), r"tokenizer\.json: expected a fast tokenizer"),
        (_break("tokenizer.json", "{}"), r"tokenizer\.json: expected a tokenizer of the `tokenizers` library"),
        (_break("tokenizer.json", b"\xff\xfe"), r"tokenizer\.json: expected text in UTF-8"),
        (_break("tokenizer_config.json", "{"), r"tokenizer_config\.json: expected JSON"),
        (_break("tokenizer_config.json", '{"a": ' + "[" * 100_000), r"tokenizer_config\.json: expected JSON"),
        (_break("tokenizer_config.json", "[]"), r"tokenizer_config\.json: expected a JSON object"),
        (
            _break("tokenizer_config.json", '{"added_tokens_decoder": {"9": {"content": "\\ud800"}, "\u00b2": {}}}'),
            r"tokenizer_config\.json: expected tokens that are Unicode text",
        ),
        (_break("chat_template.jinja", "{% for %}"), r"chat_template\.jinja: expected a chat template in Jinja"),
        (_break("tekken.json", "{}"), r"tekken\.json: vLLM reads this with mistral-common"),
        (
            _break("config.json", '{"architectures": ["GptOssForCausalLM"]}'),
            r"config\.json: GptOssForCausalLM: .*harmony",
        ),
    ],
)
def test_files_that_are_no_good_are_refused(tmp_path: Path, change: Callable[[Path], None], reported: str) -> None:
    directory = make("qwen", tmp_path / "m")
    change(directory)
    with pytest.raises(ConfigError, match=reported):
        ModelTokenizer.load(directory, TokenCache(10_000))


def test_files_that_are_read_and_cannot_be_used_are_refused(tmp_path: Path) -> None:
    """The library raises something that is no Exception, or its own Exception."""
    panics = panicking()
    panics.add_special_tokens([AddedToken("<s>", normalized=False)])  # texts are tried where there is where to cut
    word_level = Tokenizer(models.WordLevel({"b": 0}, unk_token="[UNK]"))
    for name, tokenizer, said in (("panics", panics, "index out of bounds"), ("unknown", word_level, "Missing")):
        expected = rf"tokenizer\.json: expected a tokenizer that .* can use, it fails with .*{said}"
        with pytest.raises(ConfigError, match=expected):
            ModelTokenizer.load(write(tmp_path / name, tokenizer, {}, None), TokenCache(10_000))


def test_a_panic_of_the_library_is_an_exception(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.load(write(tmp_path / "m", panicking(), {}, None), TokenCache(10_000))
    with pytest.raises(LibraryPanic, match="index out of bounds"):
        tokenizer.ids(Text("ab"), 60.0)


def test_a_directory_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: expected a directory with tokenizer\.json"):
        ModelTokenizer.load(tmp_path / "nowhere", TokenCache(10_000))
    with pytest.raises(ConfigError, match=r"no\.jinja: expected a text file: No such file"):
        ModelTokenizer.load(make("qwen", tmp_path / "m"), TokenCache(10_000), chat_template=tmp_path / "no.jinja")


def test_templates_of_every_family_are_read_as_vllm_reads_them(load: Load) -> None:
    formats = {style: load(style)[0]._templates.of(with_tools=False)[1] for style in STYLES}  # type: ignore[union-attr]
    assert {style for style, content in formats.items() if content == "openai"} == {"gemma"}
    assert "developer" not in QWEN
