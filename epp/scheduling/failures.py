"""Endpoints that fail: how often lately, and which of them are kept out of the picks but for single trials.

Without this an endpoint that answers errors at once is always idle, so every policy that looks at load prefers it.

What counts, as far as the gateway reports it:

    counts as                     what was seen
    ----------------------------  ------------------------------------------------------------------------------------
    failed                        status 5xx but 501: the server's own, or the gateway's for a connection that was
                                  refused or reset (503) or took too long (504); an answer that another endpoint gave
                                  on the gateway's retry; a client that gave up waiting for the response headers of
                                  a stream, if the endpoint has answered no request since, for 5 s; a request that ended
                                  within a second without a status, at an endpoint whose metrics are overdue and that
                                  has answered none since they are: agentgateway says nothing of a connection that was
                                  refused
    a part of a failure           status 429: the server is full, not broken; it costs more, and is never suspended;
                                  an answer that another endpoint gave instead of one that has answered no request yet:
                                  for 30 s that may be an endpoint which the gateway does not know yet
    good                          status 2xx and 3xx, when the response headers are seen
    nothing                       other 4xx and 501: the request's own fault; a stream that ended without a status soon

An answer that breaks after its headers looks to us like a client that went away, so it counts as good.

An endpoint that hangs is suspended at once, until it answers or its metrics show that it is alive: `hanging`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp2, inf
from typing import Any, ClassVar, Final

from epp.plugin import Endpoint, FailureShare, Filter, Producer, Request, Response, Services, Slot
from epp.scheduling.hanging import SILENT, Contact, Sign

ONE: Final = 1 / 8
"""Weight of one more answer in an endpoint's share: the last eight or so count. So much is one failure alone."""
_PART: Final = 0.3
"""What counts as a part of a failure counts for."""
_JOINING: Final = 30.0
"""Seconds from its first request in which an endpoint may be unknown to a gateway, as where that asks DNS for it."""
_HALF_LIFE: Final = 5.0
"""Seconds in which a share halves by itself."""
_FORGOTTEN: Final = 0.01
"""Share below which an endpoint is as one that never failed."""
_IN_A_ROW: Final = 4
"""Failures without a good answer between them, however long they take, after which an endpoint gets trials only."""
_SUSPENDED: Final = 1 - (1 - ONE) ** _IN_A_ROW
"""Share from which it does too: what so many make where none came before."""
_GOOD: Final = 3
"""Successful trials in a row until it counts as all others."""
_APART: Final = 4.0
"""Seconds between two trials, the last of which failed."""
_OTHERS: Final = 25
"""Requests between two such trials: at low rates trials would be a large part of them."""
_QUIET: Final = 60.0
"""Seconds after which a trial comes, however few those are."""
_REFUSED: Final = 1.0
"""Seconds within which a connection is refused; clients seldom give up so soon."""
_LOOK: Final = 0.5
"""Seconds between two looks at whose metrics cannot be read."""
_FAILING: Final = "endpoint-failing"
_HANGING: Final = "endpoint-hanging"


class _Shares(dict[Endpoint, FailureShare]):
    """Those of the endpoints that fail; any other has none."""

    def __missing__(self, endpoint: Endpoint) -> FailureShare:
        return _NONE


_NONE: Final = FailureShare()
_ALL_WELL: Final = _Shares()


class _Record:
    """What is known of one endpoint."""

    __slots__ = (
        "answered",
        "at",
        "bad",
        "contact",
        "first",
        "good",
        "hanging",
        "known",
        "picks",
        "share",
        "since",
        "suspended",
        "tried",
        "trying",
    )

    def __init__(self, contact: Contact, now: float) -> None:
        self.contact = contact
        self.first = now
        """When its first request was sent."""
        self.known = False
        """It has answered a request, with whatever status."""
        self.answered = now
        """When its last answer was seen."""
        self.share = 0.0
        self.at = now
        """When `share` was that."""
        self.suspended = False
        self.hanging: Sign | None = None
        """By what it hangs; then it is suspended for that alone."""
        self.since = -inf
        """When it began or ceased to be suspended: what was sent before says nothing of the time after."""
        self.tried = now
        """When the last trial was sent, and after how many picks."""
        self.picks = 0
        self.trying = 0
        """Trials in flight."""
        self.bad = 0
        """Failures since the last good answer."""
        self.good = 0
        """Answers in a row that were good, since it is suspended."""

    def share_at(self, now: float) -> float:
        return self.share * exp2((self.at - now) / _HALF_LIFE)

    def observe(self, value: float, now: float) -> None:
        share = self.share_at(now)
        self.share, self.at = share + ONE * (value - share), now

    def is_due(self, now: float, picks: int) -> bool:
        """Its next trial may come.

        Of one that hangs a trial says nothing until somebody gives it up, and each costs a client much.
        """
        waited = now - self.tried
        if self.hanging is not None and (self.hanging == "unread" or self.trying):
            return waited >= _QUIET
        return self.trying < self.good or (waited >= _APART and picks - self.picks >= _OTHERS) or waited >= _QUIET


@dataclass(eq=False)
class FailureShares(Producer[FailureShare]):
    """`failure-share-producer`: the share of each endpoint's recent answers that failed. No parameters. Source: ours.

    An endpoint that fails four times in a row, or about as often among others, is suspended: it gets one request in 4 s
    and no more than one in 26 of all, until one succeeds; then trials follow at once, and after three good ones in a
    row it counts as any other. One that hangs gets a request in 60 s, or in 4 s if its metrics are read, until it
    answers or they move. Where all are suspended, none is: then they differ by their shares only.
    """

    produces: ClassVar[type[Any]] = FailureShare
    whole_pool: ClassVar[bool] = True

    _services: Services | None = field(default=None, init=False, repr=False)
    """Gets a report of each endpoint that is suspended, and one when none is any more."""
    _records: dict[Endpoint, _Record] = field(default_factory=dict, init=False, repr=False)
    _failing: dict[Endpoint, _Record] = field(default_factory=dict, init=False, repr=False)
    """Those of them that failed lately."""
    _contacts: dict[Endpoint, Contact] = field(default_factory=dict, init=False, repr=False)
    """Of those that were scraped or sent a request."""
    _scraped: float = field(default=-inf, init=False, repr=False)
    """When any of them was scraped last, and since when without a long pause."""
    _watched: float = field(default=-inf, init=False, repr=False)
    _looked: float = field(default=-inf, init=False, repr=False)
    _picks: int = field(default=0, init=False, repr=False)
    _sees_status: bool = field(default=False, init=False, repr=False)
    _sent: Slot[tuple[_Record, float]] = field(default_factory=Slot, init=False, repr=False)
    """The account of the endpoint a request was sent to, and when, until it is known what came of it."""

    def start(self, services: Services) -> None:
        self._services = services

    def produce(self, request: Request, endpoints: Sequence[Endpoint]) -> Mapping[Endpoint, FailureShare]:
        if not self._failing:
            return _ALL_WELL
        now, shares, suspended = self.clock(), _Shares(), 0
        for endpoint in [endpoint for endpoint in endpoints if endpoint in self._failing]:
            record = self._failing[endpoint]
            share = record.share_at(now)
            if not record.suspended and share < _FORGOTTEN:
                del self._failing[endpoint]
            elif record.suspended and record.is_due(now, self._picks):
                shares[endpoint] = FailureShare(0.0, trial=True)
            else:
                share = max(share, _SUSPENDED) if record.hanging else share
                shares[endpoint] = FailureShare(share, suspended=record.suspended)
                suspended += record.suspended
        if suspended == len(endpoints):
            for endpoint, known in shares.items():
                shares[endpoint] = FailureShare(known.share)
        return shares

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        now = self.clock()
        self._picks += 1
        record = self._records.get(endpoint)
        if record is None:
            record = self._records[endpoint] = _Record(self._contact(endpoint, now), now)
        elif record.suspended:
            record.tried, record.picks = now, self._picks
            record.trying += 1
        if not request.elsewhere:
            record.contact.sent(request.tokens, now, part=bool(request.stage))
        self._sent.set(request, (record, now))

    def on_answered(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        self.on_finished(request, endpoint, response)

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        """Judge what came of a request, once: at its response headers, or at its end without any."""
        if (noted := self._sent.take(request)) is None:
            return
        record, sent = noted
        now, status = self.clock(), response.status
        if not request.elsewhere:
            record.contact.ended(request.tokens, part=bool(request.stage))
        if 200 <= status < 500 or not (status or self._sees_status):
            record.contact.answered(now)
            if status and record.hanging is not None:
                self._end(record, now)
        if 200 <= status < 400:
            record.known = self._sees_status = True
            record.answered = now
            if record.share or record.suspended:
                self._good(record, sent, now)
            return
        record.known = record.known or status > 0
        if status == 429 or (response.failed and not record.known and now - record.first < _JOINING):
            self._failed(record, endpoint, sent, _PART)
        elif response.failed or (not status and not response.lost and self._is_to_blame(record, request, sent, now)):
            self._failed(record, endpoint, sent, 1.0)
        elif record.suspended and sent >= record.since:  # the trial says nothing: the next may come
            record.trying -= 1
            if record.hanging is None:
                record.tried = sent - _QUIET

    def on_scraped(self, endpoint: Endpoint) -> None:
        now, contact = self.clock(), self._contact(endpoint, self.clock())
        if now - self._scraped > contact.pause:
            self._watched = now
        self._scraped = now
        moved = contact.scraped(endpoint.load, now)
        record = self._records.get(endpoint)
        if record is None:
            pass
        elif record.hanging is not None:
            if moved or record.hanging == "unread":
                self._end(record, now)
        elif contact.is_still(now, self._watched):
            self._hangs(record, endpoint, "still", now)
        if now - self._looked >= _LOOK:
            self._looked = now
            for other, known in self._records.items():
                if known.hanging is None and known.contact.is_unread(now, self._watched):
                    self._hangs(known, other, "unread", now)

    def on_removed(self, endpoint: Endpoint) -> None:
        self._records.pop(endpoint, None)
        self._contacts.pop(endpoint, None)
        record = self._failing.pop(endpoint, None)
        if record is not None and record.suspended:
            self._tell_recovered(record)

    def statistics(self) -> Mapping[str, float]:
        """`suspended`: endpoints that get trials only; `hanging`: those of them that hang."""
        return {
            "suspended": sum(record.suspended for record in self._failing.values()),
            "hanging": sum(record.hanging is not None for record in self._failing.values()),
        }

    def endpoint_statistics(self) -> Mapping[Endpoint, Mapping[str, float]]:
        """Of those that failed lately. `failure_share`: of their answers; `suspended`: 1 while they get trials only."""
        now = self.clock()
        return {
            endpoint: {"failure_share": record.share_at(now), "suspended": float(record.suspended)}
            for endpoint, record in self._failing.items()
            if record.suspended or record.share_at(now) >= _FORGOTTEN
        }

    def snapshot(self) -> Iterator[Any]:
        """Of those that failed lately: [endpoint, share, whether it is suspended] ..."""
        now = self.clock()
        yield [
            (each.name, record.share_at(now), record.suspended and record.hanging is None)
            for each, record in self._failing.items()
        ]

    def restore(self, piece: Any, endpoints: Mapping[str, Endpoint]) -> None:
        now = self.clock()
        for name, share, suspended in piece:
            if (endpoint := endpoints.get(name)) is None or endpoint in self._failing:
                continue
            record = self._records.get(endpoint)
            if record is None:
                record = self._records[endpoint] = _Record(self._contact(endpoint, now), now)
            self._failing[endpoint] = record
            record.known, record.share, record.at = True, min(max(float(share), 0.0), 1.0), now
            if suspended:
                self._suspend(record, endpoint, now)

    def _contact(self, endpoint: Endpoint, now: float) -> Contact:
        return self._contacts.get(endpoint) or self._contacts.setdefault(endpoint, Contact(now))

    def _hangs(self, record: _Record, endpoint: Endpoint, by: Sign, now: float) -> None:
        if record.suspended:
            return
        record.hanging = by
        self._failing[endpoint] = record
        silence = f"no answer to {record.contact.unanswered} requests for {record.contact.silence(now, -inf):.0f} s"
        sign = "its metrics cannot be read" if by == "unread" else "nothing moves in its metrics"
        self._suspend(record, endpoint, now, f": {silence}, and {sign}")

    def _suspend(self, record: _Record, endpoint: Endpoint, now: float, why: str = "") -> None:
        record.suspended, record.since, record.trying, record.good = True, now, 0, 0
        record.tried, record.picks = now, self._picks
        if self._services is not None:
            self._services.degraded(_reason(record), f"{endpoint.name}{why}", lasting=True)

    def _end(self, record: _Record, now: float) -> None:
        """It is suspended no more."""
        self._tell_recovered(record)
        record.suspended, record.hanging, record.since, record.share, record.bad = False, None, now, 0.0, 0

    def _good(self, record: _Record, sent: float, now: float) -> None:
        if sent < record.since:
            return
        record.observe(0.0, now)
        record.bad = 0
        if not record.suspended:
            return
        record.trying -= 1
        record.good += 1
        if record.good >= _GOOD:
            self._end(record, now)

    def _failed(self, record: _Record, endpoint: Endpoint, sent: float, value: float) -> None:
        now = self.clock()
        if sent < record.since:
            return
        if record.suspended:
            record.trying -= 1
        record.good = 0
        record.observe(value, now)
        if self._records.get(endpoint) is not record:
            return  # it has left the pool
        self._failing[endpoint] = record
        if value < 1:
            return
        record.bad += 1
        if not record.suspended and (record.bad >= _IN_A_ROW or record.share >= _SUSPENDED):
            self._suspend(record, endpoint, now)

    def _is_to_blame(self, record: _Record, request: Request, sent: float, now: float) -> bool:
        """For an end without a status. The endpoint has answered no request since it was sent this, for long, and the
        headers of a stream come at once; or it was refused, by an endpoint that is gone.
        """
        if not self._sees_status:
            return False
        silent = request.stream and now - max(sent, record.answered) >= SILENT
        return silent or (now - sent < _REFUSED and record.contact.is_gone(now))

    def _tell_recovered(self, ended: _Record) -> None:
        """Of its reason, if it was the last."""
        reason, others = _reason(ended), [each for each in self._failing.values() if each is not ended]
        if self._services is not None and not any(each.suspended and _reason(each) == reason for each in others):
            self._services.recovered(reason)


def _reason(record: _Record) -> str:
    return _FAILING if record.hanging is None else _HANGING


class FailingEndpointFilter(Filter):
    """`failing-endpoint-filter`: drops endpoints that fail, but for single trials. None left: all are kept.

    A trial that is due is the only endpoint kept. No parameters. Source: ours.
    """

    needs: ClassVar[tuple[type, ...]] = (FailureShare,)

    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        shares = request.signals.get(FailureShare)
        if not shares:
            return endpoints
        trial = next((endpoint for endpoint in endpoints if shares[endpoint].trial), None)
        if trial is not None:
            return (trial,)
        return [endpoint for endpoint in endpoints if not shares[endpoint].suspended] or endpoints
