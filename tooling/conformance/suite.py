"""All cases, and how they are run: one after the other, each bounded, each on its own."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tooling.conformance import answers, bodies, destination, gateways, hardships, health, refusals, subsets
from tooling.conformance.case import Case, Level
from tooling.conformance.target import ConformanceOptions, Target, reach
from tooling.conformance.verdict import Failed, Skipped

GROUPS: Final = (
    destination.GROUP,
    bodies.GROUP,
    subsets.GROUP,
    answers.GROUP,
    refusals.GROUP,
    gateways.GROUP,
    health.GROUP,
    hardships.GROUP,
)
CASES: Final[tuple[Case, ...]] = tuple(case for group in GROUPS for case in group.cases)
LIMIT: Final = 6
"""A case takes at most this many times the reply timeout."""

Outcome = Literal["pass", "fail", "skip"]


@dataclass(frozen=True)
class Result:
    """What came of a case; `detail` in words unless it passed."""

    case: Case
    outcome: Outcome
    detail: str = ""


def failed(results: Sequence[Result], level: Level) -> list[Result]:
    """Those of this level that do not hold."""
    return [result for result in results if result.outcome == "fail" and result.case.level == level]


async def run(
    options: ConformanceOptions, cases: Sequence[Case] = CASES, seen: Callable[[Result], None] = lambda _: None
) -> list[Result]:
    """Every case's result, in order; each is shown to `seen` as it comes. Raises Unreachable."""
    results = []
    async with reach(options) as target:
        for case in cases:
            result = await outcome(case, target)
            results.append(result)
            seen(result)
    return results


async def outcome(case: Case, target: Target) -> Result:
    """One case's result; never raises for what the target does."""
    limit = LIMIT * target.options.reply_timeout
    try:
        async with asyncio.timeout(limit):
            await case.check(target)
    except Skipped as skipped:
        return Result(case, "skip", str(skipped))
    except Failed as failed:
        return Result(case, "fail", str(failed))
    except TimeoutError:
        return Result(case, "fail", f"expected an end of the case; got none within {limit:g} s")
    return Result(case, "pass")
