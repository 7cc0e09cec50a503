import io
import json
from collections.abc import Iterable

import pytest
from click.testing import CliRunner
from rich.console import Console

from epp.cli import warmpath
from epp.errors import ConfigError
from tests.support.ext_proc.faulty_pickers import Bend, Reply, bent
from tooling.conformance.command import conform, header, options


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def text(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


class Mute(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        reply.ClearField("dynamic_metadata")
        yield reply


async def test_status_zero_and_a_table_when_nothing_is_broken() -> None:
    async with bent(Bend) as port:
        given = options(f"127.0.0.1:{port}", False, (), "m", ("X-A=1=2",), None, 5.0)
        assert given.headers == {"x-a": "1=2"}
        shown, errors = console(), console()
        assert await conform(given, as_json=False, console=shown, errors=errors) == 0
    assert "0 MUST and 0 SHOULD failed" in text(shown)


async def test_status_one_and_json_when_a_must_is_broken() -> None:
    async with bent(Mute) as port:
        given = options(f"127.0.0.1:{port}", False, (), "m", (), None, 5.0)
        shown = console()
        assert await conform(given, as_json=True, console=shown, errors=console()) == 1
    broken = [case["id"] for case in json.loads(text(shown))["cases"] if case["result"] == "fail"]
    assert broken == ["1.2", "6.5"]


async def test_status_two_and_one_sentence_when_nobody_is_there() -> None:
    shown, errors = console(), console()
    given = options("127.0.0.1:1", False, (), "m", (), None, 0.2)
    assert await conform(given, as_json=False, console=shown, errors=errors) == 2
    assert text(shown) == ""
    assert text(errors).strip().startswith("nothing at 127.0.0.1:1 speaks gRPC in plain text")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target", "nowhere"], "--target: 'nowhere' is not HOST:PORT"),
        (["--target", "a:1", "--health", "b"], "--health: 'b' is not HOST:PORT"),
        (["--target", "a:1", "--endpoint", "pod-1:8000"], "--endpoint: 'pod-1:8000' is not IP:PORT"),
        (["--target", "a:1", "--header", "x"], "--header: 'x' is not NAME=VALUE"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(warmpath, ["conformance", *arguments])
    assert done.exit_code == 2
    assert says in done.output


def test_headers() -> None:
    assert header("A=b") == ("a", "b")
    with pytest.raises(ConfigError):
        header("=b")
