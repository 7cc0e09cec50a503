"""Plugins as a user writes them, for configurations in tests: `type: tests.support.plugins.Name`."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Literal

from epp.plugin import (
    Detector,
    Endpoint,
    Filter,
    InFlight,
    Picked,
    Picker,
    Plugin,
    PrefixMatch,
    Producer,
    ProfileHandler,
    Request,
    RunProfile,
    Scorer,
    Services,
)


@dataclass
class Step:
    """A nested shape."""

    at: float
    label: str = "none"

    def __post_init__(self) -> None:
        if self.at < 0:
            raise ValueError(f"at: expected 0 or more, got {self.at}")


@dataclass(eq=False)
class Warm(Scorer):
    """A scorer with a parameter of every kind."""

    needs = (PrefixMatch,)

    floor: float = 0.1
    count: int = 1
    strict: bool = False
    mode: Literal["fast", "slow"] = "fast"
    wait: timedelta = timedelta(seconds=1)
    names: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    max_ttft_ms: int | None = None
    seen: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count: expected 1 or more, got {self.count}")

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return [1.0] * len(endpoints)


@dataclass
class Required(Scorer):
    """A parameter without a default; and, being a dataclass with eq, it cannot be hashed."""

    path: str

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return [1.0] * len(endpoints)


class All(Filter):
    """Keeps all."""

    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        return endpoints


class First(Picker):
    """Picks the first."""

    def pick(self, request: Request, scored: Sequence[tuple[Endpoint, float]]) -> Sequence[Endpoint]:
        return [scored[0][0]]


class Second(First):
    """Another picker."""


class Unfinished(Scorer):
    """Forgot `score`."""


class Angry(All):
    """Its constructor fails in a way of its own."""

    def __init__(self) -> None:
        raise KeyError("oops")


@dataclass(frozen=True)
class Frozen(Scorer):
    """Cannot be given a name."""

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return [1.0] * len(endpoints)


class Watching(Plugin):
    """Hooks only."""


class Chooser(ProfileHandler):
    """Runs the first profile."""

    def handle(self, request: Request, profiles: Sequence[str], run: RunProfile) -> Picked:
        return Picked(run(profiles[0]))


class Never(Detector):
    """Never full."""

    def saturation(self, endpoints: Sequence[Endpoint]) -> float:
        return 0.0


class Weather:
    """A signal nobody produces by default."""


class NeedsWeather(All):
    """Needs a signal nobody produces by default."""

    needs = (Weather,)


class _Producer(Producer[Any]):
    def produce(self, request: Request, endpoints: Sequence[Endpoint]) -> Mapping[Endpoint, Any]:
        return {}


class OwnMatch(_Producer):
    """The user's own PrefixMatch."""

    produces: ClassVar[type[Any]] = PrefixMatch


class OtherStation(_Producer):
    """Tells the weather too."""

    produces: ClassVar[type[Any]] = Weather


class Station(_Producer):
    """Needs PrefixMatch to tell the weather."""

    produces: ClassVar[type[Any]] = Weather
    needs = (PrefixMatch,)


class Circular(_Producer):
    """Needs what needs it."""

    produces: ClassVar[type[Any]] = PrefixMatch
    needs = (Weather,)


@dataclass(eq=False)
class Couple(_Producer):
    """The first of two that share a model."""

    size: int = 1

    produces: ClassVar[type[Any]] = PrefixMatch


class OtherHalf(_Producer):
    """The second, made of the first."""

    produces: ClassVar[type[Any]] = InFlight
    companion_of: ClassVar[type[Plugin]] = Couple

    def __init__(self, couple: Couple) -> None:
        self.couple = couple


CONSTANT = 3


class Slow(Scorer):
    """Holds up the picker for 0.1 s whenever it is asked."""

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        time.sleep(0.1)
        return [1.0] * len(endpoints)


class Runaway(Scorer):
    """Has a thread that computes for ever, one in a process, whether requests come or not."""

    thread: ClassVar[threading.Thread | None] = None

    def start(self, services: Services) -> None:
        if Runaway.thread is None:
            Runaway.thread = threading.Thread(target=self._compute, daemon=True)
            Runaway.thread.start()

    def _compute(self) -> None:
        while True:
            sum(range(10_000))

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return [1.0] * len(endpoints)
