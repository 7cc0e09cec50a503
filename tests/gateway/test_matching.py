from pathlib import Path

from gateway.load import load
from gateway.matching import covers, domains, intersect, ports
from tests.support.gateway.files import GATEWAY, POOL, ROUTE, write


def test_wildcards_cover_what_is_below_them() -> None:
    assert covers("*", "a.b")
    assert covers("*.b", "a.b")
    assert covers("*.b", "x.a.b")
    assert covers("*.b", "*.a.b")
    assert not covers("*.b", "b")
    assert not covers("a.b", "*.b")
    assert not covers("*.b", "ab")


def test_a_route_answers_the_hosts_that_it_and_its_listener_share() -> None:
    assert intersect(None, []) == ["*"]
    assert intersect("*.a", []) == ["*.a"]
    assert intersect(None, ["x.a", "b"]) == ["x.a", "b"]
    assert intersect("*.a", ["x.a", "b"]) == ["x.a"]
    assert intersect("x.a", ["*.a", "x.a"]) == ["x.a"]
    assert intersect("x.a", ["b"]) == []


def order(folder: Path, gateway: str, *routes: str) -> dict[str, list[str]]:
    """Names of the entries of each domain of port 80."""
    resources = load([write(folder, gateway, *routes, POOL)])
    found = domains(ports(resources.gateways)[80], resources.routes)
    return {domain: [entry.name for entry in entries] for domain, entries in found.items()}


def named(name: str, spec: str = "", metadata: str = "") -> str:
    return ROUTE.replace("{name: route}", f"{{name: {name}{metadata}}}").replace("rules:", f"{spec}\n  rules:")


def test_the_closest_host_comes_first_and_wider_ones_follow(tmp_path: Path) -> None:
    any_host, wide, exact = named("any"), named("wide", "hostnames: ['*.a']"), named("exact", "hostnames: [x.a]")
    assert order(tmp_path, GATEWAY, any_host, wide, exact) == {
        "*": ["default/any/0"],
        "*.a": ["default/wide/0", "default/any/0"],
        "x.a": ["default/exact/0", "default/wide/0", "default/any/0"],
    }


def test_a_host_belongs_to_the_listener_that_names_it_most_closely(tmp_path: Path) -> None:
    listener = "{name: http, port: 80, protocol: HTTP}"
    gateway = GATEWAY.replace(listener, f"{listener}, {listener.replace('name: http', 'name: close, hostname: x.a')}")
    wide = ROUTE.replace("{name: gate}", "{name: gate, sectionName: http}")
    assert order(tmp_path, gateway, wide) == {"*": ["default/route/0"], "x.a": []}
    hosts = wide.replace("rules:", "hostnames: [x.a, y.a]\n  rules:")
    assert order(tmp_path, gateway, hosts) == {"*": [], "x.a": [], "y.a": ["default/route/0"]}


def test_equal_matches_go_to_the_oldest_route_and_then_by_name(tmp_path: Path) -> None:
    old = named("z", metadata=", creationTimestamp: 2020-01-01T00:00:00Z")
    young = named("y", metadata=", creationTimestamp: '2024-01-01T00:00:00Z'")
    assert order(tmp_path, GATEWAY, named("b"), young, named("a"), old) == {
        "*": ["default/z/0", "default/y/0", "default/a/0", "default/b/0"]
    }
