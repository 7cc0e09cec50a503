"""Numbered cases and where their rules stand."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from inspect import cleandoc
from typing import Final, Literal

from tooling.conformance.target import Target

Level = Literal["MUST", "SHOULD"]
Check = Callable[[Target], Awaitable[None]]

# Where the rules stand. Repositories: kubernetes-sigs/gateway-api-inference-extension (GIE), envoyproxy/envoy.
PROTOCOL: Final = "GIE proposal 004 (endpoint picker protocol) v1.0.0"
ENVOY_MODE: Final = "Envoy API, ext_proc ProcessingMode.FULL_DUPLEX_STREAMED"
ENVOY_API: Final = "Envoy API, envoy.service.ext_proc.v3"
REFERENCE: Final = "GIE v1.5.0, pkg/epp/handlers"


@dataclass(frozen=True)
class Case:
    """`id`: group and number, stable. `title`: what must hold. `how`: how it is driven."""

    id: str
    group: str
    title: str
    level: Level
    source: str
    how: str
    check: Check


class Group:
    """Cases that belong together, numbered in the order they are written down."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.cases: list[Case] = []

    def case(self, level: Level, title: str, source: str) -> Callable[[Check], Check]:
        """Decorates a check: it returns when `title` holds, and raises Failed or Skipped. Its docstring is `how`."""

        def add(check: Check) -> Check:
            number = f"{self.number}.{len(self.cases) + 1}"
            how = " ".join(cleandoc(check.__doc__ or "").split())
            self.cases.append(Case(number, self.name, title, level, source, how, check))
            return check

        return add
