import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import epp.app
import tooling.laptop.up
from epp.cli import STRATEGIES, warmpath
from epp.configuration.loader import DEFAULT_STRATEGY, strategies
from epp.errors import ConfigError

GOOD = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins: [{type: queue-scorer}, {type: max-score-picker}]
schedulingProfiles:
- name: default
  plugins: [{pluginRef: queue-scorer, weight: 2}, {pluginRef: max-score-picker}]
"""


def call(*arguments: object) -> Result:
    return CliRunner().invoke(warmpath, [str(each) for each in arguments])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(GOOD)
    return file


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[epp.app.Settings]:
    """What `serve` would run with."""
    seen: list[epp.app.Settings] = []

    def run(settings: epp.app.Settings) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr(epp.app, "run", run)
    return seen


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[tooling.laptop.up.UpOptions]:
    """What `up` would run with; it ends with status 7."""
    seen: list[tooling.laptop.up.UpOptions] = []

    async def run(options: tooling.laptop.up.UpOptions) -> int:
        seen.append(options)
        return 7

    monkeypatch.setattr(tooling.laptop.up, "run", run)
    return seen


@pytest.mark.parametrize("command", [(), ("serve",), ("check",), ("up",)])
def test_every_command_has_help(command: tuple[str, ...]) -> None:
    reported = call(*command, "--help")
    assert reported.exit_code == 0
    assert reported.output.startswith("Usage: warmpath")


def test_the_version() -> None:
    assert re.fullmatch(r"warmpath \d+\.\d+\.\d+\S*\n", call("--version").output)


# --- check ----------------------------------------------------------------------------------------------------------


def test_check_prints_the_pipeline(config: Path) -> None:
    reported = call("check", config)
    assert reported.exit_code == 0
    assert "scorer, weight 2: queue-scorer" in reported.output
    assert "picker max-score-picker" in reported.output


def test_the_strategies_offered_are_those_there_are() -> None:
    assert sorted(STRATEGIES) == strategies()
    assert STRATEGIES[0] == DEFAULT_STRATEGY == epp.app.Settings.strategy


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_check_shows_a_strategy(strategy: str) -> None:
    reported = call("check", "--strategy", strategy)
    assert reported.exit_code == 0
    assert "picker" in reported.output


def test_check_prints_every_error_and_ends_with_1(config: Path) -> None:
    config.write_text(GOOD.replace("queue-scorer}", "queue-scorr}").replace("max-score-picker}]", "max-score-pickr}]"))
    reported = call("check", config)
    assert reported.exit_code == 1
    assert reported.stdout == ""
    assert "'queue-scorer'" in reported.stderr
    assert "'max-score-picker'" in reported.stderr
    assert "Traceback" not in reported.stderr


def test_check_shows_names_that_would_steer_the_terminal(config: Path) -> None:
    named = GOOD.replace("{type: queue-scorer}", '{type: queue-scorer, name: "queue\\x9b2J\\nadmission"}')
    config.write_text(named.replace("pluginRef: queue-scorer", 'pluginRef: "queue\\x9b2J\\nadmission"'))
    reported = call("check", config)
    assert reported.exit_code == 0
    assert "scorer, weight 2: queue\\x9b2J\\nadmission" in reported.output
    config.write_text(GOOD.replace("weight: 2", '"wei\\x1b[2J\\x9bght": 2'))
    reported = call("check", config)
    assert reported.exit_code == 1
    assert "\x1b" not in reported.output
    assert "\x9b" not in reported.output


def test_check_of_no_file(tmp_path: Path) -> None:
    reported = call("check", tmp_path / "gone.yaml")
    assert reported.exit_code == 1
    assert "gone.yaml" in reported.stderr


def test_check_wants_one_thing(config: Path) -> None:
    for arguments in ((), (config, "--strategy", "session")):
        reported = call("check", *arguments)
        assert (reported.exit_code, "give either a FILE or --strategy" in reported.stderr) == (2, True)


def test_check_finds_plugins_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "plugins_of_mine.py").write_text(
        "from epp.plugin import Scorer\n\nclass Mine(Scorer):\n    def score(self, request, endpoints):\n"
        "        return [1.0] * len(endpoints)\n"
    )
    file = tmp_path / "config.yaml"
    file.write_text(GOOD.replace("{type: queue-scorer}", "{type: plugins_of_mine.Mine, name: queue-scorer}"))
    reported = call("check", file)
    assert (reported.exit_code, "plugins_of_mine.Mine" in reported.output) == (0, True)


NAMES = ("serve", "up", "check", "replay")


def test_check_imports_nothing_from_modules_that_are_not_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "never_run.py").write_text("raise AssertionError\n")
    file = tmp_path / "config.yaml"
    file.write_text(GOOD.replace("{type: queue-scorer}", "{type: never_run.Mine, name: queue-scorer}"))
    reported = call("check", file, "--plugins-from", "none")
    assert reported.exit_code == 1
    assert (
        "plugins[0].type: 'never_run.Mine' is code of the module never_run; --plugins-from allows none"
        in reported.stderr
    )
    assert str(tmp_path) not in sys.path
    monkeypatch.setenv("WARMPATH_PLUGINS_FROM", "acme,acme2")
    assert "--plugins-from allows acme, acme2" in call("check", file).stderr
    assert "--plugins-from allows none" in call("replay", "chats", "--policy", file, "--plugins-from", "none").stderr


@pytest.mark.parametrize("command", NAMES)
def test_who_reads_a_configuration_can_be_reported_whose_plugins_to_take(command: str) -> None:
    assert "--plugins-from" in call(command, "--help").output
    reported = call(command, "--plugins-from", "acme-plugins")
    assert reported.exit_code == 2
    assert "'acme-plugins' is no module; expected any, none, or modules" in " ".join(reported.stderr.split())


# --- serve ----------------------------------------------------------------------------------------------------------


def test_flags_become_settings(config: Path, settings: list[epp.app.Settings]) -> None:
    ports = ("--grpc-port", 1, "--grpc-port", 2, "--grpc-health-port", 3, "--metrics-port", 4)
    reported = call(
        *("serve", "--endpoints", config, "--endpoints", config.parent, "--config", config, *ports),
        *("--max-body", 2, "--max-streams", 7, "--request-timeout", "9s", "--fallbacks", 3, "--trust-client-headers"),
        *("--audit-log", config.parent / "audit", "--plugins-from", "a,b.c", "--watch-answers", 0.5),
    )
    assert reported.exit_code == 0, reported.output
    [found] = settings
    assert found.watch_answers == 0.5
    assert list(found.endpoints) == [config, config.parent]
    assert (list(found.grpc_port), found.grpc_health_port, found.metrics_port) == ([1, 2], 3, 4)
    assert (found.max_streams, found.request_timeout) == (7, 9.0)
    assert (found.max_body, found.fallbacks, found.trust_client_headers) == (2 << 20, 3, True)
    assert found.plugins_from == ("a", "b.c")
    assert (found.config, found.audit_log) == (config, config.parent / "audit")


def test_without_flags_settings_are_the_defaults(config: Path, settings: list[epp.app.Settings]) -> None:
    assert call("serve", "--endpoints", config).exit_code == 0
    assert settings == [epp.app.Settings(endpoints=(config,))]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--strategy", "session", "--config", "{config}"), "--strategy and --config exclude each other"),
        (("--strategy", "sesion"), "'sesion' is not one of"),
        (("--config", "gone.yaml"), "'gone.yaml' does not exist"),
        (("--grpc-port", "70000"), "not in the range 0<=x<=65535"),
        (("--refresh-metrics-interval", "0"), "0 is too short; expected more than 0 s"),
        (("--fallbacks", "-1"), "not in the range x>=0"),
        (("--max-body", "0"), "not in the range 1<=x<=1024"),
        (("--drain-timeout", "-1"), "'-1' is no duration"),
        (("--grpc-prt", "1"), "Did you mean one of"),
    ],
)
def test_a_wrong_flag_is_reported_with_status_2(
    config: Path, settings: list[epp.app.Settings], flags: tuple[str, ...], sentence: str
) -> None:
    reported = call("serve", "--endpoints", config, *(flag.format(config=config) for flag in flags))
    assert reported.exit_code == 2
    assert sentence in " ".join(reported.stderr.split())
    assert settings == []


def test_a_wrong_configuration_is_one_sentence(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(settings: Any) -> int:
        raise ConfigError("plugins[0].type", "no such thing")

    monkeypatch.setattr(epp.app, "run", run)
    reported = call("serve", "--endpoints", config)
    assert (reported.exit_code, reported.stderr) == (1, "Error: plugins[0].type: no such thing\n")


# --- up -------------------------------------------------------------------------------------------------------------


def test_up_passes_its_flags_and_its_status(config: Path, options: list[tooling.laptop.up.UpOptions]) -> None:
    reported = call("up", "--once", "--pods", 2, "--replicas", 2, "--port", 8081, "--seed", 5, "--strategy", "session")
    assert reported.exit_code == 7
    wanted = tooling.laptop.up.UpOptions(once=True, pods=2, replicas=2, port=8081, seed=5, strategy="session")
    assert options == [wanted]
    assert wanted.picking == ("--strategy", "session")
    assert tooling.laptop.up.UpOptions(config=config).picking == ("--config", str(config))
    assert tooling.laptop.up.UpOptions(plugins_from=()).picking[2:] == ("--plugins-from", "none")
    assert tooling.laptop.up.UpOptions(plugins_from=("a", "b.c")).picking[2:] == ("--plugins-from", "a,b.c")


def test_up_refuses_what_makes_no_sense(config: Path, options: list[tooling.laptop.up.UpOptions]) -> None:
    for flags in (("--pods", 0), ("--port", 0), ("--replicas", 9), ("--strategy", "session", "--config", config)):
        assert call("up", *flags).exit_code == 2
    assert options == []


def test_what_ends_up_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(options: Any) -> int:
        raise tooling.laptop.up.UpError("no Envoy found")

    monkeypatch.setattr(tooling.laptop.up, "run", run)
    reported = call("up")
    assert (reported.exit_code, reported.stderr) == (1, "Error: no Envoy found\n")
