"""Requests whose bodies are not read (api `other`): routed by load alone."""

from typing import Final

from epp.errors import UnsupportedMedia
from epp.parsing.request import RawRequest

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
