"""`Stream`: one ext_proc stream as a state machine. Messages in, actions out; no I/O, no clock.

What a gateway expects differs by the body modes it configured (`protocol_config` in its first message):

request body     request headers are answered   destination and metadata go into   the body
---------------  ----------------------------   --------------------------------   ------------------------------------
FULL_DUPLEX      after the body's end           the headers' reply                 is echoed in chunks <= 62,000 bytes
BUFFERED         at once, empty                 the body's reply                   stays with the gateway
STREAMED+SWH     after the body's end           the headers' reply                 one empty reply per message
STREAMED         with a `mode_override` to full duplex, and then as above: without it the gateway would forward the
                 headers before anyone has read the body. It has to allow that (`allow_mode_override`); Envoy 1.40
                 answers 500 at once where it does not, or fails open.
NONE, or no body at once                        the headers' reply                 -
WebSocket        at once                        the headers' reply                 as in the body's mode, until it ends

(SWH: `send_body_without_waiting_for_header_response`.) Where a gateway does not say, it is taken for full duplex,
which the endpoint picker protocol demands. Envoy's BUFFERED gateways do say; one that did not would wait for us while
we wait for it, until a timeout.

(WebSocket: the client sends nothing before it has an answer, and what it sends then is no body that ends. Where it does
not go by in full duplex the headers' reply asks, by a `mode_override`, to be shown nothing of it.)

Answers: their headers are answered at once. Their body is echoed in full duplex, where closing early would cut it off;
a streamed or buffered one gets an empty reply per message; in the lean wiring (NONE) nothing is shown and the
half-close of the stream is the answer's end. Where the request's model was rewritten, an answer that is shown names the
model the client asked for. Of answers that are not shown some can be asked for (by `Sampler` or a plugin): the reply to
their headers then has a `mode_override` to STREAMED. Envoy 1.40 follows it, where it allows overrides, if its
configured request body mode is STREAMED or BUFFERED, and passes over it in silence where full duplex is configured.
Answers in events of a gateway that holds each back until it is whole (BUFFERED) are asked for so too, all of them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from itertools import chain
from random import Random
from typing import Final

import msgspec
from google.protobuf.message import DecodeError

from epp import protocol
from epp.errors import BadRequest, EppError, InternalError, Rejected, TooLarge
from epp.extproc import messages
from epp.extproc.messages import Incoming, Mode
from epp.parsing.parser import is_kept
from epp.parsing.request import RawRequest, Watched
from epp.parsing.rewrite import NameBack

NONE, STREAMED, FULL_DUPLEX, WHOLE = Mode.NONE, Mode.STREAMED, Mode.FULL_DUPLEX_STREAMED, Mode.BUFFERED
BUFFERED = (WHOLE, Mode.BUFFERED_PARTIAL)
SUPPORTED = (NONE, STREAMED, FULL_DUPLEX, *BUFFERED)


class Answered(msgspec.Struct, frozen=True):
    """The answer's headers came. The server must now call `Stream.answered` with the headers to add."""

    status: int
    """0 = none was shown."""
    served: str
    """`ip:port`, or empty."""
    content_type: str
    prefill_fallback: str = ""
    """What a sidecar says of a prompt that was to be computed elsewhere."""


class AnswerChunk(msgspec.Struct, frozen=True):
    """A piece of the answer's body passed by."""

    chunk: bytes
    end: bool


LARGE = protocol.MAX_CHUNK
"""Bytes of an answer's piece above which it counts against `Memory`, and sending it back has a deadline."""

Action = bytes | RawRequest | Answered | AnswerChunk
"""bytes: send them to the gateway. RawRequest: route it, then call `routed` or `failed`."""


class Full(Rejected):
    """What all streams together may hold is used up; `what` says so in a log."""

    def __init__(self, message: str, what: str) -> None:
        super().__init__(message)
        self.what = what


_EACH_SECOND: Final = 4.0
"""Answers that are watched in a second, whatever the share."""
_SPARED: Final = 10.0
"""Of these, as many may follow each other at once, so that where fewer requests come all of them are watched, however
they are spaced. Mean TTFT of 64k documents at 90 % of saturation, two requests a second, against that with all answers
shown: 4.5 +- 2.8 % longer (standard error) if two that are watched are a quarter of a second apart, the same if not."""
_BESIDE: Final = 3.0
"""Answers a second that plugins may ask for, whatever the share. Mean TTFT of documents of 8k on seven pods of 70B at
70 % of saturation, against that with all answers shown: 5.1 +- 1.5 % longer where none are asked for, 1.3 +- 1.1 % with
a share of 0.02, 0.7 +- 1.1 % with these."""
_MOST: Final = 0.9
"""Share of the answers that plugins may ask for, where few requests come: else there is nothing to choose."""
_GAPS: Final = 0.02
"""Weight of one more request in the mean time between two."""
AT_FIRST: Final = 200
"""Answers that are watched one after the other: until then little is known of how fast the endpoints are."""
_IGNORED: Final = 5
"""Answers in a row that were asked for and not shown (or held back until they were whole), after which a gateway counts
as one that does so with all."""
_AGAIN: Final = 60.0
"""Seconds after which it is asked once more."""
_SEVERAL: Final = 4096
"""Bytes of an answer in events of which no gateway that passes on pieces makes one."""


class Sampler:
    """Which answers to watch where a gateway shows none by itself: the first `AT_FIRST`, then this `share`, and four
    a second at least, up to ten of them at once. A share of 0: none.

    `ignored` is called when it turns out that the gateway shows none of them, `held_back` when it passes on none of
    those in events before it is whole, though asked to.
    """

    def __init__(
        self,
        share: float,
        clock: Callable[[], float],
        random: Random,
        ignored: Callable[[], None] = lambda: None,
        held_back: Callable[[], None] = lambda: None,
    ) -> None:
        self.works = False
        """Answers that were asked for are shown."""
        self._share = share
        self._clock = clock
        self._random = random
        self._tell = ignored
        self._tell_held_back = held_back
        self._last = float("-inf")
        self._spare = 0.0
        """Answers that may be watched whatever the share."""
        self._came: float | None = None
        self._gap = 0.0
        """Seconds from one request to the next, in the mean."""
        self._first = AT_FIRST
        """So many more, whatever the share."""
        self._ignored = 0
        self._whole = 0

    def wants(self, *, kept: bool = False) -> bool:
        """Whether to watch the answer of a request that is complete now. `kept`: a later request may name it, and only
        who gave it can go on from it; each of those.
        """
        if not self._share:
            return False
        now = self._clock()
        if self._came is not None:
            gap = now - self._came
            self._gap += _GAPS * (gap - self._gap)
            self._spare = min(_SPARED, self._spare + _EACH_SECOND * gap)
        self._came = now
        if self._ignored >= _IGNORED:
            wanted = now - self._last >= _AGAIN
        elif wanted := self._first > 0:
            self._first -= 1
        else:
            wanted = kept or self._spare >= 1 or self._random.random() < self._share
        if wanted:
            self._last, self._spare = now, max(0.0, self._spare - 1)
        return wanted

    @property
    def beside(self) -> float:
        """Share of the answers that plugins may ask for, beside those that `wants` takes: the same, and three a second
        at least.
        """
        return min(_MOST, self._share + _BESIDE * self._gap) if self.works else 0.0

    def shown(self) -> None:
        """An answer that was asked for is shown."""
        self.works, self._ignored = True, 0

    def not_shown(self) -> None:
        """It ended, and nothing of it was shown."""
        self._ignored += 1
        if self._ignored == _IGNORED:
            self.works = False
            self._tell()

    def came(self, *, whole: bool) -> None:
        """The first piece of an answer in events whose pieces were asked for; `whole`: it is all of it."""
        self._whole = self._whole + 1 if whole else 0
        if self._whole == _IGNORED:
            self._tell_held_back()


class Memory:
    """What all streams of a process hold together: bytes of requests (and of large pieces of answers), and themselves.
    `limit` and `most` bound the two.
    """

    __slots__ = ("held", "limit", "most", "streams")

    def __init__(self, limit: int, most: int = 1 << 30) -> None:
        self.limit = limit
        self.most = most
        self.held = 0
        self.streams = 0


HEADERS = 0  # nothing came yet
BODY = 1  # until the request is complete
ROUTING = 2  # until `routed` or `failed`
REPLIED = 3  # the request was forwarded
ABANDONED = 4  # the gateway itself answered, before we did
"""Phases of a stream. Plain numbers, as the modes are: members of a Python 3.11 Enum cost a call each time."""


class Stream:
    """What it does with each message in each of its phases, and the phase that follows, where it is another (full
    duplex; how the other modes differ says the module):

    message           HEADERS          BODY             ROUTING          REPLIED          ABANDONED        FINISHED
    ----------------  ---------------  ---------------  ---------------  ---------------  ---------------  --------
    request headers   hold BODY        refuse FINISHED  refuse FINISHED  end FINISHED     end FINISHED     ignore
    headers, no body  route ROUTING    refuse FINISHED  refuse FINISHED  end FINISHED     end FINISHED     ignore
    request body      refuse FINISHED  hold             ignore           ignore           ignore           ignore
    body's end        refuse FINISHED  route ROUTING    ignore           ignore           ignore           ignore
    request trailers  refuse FINISHED  route ROUTING    ignore           ignore           ignore           ignore
    answer headers    pass ABANDONED   pass ABANDONED   pass ABANDONED   show             pass             ignore
    answer body       pass             pass             pass             show             pass             ignore
    answer trailers   pass             pass             pass             show             pass             ignore
    routed()          ignore           ignore           send REPLIED     ignore           ignore           ignore
    failed()          refuse FINISHED  refuse FINISHED  refuse FINISHED  end FINISHED     end FINISHED     ignore
    not a message     refuse FINISHED  refuse FINISHED  refuse FINISHED  end FINISHED     end FINISHED     ignore

    hold: kept, nothing said. route: `RawRequest`, to be routed. pass: replied to. show: `Answered` or `AnswerChunk`,
    and replied to. send: the request goes to its endpoint. refuse: the client gets the error. end: too late for that,
    the stream is closed. ignore: nothing. FINISHED is `finished`: the stream is to be closed from our side.
    `refused`: the error it ended with; `too_late`: the client could not be answered any more.
    """

    __slots__ = (
        "_answer_mode", "_body", "_body_tail", "_ended", "_follows", "_forged", "_head", "_headers", "_held",
        "_held_back", "_known", "_max_body", "_memory", "_messages", "_mode", "_more", "_name", "_open", "_phase",
        "_piece", "_sampler", "_split", "_streamed", "_subset", "_trailers", "_upgrades", "_waits", "_watch",
        "finished", "refused", "tail", "too_late",
    )  # fmt: skip

    def __init__(self, max_body: int, memory: Memory, sampler: Sampler | None = None) -> None:
        self.finished = False
        """The stream is to be closed from our side."""
        self.refused: EppError | None = None
        self.too_late = False
        """What went wrong when it was too late to answer the client."""
        self.tail: bytes | None = None
        """Messages that end in it and show a piece of the answer (`messages.piece`) need not be received: the piece is
        watched, if it is, and passed on as it is."""
        self._max_body = max_body
        self._memory = memory
        self._held = 0
        self._head = 0
        """Of what is held, the bytes of the headers: they are kept until the stream ends."""
        self._piece = 0
        """The same of a large piece of the answer, or of what a WebSocket's client sends."""
        self._phase = HEADERS
        self._known = False  # the gateway's modes
        self._mode: int = FULL_DUPLEX
        self._answer_mode: int = FULL_DUPLEX
        self._follows = False  # it may follow a `mode_override` for the answer
        self._waits = False  # a STREAMED gateway that holds the body until the headers are answered
        self._headers: dict[str, str] = {}
        self._forged = messages.NOTHING
        self._subset: tuple[str, ...] | None = None
        self._body_tail = b""
        """Messages that end in it and show a piece of the request's body need not be decoded."""
        self._body = b""
        self._more: BytesIO | None = None
        """The body, where it comes in several pieces."""
        self._messages = 0
        self._open = True  # trailers may still follow the request's body
        self._trailers = False
        self._ended = False  # the answer's end was seen
        self._name: NameBack | None = None
        self._streamed = False
        """The answer's pieces are to be asked for as they come."""
        self._held_back = False
        """They are, and by itself the gateway would show the answer when it is whole; until its first piece."""
        self._sampler = sampler
        self._upgrades = False
        """It becomes a WebSocket: what comes after its headers is passed on as it comes."""
        self._split = False
        """Its prompt is to be computed elsewhere."""
        self._watch: Sampler | None = None
        """Until the answer that is to be watched is shown."""

    @property
    def sees_answer(self) -> bool:
        """The gateway shows us the answer's body; otherwise its end is the stream's. A WebSocket has none."""
        return self._answer_mode != NONE and not self._upgrades

    def receive(self, data: bytes) -> Sequence[Action]:
        """A message from the gateway. Never raises; messages after the end of what they belong to are ignored."""
        if self.finished:
            return []
        if len(data) <= LONGEST_END and self._known and (piece := _ends.get(data)) is not None:
            return piece(self, b"", True)
        if self._phase == BODY and (chunk := messages.piece(data, messages.REQUEST, self._body_tail)) is not None:
            return self._request_piece(chunk, False)
        try:
            message = messages.decode(data)
            if not self._known and (unfit := self._configure(message)) is not None:
                return self._refuse(unfit)
            receiver = _RECEIVERS.get(message.WhichOneof("request"))
            return receiver(self, message, data) if receiver is not None else []
        except DecodeError:
            return self._refuse(BadRequest("the gateway sent a message that is not a ProcessingRequest"))

    def routed(
        self,
        destination: str,
        headers: Mapping[str, str],
        body: bytes | None,
        renamed: tuple[str, str] | None = None,
        *,
        watched: bool = False,
    ) -> Iterable[bytes]:
        """Send the request to `destination` (`ip:port[,ip:port…]`) with these headers; `body` replaces its own.

        `renamed`: the model's name there, and the name for it in the answer. `watched`: ask for the answer too. The
        body stays on account until `sent`.
        """
        if self._phase != ROUTING or self.finished:
            return []
        self._phase = REPLIED
        self._split = protocol.PREFILLER in headers
        if watched:
            self._watch = self._sampler
        if renamed is not None and self.sees_answer:
            self._name = NameBack(*renamed)
        own, self._body, forged = self._body, b"", self._forged
        if self._upgrades:
            more, self._more = self._more, None
            return self._upgraded(destination, headers, own if more is None else more.getvalue())
        if body is not None:
            self._keep(self._head + len(body))
        if self._mode in BUFFERED:
            return [messages.routed_body(destination, headers, forged, body)]
        if self._mode == NONE:
            return [messages.routed_headers(destination, headers, forged, None)]
        length = None if body is None else len(body)
        first = [messages.routed_headers(destination, headers, forged, length)]
        chunks: Iterable[bytes] = ()
        if self._mode == STREAMED:
            chunks = self._silent_replies(body)
        elif (whole := own if body is None else body) or not self._trailers:
            chunks = messages.request_chunks(whole, end=not self._trailers)
        return chain(first, chunks, (messages.REQUEST_TRAILERS,)) if self._trailers else chain(first, chunks)

    def _upgraded(self, destination: str, headers: Mapping[str, str], came: bytes) -> Iterable[bytes]:
        """`came`: what the client sent already."""
        if self._mode in (NONE, FULL_DUPLEX):
            first = [messages.routed_headers(destination, headers, self._forged, None)]
            return chain(first, messages.request_chunks(came, end=not self._open)) if came or not self._open else first
        self._answer_mode = NONE
        return [messages.routed_upgrade(destination, headers, self._forged), *self._silent_replies(None)]

    def sent(self) -> None:
        """What `routed`, or the last `receive`, gave has been written: only the headers are held from now on."""
        self._keep(self._head)
        self._piece = 0

    def failed(self, error: EppError) -> list[bytes]:
        """Answer the client with this error instead, if that is still possible; either way the stream is finished."""
        return self._refuse(error)

    def answered(self, headers: Mapping[str, str]) -> bytes:
        """The reply to the answer's headers: pass them on, with these added."""
        return messages.answer_headers(headers, resized=self._name is not None, streamed=self._streamed)

    def release(self) -> None:
        """Let go of what is held. To be called when the stream ends, however it ends."""
        if self._watch is not None and self._answer_mode == STREAMED:
            self._watch.not_shown()
        self._watch = None
        self._keep(0)
        self._more = None
        self._body = b""
        self._headers = {}

    # --- the request ------------------------------------------------------------------------------------------------

    def _configure(self, message: Incoming) -> EppError | None:
        self._known = True
        if message.observability_mode:
            return InternalError("the gateway runs ext_proc in observability_mode, where nothing can be routed")
        if (modes := messages.modes(message)) is not None:
            self._mode, self._answer_mode, self._waits = modes
            for mode in modes[:2]:
                if mode not in SUPPORTED:
                    return InternalError(
                        f"the gateway's body mode {mode} (GRPC is 5) is not supported: use FULL_DUPLEX_STREAMED"
                    )
        return None

    def _request_headers(self, message: Incoming, data: bytes) -> Sequence[Action]:
        if self._phase != HEADERS:
            return self._refuse(BadRequest("the gateway sent request headers twice or too late"))
        self._head = len(data)
        if (full := self._hold(self._head)) is not None:
            return self._refuse(full)
        try:
            headers = message.request_headers
            self._headers = messages.request_headers(headers, len(data))
        except TooLarge as error:
            return self._refuse(error)
        context = message.metadata_context
        self._subset = messages.subset(context)
        self._body_tail = messages.tail(context, messages.NO_METADATA) or b""
        self._phase = BODY
        if headers.end_of_stream:
            self._mode, self._open = NONE, False
        elif messages.is_websocket(self._headers):
            self._upgrades = True
            return self._complete()
        if self._mode == NONE:
            return self._complete()
        if self._mode in BUFFERED:
            self._follows = True
            return [messages.REQUEST_HEADERS]
        if self._mode == STREAMED and self._waits:
            self._mode, self._follows = FULL_DUPLEX, True
            return [messages.override_to_duplex(self._answer_mode)]
        return []

    def _request_body(self, message: Incoming, data: bytes) -> Sequence[Action]:
        piece = message.request_body
        chunk, end = piece.body, piece.end_of_stream
        if end and not chunk:
            _remember_end(data, Stream._request_piece)
        return self._request_piece(chunk, end)

    def _request_piece(self, chunk: bytes, end: bool) -> Sequence[Action]:
        if self._phase == HEADERS:
            return self._refuse(BadRequest("the gateway sent a request body without headers before it"))
        if self._upgrades:
            return self._frames(chunk, end)
        if self._phase != BODY:
            return []
        self._messages += 1
        self._open = not end
        if chunk and (error := self._collect(chunk)) is not None:
            return self._refuse(error)
        if end or self._mode in BUFFERED:  # with trailers to come, a whole buffered body does not end the stream
            return self._complete()
        return []

    def _frames(self, chunk: bytes, end: bool) -> Sequence[Action]:
        """What a client sends by a WebSocket."""
        if not self._open:
            return []
        self._open = not end
        if self._phase == REPLIED:
            if self._mode != FULL_DUPLEX:
                return [messages.REQUEST_BODY]
            if len(chunk) > LARGE and (error := self._hold_piece(len(chunk))) is not None:
                return self._refuse(error)
            return [*messages.request_chunks(chunk, end=not self._open)]
        self._messages += 1
        if self._phase == ROUTING and (error := self._collect(chunk)) is not None:
            return self._refuse(error)
        return []

    def _request_trailers(self, message: Incoming, data: bytes) -> Sequence[Action]:
        if self._phase == HEADERS:
            return self._refuse(BadRequest("the gateway sent request trailers without headers before them"))
        if not self._open:
            return []
        if self._phase == BODY:
            if self._mode in BUFFERED:
                return self._refuse(BadRequest("a request with trailers but no body cannot be routed in BUFFERED mode"))
            self._open, self._trailers = False, True
            return self._complete()
        self._open = False
        return [messages.REQUEST_TRAILERS] if self._phase == REPLIED else []

    def _collect(self, chunk: bytes) -> EppError | None:
        """Another piece of the body; why it is too much, if it is."""
        if (error := self._hold(len(chunk))) is not None:
            return error
        if self._more is not None:
            self._more.write(chunk)
        elif not self._body:  # most bodies come as one piece and an empty end: no copy is made of those
            self._body = chunk
        else:
            self._more = BytesIO()
            self._more.write(self._body)
            self._more.write(chunk)
        return None

    def _hold(self, size: int) -> EppError | None:
        memory = self._memory
        self._held += size
        memory.held += size
        if self._held - self._head > self._max_body:
            return TooLarge(f"the request's body is larger than {self._max_body} bytes")
        if memory.held > memory.limit:
            limit = f"{memory.limit} bytes of requests are held, which is the most"
            return Full("too many large requests at once; try again later", limit)
        return None

    def _keep(self, size: int) -> None:
        """So many bytes are held from now on."""
        self._memory.held += size - self._held
        self._held = size

    def _complete(self) -> Sequence[Action]:
        headers, self._headers = self._headers, {}
        body, more, self._more = self._body, self._more, None
        if more is not None:
            body = more.getvalue()  # without a copy: joining 16 MiB would hold up everybody
        self._phase = ROUTING
        self._forged = messages.forged(headers)
        self._body = body if self._mode == FULL_DUPLEX else b""  # the others do not ask for it back
        seen, watchable = self.sees_answer, 0.0
        watched: Watched = ""
        if self._follows and not seen and (sampler := self._sampler) is not None:
            if sampler.wants(kept=is_kept(headers.get(":method", ""), headers.get(":path", ""), body)):
                self._watch, seen, watched = sampler, sampler.works, "sampled"
            else:
                watchable = sampler.beside
        return [
            messages.raw_request(headers, body, self._subset, sees_answer=seen, watched=watched, watchable=watchable)
        ]

    def _silent_replies(self, body: bytes | None) -> list[bytes]:
        if body is None or not self._messages:
            return [messages.REQUEST_BODY] * self._messages
        return [messages.replaced_chunk(body)] + [messages.replaced_chunk(b"")] * (self._messages - 1)

    def _refuse(self, error: EppError) -> list[bytes]:
        if self.finished:
            return []
        self.finished, self.tail = True, None
        self.release()
        # Its frames hold this stream and its body, which would stay until somebody looks for cycles.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self.refused = error
        self.too_late = self._phase == REPLIED or self._phase == ABANDONED
        return [] if self.too_late else [messages.refusal(error)]

    # --- the answer -------------------------------------------------------------------------------------------------

    def _answer_headers(self, message: Incoming, data: bytes) -> Sequence[Action]:
        if self._phase == REPLIED:
            context = message.metadata_context
            found = messages.answer(message, context, body_follows=self.sees_answer or self._watch is not None)
            fallback = messages.answer_header(message, protocol.PREFILL_FALLBACK) if self._split else ""
            answered = Answered(*found, fallback)
            if self._watch is not None:
                if 200 <= answered.status < 300 and not message.response_headers.end_of_stream:
                    self._answer_mode, self._streamed = STREAMED, True
                else:
                    self._watch = None
            elif self._answer_mode == WHOLE and answered.content_type.startswith("text/event-stream"):
                self._answer_mode, self._streamed = STREAMED, True  # where it is not followed, there is one piece
                self._held_back = True
            self._expect_pieces(context, data)
            return [answered]
        self._phase = ABANDONED
        self.release()
        return [messages.ANSWER_HEADERS]

    def _answer_body(self, message: Incoming, data: bytes) -> Sequence[Action]:
        piece = message.response_body
        chunk, end = piece.body, piece.end_of_stream
        if end and not chunk:
            _remember_end(data, Stream._answer_piece)
        actions = self._answer_piece(chunk, end)
        if len(chunk) > LARGE:
            self.tail = None
        else:
            self._expect_pieces(message.metadata_context, data)
        return actions

    def _expect_pieces(self, context: bytes, data: bytes) -> None:
        """Of the answer, in messages with the metadata of this one, where they are passed on as they are."""
        as_they_are = self._answer_mode == FULL_DUPLEX and self._name is None and not self._upgrades
        if as_they_are and self._phase == REPLIED and not (self._ended or self.finished):
            self.tail = messages.tail(context, data)

    def _answer_piece(self, chunk: bytes, end: bool) -> Sequence[Action]:
        if self._watch is not None:
            self._watch.shown()
            self._watch = None
        if len(chunk) > LARGE and (error := self._hold_piece(len(chunk))) is not None:
            return self._refuse(error)
        if self._answer_mode != FULL_DUPLEX:
            end = end or self._answer_mode in BUFFERED  # whole, whether Envoy says so or not
            if self._held_back:
                self._held_back = False
                if self._sampler is not None:
                    self._sampler.came(whole=end and len(chunk) > _SEVERAL)
            passed = chunk if self._name is None else self._name.feed(chunk, whole=True)
            reply = messages.ANSWER_BODY if passed == chunk else messages.replaced_answer(passed)
            return self._passing([reply], chunk, end)
        if self._ended:
            return []
        passed = chunk if self._name is None else self._name.feed(chunk, whole=end)
        replies = messages.answer_chunks(passed, end=end) if passed or end or not chunk else []
        return self._passing(replies, chunk, end)

    def _hold_piece(self, size: int) -> EppError | None:
        """A piece that may take long to be sent back: on account until `sent`, or the next one."""
        self._keep(self._held - self._piece + size)
        self._piece = size
        full = self._memory.held > self._memory.limit
        return Full("too many large answers at once", "pieces of answers fill the memory") if full else None

    def _answer_trailers(self, message: Incoming, data: bytes) -> Sequence[Action]:
        rest = b"" if self._name is None or self._answer_mode != FULL_DUPLEX else self._name.feed(b"", whole=True)
        replies = messages.answer_chunks(rest, end=False) if rest else []
        return self._passing([*replies, messages.ANSWER_TRAILERS], b"", True)

    def _passing(self, replies: Iterable[bytes], chunk: bytes, end: bool) -> Sequence[Action]:
        """Shown before it is replied to: after its last reply a gateway may reset the stream at once."""
        shown = self._phase == REPLIED and not self._ended and not self._upgrades
        if end:
            self._ended, self.tail = True, None
        return [AnswerChunk(chunk, end), *replies] if shown else [*replies]


LONGEST_END: Final = 512
"""Bytes of an end that is remembered."""
KNOWN_ENDS: Final = 1024
_ends: dict[bytes, Callable[[Stream, bytes, bool], Sequence[Action]]] = {}
"""Messages seen lately that say no more than that a body has come to its end, and of which: most bodies end so, with
the same bytes for each request and each endpoint's answer.
"""


def _remember_end(data: bytes, piece: Callable[[Stream, bytes, bool], Sequence[Action]]) -> None:
    if len(data) <= LONGEST_END:
        if len(_ends) >= KNOWN_ENDS:
            _ends.clear()
        _ends[data] = piece


_RECEIVERS: dict[str | None, Callable[[Stream, Incoming, bytes], Sequence[Action]]] = {
    "request_headers": Stream._request_headers,
    "request_body": Stream._request_body,
    "request_trailers": Stream._request_trailers,
    "response_headers": Stream._answer_headers,
    "response_body": Stream._answer_body,
    "response_trailers": Stream._answer_trailers,
}
