"""Which stages an endpoint serves, by its label; and how far two endpoints are from another."""

import pytest

from epp.plugin import Endpoint
from epp.pool.roles import RoleView, apart, roles_of, stages_of, unknown_role


def pod(name: str, role: str | None = None, **labels: str) -> Endpoint:
    return Endpoint(
        name, f"10.0.0.1:{8000 + ord(name[-1])}", labels | ({} if role is None else {"llm-d.ai/role": role})
    )


@pytest.mark.parametrize(
    ("role", "stages"),
    [
        (None, "decode"),
        ("decode", "decode"),
        ("prefill", "prefill"),
        ("encode", "encode"),
        ("both", "decode prefill"),
        ("prefill-decode", "decode prefill"),
        ("encode-prefill", "prefill encode"),
        ("encode-prefill-decode", "decode prefill encode"),
        ("decoder", ""),
        ("", ""),
    ],
)
def test_a_role_names_its_stages(role: str | None, stages: str) -> None:
    one = pod("one", role)
    roles = roles_of([one, pod("other", "decode")])
    found = {"decode": roles.decode, "prefill": roles.prefill, "encode": roles.encode}
    assert " ".join(stage for stage, endpoints in found.items() if one in endpoints) == stages


def test_without_roles_nobody_is_looked_at_twice() -> None:
    endpoints = (pod("a"), pod("b"))
    view = RoleView()
    roles = view.of(endpoints)
    assert (roles.decode, roles.apart) == (endpoints, False)
    assert roles.decode is endpoints
    assert view.of(endpoints) is roles
    assert view.of((*endpoints, pod("p", "prefill"))).apart


def test_a_request_needs_one_of_each_stage() -> None:
    d, p, both, plain, image = pod("d", "decode"), pod("p", "prefill"), pod("b", "both"), pod("x"), pod("e", "encode")
    assert [*map(list, stages_of([d, p]))] == [[d], [p]]
    assert [*map(list, stages_of([d, p, both, image]))] == [[d, both], [p, both]]
    assert [*map(list, stages_of([both, d]))] == [[both, d]]
    assert [*map(list, stages_of([plain]))] == [[plain]]
    assert [*map(list, stages_of([p]))] == [[p]]


ZONE, REGION, RACK = "topology.kubernetes.io/zone", "topology.kubernetes.io/region", "topology.kubernetes.io/rack"
HOST = "kubernetes.io/hostname"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({}, {}, None),
        ({ZONE: "a"}, {}, None),
        ({HOST: "h", ZONE: "a"}, {HOST: "h", ZONE: "a"}, 0),
        ({RACK: "r", ZONE: "a"}, {RACK: "r", ZONE: "a"}, 1),
        ({RACK: "r", ZONE: "a"}, {RACK: "s", ZONE: "a"}, 2),
        ({ZONE: "a", REGION: "x"}, {ZONE: "b", REGION: "x"}, 3),
        ({ZONE: "a", REGION: "x"}, {ZONE: "b", REGION: "y"}, 4),
        ({RACK: ""}, {RACK: ""}, None),
    ],
)
def test_labels_say_how_far(one: dict[str, str], other: dict[str, str], expected: int | None) -> None:
    a, b = pod("a", **one), pod("b", **other)
    assert apart(a, b) == apart(b, a) == expected


def test_a_node_is_a_host() -> None:
    a, b = Endpoint("a", "10.0.0.1:1", node="n"), Endpoint("b", "10.0.0.1:2", node="n")
    assert apart(a, b) == 0


@pytest.mark.parametrize(
    ("role", "said"), [(None, ""), ("both", ""), ("decoder", "; did you mean 'decode'?"), ("", "")]
)
def test_a_role_that_means_nothing_is_said_with_what_would(role: str | None, said: str) -> None:
    text = unknown_role(pod("a", role))
    if role in (None, "both"):
        assert text == ""
    else:
        assert text == (
            f"a has the label llm-d.ai/role: {role!r}, so it gets no request; expected both, decode, encode, "
            f"encode-prefill, encode-prefill-decode, prefill, prefill-decode, or no such label{said}"
        )
