"""Go's spellings, the reference pickers' flags, and argument lists as their charts write them."""

import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from epp.cli import warmpath, with_command
from epp.flags import IDLE, Duration, GoCommand, WholeNumber, log_format, log_level
from tests.support.process.charts import CHARTS
from tests.support.process.serve_args import settings_of

DOCS = Path(__file__).parents[2] / "docs" / "kubernetes.md"


@click.command(cls=GoCommand)
@click.option("--name")
@click.option("--many", multiple=True)
@click.option("--yes", type=bool)
@click.option("--number", type=int)
@click.option("--size", type=WholeNumber(1, 1024))
@click.option("--wait", type=Duration(1, above=True), default="2s")
@click.option("-v", "--v", "verbosity", type=int)
@click.option("--file", type=click.Path(exists=True))
@click.pass_context
def command(ctx: click.Context, /, **flags: Any) -> None:
    """Only shows what it was given."""
    ctx.obj.update(flags)


def given(*arguments: str) -> dict[str, Any]:
    """What was given, without what was not."""
    seen: dict[str, Any] = {}
    reported = CliRunner().invoke(command, arguments, obj=seen)
    assert reported.exit_code == 0, reported.output
    return {name: value for name, value in seen.items() if value not in (None, (), 2.0)}


def refusal(*arguments: str) -> str:
    reported = CliRunner().invoke(command, arguments, obj={})
    assert reported.exit_code == 2, reported.output
    return " ".join(reported.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--name", "x"), {"name": "x"}),
        (("-name", "x"), {"name": "x"}),
        (("-name=x",), {"name": "x"}),
        (("--name=a=b",), {"name": "a=b"}),
        (("--name", "-x"), {"name": "-x"}),
        (("--name", "--yes"), {"name": "--yes"}),
        (("--many", "a", "-many=b"), {"many": ("a", "b")}),
        (("--name", "a", "--name", "b"), {"name": "b"}),
        (("--yes",), {"yes": True}),
        (("-yes", "-name", "x"), {"yes": True, "name": "x"}),
        (("--yes=false",), {"yes": False}),
        (("-yes=F",), {"yes": False}),
        (("--yes=1",), {"yes": True}),
        (("-v", "4"), {"verbosity": 4}),
        (("-v=4",), {"verbosity": 4}),
        (("--v=4",), {"verbosity": 4}),
        (("--v", "4"), {"verbosity": 4}),
        (("-v4",), {"verbosity": 4}),
        (("--name=",), {}),
        (("--file", "", "--name", ""), {}),
        (("--wait", "1m30s"), {"wait": 90.0}),
        (("--wait=1500ms",), {"wait": 1.5}),
        (("--wait=1.5h",), {"wait": 5400.0}),
        (("--wait", "3"), {"wait": 3.0}),
    ],
)
def test_a_flag_is_spelt_as_in_go(arguments: tuple[str, ...], expected: dict[str, Any]) -> None:
    assert given(*arguments) == expected


def test_what_follows_a_boolean_is_not_its_value_and_that_is_reported() -> None:
    assert given("--yes", "false", "--name", "x") == {
        "yes": True,
        "name": "x",
        "idle_flags": ("'false' after --yes: a value follows '=', as in --yes=false",),
    }


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--nme", "x"), "No such option '--nme'. (Did you mean one of: '--name',"),
        (("-nme", "x"), "No such option '--nme'. (Did you mean one of: '--name',"),
        (("--name",), "Option '--name' requires an argument"),
        (("--yes=maybe",), "'maybe' is not a valid boolean"),
        (("--number=",), "'' is not a valid integer"),
        (("--size=1GB",), "'1GB' is no whole number; expected one of at least 1, at most 1024"),
        (("--size=2000",), "2000 is not in the range 1<=x<=1024"),
        (("--wait=1x",), "'1x' is no duration; expected one such as 50ms, 1m30s, or seconds"),
        (("--wait=1s500",), "'1s500' is no duration"),
        (("--wait=-1s",), "'-1s' is no duration"),
        (("--wait=1s",), "1s is too short; expected more than 1 s"),
        (("x",), "unexpected extra argument"),
        (("--health-checking=perhaps",), "'perhaps' is not a valid boolean"),
    ],
)
def test_what_is_wrong_is_reported(arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in refusal(*arguments)


@pytest.mark.parametrize("name", IDLE)
def test_a_flag_that_does_nothing_is_taken_and_reported_only_if_it_asks_for_something(name: str) -> None:
    idle = IDLE[name]
    if idle.usual is not None:
        assert given(f"--{name}={idle.usual}") == {}
    other = {"true": "false", "false": "true"}.get(idle.usual or "", "7")
    assert given(f"--{name}={other}") == {"idle_flags": (f"--{name}: {idle.why}",)}


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--tls-min-version=VersionTLS13", "grpc's server takes TLS 1.2 too; expected VersionTLS12"),
        ("--tls-min-version=1.2", "'1.2' is no version; expected VersionTLS12"),
        (
            "--tls-cipher-suites=TLS_RSA_WITH_RC4_128_SHA",
            "'TLS_RSA_WITH_RC4_128_SHA' is no cipher suite; expected some",
        ),
        ("--pool-group=inference.networking.x-k8s.io", "is not 'inference.networking.k8s.io'"),
        ("--zap-encoder=xml", "'xml' is not one of 'json', 'console'"),
        ("--zap-log-level=loud", "'loud' is no level; expected one of debug, info, error, panic, or a number"),
        ("--endpoint-target-ports=8000,x", "'x' is no whole number"),
        ("--peers-service=replicas", "'replicas' is no name; expected NAMESPACE/NAME"),
        ("--peers-service=ns/replicas/x", "'ns/replicas/x' is no name; expected NAMESPACE/NAME"),
        ("--pol-name=p", "No such option '--pol-name'. (Did you mean one of: '--pool-name'"),
        ("-pol-name=p", "No such option '--pol-name'. (Did you mean one of: '--pool-name'"),
    ],
)
def test_a_flag_of_the_picker_that_cannot_be_is_refused(flag: str, sentence: str) -> None:
    reported = CliRunner().invoke(warmpath, with_command([flag]))
    assert reported.exit_code == 2
    assert sentence in " ".join(reported.stderr.split())


def test_log_flags_have_an_order() -> None:
    assert [log_level(None, None, number) for number in (None, 0, 2, 3, 4, 5)] == ["info"] * 4 + ["debug"] * 2
    assert log_level(None, "error", 5) == "error"
    assert log_level("warning", "debug", 5) == "warning"
    assert (log_format(None, None, None), log_format(None, "json", True)) == ("text", "json")
    assert (log_format(None, None, False), log_format(None, "console", False)) == ("json", "text")
    assert log_format("text", "json", False) == "text"


def test_the_migration_table_names_every_flag() -> None:
    text = DOCS.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `--")]
    for name, idle in IDLE.items():
        (row,) = (row for row in rows if f"`--{name}`" in row)
        assert f"without effect: {idle.why} |" in row
    named = {flag for row in rows for flag in re.findall(r"`--([a-z0-9-]+)`", row.partition(" | ")[0])}
    known = {name.removeprefix("--") for option in warmpath.commands["serve"].params for name in option.opts}
    assert named <= known


@pytest.mark.parametrize("chart", CHARTS)
def test_arguments_as_charts_write_them_are_taken(chart: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(CHARTS[chart], tmp_path, monkeypatch)
    assert settings.pool_name or settings.endpoint_selector


def test_what_the_flags_of_charts_come_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(chart: str) -> Any:
        return settings_of(CHARTS[chart], tmp_path, monkeypatch)

    gie = of("GIE v1.5 inferencepool")
    assert (gie.pool_name, gie.pool_namespace, gie.log_format, gie.log_level) == (("vllm",), "team", "json", "info")
    assert (gie.metrics_endpoint_auth, gie.tracing, gie.idle_flags) == (False, False, ())
    assert gie.config == tmp_path / "config" / "default-plugins.yaml"
    assert of("GIE v1.5 conformance").log_level == "debug"
    standalone = of("GIE v1.5 standalone")
    assert (standalone.endpoint_selector, standalone.endpoint_target_ports) == ("app=vllm,tier=gpu", (8000, 8001))
    assert standalone.secure_serving is False
    old = of("GIE v1.0, Go's flag package")
    assert (old.pool_name, list(old.grpc_port), old.log_level) == (("vllm",), [9002], "debug")
    assert (old.secure_serving, old.refresh_metrics_interval) == (False, 0.05)
    llmd = of("llm-d-router v0.10 gateway")
    assert (llmd.drain_timeout, llmd.secure_serving, llmd.tracing) == (45.0, False, True)
    assert [each.partition(":")[0] for each in llmd.idle_flags] == [
        "--ha-enable-leader-election",
        "--grpc-max-recv-msg-size",
    ]
