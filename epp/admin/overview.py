"""The pool at a glance: what the first page shows and asks for each second, as plain figures and drawn parts."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isnan
from typing import Any, Final, NamedTuple, TypeVar

from markupsafe import Markup

from epp import protocol
from epp.admin.bills import name
from epp.admin.drawing import bar, line, spark, stack, tiles
from epp.admin.history import KV_STEPS, STEP_S, STEPS, UNKNOWN, EndpointHistory, History, PoolHistory
from epp.admin.views import PoolView
from epp.plugin import Endpoint, Load
from epp.telemetry.metrics import Metrics
from epp.telemetry.pace import Pace
from epp.telemetry.series import EndpointSeries, Waits

SLICE: Final = 300
"""Endpoints whose figures are gathered at once: some 0.3 ms."""
MOST_FLOWS: Final = 40
"""Rows of what waits in flow control, those with the most requests."""
LONG: Final = f"last {STEP_S * STEPS / 60:.0f} minutes"

T = TypeVar("T")
Value = int | float | str | None
Member = tuple[Endpoint, EndpointSeries]


class Members(NamedTuple):
    """The endpoints of a pool with what is counted and was seen of them, in the same order."""

    endpoints: Sequence[Endpoint]
    series: Sequence[EndpointSeries]
    seen: Sequence[EndpointHistory]
    roles: Mapping[str, Sequence[Member]]
    """By role, "": none; empty where no endpoint has one."""


class Column(NamedTuple):
    """Of the table of endpoints. `unit` follows its numbers; `bar`: they are parts of a hundred and drawn too."""

    head: str
    about: str
    unit: str = ""
    bar: bool = False
    chart: str = ""
    """`requests` or `kv`: it shows the last ten minutes, and its value is the newest of them."""


COLUMNS: Final = (
    Column("ours", "requests sent to it that have not ended"),
    Column("queue", "requests that wait in the engine"),
    Column("running", "requests that the engine computes"),
    Column("requests", f"running and waiting there, {LONG}", chart="requests"),
    Column("KV use", "share of KV blocks in use", " %", bar=True),
    Column("KV", f"KV use, {LONG}", chart="kv"),
    Column("hits", "share of the tokens sent to it that it was predicted to hold", " %", bar=True),
    Column("share", "of the decisions among these endpoints", " %"),
    Column("speed", "1: as modelled, 0.5: half as fast"),
    Column("trust", "how far what is predicted of its cache has proved true", " %"),
    Column("events", "state of its KV events"),
    Column("failures", "requests that failed by its fault"),
    Column("age", "of the last scrape", " s"),
)
KvEvents = Mapping[str, tuple[str, float | None, float]]
"""As `Metrics.kv_events`."""
TOGETHER_S: Final = 0.3
NOTHING: Final = (None, None, None)


class Tile(NamedTuple):
    """A figure with its last ten minutes."""

    label: str
    value: str
    chart: Markup
    keys: Sequence[tuple[str, int]] = ()
    """What the colours of a stacked chart mean."""


class Overview:
    """Of `pools`. `replicas`: as `ReplicaGroup.as_dict`; None: this picker is alone. `clock`: seconds, monotonic."""

    def __init__(
        self,
        metrics: Metrics,
        pools: Sequence[PoolView],
        history: History,
        ready: Callable[[], list[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._pools = pools
        self._history = history
        self._ready = ready
        self._clock = clock
        self.replicas: Callable[[], dict[str, Any]] | None = None
        self._version = 0
        self._began = f"{clock():.3f}"
        self._made: dict[object, tuple[int, Any]] = {}
        self._events: dict[int, tuple[float, KvEvents]] = {}
        self._scales: dict[int, tuple[int, int]] = {}
        self._known: dict[int, Members] = {}

    @property
    def version(self) -> str:
        """Another one when endpoints came or went, and of another process."""
        for pool in self._pools:
            self._members(pool)
        return f"{self._began}-{self._version}"

    @property
    def step(self) -> int:
        """How many times the histories of endpoints have grown."""
        return self._history.endpoint_steps

    def glance(self) -> dict[str, Any]:
        """What is drawn anew each second, but for the endpoints: small, however large the pools are."""
        replicas = None if self.replicas is None else self.replicas()
        return {
            "reasons": [*map(name, self._ready())],
            "degraded": self._metrics.degraded_now,
            "tiles": self._each_step("tiles", lambda: _process_tiles(self._history)),
            "replicas": None if replicas is None else [*_replicas(replicas)],
            "pools": [
                self._pool(pool, history) for pool, history in zip(self._pools, self._history.pools, strict=True)
            ],
        }

    async def columns(self, pace: Pace) -> list[list[list[Value]]]:
        """Of each pool, of each of `COLUMNS` a value for each endpoint."""
        members = [self._members(pool) for pool in self._pools]  # some may leave between two slices
        return [await self._columns(pool, mine, pace) for pool, mine in zip(self._pools, members, strict=True)]

    def scale(self, pool: PoolView) -> int:
        """Requests at the upper edge of the pool's charts of them: a power of two, which seldom changes."""
        made = self._scales.get(id(pool))
        if made is None or made[0] != self.step:
            most = max((max(seen.requests) for seen in self._members(pool).seen), default=0)
            made = self._scales[id(pool)] = self.step, max(8, 1 << (most - 1).bit_length())
        return made[1]

    def identity(self, endpoint: Endpoint) -> dict[str, str]:
        """What of an endpoint does not change while it lives."""
        role = endpoint.labels.get(protocol.ROLE_LABEL, "")
        return {
            "name": name(endpoint.name),
            "address": name(endpoint.address),
            "role": name(role),
            "node": name(endpoint.node),
        }

    def charts(self, endpoint: Endpoint, scale: int) -> dict[str, str]:
        """Points of its charts."""
        seen = self._history.endpoint(endpoint)
        return {"requests": spark(seen.requests, scale), "kv": _kv_spark(seen)}

    async def _columns(self, pool: PoolView, members: Members, pace: Pace) -> list[list[Value]]:
        columns: list[list[Value]] = [[] for _ in COLUMNS]
        decisions = sum([series.decisions for series in members.series])
        speeds, events = self._speeds(pool), self._kv_events(pool)
        for start in range(0, len(members.endpoints), SLICE):
            some = slice(start, start + SLICE)
            endpoints, series, seen = members.endpoints[some], members.series[some], members.seen[some]
            values = _values(endpoints, series, seen, self._clock(), decisions, speeds, events)
            for column, more in zip(columns, values, strict=True):
                column += more
            await pace.rest()
        return columns

    def _members(self, pool: PoolView) -> Members:
        """Looked up once while they are the same."""
        known = self._known.get(id(pool))
        if known is None or known.endpoints is not pool.endpoints:
            self._version += 1
            endpoints = pool.endpoints
            counted = [self._metrics.endpoint(endpoint) for endpoint in endpoints]
            seen = [self._history.endpoint(endpoint) for endpoint in endpoints]
            known = self._known[id(pool)] = Members(endpoints, counted, seen, _by_role(endpoints, counted))
        return known

    def _kv_events(self, pool: PoolView) -> KvEvents:
        """The same for what is drawn together."""
        made, now = self._events.get(id(pool)), self._clock()
        if made is None or now - made[0] > TOGETHER_S:
            made = self._events[id(pool)] = now, self._metrics.kv_events(pool.name)
        return made[1]

    def _speeds(self, pool: PoolView) -> dict[Endpoint, float]:
        """What plugins have learned of each endpoint, as of the last step: it changes slowly."""

        def learned() -> dict[Endpoint, float]:
            figures = self._metrics.endpoint_figure(pool, "speed")
            return {endpoint: round(speed, 2) for endpoint, speed in figures.items()}

        return self._each_step((id(pool), "speeds"), learned)

    def _each_step(self, key: object, make: Callable[[], T]) -> T:
        """Made when the history has grown, which is seldom."""
        made = self._made.get(key)
        if made is None or made[0] != self._history.steps:
            made = self._made[key] = self._history.steps, make()
        found: T = made[1]
        return found

    # --- what is drawn

    def _pool(self, pool: PoolView, history: PoolHistory) -> dict[str, Any]:
        members = self._members(pool)
        loads = [endpoint.load for endpoint in members.endpoints]
        return {
            "name": f"{name(pool.namespace)}/{name(pool.name)}",
            "endpoints": len(loads),
            "tiles": self._tiles(pool, history, members, loads),
            "map": _map(loads),
            "roles": [*_roles(members.roles)],
            "states": _states(self._kv_events(pool)),
            "flow": self._flow(pool),
        }

    def _tiles(self, pool: PoolView, history: PoolHistory, members: Members, loads: Sequence[Load]) -> list[Tile]:
        rate, in_flight, waiting, use, *others = self._each_step((id(pool), "tiles"), lambda: [*_pool_tiles(history)])
        usage = [load.kv_usage for load in loads if load.at is not None]
        mean = sum(usage) / len(usage) if usage else None
        most = f", most {_share(max(usage))}" if usage else ""
        return [
            rate,
            in_flight._replace(value=str(sum([series.in_flight for series in members.series]))),
            waiting._replace(value=str(sum([load.waiting for load in loads])) if usage else "–"),
            use._replace(label=f"KV use{most}", value=_share(mean)),
            *others,
        ]

    def _flow(self, pool: PoolView) -> dict[str, Any] | None:
        figures = self._metrics.flow(pool.name)
        if figures is None:
            return None
        rows = sorted(_flows(figures.waiting), key=lambda row: -row.requests)
        most = rows[0].requests if rows else 0
        shown = sorted(rows[:MOST_FLOWS], key=lambda row: (-row.priority, -row.requests))
        return {
            "saturation": _share(figures.saturation),
            "waiting": sum(row.requests for row in rows),
            "rows": [
                {
                    "priority": row.priority,
                    "flow": name(row.fairness_id),
                    "requests": row.requests,
                    "kilobytes": -(-row.bytes // 1024),
                    "bar": bar(row.requests, most, f"{row.requests} waiting"),
                }
                for row in shown
            ],
            "more": max(0, len(rows) - MOST_FLOWS),
        }


def _process_tiles(history: History) -> list[Tile]:
    drawn = line(history.ttft.values, f"median time to first token, {LONG}")
    refused = line(history.refused.values, f"requests refused a second, {LONG}", 1.0)
    return [
        Tile("TTFT, median", _seconds(history.ttft.last), drawn),
        Tile("refused a second", _number(history.refused.last), refused),
    ]


def _pool_tiles(history: PoolHistory) -> Iterator[Tile]:
    """As of the last step. The second to fourth are without what they show, which is of now."""

    def chart(series: str, label: str, top: float | None = None) -> Markup:
        return line(history[series].values, f"{label}, {LONG}", top)

    yield Tile("requests a second", _number(history["requests"].last), chart("requests", "requests a second"))
    yield Tile("in flight", "", chart("in_flight", "requests in flight"))
    yield Tile("waiting in engines", "", chart("waiting", "requests waiting in engines"))
    yield Tile("KV use", "", chart("kv_mean", "mean KV use", 1.0))
    held = [history[tier] for tier in ("device", "l1", "l2")]
    now = [series.last for series in held]
    total = sum(value or 0.0 for value in now) if any(value is not None for value in now) else None
    tiered = any(value > 0 for series in held[1:] for value in series.values)
    named = enumerate(zip(TIERS, now, strict=True))
    keys = [(f"{tier} {_share(value).removesuffix(' %')}", at) for at, (tier, value) in named]
    stacked = stack([series.values for series in held], f"predicted hit rate by tier, {LONG}")
    yield Tile("predicted hit rate", _share(total), stacked, keys if tiered else ())
    for series, label, write, top in OPTIONAL:
        if not all(map(isnan, history[series].values)):
            yield Tile(label, write(history[series].last), chart(series, label, top))


def _values(
    endpoints: Sequence[Endpoint],
    series: Sequence[EndpointSeries],
    seen: Sequence[EndpointHistory],
    now: float,
    decisions: int,
    speeds: Mapping[Endpoint, float],
    events: KvEvents,
) -> Sequence[Sequence[Value]]:
    """By `COLUMNS`, for each endpoint. `now`: seconds, of the clock; `decisions`: of the whole pool."""
    loads = [endpoint.load for endpoint in endpoints]
    states = [events.get(endpoint.name, NOTHING) for endpoint in endpoints] if events else [NOTHING] * len(loads)
    return (
        [each.in_flight for each in series],
        [None if load.at is None else load.waiting for load in loads],
        [None if load.at is None else load.running for load in loads],
        [each.requests[-1] for each in seen],
        [None if load.at is None else round(load.kv_usage * 100) for load in loads],
        [None if each.kv[-1] == UNKNOWN else each.kv[-1] for each in seen],
        [round(each.predicted * 100 / each.tokens) if each.tokens else None for each in series],
        [round(each.decisions * 100 / decisions) if decisions else None for each in series],
        [*map(speeds.get, endpoints)],
        [None if trust is None else round(trust * 100) for _, _, trust in states],
        [state for state, _, _ in states],
        [each.failures for each in series],
        [None if load.at is None else int((now - load.at) * 10) / 10 for load in loads],
    )


def _flows(waiting: Iterable[Waits]) -> Iterable[Waits]:
    """A row for each flow in which somebody waits, whatever the models."""
    found: dict[tuple[str, int], Waits] = {}
    for row in waiting:
        if row.requests:
            key = row.fairness_id, row.priority
            before = found.get(key)
            found[key] = (
                row if before is None else Waits(*key, before.requests + row.requests, before.bytes + row.bytes)
            )
    return found.values()


TIERS: Final = ("dev", "L1", "L2")


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value * 100:.0f} %"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}" if 0 < value < 10 else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


OPTIONAL: Final[Sequence[tuple[str, str, Callable[[float | None], str], float | None]]] = (
    ("speed", "prefill tokens/s", _number, None),
    ("trust", "least cache trust", _share, 1.0),
    ("saturation", "saturation", _share, 1.0),
    ("queued", "waiting here", _number, None),
)
"""Tiles of what not every configuration has."""


def _kv_spark(seen: EndpointHistory) -> str:
    """Without the time before the first scrape, which is at the start alone."""
    known = len(seen.kv) - seen.kv.count(UNKNOWN)
    points = spark([0] * (len(seen.kv) - known) + [*seen.kv[-known:]] if known else [], KV_STEPS).split(" ")
    return " ".join(points[-known:]) if known else ""


def _map(loads: Sequence[Load]) -> Markup:
    """A square for each endpoint by its KV use: where it is full is seen among hundreds."""
    shades = [
        None if load.at is None else 9 if (use := load.kv_usage) >= 0.9 else int(use * 10) if use > 0 else 0
        for load in loads
    ]
    full = shades.count(9)
    return tiles(shades, f"KV use of {len(shades)} endpoints in their order; {full} of them are at 90 % or more")


def _by_role(endpoints: Sequence[Endpoint], series: Sequence[EndpointSeries]) -> dict[str, list[Member]]:
    """As `Members.roles`."""
    roles: dict[str, list[Member]] = {}
    for endpoint, counted in zip(endpoints, series, strict=True):
        roles.setdefault(endpoint.labels.get(protocol.ROLE_LABEL, ""), []).append((endpoint, counted))
    return roles if any(roles) else {}


def _roles(roles: Mapping[str, Sequence[Member]]) -> Iterator[dict[str, Any]]:
    """What is shown of each."""
    for role, mine in sorted(roles.items()):
        usage = [endpoint.load.kv_usage for endpoint, _ in mine if endpoint.load.at is not None]
        mean = sum(usage) / len(usage) if usage else None
        yield {
            "role": name(role) or "no role",
            "endpoints": len(mine),
            "in_flight": sum([series.in_flight for _, series in mine]),
            "kv": _share(mean),
            "bar": bar(mean or 0.0, 1.0, f"mean KV use {_share(mean)}"),
        }


def _states(events: KvEvents) -> str:
    """How many endpoints' KV events are in which state; empty: nobody asks for events."""
    counts = Counter(state for state, _, _ in events.values())
    return ", ".join(f"{count} {state}" for state, count in counts.most_common())


def _replicas(shown: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    yield {
        "address": f"this one ({shown['instance']})",
        "state": "joined" if shown["joined"] else "joining",
        "lag": None,
        "in_flight": shown["in_flight"],
        "agreement": None,
        "bar": None,
    }
    for peer in shown["peers"]:
        share = peer["agreement"]
        drawn = bar(share or 0.0, 1.0, f"agreement {_share(share)}")
        yield {
            "address": name(peer["address"]),
            "state": name(peer["state"]),
            "lag": None if peer["lag_ms"] is None else f"{peer['lag_ms']:.1f} ms",
            "in_flight": peer["in_flight"],
            "agreement": _share(share),
            "bar": None if share is None else drawn,
        }
