"""Whose a request is: by a header that the gateway sets, or by a claim of a token that the gateway has verified."""

import binascii
from base64 import b64decode
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from epp.plugin import Request

ANONYMOUS: Final = "anonymous"
"""Who says nothing, or nothing that can be read."""
LONGEST: Final = 128
"""Characters of a name that tell tenants apart."""
_CREDENTIALS: Final = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key"})
_BEARER: Final = "bearer "
_ALPHABET: Final = str.maketrans("-_", "+/")
"""From base64url to base64. Issuers mix them up; `urlsafe_b64decode` warns of that from Python 3.15 on."""


@dataclass(frozen=True)
class TenantSource:
    """`header`: its value is the tenant's name; with a `claim`, it holds a JWT (`Bearer` before it or not) or a JWT's
    payload alone, in base64url, as gateways forward it. A claim within others is named with dots.

    No signature is checked: the gateway has done that, or the claim says what the client likes.
    """

    header: str
    claim: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "header", self.header.lower())
        if not self.header:
            raise ValueError("header: expected the name of a header")
        if self.header in _CREDENTIALS and not self.claim:
            raise ValueError(
                f"header: {self.header} holds a credential, and tenants' names are shown in metrics; expected another "
                "header, or a claim of the token in it"
            )

    def name_of(self, request: Request) -> str:
        value = request.headers.get(self.header, "")
        if self.claim and value:
            value = _claim(value, self.claim)
        return value[:LONGEST] or ANONYMOUS


def _claim(value: str, claim: str) -> str:
    """The claim of a token; empty: there is none of it."""
    token = value[len(_BEARER) :] if value[: len(_BEARER)].lower() == _BEARER else value
    payload = token.split(".")[1] if token.count(".") == 2 else token
    try:
        found: Any = msgspec.json.decode(b64decode(payload.translate(_ALPHABET) + "=" * (-len(payload) % 4)))
    except (ValueError, binascii.Error, msgspec.MsgspecError, RecursionError):
        return ""
    for name in (claim,) if isinstance(found, dict) and claim in found else claim.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return str(found) if isinstance(found, str | int) and not isinstance(found, bool) else ""
