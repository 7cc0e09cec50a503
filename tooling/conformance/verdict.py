"""What a check says when its title does not hold, or cannot be tried on this target."""


class Failed(Exception):
    """`expected` and `got`, in words."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(f"expected {expected}; got {got}")
        self.expected = expected
        self.got = got


class Skipped(Exception):
    """Why the case does not apply to this target, or which option it would need."""


class Unreachable(Exception):
    """Nothing answers at the target: one sentence for the user."""


def require(holds: bool, expected: str, got: str) -> None:
    """Raises Failed unless it holds."""
    if not holds:
        raise Failed(expected, got)
