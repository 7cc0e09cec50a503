"""`ShadowPolicy`: what another profile would have picked, for some of the requests, and what that would have cost."""

from collections.abc import Sequence
from random import Random

from msgspec.structs import replace

from epp.errors import EppError
from epp.plugin import Cost, Endpoint, Request
from epp.scheduling.decision import Chain, Comparison, OnError, ProfileRun, name_of


class ShadowPolicy:
    """Runs `chain` for a `sample` (share) of the requests, between the pick and its accounting.

    Its pick is compared and forgotten: the request goes where it goes, hooks report that alone to the plugins. So what
    the shadow's plugins remember is what really happened, and each comparison is of one pick, not of a different past.
    A failure of the shadow is reported to `on_error` and harms nothing.
    """

    def __init__(self, chain: Chain, cost: Cost, sample: float, random: Random, on_error: OnError) -> None:
        self._chain = chain
        self._cost = cost
        self._sample = sample
        self._random = random
        self._on_error = on_error

    def compare(self, request: Request, endpoints: Sequence[Endpoint], picked: Endpoint) -> Comparison | None:
        """None where the request is not in the sample."""
        if self._random.random() >= self._sample:
            return None
        apart = replace(request, kept=dict(request.kept))  # what a scorer of both profiles keeps is the pick's
        try:
            run = self._chain.run(apart, endpoints, self._on_error)
        except EppError:  # reported already, or no endpoint left by its filters
            return Comparison(self._chain.name, False, 0.0, None)
        own = run.picks[0]
        try:
            ours, its = (sum(bill) for bill in self._cost.bill(request, (picked, own)))
        except Exception as error:
            self._on_error(name_of(self._cost), error)
            return Comparison(self._chain.name, False, 0.0, None)
        return Comparison(self._chain.name, _agree(run, picked), its - ours, run)


def _agree(run: ProfileRun, picked: Endpoint) -> bool:
    own = run.picks[0]
    if own is picked:
        return True
    if not run.scored or own not in run.endpoints or picked not in run.endpoints:
        return False
    return run.totals[run.endpoints.index(picked)] == run.totals[run.endpoints.index(own)]
