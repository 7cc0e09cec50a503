"""The client of a Kubernetes API server: lists and watch streams as bytes, reviews, failures as one error.

The official client's asynchronous half brings connections, TLS and authentication. Its models and its classes for each
API are left aside: building a model takes longer than everything else about a pod, and importing them takes 20 MB. So
answers come as bytes, and `pool.watch` reads what it needs. The client is an optional dependency, imported where it is
first needed.
"""

import asyncio
import errno
import gc
import os
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar

import aiohttp
import msgspec

from epp.errors import UNREADABLE, ConfigError
from epp.pool.credentials import Credentials, sentence

_CONNECT_TIMEOUT: Final = 2.0
"""Short, so that a server that comes back is found soon."""
_READ_TIMEOUT: Final = 30.0
_REVIEW_TIMEOUT: Final = 5.0
_PAGE: Final = 500
"""Objects in one answer to a list."""
_LARGEST_ANSWER: Final = 256 * 1024 * 1024
_LARGEST_EVENT: Final = 16 * 1024 * 1024
_LARGEST_REFUSAL: Final = 64 * 1024
_READ: Final = 64 * 1024
"""Bytes of a response that wait for their reader before the server is made to wait."""
_CONNECTIONS: Final = 64

T = TypeVar("T")


class Kind(NamedTuple):
    """A namespaced resource. The core group is empty; of it we know pods."""

    group: str
    version: str
    plural: str

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


PODS: Final = Kind("", "v1", "pods")


class ApiError(Exception):
    """The API server said no (`status` is HTTP's) or could not be reached (`status` 0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status} {message}" if status else message)
        self.status = status


class User(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who a token belongs to, as the API server gives it and expects it."""

    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: dict[str, tuple[str, ...]] = {}


class _TokenStatus(msgspec.Struct):
    authenticated: bool = False
    user: User = User()


class _TokenReview(msgspec.Struct):
    status: _TokenStatus


class _AccessStatus(msgspec.Struct):
    allowed: bool = False


class _AccessReview(msgspec.Struct):
    status: _AccessStatus


class _Status(msgspec.Struct):
    message: str = ""


class ApiServer:
    """The API server that `Credentials` name. ConfigError from the constructor if there are none; it does not connect
    yet. As an async context manager it closes its connections at the end. All of it belongs to one event loop.
    """

    def __init__(self, kubeconfig: Path | None = None) -> None:
        first = "kubernetes" not in sys.modules
        self._credentials = Credentials(kubeconfig)
        self.host = self._credentials.host
        try:
            self._client: Any = self._connected()
        except (OSError, ValueError) as error:
            expected = "expected certificates and a key as PEM"
            raise ConfigError("", f"no Kubernetes credentials: {sentence(error)}; {expected}") from None
        if first:
            # The client is tens of thousands of objects that never go. Unless they are set aside, each full collection
            # looks at all of them while the event loop stands still.
            gc.collect()
            gc.freeze()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all connections, also those in use."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()
            await asyncio.sleep(0)  # sockets of aborted connections are closed in the loop's next turn

    async def page(self, kind: Kind, namespace: str, selector: str, continuation: str) -> bytes:
        """One page of a list, newest state; `continuation` is empty for the first."""
        query = {"limit": str(_PAGE), "labelSelector": selector, "continue": continuation}
        timeout = aiohttp.ClientTimeout(sock_connect=_CONNECT_TIMEOUT, sock_read=_READ_TIMEOUT)
        async with self._response("GET", _path(kind), {"namespace": namespace}, query, timeout) as response:
            return await _bounded(response, _LARGEST_ANSWER, f"a list of {kind}")

    @asynccontextmanager
    async def stream(
        self, kind: Kind, namespace: str, selector: str, version: str, seconds: int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """A watch from a resource version on: a line of JSON for each event, as they come, until the server ends it,
        after so many seconds at the latest. ApiError if the connection breaks.
        """
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        query |= {"labelSelector": selector, "resourceVersion": version}
        # A server that vanished without a word is noticed when it fails to end the watch.
        timeout = aiohttp.ClientTimeout(sock_connect=_CONNECT_TIMEOUT, sock_read=seconds + _READ_TIMEOUT)
        async with self._response("GET", _path(kind), {"namespace": namespace}, query, timeout) as response:
            yield lines(response.content.iter_any())

    async def authenticate(self, token: str) -> User | None:
        """Whose token this is; None if it is not valid. Needs the right to create TokenReviews."""
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
        status = (await self._review("/apis/authentication.k8s.io/v1/tokenreviews", body, _TokenReview)).status
        return status.user if status.authenticated and status.user.username else None

    async def authorized(self, user: User, path: str) -> bool:
        """Whether a ClusterRole lets this user get a nonResourceURL. Needs the right to create SubjectAccessReviews."""
        asked = {"nonResourceAttributes": {"path": path, "verb": "get"}, "user": user.username}
        asked |= {"uid": user.uid, "groups": user.groups, "extra": user.extra}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": asked}
        reviewed = await self._review("/apis/authorization.k8s.io/v1/subjectaccessreviews", body, _AccessReview)
        return reviewed.status.allowed

    async def _review(self, path: str, body: Any, shape: type[T]) -> T:
        timeout = aiohttp.ClientTimeout(total=_CONNECT_TIMEOUT + _REVIEW_TIMEOUT, sock_connect=_CONNECT_TIMEOUT)
        async with self._response("POST", path, {}, {}, timeout, body) as response:
            answer = await _bounded(response, _LARGEST_EVENT, "a review")
        try:
            return msgspec.json.decode(answer, type=shape)
        except UNREADABLE as error:
            raise ApiError(0, f"not the review a Kubernetes API server sends: {error}") from None

    @asynccontextmanager
    async def _response(
        self,
        method: str,
        path: str,
        names: dict[str, str],
        query: dict[str, str],
        timeout: aiohttp.ClientTimeout,
        body: Any = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response to a request, once it is a good one; ApiError otherwise."""
        with _failures():
            try:
                request = await self._open().param_serialize(
                    method,
                    path,
                    path_params=names,
                    query_params=[(name, value) for name, value in query.items() if value],
                    # Compressed, a list costs more time at both ends than it saves on the way.
                    header_params={"Accept": "application/json", "Accept-Encoding": "identity"},
                    body=body,
                    auth_settings=["BearerToken"],
                )
                # Opened anew if it was closed while a token was renewed.
                response = (await self._open().call_api(*request, _request_timeout=timeout)).response
            except ssl.SSLError:
                await self.close()  # its files may have been replaced: the next request reads them anew
                raise
        try:
            if not 200 <= response.status < 300:
                reason = await _reason(response)
                if response.status == 401:
                    await self.close()  # as above: a client's certificate may have been replaced
                raise ApiError(response.status, reason)
            yield response
        finally:
            # A response that was read to its end has given its connection back; any other's is of no more use, and
            # need not be shut as TLS would have it.
            connection = response.connection
            transport = connection.transport if connection is not None else None
            response.close()
            if transport is not None:
                transport.abort()

    def _open(self) -> Any:
        if self._client is None:
            self._client = self._connected()
        return self._client

    def _connected(self) -> Any:
        from kubernetes.aio.client import ApiClient

        configuration = self._credentials.configuration()
        configuration.retries = None  # `pool.watch` tries again
        configuration.connection_pool_maxsize = _CONNECTIONS
        # `Credentials` have looked at the environment's proxies; aiohttp would look for passwords in ~/.netrc, too.
        configuration.client_session_kwargs = {"trust_env": False, "read_bufsize": _READ}
        return ApiClient(configuration)


def _path(kind: Kind) -> str:
    root = f"/apis/{kind.group}" if kind.group else "/api"
    return f"{root}/{kind.version}/namespaces/{{namespace}}/{kind.plural}"


async def lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The lines of a stream but empty ones; what follows the last newline is incomplete and left out.

    ApiError for one that is too long, and if the stream breaks.
    """
    rest = bytearray()
    with _failures():
        async for chunk in chunks:
            rest += chunk
            if b"\n" in chunk:
                *found, last = bytes(rest).split(b"\n")
                rest = bytearray(last)
                for line in filter(None, found):
                    yield line
            if len(rest) > _LARGEST_EVENT:
                raise ApiError(0, f"an event of more than {_LARGEST_EVENT} bytes")


async def _bounded(response: aiohttp.ClientResponse, most: int, what: str) -> bytes:
    body = bytearray()
    with _failures():
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > most:
                raise ApiError(0, f"{what} of more than {most} bytes")
    return bytes(body)


@contextmanager
def _failures() -> Iterator[None]:
    """Whatever the client and the libraries below it raise, as ApiError."""
    try:
        yield
    except ConfigError as error:
        raise ApiError(0, str(error)) from None
    except aiohttp.ClientConnectorError as error:
        number = error.os_error.errno
        why = os.strerror(number) if number is not None and number in errno.errorcode else sentence(error.os_error)
        raise ApiError(0, f"{error.host}:{error.port}: {why}") from None
    except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as error:  # the last: read after it was closed
        raise ApiError(0, sentence(error)) from None


async def _reason(response: aiohttp.ClientResponse) -> str:
    """What the API server wrote, else HTTP's own words."""
    with suppress(ApiError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        answer = await _bounded(response, _LARGEST_REFUSAL, "a refusal")
        if message := msgspec.json.decode(answer, type=_Status).message:
            return message[:500]
    return str(response.reason)[:500]
