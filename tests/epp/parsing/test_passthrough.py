"""Bodies that `epp.parsing.parser` does not read."""

import gzip
import zlib

import pytest

from epp.errors import UnsupportedMedia
from epp.parsing.parser import why_opaque
from epp.parsing.request import RawRequest

JSON = b'{"model": "m", "prompt": "p"}'
FORM = b"--x\r\n"


def why(body: bytes, **headers: str) -> str:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return why_opaque(RawRequest("POST", "/v1/completions", named, body))


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({}, JSON, ""),
        ({"content_type": "application/json; charset=utf-8"}, JSON, ""),
        ({"content_type": "application/x-www-form-urlencoded"}, JSON, ""),  # what curl -d says of JSON
        ({"content_type": "application/x-www-form-urlencoded"}, b"a=b", ""),
        ({"content_encoding": "identity"}, b"no json", ""),
        ({"content_encoding": " Identity ,, identity"}, b"no json", ""),
        ({"content_encoding": "GZIP"}, gzip.compress(JSON, mtime=0), "content-encoding: gzip"),
        ({"content_encoding": "identity,\t gzip , gzip"}, gzip.compress(JSON, mtime=0), "content-encoding: gzip"),
        ({"content_encoding": "deflate, x-gzip"}, zlib.compress(JSON), "content-encoding: deflate, x-gzip"),
        ({"content_encoding": "br"}, b"\x1b\x1c\x00", "content-encoding: br"),
        ({"content_encoding": "zstd"}, b"", "content-encoding: zstd"),
        ({"content_type": "multipart/form-data; boundary=x"}, FORM, "content-type: multipart/form-data"),
    ],
)
def test_bodies_that_cannot_be_json_are_opaque(headers: dict[str, str], body: bytes, expected: str) -> None:
    assert why(body, **headers) == expected


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd", "deflate", "identity, gzip", "compress"])
@pytest.mark.parametrize("body", [JSON, b" \r\n\t" + JSON, b"\xef\xbb\xbf" + JSON, JSON.decode().encode("utf-16")])
def test_json_under_a_coding_it_does_not_have_is_read_as_engines_read_it(coding: str, body: bytes) -> None:
    assert why(body, content_encoding=coding) == ""
    assert why(body, content_type="multipart/form-data") == ""


@pytest.mark.parametrize("coding", ["x", "gzip, x", "identity;q=1", "gzip gzip", "\\xff", "g" * 100_000])
def test_a_coding_that_nobody_registered_is_refused(coding: str) -> None:
    for body in (JSON, gzip.compress(JSON)):
        with pytest.raises(
            UnsupportedMedia, match=r"content-encoding: got '.*'; expected none, or some of .*gzip"
        ) as error:
            why(body, content_encoding=coding)
        assert len(error.value.message) < 300
