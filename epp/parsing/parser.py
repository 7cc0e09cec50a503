"""`Parser`: a raw HTTP request to `Request`, read once; or not read (api `other`) and routed by load alone."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from posixpath import normpath
from typing import Final, NamedTuple, Protocol
from urllib.parse import unquote

import msgspec
from msgspec import Raw

from epp import protocol
from epp.errors import UNREADABLE, BadRequest, UnsupportedMedia
from epp.parsing import grpc
from epp.parsing.body import (
    ABSENT,
    Body,
    Chat,
    ChatBatch,
    Completion,
    Embeddings,
    Generate,
    Messages,
    NativeGenerate,
    Pooling,
    Responses,
    decode,
    model_in,
)
from epp.parsing.media import condensed, shows_media, uploaded_tokens
from epp.parsing.request import NO_OBJECTIVE, Objective, RawRequest, Request, Slo
from epp.parsing.rewrite import rewrite_model

_MAX_ID: Final = 256
"""Longest request id taken from a client, in characters."""


class _Format(NamedTuple):
    end: str
    """Of the path."""
    decoder: msgspec.json.Decoder[Body]
    unwrapped: Callable[[bytes], bytes] | None = None
    """Of a gRPC method: what makes JSON of the body."""


_CHAT: Final[msgspec.json.Decoder[Body]] = msgspec.json.Decoder(Chat)
_COMPLETION: Final[msgspec.json.Decoder[Body]] = msgspec.json.Decoder(Completion)
_RESPONSES: Final[msgspec.json.Decoder[Body]] = msgspec.json.Decoder(Responses)
_POOLING: Final[msgspec.json.Decoder[Body]] = msgspec.json.Decoder(Pooling)
_NATIVE: Final[msgspec.json.Decoder[Body]] = msgspec.json.Decoder(NativeGenerate)

PARSERS: Final[Mapping[str, tuple[_Format, ...]]] = {
    "openai-parser": (
        _Format("/v1/chat/completions", _CHAT),
        _Format("/v1/chat/completions/batch", msgspec.json.Decoder(ChatBatch)),
        _Format("/v2/chat", _CHAT),
        _Format("/v1/completions", _COMPLETION),
        _Format("/v1/responses", _RESPONSES),
        _Format("/v1/embeddings", msgspec.json.Decoder(Embeddings)),
        _Format("/v1/chat/completions/render", _CHAT),
        _Format("/v1/completions/render", _COMPLETION),
        _Format("/rerank", _POOLING),
        _Format("/score", _POOLING),
        _Format("/classify", _POOLING),
        _Format("/pooling", _POOLING),
        _Format("/generative_scoring", _POOLING),
        _Format("/v2/embed", _POOLING),
        _Format("/v1/decisions", _POOLING),
        _Format("/v1/systemone", _POOLING),
    ),
    "anthropic-parser": (_Format("/v1/messages", msgspec.json.Decoder(Messages)),),
    "vllmhttp-parser": (_Format("/inference/v1/generate", msgspec.json.Decoder(Generate)),),
    "sglanghttp-parser": (_Format("/generate", _NATIVE),),
    "vllmgrpc-parser": (
        _Format("vllm.grpc.engine.VllmEngine/Generate", _NATIVE, grpc.generate),
        _Format("vllm.grpc.engine.VllmEngine/Embed", _POOLING, grpc.embed),
    ),
    "vertexai-parser": (
        _Format("PredictionService/ChatCompletions", _CHAT, grpc.http_body),
        _Format("PredictionService/StreamRawPredict", _RESPONSES, grpc.http_body),
        _Format("PredictionService/RawPredict", _RESPONSES, grpc.http_body),
    ),
    "passthrough-parser": (),
}
"""Name, as llm-d has it -> the formats it reads, by the ends of their paths. The last takes any other path as it is."""
_USUAL: Final = ("openai-parser", "anthropic-parser", "vllmhttp-parser", "passthrough-parser")
"""Those that read where a configuration names none. Source: llm-d-router v0.10."""


class Rules(Protocol):
    """What the pool's own objects say about a request."""

    @property
    def rewrites(self) -> bool:
        """Whether `rewrite` may name another model than it is given."""

    def rewrite(self, model: str) -> str:
        """The model to ask the endpoint for, instead of `model`."""

    def objective(self, name: str) -> Objective:
        """The InferenceObjective of this name, or NO_OBJECTIVE."""


def new_id() -> str:
    """A request id for a request that brings none."""
    return os.urandom(16).hex()


class Parser:
    """Raw request to `Request`. `tokens(model, nbytes)` estimates tokens; `new_id()` names requests without a name.

    `trusted`: control headers count; else there is no objective, so priority 0, and no SLO.
    """

    def __init__(
        self,
        rules: Rules,
        tokens: Callable[[str, int], int],
        new_id: Callable[[], str] = new_id,
        *,
        trusted: bool,
    ) -> None:
        self._rules = rules
        self._trusted = trusted
        self._tokens = tokens
        self._new_id = new_id
        self.use(_USUAL)

    def use(self, names: Sequence[str]) -> None:
        """Read with these of `PARSERS` from now on, the first that knows a path; none: with the usual ones.

        Without `passthrough-parser` what is posted to any other path is refused.
        """
        names = names or _USUAL
        self._names = names
        formats = [each for name in names for each in PARSERS[name]]
        self._by_path = {each.end: each for each in reversed(formats)}
        self._by_end = sorted(formats, key=lambda each: len(each.end), reverse=True)
        self._passes = "passthrough-parser" in names

    def parse(self, raw: RawRequest) -> tuple[Request, bytes | None]:
        """The request, and the body to forward where it differs from the one that came (model rewritten), else None.

        A path we do not know, a method other than POST and a body that is compressed give api `other`: it is routed by
        load alone, and of its body only the model is read, if it is JSON and names one. Raises for a body of a known
        path BadRequest if it is wrong, UnsupportedMedia if its coding is unknown, or any while models are rewritten;
        BadRequest for a path that `use` leaves to nobody and for an SLO that is no number; never another error.
        """
        found = self._format(raw)
        opaque = "" if found is None else why_opaque(raw) if found.unwrapped is None else grpc.why_opaque(raw.body)
        if opaque and self._rules.rewrites:
            why = "models are rewritten here, for which the body has to be read"
            raise UnsupportedMedia(f"{opaque}; expected JSON without a content-encoding: {why}")
        if found is None or opaque:
            return self._other(raw, opaque)
        body = raw.body if found.unwrapped is None else found.unwrapped(raw.body)
        fields = decode(found.decoder, body)
        asked = fields.model_name()
        parts = fields.parts()
        prompt = b"".join(parts)
        model = self._rules.rewrite(asked) if asked else asked
        if model != asked and body is not raw.body:
            raise UnsupportedMedia("model: it is rewritten here, which cannot be done in a gRPC request; expected JSON")
        priority, slo = self._wanted(raw.headers)
        media = condensed(prompt, model) if prompt.find(b"[", 1) > 0 and shows_media(fields.conversation()) else None
        if media is None:
            media_tokens, tokens = 0, fields.prompt_tokens(prompt) or self._tokens(model, len(prompt))
        else:
            parts, (prompt, media_tokens, nbytes) = (), media
            tokens = media_tokens + self._tokens(model, len(prompt) - nbytes)
        request = Request(
            id=self._id(raw.headers),
            model=model,
            asked=asked,
            api=fields.api,
            whole=found.end not in protocol.DIVIDED,
            prompt=prompt,
            parts=parts,
            tokens=tokens,
            media_tokens=media_tokens,
            stream=fields.streams(),
            max_tokens=fields.answer_tokens(),
            previous=fields.previous(),
            cache_key=fields.cache_key(),
            answers=fields.answers(),
            salt=fields.salt(),
            priority=priority,
            slo=slo,
            headers=raw.headers,
            body=body,
            sees_answer=raw.sees_answer,
            watched=raw.watched,
            watchable=raw.watchable,
        )
        return request, None if model == asked else rewrite_model(raw.body, model)

    def _format(self, raw: RawRequest) -> _Format | None:
        """The format by the path's end (gateways and clients put prefixes before it); None = not one of ours."""
        if raw.method != "POST":
            return None if raw.method or raw.path else _by_body(raw.body, self._by_path)
        if (found := self._by_path.get(raw.path)) is not None:
            return found
        path = _plain(raw.path)
        for each in self._by_end:
            if path.endswith(each.end):
                return each
        if path.endswith(_ANY_FORMAT) and (found := _by_body(raw.body, self._by_path)) is not None:
            return found._replace(end=_ANY_FORMAT)
        if not self._passes:
            ends = ", ".join(each.end for each in self._by_end)
            raise BadRequest(f"path: {path[:60]!r} is read by none of {', '.join(self._names)}; expected one of {ends}")
        return None

    def _other(self, raw: RawRequest, opaque: str) -> tuple[Request, bytes | None]:
        asked = model_in(raw.body) if raw.method == "POST" and not opaque else ""
        model = self._rules.rewrite(asked) if asked else asked
        priority, slo = self._wanted(raw.headers)
        named = _KEPT.search(_plain(raw.path)) if "/responses/" in raw.path else None
        request = Request(
            id=self._id(raw.headers),
            model=model,
            asked=asked,
            api="other",
            whole=True,
            tokens=uploaded_tokens(_plain(raw.path), raw.headers.get("content-type", ""), raw.body),
            priority=priority,
            slo=slo,
            headers=raw.headers,
            body=raw.body,
            previous="" if named is None else named[1],
            sees_answer=raw.sees_answer,
            watched=raw.watched,
            opaque=opaque,
        )
        return request, None if model == asked else rewrite_model(raw.body, model)

    def _id(self, headers: Mapping[str, str]) -> str:
        given = headers.get(protocol.REQUEST_ID, "")
        return given if 0 < len(given) <= _MAX_ID else self._new_id()

    def _wanted(self, headers: Mapping[str, str]) -> tuple[int, Slo | None]:
        """Priority, and within what it is to be served: each part as its header says, else as its objective does."""
        if not self._trusted:
            return 0, None
        name = _first(headers, protocol.OBJECTIVE)
        found = self._rules.objective(name) if name else NO_OBJECTIVE
        ttft, tpot = _first(headers, protocol.SLO_TTFT_MS), _first(headers, protocol.SLO_TPOT_MS)
        if not (ttft or tpot):
            return found.priority, found.slo
        usual = found.slo or Slo()
        slo = Slo(
            _seconds(ttft, protocol.SLO_TTFT_MS[0]) if ttft else usual.ttft,
            _seconds(tpot, protocol.SLO_TPOT_MS[0]) if tpot else usual.tpot,
            "" if found is NO_OBJECTIVE else name,
        )
        return found.priority, None if slo.ttft is slo.tpot is None else slo


def _first(headers: Mapping[str, str], names: tuple[str, str]) -> str:
    newer, older = names
    return headers[newer] if newer in headers else headers.get(older, "")


def _seconds(text: str, header: str) -> float | None:
    """Of an SLO; None: 0, which asks for nothing."""
    try:
        return milliseconds(text)
    except ValueError as error:
        raise BadRequest(f"{header}: {error}", param=header) from None


_LONGEST: Final = 1e9
"""Milliseconds of an SLO: eleven days."""


def milliseconds(text: str) -> float | None:
    """Seconds of so many milliseconds; None: 0. ValueError says what was expected."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _LONGEST:
        raise ValueError(f"got {text[:60]!r}; expected milliseconds, 0 to {_LONGEST:g}")
    return value / 1000 or None


_ANY_FORMAT: Final = "/invocations"
"""Path of vLLM at which it tells the format by the body (SageMaker's)."""


def asks_for_models(raw: RawRequest) -> bool:
    """Whether it asks for the list of all models."""
    return raw.method == "GET" and "models" in raw.path and _plain(raw.path).endswith("/v1/models")


_KEPT: Final = re.compile(r"/v1/responses/([^/]+)(?:/cancel|/input_items)?$")
"""A path of an answer that an engine keeps, or of what belongs to it."""
_NOT_KEPT: Final = re.compile(rb'"store"[ \t\r\n]{0,16}:[ \t\r\n]{0,16}false')


def is_kept(method: str, path: str, body: bytes) -> bool:
    """Whether the answer is one of `/v1/responses` that the engine may keep: a later request may name it."""
    if method != "POST" or "responses" not in path or not _plain(path).endswith("/v1/responses"):
        return False
    return _NOT_KEPT.search(body) is None


def _plain(target: str) -> str:
    """A request's path as servers see it that unquote it (once), join slashes or take dot segments out."""
    path = target.partition("?")[0].partition("#")[0]
    if "%" in path:
        path = unquote(path)
    return normpath(path) if path else path


class _Fields(msgspec.Struct):
    messages: Raw = ABSENT
    prompt: Raw = ABSENT


_FIELDS: Final = msgspec.json.Decoder(_Fields)


def _by_body(body: bytes, by_path: Mapping[str, _Format]) -> _Format | None:
    """The format where a gateway (NGINX Gateway Fabric) gives neither method nor path: by a field it must have."""
    try:
        fields = _FIELDS.decode(body)
    except UNREADABLE:
        return None
    for value, path in ((fields.messages, "/v1/chat/completions"), (fields.prompt, "/v1/completions")):
        if value is not ABSENT:
            return by_path.get(path)
    return None


CODINGS: Final = frozenset(
    (
        "aes128gcm",
        "br",
        "compress",
        "dcb",
        "dcz",
        "deflate",
        "exi",
        "gzip",
        "pack200-gzip",
        "x-compress",
        "x-gzip",
        "zstd",
    )
)
"""Content codings of IANA's registry (and RFC 9110's aliases), after which a body can be read by others only."""
_BEFORE_JSON: Final = b" \t\r\n\x00\xef\xbb\xbf\xff\xfe"
"""Blanks, byte order marks and halves of wide characters: what may stand before the text in a JSON document that some
reader takes, Python's own among them."""


def why_opaque(raw: RawRequest) -> str:
    """Why this body cannot be read as JSON although its path promises it; "" = it can.

    Engines that know no coding read JSON whatever its header says, so a body that looks like JSON is read here too.
    Raises UnsupportedMedia for a coding that is not registered.
    """
    if "content-encoding" not in raw.headers and raw.headers.get("content-type") == "application/json":
        return ""
    why = ""
    if codings := _codings(raw.headers.get("content-encoding", "")):
        why = f"content-encoding: {', '.join(codings)}"
    elif (kind := raw.headers.get("content-type", "").strip().lower()).startswith("multipart/"):
        why = f"content-type: {kind.partition(';')[0][:60]}"
    return why if why and not raw.body.lstrip(_BEFORE_JSON).startswith(b"{") else ""


def _codings(header: str) -> list[str]:
    """The codings, each once, in order, without `identity`."""
    codings = dict.fromkeys(part.strip().lower() for part in header.split(","))
    for coding in codings:
        if coding not in CODINGS and coding not in ("", "identity"):
            expected = f"expected none, or some of {', '.join(sorted(CODINGS))}"
            raise UnsupportedMedia(f"content-encoding: got {coding[:60]!r}; {expected}")
    return [coding for coding in codings if coding in CODINGS]
