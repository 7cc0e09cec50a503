"""`Decision`: the chosen endpoint with all reasons. Recording keeps references only; text is made when someone asks."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from epp.plugin import Endpoint, Request


class Scored(msgspec.Struct, eq=False):
    """One scorer's part in a profile. `bills` is set for costs: seconds per term, one row per endpoint."""

    name: str
    weight: float
    scores: Sequence[float]
    terms: tuple[str, ...] = ()
    bills: Sequence[tuple[float, ...]] = ()


class ProfileRun(msgspec.Struct, eq=False):
    """One profile's run: who came in, who was dropped by which filter, who got which scores, who was picked."""

    profile: str
    dropped: list[tuple[str, Sequence[Endpoint]]]
    endpoints: Sequence[Endpoint]
    """Those that were scored, in the order of `scored[i].scores` and `totals`."""
    scored: list[Scored]
    totals: Sequence[float]
    picks: Sequence[Endpoint]


class Comparison(msgspec.Struct, frozen=True, eq=False):
    """What the shadow profile would have done with a request. None was given to it, and no account knows of it."""

    profile: str
    agreed: bool
    """It would have picked the same endpoint, or scored it as high as its own pick."""
    regret: float
    """Seconds that its pick costs more than ours by `expected-ttft`; below 0 if less."""
    run: ProfileRun | None
    """None: it failed, or its filters left no endpoint."""

    def as_dict(self) -> dict[str, Any]:
        if self.run is None:
            return {"profile": self.profile, "failed": True}
        return {
            "profile": self.profile,
            "endpoint": self.run.picks[0].name,
            "agreed": self.agreed,
            "regret_ms": round(self.regret * 1000, 3),
            "run": _run_as_dict(self.run),
        }


class Decision(msgspec.Struct, eq=False):
    """Where a request goes and why. `at` is seconds since the epoch (for people), taken once per decision."""

    request: Request
    endpoints: Sequence[Endpoint]
    """Chosen endpoint first, then fallbacks in order."""
    headers: Mapping[str, str]
    runs: list[ProfileRun]
    at: float
    shadow: Comparison | None = None
    """Where a shadow profile looked at this request too."""

    @property
    def endpoint(self) -> Endpoint:
        return self.endpoints[0]

    @property
    def destination(self) -> str:
        """Value of the destination header and metadata: `ip:port[,ip:port…]`."""
        if len(self.endpoints) == 1:
            return self.endpoints[0].address
        return ",".join(endpoint.address for endpoint in self.endpoints)

    def as_dict(self) -> dict[str, Any]:
        """The whole explanation, JSON-ready; costs in milliseconds; no prompt text."""
        return {
            "request_id": self.request.id,
            "model": self.request.model,
            **({"opaque": self.request.opaque} if self.request.opaque else {}),
            "at": self.at,
            "tokens": self.request.tokens,
            "endpoint": self.endpoint.name,
            "address": self.endpoint.address,
            "fallbacks": [endpoint.name for endpoint in self.endpoints[1:]],
            "profiles": [_run_as_dict(run) for run in self.runs],
            **({} if self.shadow is None else {"shadow": self.shadow.as_dict()}),
        }


def _run_as_dict(run: ProfileRun) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for i, endpoint in enumerate(run.endpoints):
        row: dict[str, Any] = {"endpoint": endpoint.name, "total": run.totals[i], "scores": {}}
        for scored in run.scored:
            row["scores"][scored.name] = {"score": scored.scores[i], "weight": scored.weight}
            if scored.bills:
                bill = scored.bills[i]
                row["bill_ms"] = {t: round(s * 1000, 3) for t, s in zip(scored.terms, bill, strict=True)}
                row["cost_ms"] = round(sum(bill) * 1000, 3)
        rows.append(row)
    return {
        "profile": run.profile,
        "dropped": [{"filter": name, "endpoints": [e.name for e in gone]} for name, gone in run.dropped],
        "endpoints": rows,
        "picks": [endpoint.name for endpoint in run.picks],
    }
