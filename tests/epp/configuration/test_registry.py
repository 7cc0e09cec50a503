"""Plugin objects out of specifications: classes by any name, parameters, and all the ways a class can be wrong."""

import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

from epp.configuration.loader import Pipeline, load_text, strategies, strategy_text
from epp.configuration.registry import ENTRY_POINTS, find_class
from epp.errors import ConfigError
from tests.support.plugins import Couple, First, OtherHalf, Warm
from tests.support.scheduling.pipelines import RANDOM, clock, loaded

OURS = "tests.support.plugins"
CONFIG = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: {}
"""


def test_a_users_class_needs_no_registration() -> None:
    pipeline = loaded(CONFIG.format(f"{OURS}.Warm\n  name: warm\n  parameters: {{floor: 0.5, wait: 2s, maxTTFTMs: 7}}"))
    warm = pipeline.registry["warm"].plugin
    assert isinstance(warm, Warm)
    assert (warm.floor, warm.wait.total_seconds(), warm.max_ttft_ms, warm.seen) == (0.5, 2.0, 7, 0)
    assert (warm.name, warm.clock, warm.random) == ("warm", clock, RANDOM)


def test_an_entry_point_gives_a_class_a_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("my-picker", f"{OURS}:First", ENTRY_POINTS)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] if group == ENTRY_POINTS else [])
    assert find_class("my-picker", "") is First
    with pytest.raises(ConfigError, match="did you mean 'my-picker'"):
        find_class("my-piker", "")


@pytest.mark.parametrize(
    ("type_", "message"),
    [
        (f"{OURS}.Unfinished", "plugins[0].type: Unfinished does not have the method score"),
        (f"{OURS}.CONSTANT", "to be a class made from epp.plugin's, got 3"),
        (f"{OURS}.Step", "to be a class made from epp.plugin's"),
        (f"{OURS}.Nothing", "to be a class made from epp.plugin's, got nothing"),
        ("no_such_module.Thing", "'no_such_module' cannot be imported: ModuleNotFoundError"),
        ("..Thing", "expected a known type or module.Class, got '..Thing'"),
        ("a b.Thing", "expected a known type or module.Class"),
        ("'.'", "expected a known type or module.Class"),
        ("zzzzzzzzzzzz", "no plugin type 'zzzzzzzzzzzz'; expected a known type or module.Class"),
        (f"{OURS}.Angry", "plugins[0]: Angry cannot be made: KeyError: 'oops'"),
        (f"{OURS}.Frozen", "plugins[0]: Frozen does not let name, clock and random be set"),
        (f"{OURS}.Required", "plugins[0].parameters.path: missing"),
        (f"{OURS}.Warm\n  parameters: {{flor: 1}}", "plugins[0].parameters.flor: unknown; did you mean 'floor'?"),
        (f"{OURS}.Warm\n  parameters: {{floor: hi}}", "plugins[0].parameters.floor: expected a number, got 'hi'"),
        (f"{OURS}.Warm\n  parameters: {{count: 0}}", "plugins[0].parameters.count: expected 1 or more, got 0"),
        (f"{OURS}.Warm\n  parameters: [1]", "plugins[0].parameters: expected a mapping, got a list"),
        (f"{OURS}.All\n  parameters: {{a: 1}}", "plugins[0].parameters.a: unknown; no parameters are expected here"),
    ],
)
def test_classes_that_are_refused(type_: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(CONFIG.format(type_))
    assert message in str(refused.value)


def test_a_module_that_breaks_on_import(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "broken_scorers.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ConfigError, match="'broken_scorers' cannot be imported: ZeroDivisionError: division by zero"):
        loaded(CONFIG.format("broken_scorers.Mine"))


def from_modules(type_: str, plugins_from: Sequence[str] | None) -> Pipeline:
    return load_text(CONFIG.format(type_), clock=clock, random=RANDOM, plugins_from=plugins_from)


@pytest.mark.parametrize("plugins_from", [None, ["tests"], ["acme", OURS], [OURS.rpartition(".")[0]]])
def test_modules_that_are_allowed(plugins_from: Sequence[str] | None) -> None:
    assert f"{OURS}.Warm" in from_modules(f"{OURS}.Warm", plugins_from).registry


@pytest.mark.parametrize("plugins_from", [[], ["test"], ["acme", f"{OURS}.Warm"], [OURS + "x"], ["os"]])
def test_a_module_that_is_not_allowed_is_not_imported(
    plugins_from: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "never_imported.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for type_ in (f"{OURS}.Warm", "never_imported.Scorer", "never_imported.below.Scorer"):
        module = type_.rpartition(".")[0]
        with pytest.raises(ConfigError) as refused:
            from_modules(type_, plugins_from)
        assert str(refused.value) == (
            f"plugins[0].type: {type_!r} is code of the module {module}; --plugins-from allows "
            f"{', '.join(plugins_from) or 'none'}; expected a built-in type, or that module to be allowed"
        )
    assert "never_imported" not in sys.modules


def test_an_entry_point_is_code_of_its_module_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: [metadata.EntryPoint("warm", f"{OURS}:Warm", group)])
    assert "warm" in from_modules("warm", [OURS]).registry
    with pytest.raises(ConfigError, match="is code of the module"):
        from_modules("warm", [])


@pytest.mark.parametrize("name", strategies())
def test_strategies_need_no_code_but_our_own(name: str) -> None:
    pipeline = load_text(strategy_text(name), clock=clock, random=RANDOM, plugins_from=())
    modules = [type(each.plugin).__module__ for each in pipeline.registry.values()]
    assert modules
    assert [module for module in modules if not module.startswith("epp.")] == []


def test_names_are_unique() -> None:
    with pytest.raises(ConfigError, match=r"plugins\[1\].name: a plugin above is called 'a' too"):
        loaded(CONFIG.format(f"{OURS}.All\n  name: a\n- type: {OURS}.First\n  name: a"))


@pytest.mark.parametrize("order", [("Couple", "OtherHalf"), ("OtherHalf", "Couple")])
def test_a_companion_is_made_of_the_active_plugin(order: tuple[str, str]) -> None:
    pipeline = loaded(CONFIG.format("\n- type: ".join(f"{OURS}.{name}" for name in order)))
    half, couple = pipeline.registry[f"{OURS}.OtherHalf"].plugin, pipeline.registry[f"{OURS}.Couple"].plugin
    assert isinstance(half, OtherHalf)
    assert isinstance(couple, Couple)
    assert half.couple is couple


def test_a_companion_without_its_other_half() -> None:
    with pytest.raises(ConfigError, match=r"plugins\[0\]: OtherHalf works only with Couple"):
        loaded(CONFIG.format(f"{OURS}.OtherHalf"))
    with pytest.raises(ConfigError, match=r"plugins\[0\].parameters: unknown; no parameters"):
        loaded(CONFIG.format(f"{OURS}.OtherHalf\n  parameters: {{a: 1}}\n- type: {OURS}.Couple"))


def test_a_stock_name_taken_by_another_plugin() -> None:
    text = CONFIG.format(f"{OURS}.All\n  name: utilization-detector")
    with pytest.raises(ConfigError, match="plugins\\[0\\]: 'utilization-detector' is another plugin's name"):
        loaded(text)


GIE = """
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefix-cache-scorer
  parameters: {blockSizeTokens: 64, lruCapacityPerServer: 1000, matchLengthWeight: 0.5}
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: prefix-cache-scorer
"""


def test_parameters_go_to_the_type_that_has_them_now() -> None:
    pipeline = loaded(GIE)
    scorer, producer = (
        pipeline.registry[name].plugin for name in ("prefix-cache-scorer", "approx-prefix-cache-producer")
    )
    assert vars(producer).items() >= {"block_size_tokens": 64, "lru_capacity_per_server": 1000}.items()
    assert vars(scorer)["match_length_weight"] == 0.5
    assert producer in pipeline.producers


def test_parameters_of_a_type_that_is_configured_on_its_own_are_refused_elsewhere() -> None:
    twice = GIE.replace("schedulingProfiles", "- type: approx-prefix-cache-producer\nschedulingProfiles")
    with pytest.raises(ConfigError) as refused:
        loaded(twice)
    assert str(refused.value).splitlines() == [
        f"plugins[0].parameters.{key}: a parameter of approx-prefix-cache-producer, which is configured on its own"
        for key in ("blockSizeTokens", "lruCapacityPerServer")
    ]


def test_policies_of_other_projects_are_ours_under_their_older_module_too() -> None:
    assert from_modules("tooling.policies.Lmetric", []).registry.keys() >= {"tooling.policies.Lmetric"}
    [entry] = [e for e in from_modules("epp.rivals.Lmetric", []).registry.values() if e.type == "epp.rivals.Lmetric"]
    assert type(entry.plugin).__qualname__ == "Lmetric"
