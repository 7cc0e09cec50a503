"""`Chain` of `epp.scheduling.decision`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from epp.errors import InternalError, NoEndpoint
from epp.plugin import Cost, Endpoint, Filter, Picker, Request, Scorer
from epp.scheduling.decision import Bills as KeptBills
from epp.scheduling.decision import Chain
from epp.scheduling.pickers import MaxScorePicker
from tests.support.scheduling.schedulers import ask, fail, pods


@dataclass(eq=False)
class Says(Scorer):
    scores: Sequence[float]

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return self.scores


@dataclass(eq=False)
class Bills(Cost):
    terms = ("work", "queue")
    bills: Sequence[tuple[float, ...]]
    calls: int = 0

    def bill(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[tuple[float, ...]]:
        self.calls += 1
        return self.bills


@dataclass(eq=False)
class Keeps(Filter):
    names: str

    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        return [endpoint for endpoint in endpoints if endpoint.name in self.names]


@dataclass(eq=False)
class KeepsOf(Keeps):
    """Of one model's requests."""

    model: str = "m"

    def applies(self, request: Request) -> bool:
        return request.model == self.model


@dataclass(eq=False)
class Breaks(Filter, Scorer, Picker):
    error: Exception = field(default_factory=lambda: RuntimeError("broken"))

    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        raise self.error

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        raise self.error

    def pick(self, request: Request, scored: Sequence[tuple[Endpoint, float]]) -> Sequence[Endpoint]:
        raise self.error


class Nobody(Picker):
    def pick(self, request: Request, scored: Sequence[tuple[Endpoint, float]]) -> Sequence[Endpoint]:
        return []


def named(plugin: Breaks, name: str) -> Breaks:
    plugin.name = name
    return plugin


def recorder() -> tuple[list[tuple[str, str]], Callable[[str, Exception], None]]:
    seen: list[tuple[str, str]] = []
    return seen, lambda plugin, error: seen.append((plugin, str(error)))


def test_scores_are_weighed_and_summed() -> None:
    a, b = pods("ab")
    chain = Chain("p", [], [(Says([0.5, 0.25]), 2), (Says([0.0, 1.0]), 1)], MaxScorePicker())
    run = chain.run(ask(), [a, b], fail)
    assert run.totals == [1.0, 1.5]
    assert run.picks == [b]
    assert [(s.name, s.weight, s.scores) for s in run.scored] == [("Says", 2.0, [0.5, 0.25]), ("Says", 1.0, [0.0, 1.0])]


def test_scores_are_clamped_and_nan_is_zero() -> None:
    endpoints = pods("abcde")
    wild = Says([float("nan"), -1.0, 7.0, float("inf"), 0.25])
    run = Chain("p", [], [(wild, 1)], MaxScorePicker()).run(ask(), endpoints, fail)
    assert run.totals == [0.0, 0.0, 1.0, 1.0, 0.25]


def test_without_scorers_everybody_is_equal() -> None:
    endpoints = pods("ab")
    run = Chain("p", [], [], MaxScorePicker()).run(ask(), endpoints, fail)
    assert run.totals == [0.0, 0.0]
    assert run.scored == []


def test_filters_run_in_order_and_say_whom_they_dropped() -> None:
    a, b, c, d = endpoints = pods("abcd")
    first, second, third = Keeps("abc"), Keeps("ab"), Keeps("abcd")
    run = Chain("p", [first, second, third], [(Says([0.0, 1.0]), 1)], MaxScorePicker()).run(ask(), endpoints, fail)
    assert run.dropped == (("Keeps", [d]), ("Keeps", [c]))
    assert run.endpoints == [a, b]
    assert run.picks == [b]


def test_a_filter_that_does_not_apply_is_not_asked() -> None:
    a, b = pods("ab")
    chain = Chain("p", [KeepsOf("b", "m")], [], MaxScorePicker())
    assert chain.run(ask(model="m"), [a, b], fail).endpoints == [b]
    assert chain.run(ask(model="n"), [a, b], fail).endpoints == [a, b]
    assert [chain.narrows(ask(model=model)) for model in "mn"] == [True, False]
    assert Chain("p", [Keeps("ab")], [], MaxScorePicker()).narrows(ask())


def test_a_filter_that_drops_everybody_is_named() -> None:
    empty = Keeps("")
    empty.name = "gpu-only"
    with pytest.raises(NoEndpoint, match="'gpu-only' left none of 2") as caught:
        Chain("p", [Keeps("ab"), empty], [], MaxScorePicker()).run(ask(), pods("abc"), fail)
    assert caught.value.status == 503


def test_kept_bills_are_rows_of_numbers() -> None:
    run = Chain("p", [], [(Bills([(0.2, 3), (0.1, 0.1)]), 1)], MaxScorePicker()).run(ask(), pods("ab"), fail)
    kept = run.scored[0].bills
    assert (len(kept), kept[0], kept[1]) == (2, (0.2, 3.0), (0.1, 0.1))
    for at in (-1, 2):
        with pytest.raises(IndexError):
            kept[at]


def test_kept_bills_may_have_no_terms() -> None:
    kept = KeptBills(b"", 2, 0)
    assert (len(kept), [*kept]) == (2, [(), ()])


def test_a_bill_that_holds_something_else_than_numbers_counts_nothing() -> None:
    reported: list[str] = []
    bills = Bills([(0.2, 0.1), (0.1, None)])  # type: ignore[list-item]
    run = Chain("p", [], [(bills, 1)], MaxScorePicker()).run(
        ask(), pods("ab"), lambda plugin, error: reported.append(plugin)
    )
    assert (run.totals, reported) == ([0.0, 0.0], ["Bills"])


def test_a_cost_is_billed_once_and_its_bill_is_kept() -> None:
    a, b = pods("ab")
    cost = Bills([(0.2, 0.3), (0.1, 0.1)])
    run = Chain("p", [], [(cost, 1)], MaxScorePicker()).run(ask(), [a, b], fail)
    assert cost.calls == 1
    assert run.picks == [b]
    assert [*run.scored[0].bills] == [(0.2, 0.3), (0.1, 0.1)]
    assert run.scored[0].terms == ("work", "queue")
    assert run.scored[0].scores == [pytest.approx(0.201 / 0.501), 1.0]


def test_a_scorer_that_raises_counts_zero_and_is_reported() -> None:
    a, b = pods("ab")
    seen, on_error = recorder()
    chain = Chain("p", [], [(named(Breaks(), "bad"), 5), (Says([0.0, 0.5]), 1)], MaxScorePicker())
    run = chain.run(ask(), [a, b], on_error)
    assert run.picks == [b]
    assert run.scored[0].scores == [0.0, 0.0]
    assert seen == [("bad", "broken")]


def test_scores_that_are_no_numbers_count_zero() -> None:
    seen, on_error = recorder()
    chain = Chain("p", [], [(Says(["much", None]), 1)], MaxScorePicker())  # type: ignore[list-item]
    assert chain.run(ask(), pods("ab"), on_error).totals == [0.0, 0.0]
    assert len(seen) == 1


@pytest.mark.parametrize("scorer", [Says([1.0]), Says([1.0] * 3), Bills([(0.1, 0.1)]), Bills([(0.1,), (0.2,)])])
def test_a_wrong_number_of_scores_fails_the_request_and_names_the_scorer(scorer: Scorer) -> None:
    seen, on_error = recorder()
    scorer.name = "miscounts"
    with pytest.raises(InternalError, match="'miscounts'"):
        Chain("p", [], [(scorer, 1)], MaxScorePicker()).run(ask(), pods("ab"), on_error)
    assert [plugin for plugin, _ in seen] == ["miscounts"]


@pytest.mark.parametrize("broken", ["filter", "picker", "nobody"])
def test_a_broken_filter_or_picker_fails_the_request_and_is_named(broken: str) -> None:
    seen, on_error = recorder()
    bad = named(Breaks(), broken)
    nobody = Nobody()
    nobody.name = broken
    filters, picker = {
        "filter": ([bad], MaxScorePicker()),
        "picker": ([], bad),
        "nobody": ([], nobody),
    }[broken]
    with pytest.raises(InternalError, match=f"'{broken}'"):
        Chain("p", filters, [], picker).run(ask(), pods("ab"), on_error)
    assert [plugin for plugin, _ in seen] == [broken]
