"""`--policy`: a strategy's name, an EndpointPickerConfig file, `my_scorers.py:Mine`, or `oracle`; with
`+flow-control` behind it, with flow control.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from epp.configuration.loader import (
    DEFAULT_STRATEGY,
    Pipeline,
    load_text,
    read_file,
    strategies,
    strategy_text,
)
from epp.configuration.registry import find_class
from epp.documents.strict import nearest, short
from epp.errors import ConfigError
from epp.plugin import Filter, Picker, Scorer

ORACLE = "oracle"
ALWAYS, NEVER, THRESHOLD, TOGETHER = "always-apart", "never-apart", "apart-from-16-tokens", "without-roles"
"""The default strategy, but prompts are computed by another pod always, never, or from so many tokens on that are not
cached; or the pods have no roles."""
_DECIDERS = {
    ALWAYS: "always-disagg-pd-decider}",
    NEVER: "prefix-based-pd-decider, parameters: {nonCachedTokens: 0}}",
    THRESHOLD: "prefix-based-pd-decider, parameters: {nonCachedTokens: 16}}",
}
FLOW = "+flow-control"
"""After the name of a policy: with flow control, as `warmpath serve --flow-control`."""
_HEAD = "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\n"


@dataclass(frozen=True)
class Policy:
    """A way to pick, as text, so that it can be sent to another process."""

    name: str
    """As it stands in tables."""
    text: str
    """EndpointPickerConfig YAML."""
    directory: str = ""
    """Where its modules are."""
    plugins_from: tuple[str, ...] | None = None
    """Modules whose classes it may name, besides our own; None: any."""
    flow_control: bool = False
    """As `warmpath serve --flow-control`."""
    roles: bool = True
    """The pods have the roles of `--roles`; false: none has one, and each serves requests as a whole."""

    def build(self, clock: Callable[[], float], random: Random) -> Pipeline:
        """The pipeline. Raises ConfigError."""
        if self.plugins_from != ():
            _importable(self.directory)
        return load_text(
            self.text,
            clock=clock,
            random=random,
            where=self.name,
            plugins_from=self.plugins_from,
            flow_control=self.flow_control,
        )


def policy(spec: str, plugins_from: tuple[str, ...] | None = None) -> Policy:
    """What `--policy` names, tried once. Raises ConfigError."""
    plain = spec.removesuffix(FLOW)
    found = replace(_policy(plain, plugins_from), plugins_from=plugins_from)
    if plain != spec:
        found = replace(found, name=found.name + FLOW, flow_control=True)
    found.build(lambda: 0.0, Random(0))
    return found


def _policy(spec: str, plugins_from: Sequence[str] | None) -> Policy:
    if spec == ORACLE:
        return Policy(ORACLE, _chain("tooling.replay.oracle.Oracle"))
    if spec == TOGETHER:
        return Policy(TOGETHER, strategy_text(DEFAULT_STRATEGY), roles=False)
    if spec in _DECIDERS:
        return Policy(spec, _split_by(_DECIDERS[spec]))
    if spec in strategies():
        return Policy(spec, strategy_text(spec))
    file, colon, name = spec.rpartition(":")
    path = Path(file if colon else spec)
    if not colon and path.suffix in (".yaml", ".yml", ".json"):
        return Policy(path.stem, read_file(path).decode("utf-8", "replace"), str(path.absolute().parent))
    if path.suffix != ".py" or not name.isidentifier():
        near = nearest(spec, [*strategies(), ORACLE, *_DECIDERS, TOGETHER])
        raise ConfigError(
            "policy", f"expected a strategy, {ORACLE}, FILE.yaml or FILE.py:CLASS, got {short(spec)}{near}"
        )
    if not path.is_file():
        raise ConfigError(str(path), "there is no such file")
    directory = str(path.absolute().parent)
    return Policy(f"{path.name}:{name}", _around(f"{path.stem}.{name}", directory, spec, plugins_from), directory)


def _around(type_: str, directory: str, spec: str, plugins_from: Sequence[str] | None) -> str:
    """A configuration in which a user's class decides: alone if it can, else with the default scorer."""
    _importable(directory)
    cls = find_class(type_, spec, plugins_from)
    if issubclass(cls, Scorer):
        return _chain(type_)
    if issubclass(cls, (Filter, Picker)):
        return _chain(type_, "expected-ttft", picker="" if issubclass(cls, Picker) else "max-score-picker")
    raise ConfigError(spec, f"expected a Scorer, Cost, Filter or Picker, got {cls.__qualname__}; use a FILE.yaml")


def _chain(*types: str, picker: str = "max-score-picker") -> str:
    names = [*types, picker] if picker else types
    plugins = "".join(f"- type: {name}\n" for name in names)
    references = "".join(f"  - pluginRef: {name}\n" for name in names)
    return f"{_HEAD}plugins:\n{plugins}schedulingProfiles:\n- name: default\n  plugins:\n{references}"


def _split_by(decider: str) -> str:
    """The default strategy with another decider of prefill elsewhere."""
    plugins = f"- {{name: decider, type: {decider}\n- type: role-profile-handler\n  parameters: {{decider: decider}}\n"
    return _chain("expected-ttft").replace("plugins:\n", "plugins:\n" + plugins, 1)


def _importable(directory: str) -> None:
    if directory and directory not in sys.path:
        sys.path.insert(0, directory)
