from typing import get_args

import pytest

from gateway.wiring import Wiring, picker_filter


@pytest.mark.parametrize("wiring", get_args(Wiring))
def test_the_filter_is_off_until_a_route_turns_it_on(wiring: Wiring) -> None:
    made = picker_filter(wiring)
    assert made.disabled


def test_only_full_duplex_carries_answers() -> None:
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ExternalProcessor
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ProcessingModeBodySendMode as Body

    modes = {}
    for wiring in get_args(Wiring):
        packed = picker_filter(wiring).typed_config
        assert packed is not None
        config = packed.unpack()
        assert isinstance(config, ExternalProcessor)
        assert config.processing_mode is not None
        modes[wiring] = config.processing_mode.response_body_mode
    assert modes.pop("full-duplex") == Body.FULL_DUPLEX_STREAMED
    assert set(modes.values()) == {Body.NONE}
