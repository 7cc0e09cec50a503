import json

import pytest

from epp.pool.engines import ENGINES, Places, parse
from epp.pool.models import models_of
from epp.pool.scrape import Visit
from hack.benches.idle import HERE, MODEL, endpoints, measure, pickers, table
from hack.benches.rig.pages import VLLM_BYTES


@pytest.mark.parametrize("busy", [False, True])
async def test_its_endpoints_answer_as_vllm_does(busy: bool) -> None:
    with endpoints(2, busy) as pool:
        one, two = json.loads(pool)["endpoints"]
        assert one["address"] != two["address"]
        address = f"{two['address']}:{two['port']}"
        visit, models = Visit(address), Visit(address, "/v1/models")
        pages = [await visit.page() for _ in range(2)]
        served = models_of(await models.page())
        visit.close()
        models.close()
    assert [one.id for one in served or ()] == [MODEL]
    first, second = (parse(page, ENGINES["vllm"], 0.0, Places()) for page in pages)
    assert first is not None
    assert first.block_size == 16
    assert (first == second) != busy
    assert pages[0] != pages[1]
    assert min(map(len, pages)) >= VLLM_BYTES


def test_pickers_are_measured_in_the_same_seconds() -> None:
    with endpoints(2, False) as pool, pickers({"one": HERE, "two": HERE}, pool, warm=0.0) as programs:
        shares = measure(programs, 1.0)
    assert min(shares.values()) > 0


def test_others_are_multiples_of_ours_within_each_round() -> None:
    rounds = [
        {"warmpath": 0.02, "before": 0.04},
        {"warmpath": 0.03, "before": 0.09},
        {"warmpath": 0.01, "before": 0.02},
    ]
    assert table(rounds, 100).splitlines() == [
        "warmpath: 2.00 % of a core with 100 endpoints: 200 us each a second",
        "before: 4.00 % of a core with 100 endpoints: 400 us each a second; 2.00 times warmpath",
    ]
