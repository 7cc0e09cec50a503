"""One model's tokenizer, from its files: text to exact ids, and only the text that was not seen before is tokenized.

Text is cut at special tokens, and the pieces between them are remembered. That is exact where a tokenizer reads the
pieces one by one itself, which Hugging Face's do: added tokens are taken out of the raw text first. Two things could
make it inexact, so both are met: a piece that is not the first is always read behind a special token (a blank that is
put before the first word only would else appear before every piece), and a tokenizer whose added tokens reach into
their neighbourhood (whole words only) is not cut at all. What is left is tried out when the files are loaded: cut and
uncut must give equal ids on a set of awkward texts, or this tokenizer is not cut.
"""

import json
import os
import re
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from jinja2 import TemplateError

from epp.errors import ConfigError
from epp.prefix.tokens.cache import Ids, TokenCache, key_of
from epp.prefix.tokens.conversation import Unsupported, conversation, tool_list
from epp.prefix.tokens.prompt import Chat, Prompt, Text
from epp.prefix.tokens.template import ChatTemplate, ContentFormat

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time here: its pool of threads would only wait
from tokenizers import AddedToken, Encoding, Tokenizer

LONGEST_TEXT: Final = 4 << 20
"""Characters of one rendered prompt."""
LONGEST_PIECE: Final = 1 << 20
"""Bytes of text that are tokenized at once; a token takes some 300 bytes meanwhile, and a byte may be one."""
_MOST_FILE: Final = 256 << 20
"""Bytes of a tokenizer.json. The largest in use have some 35 MB."""
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that a template may name, as in tokenizer_config.json."""
_OWN_RENDERERS: Final = {
    "GptOssForCausalLM": "harmony",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "DeepseekV41ForCausalLM": "deepseek_v41",
    "KimiK3ForConditionalGeneration": "kimi_k3",
    "MoonshotKimiaForCausalLM": "kimi_audio",
    "InklingForCausalLM": "inkling",
}
"""Architecture -> the renderer of its own that vLLM 0.33 has for it, instead of a chat template."""
_TRIALS: Final = (
    "",
    "Hello, world",
    " leading blank",
    "trailing blank ",
    "\n\n",
    "two  blanks\tand\ttabs\r\n",
    "Grüße, 你好 👩‍👩‍👧 e\u0301 \u00a0 ﬁ ½",
    "\u2581metaspace \ufeffmark \u200bzero",
    "x = {'a': [1, 22, 333]}  # 1234567890",
    "don't I'LL we've",
    "<",
    "<|",
    "[INST",
    "\x00\x07",
)
"""Texts on which cut and uncut are compared."""


class TooLate(Exception):
    """The time given was over before all was read. What was read is remembered."""


class LibraryPanic(Exception):
    """The `tokenizers` library met what its authors thought could not be. Its own class for that is no Exception."""


class ModelTokenizer:
    """Exact ids as the engine makes them from the same files. Thread-safe.

    Differences that files cannot show (`--chat-template`, `--default-chat-template-kwargs` of the engine) are the
    parameters of `load`; `efforts`, its --reasoning-effort-map, is for `prompt_of`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: "ChatTemplates | None",
        named: Mapping[str, str],
        defaults: Mapping[str, Any],
        pieces: TokenCache,
        efforts: Mapping[str, str],
    ) -> None:
        self.efforts = efforts
        self._tokenizer = tokenizer
        self._templates = template
        self._named = named
        self._defaults = defaults
        self._pieces = pieces
        self._seed = os.urandom(16)
        self._head, self._tail = _around(tokenizer)
        self._cuts = _cuts(tokenizer)
        self._ids = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
        self._anchor = next(iter(self._cuts[1]), "") if self._cuts else ""
        if self._cuts and not self._is_exact():
            self._cuts = None

    @classmethod
    def load(
        cls,
        directory: Path,
        pieces: TokenCache,
        *,
        chat_template: Path | None = None,
        content_format: ContentFormat | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort_map: Mapping[str, str] | None = None,
    ) -> "ModelTokenizer":
        """From a directory with tokenizer.json and what usually lies beside it. Takes seconds for a large vocabulary.

        `chat_template`, `content_format`, `chat_template_kwargs` and `reasoning_effort_map` are what the engine was
        given with flags of such names. Raises ConfigError with the file and what was expected in it.
        """
        if not directory.is_dir():
            raise ConfigError(str(directory), "expected a directory with tokenizer.json and tokenizer_config.json")
        if found := sorted(
            path.name for path in (*directory.glob("tekken.json"), *directory.glob("tokenizer.model.v*"))
        ):
            raise ConfigError(
                str(directory / found[0]), "vLLM reads this with mistral-common; expected tokenizer.json alone"
            )
        architectures = _json(directory / "config.json", optional=True).get("architectures") or ()
        for name in architectures if isinstance(architectures, list) else ():
            if isinstance(name, str) and name in _OWN_RENDERERS:
                what = f"{name}: vLLM renders it with {_OWN_RENDERERS[name]}, not with a chat template"
                raise ConfigError(str(directory / "config.json"), f"{what}; expected another model")
        settings = _json(directory / "tokenizer_config.json", optional=True)
        if "added_tokens_decoder" not in settings:  # newer files say all in one place
            settings |= _json(directory / "special_tokens_map.json", optional=True)
        with _refused(directory / "tokenizer.json") as path:
            tokenizer = _read_tokenizer(path)
            try:
                named = _complete(tokenizer, settings)
            except ValueError as error:  # half a surrogate pair is text in JSON, and none for the library
                where = directory / "tokenizer_config.json"
                raise ConfigError(str(where), f"expected tokens that are Unicode text: {str(error)[:200]}") from None
            templates = ChatTemplates.load(directory, settings, chat_template, content_format)
            return cls(tokenizer, templates, named, chat_template_kwargs or {}, pieces, reasoning_effort_map or {})

    @property
    def cut(self) -> bool:
        """Whether text is cut at special tokens; else every prompt is tokenized from its beginning."""
        return self._cuts is not None

    def ids(self, prompt: Prompt, seconds: float) -> Ids:
        """The prompt's ids. Raises Unsupported, TooLate, TemplateTooLong, TemplateError.

        Rendering ends when `seconds` are over, tokenizing after the piece at which they are.
        """
        until = time.monotonic() + seconds
        if isinstance(prompt, Text):
            return self._read(prompt.text, prompt.special, until)
        if isinstance(prompt, Chat):
            return self._read(self.render(prompt, seconds), prompt.special, until)
        return prompt

    def render(self, chat: Chat, seconds: float) -> str:
        """The conversation as the template writes it. Raises as `ids`."""
        if self._templates is None:
            raise Unsupported("a chat, and the tokenizer has no chat template")
        template, content = self._templates.of(with_tools=chat.tools is not None)
        messages = conversation(chat.messages, parts=content == "openai", developer=template.knows_developer)
        mark = _leave_open(messages) if chat.go_on else ""
        values = {
            **self._named,
            **self._defaults,
            **chat.variables,
            "messages": messages,
            "tools": None if chat.tools is None else tool_list(chat.tools),
            "documents": chat.variables.get("documents", self._defaults.get("documents")),
            "add_generation_prompt": chat.answer,
        }
        text = template.render(values, seconds, LONGEST_TEXT)
        return _cut_open(text, mark) if mark else text

    # --- text to ids --------------------------------------------------------------------------------------------

    def _read(self, text: str, special: bool, until: float) -> Ids:
        if len(text) > LONGEST_TEXT:
            raise TooLate(f"a text of {len(text)} characters; expected at most {LONGEST_TEXT}")
        if self._cuts is None:
            return self._known(f"{int(special)}{text}", lambda: _encode(self._tokenizer, text, special))
        ids = array("I", self._head if special else ())
        for number, piece, first in self._walk(text, self._cuts):
            if piece:
                ids.extend(self._piece(piece, first))
                if time.monotonic() > until:
                    raise TooLate("the time was over")
            if number is not None:
                ids.append(number)
        ids.extend(self._tail if special else ())
        return ids

    def _walk(
        self, text: str, cuts: "tuple[re.Pattern[str], frozenset[str]]"
    ) -> Iterator[tuple[int | None, str, bool]]:
        """(special token behind the piece, or None at the end; the piece; whether it is the first)."""
        pattern, tokens = cuts
        at, first = 0, True
        for found in pattern.finditer(text):
            if (token := found[0]) in tokens:
                yield self._ids[token], text[at : found.start()], first
                at, first = found.end(), False
        yield None, text[at:], first

    def _piece(self, piece: str, first: bool) -> Ids:
        return self._known(f"{int(first)}{piece}", lambda: self._encode(piece, first))

    def _known(self, text: str, encode: Callable[[], list[int]]) -> Ids:
        key = key_of(self._seed, text)
        if (ids := self._pieces.get(key)) is None:
            size = len(text.encode("utf-8", "surrogatepass")) - 1
            if size > LONGEST_PIECE:
                raise TooLate(f"a text of {size} bytes without a special token in it; expected at most {LONGEST_PIECE}")
            ids = array("I", encode())
            self._pieces.put(key, ids, size)
        return ids

    def _encode(self, piece: str, first: bool) -> list[int]:
        if first:
            return _encode(self._tokenizer, piece)
        return _encode(self._tokenizer, self._anchor + piece)[1:]

    def _is_exact(self) -> bool:
        """Whether cut and uncut agree on the trials, alone and around special tokens."""
        assert self._cuts
        tokens = sorted(self._cuts[1])[:6]
        texts = [*_TRIALS, *(f"{a}{token}{b}" for token in tokens for a in _TRIALS for b in _TRIALS[:5])]
        texts.append("".join(f"{trial}{tokens[i % len(tokens)]}" for i, trial in enumerate(_TRIALS)))
        texts.append("".join(self._ids) + "".join(reversed(self._ids)))
        for text in texts:
            whole = _encode(self._tokenizer, text)
            cut: list[int] = []
            for number, piece, first in self._walk(text, self._cuts):
                cut += self._encode(piece, first) if piece else ()  # never through what is remembered
                cut += () if number is None else (number,)
            if whole != cut or whole != self._tokenizer.encode(text, add_special_tokens=False).ids:
                return False
            if _encode(self._tokenizer, text, True) != [*self._head, *whole, *self._tail]:
                return False
        return True


def _encode(tokenizer: Tokenizer, text: str, special: bool = False) -> list[int]:
    """In a batch of one: that way, and not with `encode`, other threads run meanwhile. Raises LibraryPanic."""
    try:
        encodings: list[Encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=special)
    except BaseException as error:
        if _is_panic(error):
            raise LibraryPanic(str(error)) from None
        raise
    found: list[int] = encodings[0].ids
    return found


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids put before and behind a text where special tokens are added."""
    bare, full = _encode(tokenizer, "a"), _encode(tokenizer, "a", True)
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def _cuts(tokenizer: Tokenizer) -> tuple[re.Pattern[str], frozenset[str]] | None:
    """What finds added tokens in raw text as the tokenizer does, and at which of them to cut; None: cut nowhere."""
    raw = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.normalized and token.content]
    tokens = frozenset(token.content for token in raw if not (token.lstrip or token.rstrip))
    if not tokens or tokenizer.encode_special_tokens or any(token.single_word for token in raw):
        return None
    longest_first = sorted((token.content for token in raw), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))), tokens


# --- a message left open --------------------------------------------------------------------------------------------

_MARK: Final = "\ue000warmpath-continues-here\ue001"


def _leave_open(messages: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's text, and return that text. Raises Unsupported if it has none."""
    last = messages[-1]
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = f"{content}{_MARK} "
        return content or " "
    for part in reversed(content or ()):
        if "text" in part:
            text: str = part["text"]
            part["text"] = f"{text}{_MARK} "
            return text or " "
    raise Unsupported("continue_final_message, and the last message has no text")


def _cut_open(text: str, last: str) -> str:
    """The text up to the mark. Where the template trims messages, the end of this one is trimmed too."""
    at = text.rfind(_MARK)
    if at < 0 or last.strip() not in text:
        raise TemplateError("continue_final_message, and the template does not show the last message as it is")
    return text[:at] if text.startswith(" ", at + len(_MARK)) else text[:at].rstrip()


# --- files ----------------------------------------------------------------------------------------------------------


class ChatTemplates:
    """The templates of one model: the usual one, and perhaps one for requests with tools."""

    def __init__(self, usual: ChatTemplate, tools: ChatTemplate, given: ContentFormat | None) -> None:
        self._usual, self._tools, self._given = usual, tools, given

    def of(self, *, with_tools: bool) -> tuple[ChatTemplate, ContentFormat]:
        template = self._tools if with_tools else self._usual
        return template, self._given or template.content_format

    @classmethod
    def load(
        cls, directory: Path, settings: Mapping[str, Any], given: Path | None, content: ContentFormat | None
    ) -> "ChatTemplates | None":
        """As vLLM looks for them: the file given, chat_template.jinja and its kin, tokenizer_config.json."""
        if given is not None:
            template = _template(_text(given), given)
            return cls(template, template, content)
        where = directory / "tokenizer_config.json"
        sources: dict[str, tuple[str, Path]] = {}
        said = settings.get("chat_template")
        if isinstance(said, str):
            sources["default"] = said, where
        elif isinstance(said, list):
            for each in said:
                if isinstance(each, dict) and isinstance(each.get("template"), str):
                    sources[str(each.get("name"))] = each["template"], where
        files = {"default": directory / "chat_template.jinja"} if (directory / "chat_template.jinja").is_file() else {}
        files |= {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
        if files:
            sources = {name: (_text(path), path) for name, path in files.items()}
        if "default" not in sources:
            return None
        usual = _template(*sources["default"])
        return cls(usual, _template(*sources["tool_use"]) if "tool_use" in sources else usual, content)


def _template(source: str, where: Path) -> ChatTemplate:
    try:
        return ChatTemplate(source)
    except (TemplateError, RecursionError) as error:
        raise ConfigError(str(where), f"expected a chat template in Jinja: {type(error).__name__}: {error}") from error


@contextmanager
def _refused(path: Path) -> Iterator[Path]:
    """What the library fails at when it is used is as wrong as what it does not read: ConfigError."""
    try:
        yield path
    except BaseException as error:
        if type(error) in (Exception, LibraryPanic) or _is_panic(error):  # its own class for all else is Exception
            expected = "expected a tokenizer that the `tokenizers` library can use"
            raise ConfigError(str(path), f"{expected}, it fails with {str(error)[:200]!r}") from None
        raise


def _is_panic(error: BaseException) -> bool:
    """The class, made by pyo3, cannot be imported, and each library has one of its own."""
    return type(error).__name__ == "PanicException"


def _read_tokenizer(path: Path) -> Tokenizer:
    text = _text(path, "a fast tokenizer, as `save_pretrained` of transformers writes it")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library's own class for everything is Exception
        raise ConfigError(str(path), f"expected a tokenizer of the `tokenizers` library: {str(error)[:200]}") from error
    tokenizer.no_truncation()  # the engine refuses what is too long, it does not shorten it
    tokenizer.no_padding()
    return tokenizer


def _complete(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> dict[str, str]:
    """Do to the tokenizer what its configuration adds to the file, and return the special tokens by name.

    `add_bos_token` and `add_eos_token` do nothing beside a tokenizer.json: what it puts around a text is what counts.
    """
    named = {key: found for key in _NAMED if (found := _content(settings.get(key)))}
    there = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    listed = settings.get("added_tokens_decoder")
    decoder = listed if isinstance(listed, dict) else {}
    for number in sorted((each for each in decoder if str(each).isdecimal()), key=int):
        if isinstance(decoder[number], dict) and repr(token := _added(decoder[number])) not in there:
            tokenizer.add_tokens([token])
    extra = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or ()
    contents = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for content in (*named.values(), *(map(_content, extra) if isinstance(extra, list) else ())):
        if content and content not in contents:
            tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False)])
    tokenizer.encode_special_tokens = settings.get("split_special_tokens") is True
    return named


def _content(token: Any) -> str:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


def _added(said: Mapping[str, Any]) -> AddedToken:
    flags = {flag: bool(said[flag]) for flag in ("lstrip", "rstrip", "normalized", "single_word") if flag in said}
    return AddedToken(_content(said), special=bool(said.get("special")), **flags)


def _json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        found = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), f"expected JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(str(path), "expected a JSON object")
    return found


def _text(path: Path, expected: str = "a text file") -> str:
    try:
        if path.stat().st_size > _MOST_FILE:
            raise ConfigError(str(path), f"more than {_MOST_FILE} bytes")
        return path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(str(path), f"expected {expected}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), "expected text in UTF-8") from error
