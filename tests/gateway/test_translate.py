"""Golden files: `golden/NAME.yaml` in, `golden/NAME.json` out. After a wanted change, write them anew with

    REGENERATE=1 python -m pytest tests/gateway/test_translate.py

and read the difference before committing it.
"""

import json
import os
from pathlib import Path
from typing import get_args

import pytest

from gateway.envoy import validate
from gateway.errors import GatewayError
from gateway.load import Resources, load
from gateway.translate import TranslateOptions, translate
from gateway.wiring import Wiring
from gateway.xds import Rendering
from tests.support.gateway.files import GATEWAY, POOL, ROUTE, write

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.yaml"))


def rendered(name: str, wiring: Wiring = "lean") -> Rendering:
    resources = load([GOLDEN / f"{name}.yaml"])
    pickers = {pool.metadata.id: ["127.0.0.1:9002", "127.0.0.1:9012"] for pool in resources.pools}
    return translate(resources, pickers, TranslateOptions(wiring=wiring))


@pytest.mark.parametrize("name", NAMES)
def test_the_configuration_is_as_written_down(name: str) -> None:
    found = json.dumps(rendered(name).static(), indent=1) + "\n"
    file = GOLDEN / f"{name}.json"
    if os.environ.get("REGENERATE"):
        file.write_text(found)
    assert json.loads(found) == json.loads(file.read_text())


@pytest.mark.envoy
@pytest.mark.parametrize("wiring", get_args(Wiring))
@pytest.mark.parametrize("name", NAMES)
async def test_envoy_finds_every_rendering_valid(name: str, wiring: Wiring) -> None:
    assert await validate(rendered(name, wiring)) is None


@pytest.mark.envoy
async def test_envoy_is_asked_about_regular_expressions(tmp_path: Path) -> None:
    match = "matches: [{path: {type: RegularExpression, value: '/(['}}]\n    backendRefs"
    resources = load([write(tmp_path, GATEWAY, ROUTE.replace("backendRefs", match), POOL)])
    error = await validate(translate(resources, {"default/sim": ["127.0.0.1:9002"]}))
    assert error is not None
    assert "missing ]" in error


def test_a_pool_needs_its_picker_and_a_gateway_must_be(tmp_path: Path) -> None:
    resources = load([write(tmp_path, GATEWAY, ROUTE, POOL)])
    with pytest.raises(
        GatewayError, match="InferencePool default/sim: no address is known for its endpoint picker epp"
    ):
        translate(resources, {})
    with pytest.raises(GatewayError, match="there is no Gateway"):
        translate(Resources(), {})
    with pytest.raises(GatewayError, match="there is no HTTPRoute, so every request would be answered 404"):
        translate(load([write(tmp_path, GATEWAY, POOL)]), {"default/sim": ["127.0.0.1:9002"]})


def test_the_address_to_listen_on_is_an_option(tmp_path: Path) -> None:
    resources = load([write(tmp_path, GATEWAY, ROUTE, POOL)])
    [listener] = translate(resources, {"default/sim": ["[::1]:9002"]}, TranslateOptions(bind="0.0.0.0")).listeners
    assert listener["address"]["socket_address"] == {"address": "0.0.0.0", "port_value": 80}
