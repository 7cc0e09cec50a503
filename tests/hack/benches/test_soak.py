import asyncio
from pathlib import Path
from random import Random

import pytest

from hack.benches.rig.mixed_load import MixedLoad, Request, mixed_load
from hack.benches.soak import LEAK, Sample, Slope, report, slope, soak
from tests.support.process.waiting import until

REQUESTS = [100.0 * n for n in range(1, 81)]


def test_a_line_is_its_slope_and_noise_its_error() -> None:
    exact = slope(REQUESTS, [50_000 + 0.3 * n for n in REQUESTS])
    assert exact.per_thousand == pytest.approx(300)
    assert exact.error == pytest.approx(0, abs=1e-6)
    noise = Random(1)
    noisy = slope(REQUESTS, [50_000 + noise.gauss(0, 100) for _ in REQUESTS])
    assert abs(noisy.per_thousand) < 2 * noisy.error
    assert slope([1.0, 2.0], [1.0, 2.0]).error == float("inf")


@pytest.mark.parametrize(
    ("rise", "error", "verdict"), [(300, 50, "leak"), (5, 10, "none"), (-80, 60, "none"), (90, 60, "unknown")]
)
def test_two_errors_decide(rise: float, error: float, verdict: str) -> None:
    assert Slope(rise, error).verdict(LEAK) == verdict


def sample(n: float, rss: float) -> Sample:
    return Sample(int(n), int(rss), 400_000, 9_000, 20, 8, 900, {}, 0.5, 0.01, 0.02)


def test_the_report_says_what_grows_and_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    flat, steep = ([sample(n, 80_000 + rise * n) for n in REQUESTS] for rise in (0.0, 0.5))
    load = MixedLoad("http://nowhere", sent=1)
    assert report(flat, load) == 0
    assert "no leak: surely less than 64 bytes a request" in capsys.readouterr().out
    assert report(steep, load) == 1
    assert "a leak" in capsys.readouterr().out
    load.done.append(Request("chat", 0.0, 1.0, "failed", "TimeoutError"))
    assert report(flat, load) == 1
    assert "failed: TimeoutError" in capsys.readouterr().out


async def test_so_many_are_under_way_and_no_more() -> None:
    enough = asyncio.Event()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await enough.wait()
        writer.close()

    server = await asyncio.start_server(late, "127.0.0.1", 0)
    load = MixedLoad(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", shares={"chat": 1.0})
    async with mixed_load(load, 1000, at_once=3):
        await until(lambda: load.sent == 3)
        await asyncio.sleep(0.1)
        assert (load.sent, load.done) == (3, [])
        enough.set()
        await until(lambda: len(load.done) > 3)
    server.close()


@pytest.mark.long
@pytest.mark.envoy
async def test_some_seconds_of_it(tmp_path: Path) -> None:
    """Whether there is a leak, minutes do not say; that every kind of request ends as it should, they do."""
    samples, load = await soak(0.1, 30, tmp_path)
    assert {each.kind for each in load.done} == set(load.shares)
    assert [each for each in load.done if each.outcome == "failed"] == []
    assert {each.outcome for each in load.done if each.kind == "malformed"} == {"refused"}
    last = samples[-1]
    assert min(last.requests, last.rss_kb, last.descriptors, last.threads, last.series, len(last.tables)) > 0
    assert 100_000 < last.blocks < 2_000_000
    assert 1_000 < last.malloc_kb < last.rss_kb
