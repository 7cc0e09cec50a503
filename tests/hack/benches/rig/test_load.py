import pytest

from hack.benches.rig.load import Seen, seen
from hack.benches.rig.processes import BenchError


def test_the_result_line_is_read() -> None:
    output = "BODIES READ\nRunning 5m test\n...\nRESULT requests=120 failed=0 p50=410.0 p99=1300.5\n"
    assert seen(output) == Seen(120, 410.0, 1300.5)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("RESULT requests=10 failed=3 p50=1.0 p99=2.0", "3 of 10 requests failed"),
        ("RESULT requests=0 failed=0 p50=0.0 p99=0.0", "0 of 0 requests failed"),
        ("unable to connect to 127.0.0.1", "unable to connect"),
    ],
)
def test_figures_of_errors_are_no_figures(output: str, said: str) -> None:
    with pytest.raises(BenchError, match=said):
        seen(output)
