import pytest

from epp import errors, protocol
from epp.errors import (
    BadRequest,
    ConfigError,
    ConfigErrors,
    DeadlineExceeded,
    EppError,
    InternalError,
    NoEndpoint,
    NotAllowed,
    OwnAnswer,
    RateLimited,
    Refused,
    Rejected,
    RequestTimeout,
    TooLarge,
    UnknownModel,
    UnsupportedMedia,
)

STATUS = {
    BadRequest: 400,
    OwnAnswer: 200,
    UnknownModel: 404,
    RequestTimeout: 408,
    TooLarge: 413,
    UnsupportedMedia: 415,
    Rejected: 429,
    InternalError: 500,
    NoEndpoint: 503,
    DeadlineExceeded: 503,
    RateLimited: 429,
    NotAllowed: 403,
    Refused: 500,
}


def test_every_error_of_the_tree_is_drawn_with_its_status() -> None:
    assert {kind: kind.status for kind in EppError.__subclasses__()} == STATUS
    for kind, status in STATUS.items():
        drawn = "any" if kind is Refused else str(status)
        assert any(kind.__name__ in line and drawn in line for line in (errors.__doc__ or "").splitlines())


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Rejected("full"), protocol.DROP_SATURATED),
        (NoEndpoint("nobody"), protocol.DROP_NO_ENDPOINTS),
        (DeadlineExceeded("late"), protocol.DROP_TTL_EXPIRED),
        (BadRequest("bad", param="model"), None),
    ],
)
def test_dropped_requests_have_a_reason_from_the_protocol(error: EppError, reason: str | None) -> None:
    assert error.reason == reason


def test_a_configuration_error_is_one_sentence_with_its_place() -> None:
    assert str(ConfigError("plugins[0].type", "expected a type")) == "plugins[0].type: expected a type"
    assert str(ConfigError("", "nothing there")) == "nothing there"


def test_what_a_file_says_cannot_steer_a_terminal_or_fill_it() -> None:
    assert str(ConfigError("plugins.\x1b[2J\n", "got '\u009b31m'")) == r"plugins.\x1b[2J\n: got '\x9b31m'"
    assert len(str(ConfigError("k" * 100_000, "unknown"))) < 1100
    many = str(ConfigErrors([ConfigError(f"k{i}", "unknown") for i in range(120)])).splitlines()
    assert (len(many), many[0], many[-1]) == (101, "k0: unknown", "and 20 errors more")


def test_several_are_a_line_each() -> None:
    both = ConfigErrors([ConfigError("a", "one"), ConfigError("b", "two")])
    assert str(both) == "a: one\nb: two"
    assert isinstance(both, ConfigError)
