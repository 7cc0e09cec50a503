"""Asking servers over HTTP: a short answer, or what was wrong with it."""

from collections.abc import Mapping
from typing import Any, Final, Self

import aiohttp
import msgspec

from epp import protocol
from epp.errors import UNREADABLE

MOST: Final = 8 << 20
"""Bytes of an answer."""


class Trouble(Exception):
    """No good answer. `status` is HTTP's, 0 where there was none; `dropped`: not even a refusal to connect came."""

    def __init__(self, message: str, status: int = 0, *, dropped: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.dropped = dropped


class HttpClient:
    """`async with HttpClient(seconds) as ask: await ask.json(url)`. Redirects are not followed: they could lead
    anywhere.
    """

    def __init__(self, seconds: float) -> None:
        self._connect = seconds / 2
        self._timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=self._connect)

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(keepalive_timeout=protocol.MODEL_SERVER_IDLE)
        self._session = aiohttp.ClientSession(timeout=self._timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def bytes(self, url: str, body: Any = None, more: Mapping[str, str] = {}) -> bytes:
        """The answer to a GET, or to a POST of `body` as JSON, with `more` headers. Raises Trouble for anything but a
        200.
        """
        method, data = ("GET", None) if body is None else ("POST", msgspec.json.encode(body))
        headers = {"content-type": "application/json", **more} if data else more
        try:
            async with self._session.request(
                method, url, data=data, headers=headers, allow_redirects=False
            ) as response:
                page = bytearray()
                async for piece in response.content.iter_chunked(1 << 16):
                    page += piece
                    if len(page) > MOST:
                        raise Trouble(f"more than {MOST} bytes", response.status)
                if response.status != 200:
                    raise Trouble(
                        f"status {response.status}: {bytes(page[:120]).decode('utf-8', 'replace')}", response.status
                    )
                return bytes(page)
        except aiohttp.ConnectionTimeoutError:
            raise Trouble(f"no connection within {self._connect:g} s", dropped=True) from None
        except TimeoutError:
            raise Trouble(f"no whole answer within {self._timeout.total:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Trouble(f"{type(error).__name__}: {error}"[:200]) from None

    async def json(self, url: str, body: Any = None, more: Mapping[str, str] = {}) -> dict[str, Any]:
        """The same, of a JSON object."""
        page = await self.bytes(url, body, more)
        try:
            return msgspec.json.decode(page, type=dict[str, Any])
        except UNREADABLE as error:
            raise Trouble(f"no JSON object: {str(error)[:100]}", 200) from None
