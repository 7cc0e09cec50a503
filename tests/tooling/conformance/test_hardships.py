from collections.abc import Iterable

import pytest

from tests.support.ext_proc.faulty_pickers import Bend, Broken, Request, failing


class DiesOfBytes(Bend):
    def asked(self, message: Request) -> Iterable[Request]:
        for entry in message.request_headers.headers.headers:
            try:
                (entry.raw_value or entry.value).decode()
            except UnicodeDecodeError:
                raise Broken from None
        yield message


class DiesOfDepth(Bend):
    def asked(self, message: Request) -> Iterable[Request]:
        if b"[" * 1000 in message.request_body.body:
            raise Broken
        yield message


class FewStreams(Bend):
    server_options = (("grpc.max_concurrent_streams", 100),)


@pytest.mark.parametrize(("bend", "fail"), [(DiesOfBytes, {"8.4"}), (DiesOfDepth, {"8.5"})])
async def test_bent_nerves_are_noticed(bend: type[Bend], fail: set[str]) -> None:
    assert await failing(bend) == fail


async def test_a_bound_on_streams_is_noticed() -> None:
    assert await failing(FewStreams, frozenset({"8.3"})) == {"8.3"}
