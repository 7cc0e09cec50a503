"""The section `limits` becomes limits of tenants; what is wrong with it is refused by name."""

from math import inf
from random import Random

import pytest

from epp.configuration.describe import describe
from epp.configuration.loader import Pipeline, load_text
from epp.errors import ConfigError
from epp.flow.tenants import TenantSource

HEAD = "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins: [{type: queue-scorer}]\n"


def loaded(body: str) -> Pipeline:
    return load_text(HEAD + body, clock=lambda: 0.0, random=Random(0))


def refused(body: str) -> str:
    with pytest.raises(ConfigError) as found:
        loaded(body)
    return str(found.value)


def test_without_the_section_there_are_none() -> None:
    pipeline = loaded("")
    assert (pipeline.limits, pipeline.guards) == (None, ())
    assert "limits" not in describe(pipeline)


def test_a_tenant_has_what_it_does_not_say_from_the_section() -> None:
    limits = loaded(
        """
limits:
  tenant: {header: X-Tenant}
  requestsPerMinute: 60
  tokensPerMinute: 1.5k
  models: [a, "b*"]
  tenants:
    x: {requestsPerMinute: 0, maxPromptTokens: 100}
    y: {models: []}
"""
    ).limits
    assert limits is not None
    assert limits.source == TenantSource("x-tenant")
    x, y, z = (limits.of(name) for name in "xyz")
    assert (x.requests_per_minute, x.tokens_per_minute, x.max_prompt_tokens) == (inf, 1500, 100)
    assert (y.requests_per_minute, y.models, z.models) == (60, (), ("a", "b*"))
    assert z is limits.usual
    assert z.concurrent_requests == z.max_output_tokens == inf


def test_check_shows_each_tenants_limits() -> None:
    shown = describe(loaded("limits: {requestsPerMinute: 5, tenants: {x: {models: []}, y: {requestsPerMinute: 0}}}"))
    assert [line.removeprefix("limits").strip() for line in shown.splitlines() if line.startswith("limits")] == [
        "tenant by a guard's word; else all requests are one's",
        "each tenant: 5 requests a minute",
        "tenant x: 5 requests a minute, of models none",
        "tenant y: none",
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("limits: {requestPerMinute: 5}", "limits.requestPerMinute: unknown; did you mean 'requestsPerMinute'?"),
        ("limits: {requestsPerMinute: -5}", "limits.requestsPerMinute: expected a quantity such as 5000, 500M or 1Gi"),
        ("limits: {requestsPerMinute: 0.5}", "limits.requestsPerMinute: expected a whole number, got 0.5"),
        ("limits: {tenant: {}}", "limits.tenant.header: missing"),
        ("limits: {tenant: {header: Cookie}}", "limits.tenant: header: cookie holds a credential"),
        ("limits: {models: ['a*b']}", "limits.models[0]: expected a model's name, or its beginning and one *"),
        ("limits: {tenants: {x: 5}}", "limits.tenants.x: expected a mapping, got 5"),
        ("limits: {tenants: {x: {tenants: {}}}}", "limits.tenants.x.tenants: unknown"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(body: str, message: str) -> None:
    assert message in refused(body)
