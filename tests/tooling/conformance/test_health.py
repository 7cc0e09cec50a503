import pytest

from tests.support.ext_proc.faulty_pickers import Bend, Status, bent, failing
from tooling.conformance.suite import CASES, run
from tooling.conformance.target import ConformanceOptions


class NotServing(Bend):
    @staticmethod
    def health(service: str) -> object:
        return Status.NOT_SERVING


class KnowsOneName(Bend):
    @staticmethod
    def health(service: str) -> object:
        return Status.SERVING if service == "inference-extension" else Status.SERVICE_UNKNOWN


class KnowsNotTheCharts(Bend):
    @staticmethod
    def health(service: str) -> object:
        return Status.SERVICE_UNKNOWN if service == "inference-extension" else Status.SERVING


@pytest.mark.parametrize(
    ("bend", "fail"),
    [
        (NotServing, {"7.1", "7.2", "7.3", "7.4"}),
        (KnowsOneName, {"7.2", "7.3", "7.4"}),
        (KnowsNotTheCharts, {"7.1"}),
    ],
)
async def test_bent_health_is_noticed(bend: type[Bend], fail: set[str]) -> None:
    assert await failing(bend) == fail


async def test_a_health_port_where_nobody_is_and_one_that_was_not_named() -> None:
    cases = [case for case in CASES if case.group == "health"]
    async with bent(Bend) as port:
        at = f"127.0.0.1:{port}"
        gone = await run(ConformanceOptions(at, health="127.0.0.1:1"), cases)
        unnamed = await run(ConformanceOptions(at), cases)
    assert [result.outcome for result in gone] == ["fail", "fail", "fail", "pass"]
    assert "nobody there" in gone[0].detail
    assert [result.outcome for result in unnamed] == ["skip", "skip", "skip", "pass"]
