from tooling.conformance.case import Group
from tooling.conformance.suite import CASES, GROUPS
from tooling.conformance.target import Target


def test_cases_are_numbered_in_the_order_they_are_written() -> None:
    group = Group(9, "nine")

    @group.case("MUST", "first", "somewhere")
    async def first(target: Target) -> None:
        """How,
        on two lines.
        """

    @group.case("SHOULD", "second", "elsewhere")
    async def second(target: Target) -> None:
        """How."""

    assert [(case.id, case.level, case.how) for case in group.cases] == [
        ("9.1", "MUST", "How, on two lines."),
        ("9.2", "SHOULD", "How."),
    ]
    assert group.cases[0].check is first
    assert group.cases[1].check is second


def test_every_case_says_what_must_hold_how_it_is_driven_and_where_that_stands() -> None:
    assert [group.number for group in GROUPS] == list(range(1, len(GROUPS) + 1))
    assert len({case.id for case in CASES}) == len(CASES) >= 70
    assert [case.id for case in CASES if not (case.title and case.how and case.source)] == []
