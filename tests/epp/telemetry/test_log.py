import io
import json
import logging
import warnings
from collections.abc import Iterator

import pytest

from epp.telemetry import log


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("warmpath")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def test_text_is_one_line_an_event_whatever_a_client_sends() -> None:
    out = io.StringIO()
    log.set_up("info", "text", out)
    logging.getLogger("warmpath").warning("id %s", "a\nb\x1b[31m\u2028\x9b2J\u202e forged")
    logging.getLogger("warmpath").debug("too quiet")
    lines = out.getvalue().splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("warning id a\\nb\\x1b[31m\\u2028\\x9b2J\\u202e forged")


def test_json_lines_carry_time_level_message_and_trace() -> None:
    out = io.StringIO()
    log.set_up("debug", "json", out)
    logging.getLogger("warmpath").debug("fine")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("warmpath").exception("failed\nbadly")
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("debug", "warmpath", "fine")
    assert first["at"].endswith("Z")
    assert second["message"] == "failed\\nbadly"
    assert "ValueError: broken" in second["trace"]


def test_long_messages_are_cut() -> None:
    out = io.StringIO()
    log.set_up("info", "text", out)
    logging.getLogger("warmpath").info("x" * 1_000_000)
    assert len(out.getvalue()) < log.LONGEST + 100


def test_a_trace_in_text_is_indented_under_its_line() -> None:
    out = io.StringIO()
    log.set_up("info", "text", out)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("warmpath").exception("failed")
    first, *rest = out.getvalue().splitlines()
    assert first.endswith("failed")
    assert rest
    assert all(line.startswith("  ") for line in rest)


def test_a_trace_quotes_nothing_that_steers_a_terminal() -> None:
    out = io.StringIO()
    log.set_up("info", "text", out)
    try:
        raise ValueError("\x9b31m\u202eredrum \udc80")
    except ValueError:
        logging.getLogger("warmpath").exception("failed")
    assert "ValueError: \\x9b31m\\u202eredrum \\udc80" in out.getvalue()


def test_libraries_speak_from_warning_on_and_warnings_are_logged() -> None:
    out = io.StringIO()
    with warnings.catch_warnings():  # pytest's own, which turns them into errors, steps aside
        warnings.simplefilter("always")
        log.set_up("info", "text", out)
        logging.getLogger("aiohttp.access").info("GET /")
        logging.getLogger("grpc").warning("careful")
        warnings.warn("old thing", stacklevel=1)
        logging.captureWarnings(False)
    text = out.getvalue()
    assert "GET /" not in text
    assert "grpc: careful" in text
    assert "old thing" in text


def test_setting_up_again_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    log.set_up("info", "text", first)
    log.set_up("error", "json", second)
    logging.getLogger("warmpath").warning("quiet")
    logging.getLogger("warmpath").error("loud")
    assert first.getvalue() == ""
    assert json.loads(second.getvalue())["message"] == "loud"
