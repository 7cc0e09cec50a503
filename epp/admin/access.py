"""Who may read the admin server in Kubernetes: bearer tokens, checked by the API server, answers kept for a while.

Source: Kubernetes API, TokenReview and SubjectAccessReview; controller-runtime's metrics filter, which the reference
pickers use, asks the same. A path is a nonResourceURL with the verb `get`, as a ClusterRole names it.
"""

import asyncio
import base64
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from epp.pool.apiserver import ApiError, User
from epp.telemetry.metrics import Metrics

ALLOWED_S: Final = 60.0
REFUSED_S: Final = 10.0
"""Seconds an answer is used again: how long a right that was withdrawn still counts, and a new one does not yet."""
KEPT: Final = 256
"""Answers kept."""
AT_ONCE: Final = 2
WAITING: Final = 32
"""Questions to the API server under way, and readers who wait for one: a flood of tokens costs no more."""
DEGRADATION: Final = "access-not-checked"


class Reviewer(Protocol):
    """What we need of `ApiServer`. Both raise ApiError."""

    async def authenticate(self, token: str) -> User | None: ...

    async def authorized(self, user: User, path: str) -> bool: ...


def _token(authorization: str) -> str:
    """Empty: there is none."""
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2].strip()
        except ValueError:
            return ""
    return rest.strip() if scheme.lower() == "bearer" else ""


class Verdict(NamedTuple):
    """200, or the status to answer with instead and why."""

    status: int
    message: str = ""


class Access:
    """Asks `reviewer`. While it is away, only tokens it accepted a moment ago pass."""

    def __init__(self, reviewer: Reviewer, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._reviewer = reviewer
        self._metrics = metrics
        self._clock = clock
        self._known: OrderedDict[tuple[bytes, str], tuple[float, Verdict]] = OrderedDict()
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._asking = 0

    async def check(self, authorization: str, path: str) -> Verdict:
        """May the bearer of this Authorization header (empty: there is none) get `path`?

        Browsers can only be asked for a name and a password: there the token is the password.
        """
        token = _token(authorization)
        if not token:
            return Verdict(401, f"expected an Authorization header with a bearer token of who may get {path}")
        key = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest(), path
        if (verdict := self._remembered(key)) is not None:
            return verdict
        if self._asking >= WAITING:
            return Verdict(503, "too many readers wait for the API server to say who they are; try again later")
        self._asking += 1
        try:
            async with self._turn:
                # Another reader with this token may have been answered meanwhile.
                return self._remembered(key) or await self._ask(key, token)
        finally:
            self._asking -= 1

    async def _ask(self, key: tuple[bytes, str], token: str) -> Verdict:
        try:
            verdict = await self._reviewed(token, key[1])
        except ApiError as error:
            self._metrics.degraded(DEGRADATION, str(error), lasting=True)
            return Verdict(503, f"cannot ask the Kubernetes API server whether you may read this: {error}")
        self._metrics.recovered(DEGRADATION)
        self._known[key] = (self._clock() + (ALLOWED_S if verdict.status == 200 else REFUSED_S), verdict)
        self._known.move_to_end(key)
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return verdict

    async def _reviewed(self, token: str, path: str) -> Verdict:
        user = await self._reviewer.authenticate(token)
        if user is None:
            return Verdict(401, "the Kubernetes API server does not know this token")
        if not await self._reviewer.authorized(user, path):
            needs = f"a ClusterRole with nonResourceURLs: [{path}], verbs: [get]"
            return Verdict(403, f"{user.username} may not get {path}; it takes {needs}")
        return Verdict(200)

    def _remembered(self, key: tuple[bytes, str]) -> Verdict | None:
        until, verdict = self._known.get(key, (0.0, None))
        if verdict is None or until <= self._clock():
            return None
        self._known.move_to_end(key)
        return verdict
