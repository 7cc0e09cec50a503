"""Bounded YAML, strict YAML, and strict dataclasses out of it. Nothing is guessed or ignored, every error says where.

`documents` reads any YAML within bounds. `read` makes plain values of YAML 1.2's core schema: no dates, no `yes` for
true, no `1_000`, no merge keys, no tags.
`decode` makes a value of a type out of them. YAML keys are camelCase, fields snake_case; as in llm-d and GIE (Go's
JSON), the case of a key's letters does not count, so `maxTTFTPenaltyMs` is the field `max_ttft_penalty_ms`. A field
with `metadata={"alias": "key"}` is set by that key as well.
"""

import dataclasses
import math
import re
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, ClassVar, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml

from epp.documents.durations import seconds_of
from epp.errors import ConfigError, ConfigErrors

T = TypeVar("T")

MAX_BYTES: Final = 256 * 1024
"""Of a file. Configurations people write have a few KB; Kubernetes stops at 1 MiB."""
MAX_VALUES: Final = 20_000
"""Values in a file with aliases spelled out, so that a few lines cannot stand for millions."""
MAX_DEPTH: Final = 64

_SUFFIXES: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    letter + "i": 1 << 10 * power for power, letter in enumerate("KMGT", 1)
}

_TAG: Final = "tag:yaml.org,2002:"
_LIBYAMLS_DEPTH: Final = "exceeded maximum nesting depth"
"""It says so of a thousand levels, from PyYAML 6.0.4 on, where it looks ahead for a key before we see any of them."""
_UPPER: Final = frozenset({"ttft", "tpot"})


class Quantity(float):
    """An amount as Kubernetes writes it, 0 or more: `5000`, `1Gi`, `500M`, also as text."""

    __slots__ = ()


class Problems:
    """Collects the errors of several steps, so that all are reported at once."""

    def __init__(self) -> None:
        self.errors: list[ConfigError] = []

    def add(self, path: str, message: str) -> None:
        self.errors.append(ConfigError(path, message))

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Go on after a ConfigError in the block."""
        try:
            yield
        except ConfigErrors as several:
            self.errors += several.errors
        except ConfigError as error:
            self.errors.append(error)

    def check(self) -> None:
        """Raise ConfigErrors if there was any."""
        if self.errors:
            raise ConfigErrors(self.errors)


def nearest(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'x'?` where one of `names` is close to `name`, else nothing."""
    by_lower = {each.lower(): each for each in names}
    found = get_close_matches(name[:100].lower(), by_lower, 1)
    return f"; did you mean {by_lower[found[0]]!r}?" if found else ""


def value_at(content: Any, path: str) -> Any:
    """What mappings hold at a path such as `dataLayer.discovery`, in any case of letters; None: nothing.

    Of a list, as in `engineConfigs[].name`, what its first item with something there holds.
    """
    key, _, rest = path.partition(".")
    if not isinstance(content, Mapping):
        return None
    wanted = key.removesuffix("[]").lower()
    found = next((item for name, item in content.items() if name.lower() == wanted), None)
    if not rest:
        return found
    items = found if key.endswith("[]") and isinstance(found, list) else [found]
    return next((value for item in items if (value := value_at(item, rest)) is not None), None)


def short(value: object) -> str:
    """A value as an error message shows it."""
    if isinstance(value, (dict, list)):
        return ("a mapping" if isinstance(value, dict) else "a list") if value else repr(value)
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return "a huge number"
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


# --- YAML to plain values -------------------------------------------------------------------------------------------

_Loaders: tuple[Any, ...] = (yaml.composer.Composer, yaml.CSafeLoader) if yaml.__with_libyaml__ else (yaml.SafeLoader,)
"""PyYAML's packages have its C parser; one that was built without libyaml is slower and reads the same."""


class BoundedLoader(*_Loaders):  # type: ignore[misc]
    """YAML within bounds: levels, and values with aliases spelled out, so that a few lines cannot stand for millions.

    What composes nodes is PyYAML's Python, below it the C parser, which keeps its own stack: C code that composes
    nodes recurses until the process dies of it.
    """

    max_depth: ClassVar[int] = 100
    max_values: ClassVar[int] = 500_000
    """Values and keys of a file, at some 300 bytes. 1,500 Pods as `kubectl get --output yaml` prints them."""

    def __init__(self, stream: str | bytes) -> None:
        _Loaders[-1].__init__(self, stream)
        yaml.composer.Composer.__init__(self)
        self._values = 0
        self._open = 0
        self._below = 0
        """Levels of the deepest node composed within the one that is open."""
        self._extents: dict[str, tuple[int, int]] = {}
        """Anchor -> values and levels of what its aliases stand for."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        anchor, known = event.anchor, isinstance(event, yaml.AliasEvent)
        if parent is None:
            self._extents.clear()  # anchors are a document's own
        if known and anchor in self.anchors and anchor not in self._extents:
            raise self._refused(event, f"*{anchor} is within &{anchor}; expected a value that is no part of itself")
        values, levels = self._extents.get(anchor, (1, 1)) if known else (1, 1)
        before, self._values = self._values, self._values + values
        if self._values > self.max_values:
            raise self._refused(
                event, f"too many values; expected at most {self.max_values}, aliases counted where they are used"
            )
        self._open += 1
        if self._open + levels - 1 > self.max_depth:
            raise self._refused(event, self.too_deep())
        around, self._below = self._below, 0
        node: yaml.Node | None = super().compose_node(parent, index)
        self._open -= 1
        levels = max(levels, self._below + 1)
        self._below = max(around, levels)
        if anchor and not known:
            self._extents[anchor] = self._values - before, levels
        return node

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Hashable, Any]:
        self._check_keys(node)
        made: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return made

    def _check_keys(self, node: yaml.Node) -> None:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen and key.tag != f"{_TAG}merge":
                    raise self._refused(key, f"the key {short(key.value)} is here twice; expected it once")
                seen.add(key.value)

    @classmethod
    def too_deep(cls) -> str:
        """What is wrong with a value within more others than may be."""
        return f"nested too deep; expected at most {cls.max_depth} levels"

    def _refused(self, there: yaml.Event | yaml.Node, message: str) -> ConfigError:
        return ConfigError(_place(there.start_mark), message)


def documents(text: str | bytes, loader: type[BoundedLoader] = BoundedLoader) -> list[Any]:
    """Every YAML document in `text`. Raises ConfigError, whatever the text; its path is a line and column if known."""
    try:
        return list(yaml.load_all(text, cast("Any", loader)))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if error.problem == _LIBYAMLS_DEPTH:
            raise ConfigError(_place(mark), loader.too_deep()) from None
        if mark and _starts_with_tab(text, mark.line):
            problem = "a tab indents this line; expected spaces"
        else:
            context = f"{error.context} ({_place(error.context_mark)})" if error.context_mark else error.context
            problem = ", ".join(filter(None, (context, error.problem)))
        raise ConfigError(_place(mark), f"not valid YAML: {' '.join(problem.split())}") from None
    except yaml.reader.ReaderError as error:
        where = f"{error.reason} at byte {error.position}"
        raise ConfigError("", f"not valid YAML: {where}; expected text in UTF-8") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError("", f"not valid YAML: {' '.join(str(error).split())}") from None
    except (LookupError, AttributeError, TypeError):  # PyYAML's own, of a tag over what it does not fit
        raise ConfigError("", "not valid YAML: a value that its tag does not fit, like !!int ''") from None
    except RecursionError:  # of a caller that is deep in its own stack already
        raise ConfigError("", loader.too_deep()) from None


def _place(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def _starts_with_tab(text: str | bytes, number: int) -> bool:
    lines = (text.encode("utf-8", "replace") if isinstance(text, str) else text).splitlines()
    return number < len(lines) and lines[number].lstrip(b" ").startswith(b"\t")


class _Loader(BoundedLoader):
    """YAML 1.2's core schema, and words for keys."""

    max_depth = MAX_DEPTH
    max_values = MAX_VALUES
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (the base class has it so)
    yaml_constructors: ClassVar[dict[str | None, Any]] = {}

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Hashable, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise yaml.constructor.ConstructorError(None, None, "expected a mapping", node.start_mark)
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._refused(
                    key, "a key must be a word; is a template such as {{ .Values.x }} left in the file?"
                )
        self._check_keys(node)
        return {key.value: self.construct_object(item, deep) for key, item in node.value}


def _integer(text: str) -> int:
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


def _number(text: str) -> float:
    return float(text.replace(".inf", "inf").replace(".nan", "nan").replace(".Inf", "inf").replace(".NaN", "nan"))


def _scalar(tag: str, pattern: str, first: Iterable[str], make: Callable[[str], Any]) -> None:
    form = re.compile(rf"(?:{pattern})\Z")

    def construct(loader: Any, node: yaml.ScalarNode) -> Any:
        text = loader.construct_scalar(node)
        if not form.match(text):
            raise yaml.constructor.ConstructorError(None, None, f"{text!r} is no {tag}", node.start_mark)
        return make(text)

    _Loader.add_implicit_resolver(_TAG + tag, form, list(first))
    _Loader.add_constructor(_TAG + tag, construct)


_scalar("bool", "true|True|TRUE|false|False|FALSE", "tTfF", lambda text: text.lower() == "true")
_scalar("null", "~|null|Null|NULL|", ["~", "n", "N", ""], lambda text: None)
_scalar("int", "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789", _integer)
_scalar(
    "float",
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf)|\.(?:nan|NaN)",
    "-+.0123456789",
    _number,
)
for _name, _constructor in (
    ("str", yaml.SafeLoader.construct_yaml_str),
    ("seq", yaml.SafeLoader.construct_yaml_seq),
    ("map", yaml.SafeLoader.construct_yaml_map),
):
    _Loader.add_constructor(_TAG + _name, cast("Any", _constructor))
_Loader.add_constructor(None, yaml.SafeLoader.construct_undefined)


def read(text: str | bytes) -> Any:
    """The one YAML document in `text` as dicts with text keys, lists and scalars. Raises ConfigError."""
    if len(text) > MAX_BYTES:
        raise ConfigError("", f"more than {MAX_BYTES} bytes; expected at most {MAX_BYTES}")
    found = [each for each in documents(text, _Loader) if each is not None]
    if len(found) > 1:
        raise ConfigError("", f"{len(found)} YAML documents; expected one, without a line `---` between them")
    return found[0] if found else None


# --- plain values to dataclasses ------------------------------------------------------------------------------------


def yaml_name(field: "dataclasses.Field[Any]") -> str:
    """A field's key in YAML: its name in camelCase, abbreviations as in llm-d (requestTTL, evictionTtlSeconds)."""
    first, *rest = field.name.split("_")
    name = first + "".join(part.upper() if part in _UPPER else part.capitalize() for part in rest)
    return name[:-3] + "TTL" if name.endswith("Ttl") else name


def parameters_of(cls: type[Any]) -> dict[str, "dataclasses.Field[Any]"]:
    """The fields of a dataclass that YAML may set, by key; none for any other class."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return {yaml_name(field): field for field in fields if field.init}


class Wrong(str):
    """Text of a field that holds something else; the error is reported already."""

    __slots__ = ()


WRONG: Final = Wrong()


def decode(kind: type[T], value: object, path: str) -> T:
    """`value` as a `kind`, or ConfigErrors with all that is wrong with it.

    Kinds: Any, bool, int, float (finite), str, timedelta (as `1m30s`, `200ms`), Quantity, Literal, X | None, list[X],
    Sequence[X], tuple[X, ...], dict[str, X], Mapping[str, X], dataclasses of these.
    """
    problems = Problems()
    made = _Decoder(problems).decode(kind, value, path)
    problems.check()
    return cast("T", made)


def build(cls: type[T], value: object, path: str) -> T:
    """An instance of the class with the mapping `value` as its parameters; its own ValueError becomes a ConfigError."""
    problems = Problems()
    made = _Decoder(problems).build(cls, value, path)
    problems.check()
    return cast("T", made)


def salvage(cls: type[T], value: object, path: str, problems: Problems) -> T:
    """The same, with what is right of a wrong `value`, so that more of it can be checked; the errors go to `problems`.

    In the place of what is wrong is the field's default, else WRONG for text, an empty list, or None.
    """
    return cast("T", _Decoder(problems, salvage=True).build(cls, value, path))


class _Decoder:
    """Plain values to values of types. Every error goes to `problems`; what is returned then means nothing, or, with
    `salvage`, has its default in the place of what is wrong."""

    def __init__(self, problems: Problems, *, salvage: bool = False) -> None:
        self._problems = problems
        self._salvage = salvage

    def build(self, cls: type[Any], value: object, path: str) -> Any:
        fields = parameters_of(cls)
        before = len(self._problems.errors)
        given: dict[str, Any] = {}
        if isinstance(value, dict):
            self._fill(cls, fields, value, path, given)
        else:
            self._problems.add(path, _no_mapping(fields, value))
        wrong = len(self._problems.errors) > before
        if wrong and not self._salvage:
            return None
        for field in fields.values():
            if field.name not in given:
                given[field.name] = _stand_in(field)
        try:
            return cls(**given)
        except ValueError as error:
            if not wrong:
                self._problems.errors.append(_refused(str(error), fields, value, path))
            return None

    def _fill(
        self,
        cls: type[Any],
        fields: Mapping[str, "dataclasses.Field[Any]"],
        value: dict[Any, Any],
        path: str,
        given: dict[str, Any],
    ) -> None:
        by_lower = _by_key(fields)
        keys: dict[str, str] = {}  # of the fields given so far
        try:
            hints = get_type_hints(cls) if fields else {}
        except Exception as error:
            self._problems.add(path, f"the annotations of {cls.__qualname__} cannot be resolved: {error}")
            return
        for key, item in value.items():
            where = f"{path}.{key}" if path else key
            if (field := by_lower.get(key.lower())) is None:
                self._problems.add(where, _unknown(key, fields))
            elif (first := keys.setdefault(field.name, key)) != key:
                self._problems.add(where, _twice(first, key))
            else:
                before = len(self._problems.errors)
                made = self.decode(hints[field.name], item, where)
                wrong = len(self._problems.errors) > before and (made is None or made is WRONG)
                given[field.name] = _stand_in(field) if wrong else made
        for name, field in fields.items():
            if _required(field) and field.name not in given:
                self._problems.add(f"{path}.{name}" if path else name, "missing")

    def decode(self, kind: Any, value: Any, path: str) -> Any:
        if kind is Any or kind is object:
            return value
        origin, arguments = get_origin(kind), get_args(kind)
        if origin in (Union, types.UnionType):
            kinds = [each for each in arguments if each is not type(None)]
            if value is None and len(kinds) < len(arguments):
                return None
            if len(kinds) == 1:
                return self.decode(kinds[0], value, path)
        if origin in (list, Sequence):
            return self._each(arguments[0], value, path)
        if origin is tuple and arguments[1:] == (...,):
            return tuple(self._each(arguments[0], value, path))
        if origin in (dict, Mapping):
            return self._mapping(arguments[1], value, path)
        if dataclasses.is_dataclass(kind):
            return self.build(cast("type[Any]", kind), value, path)
        with self._problems.collect():
            return _leaf(kind, value, path)
        return WRONG if kind is str else None

    def _each(self, kind: Any, value: Any, path: str) -> list[Any]:
        if isinstance(value, list):
            return [self.decode(kind, item, f"{path}[{i}]") for i, item in enumerate(value)]
        self._problems.add(path, f"expected a list, got {short(value)}")
        return []

    def _mapping(self, kind: Any, value: Any, path: str) -> dict[str, Any]:
        if isinstance(value, dict):
            return {key: self.decode(kind, item, f"{path}.{key}") for key, item in value.items()}
        self._problems.add(path, f"expected a mapping, got {short(value)}")
        return {}


def _no_mapping(fields: Mapping[str, "dataclasses.Field[Any]"], value: Any) -> str:
    """The error, with the keys that must be there, and the mistake that makes text of a mapping."""
    keys = ", ".join(name for name, field in fields.items() if _required(field))
    colon = "; a space is missing after the colon" if isinstance(value, str) and re.match(r"\w+:\S", value) else ""
    return f"expected a mapping{' with ' + keys if keys else ''}, got {short(value)}{colon}"


def _by_key(fields: Mapping[str, "dataclasses.Field[Any]"]) -> dict[str, "dataclasses.Field[Any]"]:
    """The fields by their keys and aliases in lower case."""
    aliases = {field.metadata["alias"].lower(): field for field in fields.values() if "alias" in field.metadata}
    return aliases | {name.lower(): field for name, field in fields.items()}


def _twice(first: str, second: str) -> str:
    if first.lower() == second.lower():
        return "given twice, in different letters"
    return f"the same parameter as {short(first)}, which is given too; expected one of them"


def _required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _stand_in(field: "dataclasses.Field[Any]") -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return WRONG if field.type is str else [] if get_origin(field.type) is list else None


def _leaf(kind: Any, value: Any, path: str) -> Any:
    if get_origin(kind) is Literal:
        arguments = get_args(kind)
        if value in arguments and any(value is each or type(value) is type(each) for each in arguments):
            return value
        near = nearest(value, map(str, arguments)) if isinstance(value, str) else ""
        raise ConfigError(path, f"expected {' or '.join(map(str, arguments))}, got {short(value)}{near}")
    if kind is Quantity:
        return _quantity(value, path)
    return _duration(value, path) if kind is timedelta else _scalar_of(kind, value, path)


def _unknown(key: str, names: Iterable[str]) -> str:
    known = list(names)
    if not known:
        return "unknown; no parameters are expected here"
    return f"unknown{nearest(key, known) or '; expected one of ' + ', '.join(known)}"


def _refused(message: str, fields: Mapping[str, "dataclasses.Field[Any]"], value: object, path: str) -> ConfigError:
    """A constructor's refusal, at its parameter where the message begins with one: `queueDepth: expected 1 or more`.

    `value`: the mapping as given; the path names the parameter by its key there.
    """
    head, colon, rest = message.partition(": ")
    for name, field in fields.items() if colon else ():
        if name.lower() == head.replace("_", "").lower():
            by_key = _by_key({name: field})
            given = value if isinstance(value, dict) else ()
            key = next((key for key in given if key.lower() in by_key), name)
            return ConfigError(f"{path}.{key}" if path else key, rest)
    return ConfigError(path, message)


def _scalar_of(kind: Any, value: Any, path: str) -> Any:
    if kind is bool:
        found, expected = isinstance(value, bool), "true or false"
    elif kind is int:
        whole = isinstance(value, int) and not isinstance(value, bool)
        found, expected = whole and abs(value) < 1 << 63, "a whole number"
    elif kind is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        found, expected = number and abs(value) < 1 << 1000 and math.isfinite(value), "a number"
        value = float(value) if found else value
    elif kind is str:
        found, expected = isinstance(value, str), "text"
    else:
        raise ConfigError(path, f"a field of type {kind} cannot be set from YAML")
    if not found:
        raise ConfigError(path, f"expected {expected}, got {short(value)}")
    return value


def _quantity(value: Any, path: str) -> Quantity:
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    form = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([a-zA-Z]{0,2})", text) if isinstance(text, str) else None
    if form is None or form[2] not in _SUFFIXES or len(text) > 32:
        raise ConfigError(path, f"expected a quantity such as 5000, 500M or 1Gi, got {short(value)}")
    return Quantity(float(form[1]) * _SUFFIXES[form[2]])


def _duration(value: Any, path: str) -> timedelta:
    try:
        return timedelta(seconds=seconds_of(value if isinstance(value, str) else ""))
    except ValueError:
        raise ConfigError(path, f"expected a duration such as 200ms, 5s or 1m30s, got {short(value)}") from None
