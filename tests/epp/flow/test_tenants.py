"""Whose a request is."""

import json
from base64 import urlsafe_b64encode

import pytest

from epp.flow.tenants import ANONYMOUS, LONGEST, TenantSource
from epp.testing import request


def encoded(claims: object) -> str:
    return urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")


def named(source: TenantSource, value: str) -> str:
    return source.name_of(request(headers={source.header: value}))


def test_a_header_names_the_tenant() -> None:
    source = TenantSource("X-Tenant")
    assert source.name_of(request(headers={"x-tenant": "team-a"})) == "team-a"
    assert source.name_of(request()) == ANONYMOUS
    assert named(source, "x" * 1000) == "x" * LONGEST


@pytest.mark.parametrize("form", ["{}", "Bearer h.{}.s", "bearer h.{}.s", "h.{}.s"])
def test_a_claim_is_found_in_a_token_and_in_a_payload(form: str) -> None:
    claims = {"sub": "you", "org": {"team": 7}, "https://example.com/team": "blue", "list": ["a"], "flag": True}
    value = form.format(encoded(claims))
    found = {claim: named(TenantSource("x-jwt", claim), value) for claim in ("sub", "org.team", "list", "flag", "none")}
    assert found == {"sub": "you", "org.team": "7", "list": ANONYMOUS, "flag": ANONYMOUS, "none": ANONYMOUS}
    assert named(TenantSource("x-jwt", "https://example.com/team"), value) == "blue"


def test_a_payload_may_be_in_either_alphabet() -> None:
    value = encoded({"sub": "~~~???"})
    assert {"-", "_"} & set(value)
    assert named(TenantSource("x-jwt", "sub"), value) == "~~~???"
    assert named(TenantSource("x-jwt", "sub"), value.replace("-", "+").replace("_", "/")) == "~~~???"


@pytest.mark.parametrize("value", ["", "sk-secret", "Bearer é.é.é", "a.b.c", encoded([1]), encoded("x"), "[" * 9000])
def test_what_is_no_token_names_nobody(value: str) -> None:
    assert named(TenantSource("authorization", "sub"), value) == ANONYMOUS


def test_a_credential_never_becomes_a_name() -> None:
    with pytest.raises(ValueError, match="header: authorization holds a credential"):
        TenantSource("Authorization")
    assert TenantSource("Authorization", "sub").header == "authorization"
