from collections.abc import Iterable

import pytest

from tests.support.ext_proc.faulty_pickers import Bend, Broken, Reply, Request, bent, failing, subset_of
from tooling.conformance.subsets import address_of, joined
from tooling.conformance.suite import CASES, run
from tooling.conformance.target import ConformanceOptions


class Ignores(Bend):
    def asked(self, message: Request) -> Iterable[Request]:
        message.ClearField("metadata_context")
        yield message


class ReadsLastMessageOnly(Bend):
    """As an EPP does that takes the metadata of each message for the request's."""

    def __init__(self) -> None:
        self.headers: Request | None = None

    def asked(self, message: Request) -> Iterable[Request]:
        if message.HasField("request_headers") and not message.request_headers.end_of_stream:
            self.headers = message
        elif self.headers is not None and message.request_body.end_of_stream:
            self.headers.metadata_context.CopyFrom(message.metadata_context)
            yield from (self.headers, message)
            self.headers = None
        else:
            yield message


class IgnoresWithoutBody(Bend):
    def asked(self, message: Request) -> Iterable[Request]:
        if message.request_headers.end_of_stream:
            message.ClearField("metadata_context")
        yield message


class LooksAtAddressesOnly(Bend):
    def asked(self, message: Request) -> Iterable[Request]:
        if (hint := subset_of(message)) is not None:
            for value in hint.list_value.values:
                if value.string_value.count(b".") == 3:
                    value.string_value = value.string_value.partition(b":")[0]
        yield message


class ReadsListsOnly(Bend):
    def asked(self, message: Request) -> Iterable[Request]:
        hint = subset_of(message)
        if hint is not None and hint.HasField("string_value"):
            message.ClearField("metadata_context")
        yield message


class WantsPorts(Bend):
    def asked(self, message: Request) -> Iterable[Request]:
        if (hint := subset_of(message)) is not None:
            for value in hint.list_value.values:
                if value.string_value == b"127.0.0.11":
                    value.string_value = b"192.0.2.1:1"
        yield message


class TakesEmptyForAbsent(Bend):
    def asked(self, message: Request) -> Iterable[Request]:
        hint = subset_of(message)
        if hint is not None and hint.HasField("list_value") and not hint.list_value.values:
            message.ClearField("metadata_context")
        yield message


class KnowsNoIpv6(Bend):
    def asked(self, message: Request) -> Iterable[Request]:
        if (hint := subset_of(message)) is not None:
            kept = [value for value in hint.list_value.values if not value.string_value.startswith((b"[", b":"))]
            if hint.HasField("list_value"):
                del hint.list_value.values[:]
                hint.list_value.values.extend(kept)
        yield message


class FailsInsteadOf503(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if reply.immediate_response.status.code == 503:
            raise Broken
        yield reply


class Says429(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if reply.immediate_response.status.code == 503:
            reply.immediate_response.status.code = 429
        yield reply


@pytest.mark.parametrize(
    ("bend", "fail"),
    [
        (Ignores, {f"3.{number}" for number in range(1, 11)} | {"5.7", "5.8"}),
        (IgnoresWithoutBody, {"3.6", "3.7", "3.8"}),
        (LooksAtAddressesOnly, {"3.1", "3.2", "3.5", "3.6"}),
        (ReadsListsOnly, {"3.9"}),
        (WantsPorts, {"3.10"}),
        (TakesEmptyForAbsent, {"3.4", "3.7"}),
        (KnowsNoIpv6, {"3.8"}),
        (FailsInsteadOf503, {"3.3", "3.4", "3.5", "3.7", "5.7", "5.8"}),
        (Says429, {"3.3", "3.4", "3.5", "3.7"}),
    ],
)
async def test_a_bent_subset_is_noticed(bend: type[Bend], fail: set[str]) -> None:
    assert await failing(bend) == fail


async def test_an_epp_that_takes_the_last_messages_metadata_is_given_what_envoy_gives() -> None:
    cases = frozenset({"2.2", "3.1", "3.2", "3.3", "3.4", "3.7", "5.7"})
    assert await failing(ReadsLastMessageOnly, cases) == set()


async def test_what_needs_endpoints_is_skipped_without_them() -> None:
    cases = [case for case in CASES if case.group == "subset"]
    async with bent(Bend) as port:
        found = await run(ConformanceOptions(f"127.0.0.1:{port}"), cases)
    assert {result.case.id for result in found if result.outcome == "pass"} == {"3.3", "3.4", "3.7"}
    assert {result.outcome for result in found} == {"pass", "skip"}
    assert all("--endpoint" in result.detail for result in found if result.outcome == "skip")


def test_addresses() -> None:
    assert address_of("[::1]:80") == ("::1", 80)
    assert joined("::1", 81) == "[::1]:81"
    assert joined("10.0.0.1", 81) == "10.0.0.1:81"
    with pytest.raises(ValueError, match="--endpoint nowhere"):
        address_of("nowhere")
