from hack.benches.choose import STATES, measure


def test_every_state_is_measured() -> None:
    assert all(measure(4, state, 2) > 0 for state in STATES)
