"""Tokens from bytes, by a ratio per model.

It is learned from answers where the gateway shows them, else from the engines' counters.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from epp.plugin import Endpoint, Load, Plugin, Request, Response, Slot

DEFAULT_RATIO: Final = 4.0
"""Bytes a token until something was learned: English text with common BPE vocabularies."""
_LEAST, _MOST = 0.5, 16.0
_MEMORY: Final = 0.98
"""What is kept of the past at each observation: the last fifty or so count."""
_FEWEST: Final = 256
"""Bytes below which a prompt says little: the chat template's own tokens outweigh it."""
_HEAVIEST: Final = 65536.0
"""Bytes beyond which a prompt weighs no more, so that one book does not drown fifty chats."""
_PRIOR: Final = 1024.0
"""Weight of `DEFAULT_RATIO`, in bytes, at the start."""


class TokenRatio:
    """Bytes of a raw prompt per token, per model. Forgets the models used least recently beyond `limit`."""

    def __init__(self, limit: int = 1000) -> None:
        self._limit = limit
        self._seen: OrderedDict[str, tuple[float, float]] = OrderedDict()  # model -> smoothed (bytes, tokens)

    def tokens(self, model: str, nbytes: int) -> int:
        """Estimated tokens of `nbytes` bytes of prompt; at least 1 for a prompt that is not empty."""
        if nbytes <= 0:
            return 0
        sums = self._seen.get(model)
        return round(nbytes / (DEFAULT_RATIO if sums is None else sums[0] / sums[1])) or 1

    def ratio(self, model: str) -> float:
        """Bytes a token, 0.5..16."""
        if (sums := self._seen.get(model)) is None:
            return DEFAULT_RATIO
        return sums[0] / sums[1]

    def learner(self) -> Plugin:
        """A plugin that watches the requests of one pool and learns from them."""
        return LearnTokens(self.observe, self)

    def learned(self) -> list[tuple[str, float, float]]:
        """(model, smoothed bytes, their tokens) of each, used least recently first."""
        return [(model, *sums) for model, sums in self._seen.items()]

    def restore(self, learned: Sequence[tuple[str, float, float]]) -> None:
        """Take over what another has learned, of models of which nothing is known here. ValueError if it cannot be."""
        for model, nbytes, tokens in learned:
            if not (tokens > 0 and _LEAST <= nbytes / tokens <= _MOST):
                raise ValueError(f"{nbytes} bytes are not {tokens} tokens")
            if model not in self._seen and len(self._seen) < self._limit:
                self._seen[model] = nbytes, tokens

    def observe(self, model: str, nbytes: int, tokens: int) -> None:
        """Learn from an answer: this prompt had `nbytes` bytes and `tokens` tokens. Implausible pairs are bounded."""
        if nbytes < _FEWEST or tokens <= 0:
            return
        ratio = min(max(nbytes / tokens, _LEAST), _MOST)
        weight = min(float(nbytes), _HEAVIEST)
        old_bytes, old_tokens = self._seen.get(model, (_PRIOR, _PRIOR / DEFAULT_RATIO))
        self._seen[model] = (old_bytes * _MEMORY + weight, old_tokens * _MEMORY + weight / ratio)
        self._seen.move_to_end(model)
        if len(self._seen) > self._limit:
            self._seen.popitem(last=False)


_IDS: Final = re.compile(rb"[\s\[]*[0-9]")
"""How token ids begin, which say themselves how many they are; their bytes are no text."""
_PIECE: Final = 100
"""Models in a piece of a snapshot."""

Observe = Callable[[str, int, int], None]
"""Called with (model, bytes of prompts, their tokens)."""


class _Window:
    """What we sent to one endpoint between two scrapes."""

    __slots__ = ("bytes", "load", "model", "open", "peak", "uncounted")

    def __init__(self, load: Load) -> None:
        self.load = load
        self.bytes = 0
        self.model: str | None = None
        """That was asked for last."""
        self.open = 0
        """Requests in flight now."""
        self.peak = 0
        """Most requests in flight since the scrape."""
        self.uncounted = False
        """A request in it failed, so the engine may not have counted its prompt; or they asked for several models."""


class LearnTokens(Plugin):
    """Watches requests and reports to `observe` how many tokens their prompts had.

    `usage.prompt_tokens` says it exactly. In the lean wiring it is not seen; there `vllm:prompt_tokens_total` grows
    between two scrapes by the tokens of what was sent meanwhile. A prompt that crosses the edge of a window is counted
    in one and sent in another, which evens out over windows; a window with more requests running than are ours, or
    with several models or one that failed, says nothing.
    """

    def __init__(self, observe: Observe, ratios: TokenRatio | None = None) -> None:
        """`ratios`: what other replicas are told of, and take over."""
        self._observe = observe
        self._ratios = ratios
        self._windows: dict[Endpoint, _Window] = {}
        self._noted = Slot[tuple[_Window, int]]()
        """Where a request counts, and the length of its prompt."""
        self._from_answers = 0
        self._from_counters = 0

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        if request.api == "other":
            return
        prompt = request.prompt
        size = len(prompt) or self._bytes_of(request) or 0
        self._sent(request, endpoint, None if request.media_tokens or (prompt and _IDS.match(prompt)) else size)

    def _bytes_of(self, request: Request) -> int | None:
        noted = self._noted.get(request)
        return None if noted is None else noted[1]

    def _sent(self, request: Request, endpoint: Endpoint, size: int | None) -> None:
        """A prompt of so many bytes was sent; None: its bytes say nothing of its tokens."""
        window = self._windows.get(endpoint)
        if window is None:
            window = self._windows[endpoint] = _Window(endpoint.load)
        if size is None:
            window.uncounted = True
            return
        self._noted.set(request, (window, size))
        window.bytes += size
        if window.model != request.model:
            window.uncounted = window.uncounted or window.model is not None
            window.model = request.model
        window.open += 1
        if window.open > window.peak:
            window.peak = window.open

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        noted = self._noted.get(request)
        if noted is None:
            return
        window, size = noted
        window.open -= 1
        if response.status >= 400 or response.failed:
            window.uncounted = True
        usage = response.usage
        if usage is not None and usage.prompt > 0:
            self._from_answers += 1
            self._observe(request.model, size, usage.prompt)

    def on_scraped(self, endpoint: Endpoint) -> None:
        """A window ends, and says what it says."""
        window, load = self._windows.get(endpoint), endpoint.load
        if window is None:
            return
        tokens = load.prompt_tokens - window.load.prompt_tokens
        ours = load.running + load.waiting <= window.peak
        if (
            window.load.at is not None
            and tokens > 0
            and window.bytes
            and window.model is not None
            and ours
            and not window.uncounted
        ):
            self._from_counters += 1
            self._observe(window.model, window.bytes, tokens)
        window.load, window.bytes, window.peak, window.uncounted, window.model = load, 0, window.open, False, None

    def to_peers(self, request: Request, endpoint: Endpoint) -> Any:
        """Bytes of the prompt."""
        return self._bytes_of(request)

    def from_peer(self, request: Request, endpoint: Endpoint, state: Any) -> None:
        if request.api != "other":
            self._sent(request, endpoint, int(state) if state else None)

    def snapshot(self) -> Iterator[Any]:
        """The ratios learned: [model, bytes, tokens] ..., used least recently first."""
        learned = self._ratios.learned() if self._ratios is not None else []
        for start in range(0, len(learned), _PIECE):
            yield learned[start : start + _PIECE]

    def restore(self, piece: Any, endpoints: Mapping[str, Endpoint]) -> None:
        if self._ratios is not None:
            self._ratios.restore(piece)

    def on_removed(self, endpoint: Endpoint) -> None:
        self._windows.pop(endpoint, None)

    def statistics(self) -> Mapping[str, float]:
        return {"from_answers": self._from_answers, "from_counters": self._from_counters}
