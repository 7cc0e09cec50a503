"""Token ids from a pod of the pool: vLLM's `/tokenize`, for models whose tokenizer files are not at hand.

The prompt goes to an endpoint that requests are sent to anyway, over a connection that is kept.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from epp.errors import UNREADABLE
from epp.plugin import Endpoint, Request
from epp.pool.http import BadAnswer, Kept, host_and_port
from epp.prefix.tokens.cache import Ids
from epp.prefix.tokens.conversation import Unsupported
from epp.prefix.tokens.prompt import Chat, Text, prompt_of

_MOST_KEPT: Final = 8
"""Idle connections, over all endpoints."""

MAX_BODY: Final = 2 << 20
"""Bytes of a body that a pod is asked about: more of it no pod reads in the time there is, and its own work waits."""


class _Answer(msgspec.Struct):
    tokens: list[int]


_ANSWER: Final = msgspec.json.Decoder(_Answer)


class Remote:
    """Asks `endpoints()` in turn. Used on the event loop only; there is no deadline here: put one around it."""

    def __init__(self, endpoints: Callable[[], Sequence[Endpoint]]) -> None:
        self._endpoints = endpoints
        self._turn = 0
        self._idle: list[tuple[str, Kept]] = []

    async def page(self, asked: bytes) -> bytes:
        """The answer to a question of `question`. Raises BadAnswer, OSError where there is no good one."""
        endpoints = self._endpoints()
        if not endpoints:
            raise BadAnswer("the pool has no endpoint to ask")
        self._turn += 1
        address = endpoints[self._turn % len(endpoints)].address
        head = f"POST /tokenize HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        return await self._ask(address, f"{head}Content-Length: {len(asked)}\r\n\r\n".encode() + asked)

    async def _ask(self, address: str, message: bytes) -> bytes:
        kept = next((i for i, (where, _) in enumerate(self._idle) if where == address), None)
        server = Kept(*host_and_port(address)) if kept is None else self._idle.pop(kept)[1]
        page = await server.exchange(message)
        if server.open:
            self._idle.append((address, server))
            while len(self._idle) > _MOST_KEPT:
                self._idle.pop(0)[1].close()
        return page

    def close(self) -> None:
        """Close what is kept open."""
        while self._idle:
            self._idle.pop()[1].close()


def question(request: Request) -> "bytes | Ids":
    """The body for `/tokenize` that gives what the request itself would; or the ids, where it has them already.

    Raises Unsupported. Takes milliseconds for a large body: call it in a thread.
    """
    if len(request.body) > MAX_BODY:
        raise Unsupported(f"a body of {len(request.body)} bytes; a pod is asked about at most {MAX_BODY}")
    prompt = prompt_of(request)
    if isinstance(prompt, Text):
        asked: dict[str, Any] = {"prompt": prompt.text}
    elif isinstance(prompt, Chat):
        if b'"reasoning_content"' in request.body:  # chat completions read it as `reasoning`, `/tokenize` does not
            raise Unsupported("reasoning_content, which /tokenize reads otherwise than chat completions")
        asked = {"messages": prompt.messages, "chat_template_kwargs": prompt.variables}
        asked |= {"add_generation_prompt": prompt.answer, "continue_final_message": prompt.go_on}
        asked |= {"tools": prompt.tools} if prompt.tools else {}
    else:
        return prompt
    return msgspec.json.encode({"model": request.model, "add_special_tokens": prompt.special, **asked})


def ids_in(page: bytes) -> Ids:
    """The ids in an answer. Raises BadAnswer. Takes milliseconds for a long one: call it in a thread."""
    try:
        return array("I", _ANSWER.decode(page).tokens)
    except (*UNREADABLE, OverflowError) as error:
        raise BadAnswer(f"no token ids: {type(error).__name__}") from None
