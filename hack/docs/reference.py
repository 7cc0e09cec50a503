"""Makes docs/reference/ of the code: flags, configuration, plugins with their parameters, metrics."""

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Final, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from epp import plugin
from epp.cli import warmpath
from epp.configuration import builtin
from epp.configuration.describe import shown
from epp.configuration.schema import EndpointPickerConfig
from epp.documents.strict import parameters_of
from epp.telemetry.metrics_table import metrics_table

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
MADE: Final = "<!-- made by hack/reference; do not edit -->\n"
KINDS: Final[Mapping[str, type[plugin.Plugin]]] = {
    "Guards": plugin.Guard,
    "Producers": plugin.Producer,
    "Filters": plugin.Filter,
    "Costs": plugin.Cost,
    "Scorers": plugin.Scorer,
    "Pickers": plugin.Picker,
    "Profile handlers": plugin.ProfileHandler,
    "Deciders": plugin.Decider,
    "Admitters": plugin.Admitter,
    "Detectors": plugin.Detector,
    "Fairness policies": plugin.FairnessPolicy,
    "Ordering policies": plugin.OrderingPolicy,
    "Band selection policies": plugin.BandSelectionPolicy,
    "Usage limit policies": plugin.UsageLimitPolicy,
    "Others": plugin.Plugin,
}
"""Heading -> class; a plugin of several kinds stands under the first."""


def pages() -> dict[str, str]:
    """Name of the file -> its text."""
    return {name: MADE + make() for name, make in _PAGES.items()}


# --- what the code says ---------------------------------------------------------------------------------------------


@cache
def _classes(module: str) -> Mapping[str, ast.ClassDef]:
    """Those of a module, by name. `inspect` finds no source of a class that a decorator has made anew."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


@cache
def _documented(cls: type[Any]) -> Mapping[str, str]:
    """Field -> the text below it, of the class itself."""
    found: dict[str, str] = {}
    if cls is Generic:  # which is written in C since Python 3.12
        return found
    for before, after in pairwise(_classes(cls.__module__)[cls.__qualname__].body):
        match before, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _says(cls: type[Any], field: str) -> str:
    return next((_documented(each)[field] for each in cls.__mro__[:-1] if field in _documented(each)), "")


def _kind(hint: Any) -> str:
    """A type as a reader of YAML calls it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_kind(each) for each in arguments if each is not type(None))
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"mapping to {_kind(arguments[1])}"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"list of {_kind(arguments[0])}"
    if isinstance(hint, TypeVar) or hint is Any:
        return "any"
    names = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    other = {"timedelta": "duration", "Quantity": "quantity"}
    return names.get(hint) or other.get(hint.__name__, f"[{hint.__name__}](#{hint.__name__.lower()})")


def _default(field: "dataclasses.Field[Any]") -> str:
    factory = field.default_factory
    value = field.default if factory is dataclasses.MISSING else factory()
    if value is dataclasses.MISSING:
        return "required"
    if value is None or value == "":
        return ""
    return f"`{float(f'{value:.3g}'):g}`" if isinstance(value, float) else f"`{shown(value)}`"


def _parameters(cls: type[Any]) -> tuple[str, list[type[Any]]]:
    """The table of a dataclass's keys, and the dataclasses that its values are of."""
    fields, hints = parameters_of(cls), get_type_hints(cls)
    within = [each for field in fields.values() for each in _dataclasses(hints[field.name])]
    rows = [
        (f"`{key}`", _kind(hints[field.name]), _default(field), _says(cls, field.name)) for key, field in fields.items()
    ]
    return _table(("key", "value", "default", ""), rows), within


def _dataclasses(hint: Any) -> Iterator[type[Any]]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    for each in get_args(hint):
        yield from _dataclasses(each)


def _prose(cls: type[Any], type_: str = "") -> str:
    """A class's docstring as Markdown, with its parameters as YAML names them."""
    text = inspect.cleandoc(cls.__doc__ or "")
    for key, field in parameters_of(cls).items():
        text = re.sub(rf"`{field.name}`", f"`{key}`", text)
    text = re.sub(rf"^`{re.escape(type_)}`: (\w)", lambda found: found[1].upper(), text)
    paragraphs = []
    for paragraph in text.split("\n\n"):
        listed = [line.startswith("  ") for line in paragraph.splitlines()]
        if any(listed):
            first = listed.index(True)
            lines = paragraph.splitlines()
            head, rest = "\n".join(lines[:first]), textwrap.dedent("\n".join(lines[first:]))
            paragraphs.append(f"{head}\n\n```text\n{rest}\n```".strip())
        else:
            paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) + "\n" for line in cells)


# --- the pages ------------------------------------------------------------------------------------------------------


def _metrics() -> str:
    first = """
        What the labels mean, where figures come from and what each reason of `warmpath_degraded_total` is:
        [Metrics](../metrics.md).
    """
    return f"# Every metric\n\n{_filled(first)}\n\n{metrics_table()}"


def _filled(text: str) -> str:
    """A paragraph in lines of the width that pages have."""
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def _configuration() -> str:
    lines = [
        "# Configuration",
        _filled("""
            An `EndpointPickerConfig`, as `--config FILE` takes it: llm-d's and GIE's, in three API versions. Unknown
            keys are refused. `warmpath check FILE` prints what a file comes to; [plugins](plugins.md) have parameters
            of their own. Durations are as Go writes them (`1m30s`, `200ms`), quantities as Kubernetes does (`500M`,
            `1Gi`).
        """),
    ]
    todo: list[type[Any]] = [EndpointPickerConfig]
    for cls in todo:  # grows
        table, within = _parameters(cls)
        todo += [each for each in dict.fromkeys(within) if each not in todo]
        said = "" if cls is EndpointPickerConfig else _prose(cls)
        lines += [f"## {cls.__name__}", *([said] if said and not said.startswith(f"{cls.__name__}(") else []), table]
    return "\n\n".join(line.rstrip() for line in lines) + "\n"


def _plugins() -> str:
    classes = {type_: _class(where) for type_, where in builtin.CLASSES.items()}
    lines = [
        "# Plugins",
        _filled("""
            The types that a [configuration](configuration.md) may name, with their parameters. A plugin of your own is
            named by its module and class: [Write a plugin](../plugins.md).
        """),
    ]
    within: list[type[Any]] = []
    for heading, kind in KINDS.items():
        own = {type_: cls for type_, cls in sorted(classes.items()) if _first(cls) is kind}
        lines += [f"## {heading}"] * bool(own)
        for type_, cls in own.items():
            lines += [f"### {type_}", *_plugin(type_, cls)]
            within += _parameters(cls)[1]
    lines += ["## Values of parameters"]
    for cls in within:  # grows
        within += [each for each in _parameters(cls)[1] if each not in within]
    for cls in sorted(dict.fromkeys(within), key=lambda each: each.__name__):
        lines += [f"### {cls.__name__}", _prose(cls), _parameters(cls)[0]]
    lines += [
        "## Older names",
        _table(("type", "is"), [(f"`{old}`", f"`{new}`") for old, new in builtin.ALIASES.items()]),
        "## Always on",
        "These may be named and configure nothing: " + ", ".join(f"`{each}`" for each in builtin.BUILT_IN) + ".",
        "## Not there",
        _table(("type of llm-d or GIE", "needs"), [(f"`{each}`", why) for each, why in builtin.MISSING.items()]),
        "## Removed by llm-d or GIE",
        _table(("type", "instead", ""), [(f"`{old}`", f"`{new}`", how) for old, (new, how) in builtin.REMOVED.items()]),
    ]
    return "\n\n".join(line.rstrip() for line in lines) + "\n"


def _class(where: str) -> type[Any]:
    module, _, name = where.rpartition(".")
    found: type[Any] = getattr(importlib.import_module(module), name)
    return found


def _first(cls: type[Any]) -> type[plugin.Plugin]:
    return next(kind for kind in KINDS.values() if issubclass(cls, kind))


def _plugin(type_: str, cls: type[Any]) -> Iterator[str]:
    yield _prose(cls, type_)
    also = [name.lower() for name, kind in KINDS.items() if issubclass(cls, kind) and not issubclass(_first(cls), kind)]
    if also:
        yield f"Stands among {' and '.join(also)} too."
    if issubclass(cls, plugin.Cost) and cls.meanings:
        yield "Terms of the bill, which sum to the cost:"
        yield _table(("term", "is"), [(f"`{term}`", meaning) for term, meaning in cls.meanings.items()])
    table, _ = _parameters(cls)
    if parameters_of(cls):
        yield table
    elif "No parameters" not in _prose(cls):
        yield "No parameters."
    if idle := builtin.IDLE.get(type_):
        yield (
            "Taken from llm-d's files, without effect: " + "; ".join(f"`{k}` ({v.why})" for k, v in idle.items()) + "."
        )


def _cli() -> str:
    lines = [
        "# Command line",
        "`warmpath COMMAND`; in a checkout `hack/warmpath COMMAND`. Flags without a command mean `serve`.",
    ]
    for name, command in sorted(warmpath.commands.items()):
        context = click.Context(command, info_name=f"warmpath {name}", max_content_width=10_000, terminal_width=10_000)
        usage = " ".join(command.collect_usage_pieces(context))
        lines += [f"## warmpath {name}", f"`warmpath {name} {usage}`", inspect.cleandoc(command.help or "")]
        rows = [_option(each, context) for each in command.params if isinstance(each, click.Option) and not each.hidden]
        lines.append(_table(("flag", "value", "default", ""), rows))
    return "\n\n".join(line.rstrip() for line in lines) + "\n"


def _option(option: click.Option, context: click.Context) -> tuple[str, str, str, str]:
    flags = ", ".join(f"`{each}`" for each in (*option.opts, *option.secondary_opts))
    value = "" if option.is_flag else f"`{option.make_metavar(context)}`"
    default = option.default
    plain = isinstance(default, (str, int, float)) and not (option.is_flag and default is False)
    text = re.sub(r" ?\[default: [^]]*\]", "", option.help or "")
    said = re.search(r"\[(?:default: )([^]]*)\]", option.help or "")
    return flags, value, said[1] if said else f"`{shown(default)}`" if plain and default != "" else "", text


_PAGES: Final = {"cli.md": _cli, "configuration.md": _configuration, "plugins.md": _plugins, "metrics.md": _metrics}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="hack/reference", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="instead of docs/reference")
    folder = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
    sys.stdout.write(f"{', '.join(_PAGES)} in {folder}\n")


if __name__ == "__main__":
    main()
