"""What requests do to these labels: test_metrics.py."""

from epp.telemetry.series import CANDIDATES, HALF_LIFE_S, Models


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_label_is_taken_by_twice_the_answers_of_the_least_used() -> None:
    clock = Clock()
    models = Models(clock, most=2)
    for _ in range(4):
        models.answered("often")
    for _ in range(2):
        models.answered("seldom")
    for _ in range(3):
        assert models.answered("new") is models.other
    assert models.answered("new") is models.of("new") is not models.other
    assert models.of("seldom") is models.other
    assert [name for name, _ in models] == ["often", "new"]


def test_an_answer_counts_half_after_a_while() -> None:
    clock = Clock()
    models = Models(clock, most=1)
    for _ in range(4):
        models.answered("old")
    clock.now += 3 * HALF_LIFE_S
    models.answered("new")
    assert "new" in models
    assert "old" not in models


def test_answers_of_names_without_a_label_are_forgotten_the_longest_unused_first() -> None:
    models = Models(Clock(), most=1)
    for _ in range(2):
        models.answered("real")
    for _ in range(3):
        models.answered("late")
        for n in range(CANDIDATES - 1):
            models.answered(f"made-up-{n}")
    models.answered("late")  # the fourth answer counts: it was never the longest unused
    assert "late" in models
    models = Models(Clock(), most=1)
    for _ in range(2):
        models.answered("real")
    for _ in range(8):
        models.answered("late")
        if "late" in models:
            break
        for n in range(CANDIDATES):
            models.answered(f"made-up-{n}")
    assert "late" not in models
