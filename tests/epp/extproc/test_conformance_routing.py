from random import Random

import pytest

from epp import protocol
from epp.errors import NoEndpoint
from epp.extproc.conformance_routing import ConformanceRouter
from epp.flow.saturation import ConcurrencyDetector
from epp.parsing.parser import Parser
from epp.parsing.request import RawRequest
from epp.pool.store import Pool
from epp.route import Admission, Policy, Router
from epp.scheduling.pickers import RoundRobinPicker
from tests.epp.test_route import Diary
from tests.support.scheduling.schedulers import pod, scheduler

ADDRESSES = ("10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:8000", "[fd00::1]:8000")
BODY = b'{"model": "m", "prompt": "hello"}'


class Rig:
    def __init__(self) -> None:
        self.pool = Pool("p", "ns", random=Random(1))
        self.pool.replace(pod(f"e{n}", address=address) for n, address in enumerate(ADDRESSES))
        self.diary = Diary()
        self.router = Router(
            self.pool,
            Parser(self.pool, lambda model, size: size // 4, lambda: "made-up", trusted=False),
            Policy(Admission(ConcurrencyDetector()), scheduler(picker=RoundRobinPicker())),
            self.diary,
            lambda: 0.0,
        )
        self.steered = ConformanceRouter(self.router)

    async def chosen(self, selection: str | None = None, subset: tuple[str, ...] | None = None) -> set[str]:
        """Where eight requests go."""
        headers = {} if selection is None else {protocol.TEST_SELECTION: selection}
        found = set()
        for _ in range(8):
            async with self.steered.route(RawRequest("POST", "/v1/completions", headers, BODY, subset)) as routed:
                found.add(routed.destination)
        return found


@pytest.mark.parametrize(
    ("selection", "chosen"),
    [
        (None, set(ADDRESSES)),
        ("", set(ADDRESSES)),
        (" , ", set(ADDRESSES)),
        ("10.0.0.2", {"10.0.0.2:8000"}),
        ("10.0.0.1:8001", {"10.0.0.1:8001"}),
        ("10.0.0.1", {"10.0.0.1:8000", "10.0.0.1:8001"}),
        ("10.0.0.1:8000, 10.0.0.2", {"10.0.0.1:8000", "10.0.0.2:8000"}),
        ("[fd00::1]:8000", {"[fd00::1]:8000"}),
        ("fd00:0::1", {"[fd00::1]:8000"}),
        ("10.9.9.9,10.0.0.2", {"10.0.0.2:8000"}),
    ],
)
async def test_a_request_goes_where_its_header_says(selection: str | None, chosen: set[str]) -> None:
    assert await Rig().chosen(selection) == chosen


async def test_the_header_goes_before_the_gateways_subset() -> None:
    assert await Rig().chosen("10.0.0.2", ("10.0.0.1:8000",)) == {"10.0.0.2:8000"}
    assert await Rig().chosen(None, ("10.0.0.1:8000",)) == {"10.0.0.1:8000"}


async def test_who_names_nobody_of_the_pool_gets_nobody() -> None:
    with pytest.raises(NoEndpoint, match=r"10\.9\.9\.9"):
        await Rig().chosen("10.9.9.9")


async def test_the_answer_says_where_it_was_sent_and_who_served() -> None:
    rig = Rig()
    headers = {protocol.TEST_SELECTION: "10.0.0.2"}
    async with rig.steered.route(RawRequest("POST", "/v1/completions", headers, BODY)) as routed:
        assert (routed.body, routed.renamed, dict(routed.headers)) == (None, None, {})
        reported = dict(routed.answered(500, "10.0.0.1:8000"))
        routed.answer_chunk(b"x", end=True)
    assert reported == {
        "x-conformance-test-served-endpoint": "10.0.0.1:8000",
        "x-conformance-test-selected-endpoint": "10.0.0.2:8000",
        "x-conformance-test-epp-pool": "ns/p",
        "x-went-into-resp-headers": "true",
    }
    assert rig.diary.lines[-1] == "finished e0 500"  # a retry landed there
    async with rig.steered.route(RawRequest("POST", "/v1/completions", headers, BODY)) as routed:
        reported = dict(routed.answered(200, ""))
    assert reported["x-conformance-test-served-endpoint"] == "fail: missing destination endpoint served metadata"
