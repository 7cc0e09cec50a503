import pytest

from epp.parsing.passthrough import why_opaque
from epp.parsing.request import RawRequest


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({}, ""),
        ({"content-type": "application/json; charset=utf-8"}, ""),
        ({"content-type": "application/x-www-form-urlencoded"}, ""),  # what curl -d says of JSON
        ({"content-encoding": "identity"}, ""),
        ({"content-encoding": "GZIP"}, "content-encoding: gzip"),
        ({"content-type": "multipart/form-data; boundary=x"}, "content-type: multipart/form-data"),
    ],
)
def test_bodies_that_cannot_be_json_are_opaque(headers: dict[str, str], why: str) -> None:
    assert why_opaque(RawRequest("POST", "/v1/completions", headers)) == why
