import pytest

from epp.admin.hosts import Hosts
from epp.errors import ConfigError

KNOWN = Hosts("picker", ["metrics.example.org"])


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:9090", "LOCALHOST.", "127.0.0.1", "10.1.2.3:9090", "[::1]:9090", "[fd00::1]", "::1"),
        *("picker:9090", "metrics.example.org", "Metrics.Example.Org:80"),
    ],
)
def test_addresses_loopback_and_the_names_given_are_ours(host: str) -> None:
    assert KNOWN.refusal([host]) == ""


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example.org", "evil.example.org:9090", "127.0.0.1.evil.example.org", "localhost.evil.example.org"),
        *("xmetrics.example.org", "", "a:b:c", "[evil.example.org]", "127.0.0.1@evil", "0x7f.1", "2130706433"),
    ],
)
def test_any_other_name_is_refused_with_what_is_expected(host: str) -> None:
    reported = KNOWN.refusal([host])
    assert reported.startswith(f"Host: got {host!r}; expected an IP address, ")
    assert "metrics.example.org, picker, or a name given with --metrics-allowed-host" in reported


def test_no_host_is_no_browser_and_two_are_nobody() -> None:
    assert KNOWN.refusal([]) == ""
    assert KNOWN.refusal(["localhost", "evil"]) == "expected one Host header, got 2"


@pytest.mark.parametrize("name", ["http://a", "a:9090", "", "a b", "*", ".a", "a..b"])
def test_a_name_that_is_none_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^--metrics-allowed-host: expected a host name "):
        Hosts("127.0.0.1", [name])
