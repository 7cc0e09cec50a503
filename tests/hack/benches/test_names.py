from pathlib import Path

from hack.benches.names import PAGES, Sample, attack, grown


def sample(requests: int, rss_kb: int, page: int) -> Sample:
    return Sample(requests, rss_kb, 900, {"/metrics": page, "/": 100})


def test_what_fills_and_stays_is_no_growth_and_what_goes_on_is_reported() -> None:
    full = [sample(n * 1000, 80_000 + min(n, 4) * 5000, 1000 + min(n, 4) * 500) for n in range(9)]
    assert grown(full) == []
    leaking = [sample(n * 1000, 80_000 + n * 1000, 1000 + n * 500) for n in range(9)]
    assert grown(leaking) == ["/metrics: 3,000 to 5,000 bytes", "memory: 1024 bytes for each request"]


async def test_some_requests_of_it(tmp_path: Path) -> None:
    """Too few to fill anything: that a picker is asked, and looked at, they show."""
    seen = await attack(80, 0, tmp_path)
    assert [each.requests for each in seen] == list(range(0, 81, 10))
    assert seen[-1].series > seen[0].series
    assert set(seen[-1].pages) == {"/metrics", *PAGES}
