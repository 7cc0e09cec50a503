import pytest

from tests.support.ext_proc.server import Route, ext_proc_server
from tooling.conformance.target import ConformanceOptions, host_and_port, reach
from tooling.conformance.verdict import Skipped, Unreachable


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("[::1]:80", ("::1", 80)),
        ("[0:0::1]:80", ("::1", 80)),
        ("::1:80", None),
        ("[10.0.0.1]:80", None),
        ("10.0.0.1", None),
        ("10.0.0.1:", None),
        ("10.0.0.1:0", None),
        ("10.0.0.1:65536", None),
        ("10.0.0.1:²", None),
        ("name:80", None),
    ],
)
def test_addresses(text: str, address: tuple[str, int] | None) -> None:
    assert host_and_port(text) == address


async def test_what_the_user_did_not_say_is_skipped() -> None:
    async with ext_proc_server(Route()) as made:
        async with reach(
            ConformanceOptions(f"127.0.0.1:{made.ports[0]}", endpoints=("10.0.0.1:80", "[::1]:80"))
        ) as target:
            assert target.endpoints(2) == ("10.0.0.1:80", "[::1]:80")
            assert target.ipv6_endpoint() == "[::1]:80"
            with pytest.raises(Skipped, match="needs 3"):
                target.endpoints(3)
            with pytest.raises(Skipped, match="--health"):
                async with target.health_channel():
                    pass
        async with reach(ConformanceOptions(f"127.0.0.1:{made.ports[0]}")) as target:
            with pytest.raises(Skipped, match="IPv6"):
                target.ipv6_endpoint()


@pytest.mark.parametrize("tls", [False, True])
async def test_a_target_that_is_not_there(tls: bool) -> None:
    with pytest.raises(Unreachable, match=r"nothing at 127\.0\.0\.1:1 speaks gRPC .*\?"):
        async with reach(ConformanceOptions("127.0.0.1:1", tls=tls, reply_timeout=0.3)):
            pass
