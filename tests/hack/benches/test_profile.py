import asyncio
import cProfile

import pytest

from hack.benches.profile import ROOT, STAGES, shares, spent, stage_of


@pytest.mark.parametrize("wiring", ["full-duplex", "lean"])
def test_a_request_passes_every_stage(wiring: str) -> None:
    profiler = cProfile.Profile()
    assert asyncio.run(spent(2048, wiring, 5, profiler)) > 0
    found = shares(profiler)
    assert found.keys() >= STAGES.keys()
    assert sum(found.values()) == pytest.approx(1.0)


def test_modules_belong_to_the_first_stage_that_fits() -> None:
    assert stage_of(f"{ROOT}/epp/extproc/http2.py") == "HTTP/2"
    assert stage_of(f"{ROOT}/epp/extproc/stream.py") == "ext_proc messages"
    assert stage_of("/usr/lib/python3/uuid.py") == "other"
