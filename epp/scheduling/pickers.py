"""Pickers: from scores to the endpoint to use, and fallbacks in order. Profile handlers: whose picks count."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import ClassVar

from epp.plugin import BadRequest, Endpoint, Picked, Picker, ProfileHandler, Request, RunProfile

_score = itemgetter(1)


class _Turns:
    """Who was picked when: the one picked longest ago (or never) is next.

    A plain counter modulo the number of ties would lock step with the traffic: when two kinds of requests alternate,
    each kind would see only every other endpoint. This cannot: every set of ties is served evenly, whatever came
    between.
    """

    def __init__(self) -> None:
        self._count = 0
        self._last: defaultdict[Endpoint, int] = defaultdict(int)
        self.of: Callable[[Endpoint], int] = self._last.__getitem__
        """Sort key: the turn an endpoint was last picked at; 0 = never."""

    def take(self, endpoint: Endpoint) -> None:
        self._count += 1
        self._last[endpoint] = self._count

    def forget(self, endpoint: Endpoint) -> None:
        self._last.pop(endpoint, None)


@dataclass(eq=False)
class _Picker(Picker):
    max_num_of_endpoints: int = 1

    def __post_init__(self) -> None:
        if self.max_num_of_endpoints < 1:
            raise ValueError(f"maxNumOfEndpoints: expected 1 or more, got {self.max_num_of_endpoints}")


@dataclass(eq=False)
class MaxScorePicker(_Picker):
    """`max-score-picker`: the highest score wins; equal scores take turns.

    `max_num_of_endpoints` (endpoints, 1): the endpoint and its fallbacks, in order of score. Among equals the one
    picked longest ago comes first, so that ties spread evenly. Source: GIE v1.5, llm-d-router.
    """

    takes_best: ClassVar[bool] = True

    _turns: _Turns = field(default_factory=_Turns, init=False, repr=False)

    def pick(self, request: Request, scored: Sequence[tuple[Endpoint, float]]) -> Sequence[Endpoint]:
        scores = [*map(_score, scored)]
        best = max(scores)
        first = scored[scores.index(best)][0] if scores.count(best) == 1 else self._longest_ago(scored, best)
        picks = [first]
        if self.max_num_of_endpoints > 1:
            picks += self._fallbacks(scored, first)
        self._turns.take(first)
        return picks

    def _longest_ago(self, scored: Sequence[tuple[Endpoint, float]], best: float) -> Endpoint:
        return min((endpoint for endpoint, score in scored if score == best), key=self._turns.of)

    def _fallbacks(self, scored: Sequence[tuple[Endpoint, float]], first: Endpoint) -> Sequence[Endpoint]:
        last_turn = self._turns.of
        rest = sorted((pair for pair in scored if pair[0] is not first), key=lambda p: (-p[1], last_turn(p[0])))
        return [endpoint for endpoint, _ in rest[: self.max_num_of_endpoints - 1]]

    def on_removed(self, endpoint: Endpoint) -> None:
        self._turns.forget(endpoint)


@dataclass(eq=False)
class RandomPicker(_Picker):
    """`random-picker`: every endpoint is as likely as any other, whatever its score.

    `max_num_of_endpoints` (endpoints, 1): drawn without putting back. Source: GIE v1.5.
    """

    def pick(self, request: Request, scored: Sequence[tuple[Endpoint, float]]) -> Sequence[Endpoint]:
        drawn = self.random.sample(scored, min(self.max_num_of_endpoints, len(scored)))
        return [endpoint for endpoint, _ in drawn]


@dataclass(eq=False)
class WeightedRandomPicker(_Picker):
    """`weighted-random-picker`: scores are lottery tickets; twice the score is picked twice as often.

    Algorithm A-Res (Efraimidis and Spirakis, 2006): each endpoint draws U in (0, 1], its key is U^(1/score), the
    largest keys win. Sorted here by -ln(U)/score, smallest first: the same order, without underflow. An endpoint with
    score 0 comes after all others; when every score is 0, all are equally likely.
    `max_num_of_endpoints` (endpoints, 1). Source: GIE v1.5.
    """

    def pick(self, request: Request, scored: Sequence[tuple[Endpoint, float]]) -> Sequence[Endpoint]:
        draws = [(-math.log(1.0 - self.random.random()), score, endpoint) for endpoint, score in scored]
        draws.sort(key=lambda d: (d[0] / d[1] if d[1] > 0.0 else math.inf, d[0]))
        return [endpoint for _, _, endpoint in draws[: self.max_num_of_endpoints]]


@dataclass(eq=False)
class RoundRobinPicker(_Picker):
    """`round-robin-picker`: endpoints take turns in the order of their names, whatever their scores.

    The one picked longest ago is next, so turns stay even when candidates come and go between requests (a subset, a
    filter, a rollout). `max_num_of_endpoints` (endpoints, 1): fallbacks are those whose turn comes next. Source: ours.
    """

    _turns: _Turns = field(default_factory=_Turns, init=False, repr=False)

    def pick(self, request: Request, scored: Sequence[tuple[Endpoint, float]]) -> Sequence[Endpoint]:
        last_turn = self._turns.of
        order = sorted((endpoint for endpoint, _ in scored), key=lambda endpoint: (last_turn(endpoint), endpoint.name))
        self._turns.take(order[0])
        return order[: self.max_num_of_endpoints]

    def on_removed(self, endpoint: Endpoint) -> None:
        self._turns.forget(endpoint)


class SingleProfileHandler(ProfileHandler):
    """`single-profile-handler`: runs the one profile of the configuration; its picks are the answer.

    No parameters. Source: GIE v1.5 and llm-d-router. Raises ValueError when there is more than one profile.
    """

    def handle(self, request: Request, profiles: Sequence[str], run: RunProfile) -> Picked:
        if len(profiles) != 1:
            raise ValueError(f"single-profile-handler needs exactly one profile, found {', '.join(profiles) or 'none'}")
        return Picked(run(profiles[0]))


@dataclass(eq=False)
class HeaderProfileHandler(ProfileHandler):
    """`header-profile-handler`: runs the profile that a request's header names; where there is one only, that one.

    `header_name` (EPP-Profile); without the header, or with an empty one, `default_profile` (decode) runs. A name that
    is no profile's is the client's error (400). Source: llm-d-router, which answers 429 there.
    """

    header_name: str = "EPP-Profile"
    default_profile: str = "decode"

    def __post_init__(self) -> None:
        if not self.header_name:
            raise ValueError("headerName: expected the name of a header, got nothing")

    def handle(self, request: Request, profiles: Sequence[str], run: RunProfile) -> Picked:
        if len(profiles) == 1:
            return Picked(run(profiles[0]))
        header = self.header_name.lower()
        name = (request.header(header) or "").strip() or self.default_profile
        if name not in profiles:
            raise BadRequest(f"{header}: got {name[:60]!r}; expected one of {', '.join(profiles)}")
        return Picked(run(name))
