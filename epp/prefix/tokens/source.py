"""`Tokens`: the token ids an engine will see for a request, exactly, within a deadline, off the event loop.

From the model's own tokenizer files where they are mounted (`tokenizer`), else from a pod's `/tokenize` (`remote`).
A plugin that gets `NoTokens` goes on without: the pick gets worse, never wrong.
"""

import asyncio
import json
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from jinja2 import TemplateError

from epp.documents.strict import nearest
from epp.errors import ConfigError
from epp.plugin import NoTokens, Request
from epp.pool.http import BadAnswer
from epp.prefix.tokens.cache import Ids, TokenCache
from epp.prefix.tokens.conversation import Unsupported
from epp.prefix.tokens.prompt import prompt_of
from epp.prefix.tokens.remote import Remote, ids_in, question
from epp.prefix.tokens.sandbox import TemplateTooLong
from epp.prefix.tokens.template import ContentFormat
from epp.prefix.tokens.tokenizer import ModelTokenizer, TooLate

R = TypeVar("R")

_SMALL: Final = 64 << 10
"""Bytes that are read at once; more are read in a thread."""

_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""What `reasoning_effort` may be. Source: vLLM 0.33."""
ANY_MODEL: Final = "*"
"""Key of the tokenizer for every model that has none of its own, LoRA adapters above all."""


@dataclass(frozen=True)
class TokenizerFiles:
    """Where a model's tokenizer is, and the flags of its engines beside it."""

    path: str
    """Directory with tokenizer.json and what usually lies beside it; or `hf:ORG/NAME[@REVISION]`, a model on the hub or
    in its local cache."""
    chat_template: str | None = None
    """The engine's --chat-template, a file."""
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    """The engine's flag of that name."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The engine's --default-chat-template-kwargs."""
    reasoning_effort_map: Mapping[str, str] = field(default_factory=dict)
    """The engine's flag of that name (vLLM 0.33): a request's effort -> the one that the template is given."""


class Tokens:
    """See the module. One for a process; used on its event loop; `close` it, or let it go with the process."""

    def __init__(
        self,
        tokenizers: Mapping[str, ModelTokenizer],
        pieces: TokenCache,
        *,
        remote: Remote | None = None,
        deadline: float,
        workers: int = 2,
        waiting: int = 64,
    ) -> None:
        """`deadline` in seconds; at most `workers` requests are read at once and `waiting` more wait for that."""
        self._tokenizers = tokenizers
        self._pieces = pieces
        self._remote = remote
        self._deadline = deadline
        self._pool = ThreadPoolExecutor(workers, "tokens")
        self._places = threading.BoundedSemaphore(workers + waiting)
        self._counts: dict[str, int] = {"read": 0, "no-tokenizer": 0, "late": 0, "unsupported": 0, "failed": 0}

    async def of(self, request: Request) -> Ids:
        """The ids of the request's prompt. Raises NoTokens, after the deadline at the latest."""
        try:
            ids = await self._of(request)
        except NoTokens as none:
            self._counts[none.reason] += 1
            raise
        self._counts["read"] += 1
        return ids

    def statistics(self) -> Mapping[str, float]:
        """Requests read and not read, by reason; bytes that had to be tokenized; what is remembered."""
        return {
            **{reason.replace("-", "_"): count for reason, count in self._counts.items()},
            "encoded_bytes": self._pieces.encoded,
            "pieces": len(self._pieces),
            "pieces_bytes": self._pieces.bytes,
        }

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._remote is not None:
            self._remote.close()

    async def _of(self, request: Request) -> Ids:
        tokenizer = self._tokenizers.get(request.model) or self._tokenizers.get(ANY_MODEL)
        if tokenizer is None and self._remote is None:
            raise NoTokens("no-tokenizer", f"no tokenizer for {request.model[:100]!r}")
        try:
            async with asyncio.timeout(self._deadline):
                if tokenizer is not None:
                    return await self._in_thread(self._work, tokenizer, request)
                assert self._remote is not None
                return await self._asked(self._remote, request)
        except TimeoutError:
            raise NoTokens("late", f"no ids within {self._deadline:g} s") from None
        except (TooLate, TemplateTooLong) as error:
            raise NoTokens("late", str(error)) from None
        except Unsupported as error:
            raise NoTokens("unsupported", str(error)) from None
        except (BadAnswer, OSError) as error:
            raise NoTokens("failed", f"/tokenize: {error}") from None

    async def _asked(self, remote: Remote, request: Request) -> Ids:
        """From a pod. What takes long for a large body is done in a thread, as for tokenizers of our own."""
        large = len(request.body) > _SMALL
        asked = await self._in_thread(question, request) if large else question(request)
        if not isinstance(asked, bytes):
            return asked
        page = await remote.page(asked)
        return await self._in_thread(ids_in, page) if len(page) > _SMALL else ids_in(page)

    async def _in_thread(self, do: Callable[..., R], *args: Any) -> R:
        if not self._places.acquire(blocking=False):
            raise NoTokens("late", "too many requests wait for their tokens")
        try:
            work = self._pool.submit(do, *args)
        except BaseException:
            self._places.release()
            raise
        work.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(work)  # cancelled by the deadline: not begun, it never begins

    def _work(self, tokenizer: ModelTokenizer, request: Request) -> Ids:
        """In a thread. The time given here begins with the work, so that it is never cut shorter than one piece."""
        try:
            return tokenizer.ids(prompt_of(request, tokenizer.efforts), self._deadline)
        except (Unsupported, TooLate, TemplateTooLong):
            raise
        except TemplateError:
            raise NoTokens("failed", "the chat template refused the conversation") from None  # its words quote prompts
        except Exception as error:
            raise NoTokens("failed", f"{type(error).__name__} while the prompt was read") from None


def tokenizer_files(tokenizers: Sequence[str], arguments: Sequence[str]) -> dict[str, TokenizerFiles]:
    """What the flags say: `MODEL=DIRECTORY` each, and `MODEL=FLAGS`, the engine's own as on its command line.

    Raises ConfigError with the flag, what was given and what was expected.
    """
    files = {
        model: TokenizerFiles(path)
        for model, path in _pairs("--tokenizer", tokenizers, "MODEL=DIRECTORY, or *=DIRECTORY for any model")
    }
    for model, text in _pairs("--tokenizer-args", arguments, "MODEL=FLAGS, the engine's own"):
        if model not in files:
            message = f"{model!r} has no --tokenizer{nearest(model, files)}"
            raise ConfigError("--tokenizer-args", message)
        files[model] = _with_flags(files[model], text)
    return files


def _pairs(flag: str, given: Sequence[str], expected: str) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for each in given:
        model, equals, value = each.partition("=")
        if not (model and equals and value):
            raise ConfigError(flag, f"expected {expected}, got {each[:100]!r}")
        if model in seen:
            raise ConfigError(flag, f"{model!r} is given twice")
        seen.add(model)
        yield model, value


_FLAGS: Final = {
    "--chat-template": "chat_template",
    "--chat-template-content-format": "chat_template_content_format",
    "--default-chat-template-kwargs": "chat_template_kwargs",
    "--reasoning-effort-map": "reasoning_effort_map",
}
"""The engine's flags that change what a prompt becomes."""


def _with_flags(files: TokenizerFiles, text: str) -> TokenizerFiles:
    try:
        words = [part for word in shlex.split(text) for part in _parted(word)]
    except ValueError as error:
        raise ConfigError("--tokenizer-args", f"expected words as a shell takes them: {error}") from None
    changes: dict[str, Any] = {}
    for flag, value in zip_longest(words[::2], words[1::2]):
        if flag not in _FLAGS:
            known = nearest(flag, _FLAGS) or "; expected some of " + ", ".join(_FLAGS)
            raise ConfigError("--tokenizer-args", f"{flag!r} does not change what a prompt becomes{known}")
        if value is None:
            raise ConfigError("--tokenizer-args", f"{flag}: expected a value")
        changes[_FLAGS[flag]] = _value(flag, value)
    return replace(files, **changes)


def _parted(word: str) -> Sequence[str]:
    """`--flag=value` as two words."""
    return word.split("=", 1) if word.startswith("--") else (word,)


def _value(flag: str, value: str) -> Any:
    if flag == "--chat-template-content-format" and value not in ("auto", "string", "openai"):
        raise ConfigError("--tokenizer-args", f"{flag}: expected auto, string or openai, got {value[:100]!r}")
    if flag not in ("--default-chat-template-kwargs", "--reasoning-effort-map"):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError("--tokenizer-args", f"{flag}: expected a JSON object, got {value[:100]!r}")
    if flag == "--reasoning-effort-map":
        _check_efforts(found)
    return found


def _check_efforts(found: Mapping[str, Any]) -> None:
    for effort, mapped in found.items():
        where = f"--reasoning-effort-map: {effort[:100]!r}"
        if effort not in _EFFORTS:
            known = nearest(effort, _EFFORTS) or "; expected some of " + ", ".join(_EFFORTS)
            raise ConfigError("--tokenizer-args", f"{where} is no effort{known}")
        if not isinstance(mapped, str):
            raise ConfigError("--tokenizer-args", f"{where}: expected a string, got {str(mapped)[:100]}")


def load_tokenizers(files: Mapping[str, TokenizerFiles], pieces: TokenCache) -> dict[str, ModelTokenizer]:
    """A tokenizer for each model. Raises ConfigError: the flag, the model, the file, the expectation."""
    loaded = {}
    for model, said in files.items():
        try:
            loaded[model] = _load(said, pieces)
        except ConfigError as error:
            raise ConfigError(f"--tokenizer {model}", str(error)) from error
    return loaded


def _load(said: TokenizerFiles, pieces: TokenCache) -> ModelTokenizer:
    given: ContentFormat | None = None
    if said.chat_template_content_format != "auto":
        given = said.chat_template_content_format
    return ModelTokenizer.load(
        _directory(said.path),
        pieces,
        chat_template=Path(said.chat_template) if said.chat_template else None,
        content_format=given,
        chat_template_kwargs=said.chat_template_kwargs,
        reasoning_effort_map=said.reasoning_effort_map,
    )


_WANTED: Final[Sequence[str]] = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "tekken.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)


def _directory(path: str) -> Path:
    """`path`, or the directory of a model's small files after asking the hub, or its cache, for them."""
    if not path.startswith("hf:"):
        return Path(path)
    name, _, revision = path.removeprefix("hf:").partition("@")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(path, "expected the package huggingface_hub to be installed, or a directory") from error
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(_WANTED)))
    except Exception as error:  # the hub's client has many; without a network all end here
        first = str(error).partition("\n")[0][:200]
        raise ConfigError(path, f"expected a model on the hub or in its local cache: {first}") from error
