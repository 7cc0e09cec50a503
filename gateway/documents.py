"""YAML documents out of files and directories, and strict shapes out of documents; an error says where."""

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, TypeVar, Union, cast, get_args, get_origin

import msgspec
import yaml

from gateway.errors import ResourceError

T = TypeVar("T")

MAX_FILE: Final = 16 * 1024 * 1024
MANY: Final = 12
"""Names that one sentence cannot list."""
MAX_VALUES: Final = 500_000
"""Values and keys of a file, at some 300 bytes; aliases counted where they are used."""
MAX_DEPTH: Final = 100
ENDINGS: Final = (".yaml", ".yml", ".json")
_PLACE: Final = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?$", re.DOTALL)
_WORDS: Final = {"array": "a list", "object": "a mapping", "str": "text", "int": "a whole number"}
_STEP: Final = re.compile(r"\.?([^.\[]+)|\[(\d+|\.\.\.)\]")


class _Loader(yaml.SafeLoader):
    """YAML as Kubernetes reads it: a key given twice is a mistake. No more values than `MAX_VALUES`."""

    _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        if self._nodes > MAX_VALUES:
            raise yaml.MarkedYAMLError(None, None, _MANY, cast(Any, self).peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class Document(msgspec.Struct, frozen=True):
    """One YAML document that is a mapping; `number` counts from 1 in its file."""

    file: str
    number: int
    content: dict[str, Any]

    @property
    def kind(self) -> str | None:
        """None for a document that has no `kind`."""
        return str(self.content["kind"]) if "kind" in self.content else None

    @property
    def where(self) -> str:
        """File and object, for people: `route.yaml: HTTPRoute default/chat`, or `route.yaml: document 2`."""
        metadata = self.content.get("metadata")
        if self.kind is None or not isinstance(metadata, dict) or "name" not in metadata:
            return f"{self.file}: document {self.number}"
        return f"{self.file}: {self.kind} {metadata.get('namespace', 'default')}/{metadata['name']}"

    def error(self, path: str, message: str) -> ResourceError:
        return ResourceError(self.where, path, message)

    def shape(self, shape: type[T]) -> T:
        """The content as `shape`. ResourceError with path, value, what is supported and the nearest valid name."""
        try:
            return msgspec.convert(self.content, shape)
        except msgspec.ValidationError as error:
            raise self._refusal(str(error), shape) from None
        except RecursionError:
            raise self.error("", "nested too deeply, or a part of itself") from None

    def _refusal(self, text: str, shape: Any) -> ResourceError:
        found = _PLACE.match(text)
        what, path = (found["what"], found["path"] or "") if found else (text, "")
        kind, value = _at(shape, self.content, path)
        if name := re.search(r"unknown field `(.*)`", what):
            names = [field.encode_name for field in msgspec.structs.fields(kind)]
            return self.error(f"{path}.{name[1]}".lstrip("."), "not supported; " + expectation(name[1], names))
        if name := re.search(r"missing required field `(.*)`", what):
            return self.error(f"{path}.{name[1]}".lstrip("."), "missing, but required")
        if what.startswith("Invalid enum value"):
            return self.error(path, f"{value} is not supported; {expectation(str(value), get_args(kind))}")
        if what.startswith(("Expected", "Invalid", "Object")):
            plain = re.sub(r"`(\w+)`(, got .*)?", lambda type: _WORDS.get(type[1], type[0]), what)
            return self.error(path, f"got {_short(value)}; {plain[0].lower()}{plain[1:]}")
        return self.error(path, what)


def expectation(got: str, names: Sequence[str], *, there: str = "supported") -> str:
    """`supported: a, b; did you mean a?`, without the names where there are many and one is near."""
    near = get_close_matches(got, names, 1) if len(names) > 1 else []
    hint = [f"did you mean {near[0]}?"] if near else []
    return "; ".join(hint if hint and len(names) > MANY else [f"{there}: {', '.join(names)}", *hint])


def read(paths: Sequence[Path]) -> list[Document]:
    """The documents of files, and of the `*.yaml`, `*.yml`, `*.json` in directories (not below), in name order.

    Empty documents are left out, `List` and `PodList` are unrolled. ResourceError: missing, too big, no YAML.
    """
    return [document for path in paths for file in _files(path) for document in _documents(file)]


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        inside = sorted(each for each in path.iterdir() if each.suffix in ENDINGS and each.is_file())
        if not (files := [each for each in inside if each.stem != "kustomization"]):
            raise ResourceError(str(path), "", f"no {', '.join(ENDINGS)} file in here (directories below are not read)")
        return files
    if not path.exists():
        raise ResourceError(str(path), "", "no such file or directory")
    return [path]


def _documents(file: Path) -> Iterator[Document]:
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_FILE + 1)
        if len(text) > MAX_FILE:
            raise ResourceError(str(file), "", f"has more than {MAX_FILE} bytes; expected at most {MAX_FILE}")
        contents = list(yaml.load_all(text, Loader=_Loader))
    except OSError as error:
        raise ResourceError(str(file), "", f"cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        raise ResourceError(str(file), _place(error), f"not valid YAML: {_problem(error)}") from None
    except RecursionError:
        raise ResourceError(str(file), "", _DEEP) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ResourceError(str(file), "", f"not valid YAML: {' '.join(str(error).split())}") from None
    except (LookupError, AttributeError, TypeError):  # PyYAML's own, of a tag over what it does not fit
        raise ResourceError(str(file), "", "not valid YAML: a value that its tag does not fit, like !!int ''") from None
    if problem := _beyond(contents):
        raise ResourceError(str(file), "", problem)
    for number, content in enumerate(contents, 1):
        many = (
            isinstance(content, dict)
            and content.get("kind") in ("List", "PodList")
            and isinstance(content.get("items"), list)
        )
        for item in content["items"] if many else [content]:
            if item is None:
                continue
            if not isinstance(item, dict):
                raise ResourceError(str(file), f"document {number}", f"got {_short(item)}; expected a mapping")
            yield Document(str(file), number, item)


_MANY: Final = f"too many values; expected at most {MAX_VALUES}, aliases counted where they are used"
_DEEP: Final = f"nested too deep; expected at most {MAX_DEPTH} levels"


def _beyond(contents: list[Any]) -> str:
    """Why these values are too much for whoever walks them, those behind aliases again at each use; "" if they are not.

    Code that follows every reference would take for ever on a few lines of aliases of aliases.
    """
    left, todo = MAX_VALUES, [(content, 1) for content in contents]
    while todo:
        value, depth = todo.pop()
        if depth > MAX_DEPTH:
            return _DEEP
        children = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        left -= 1 + len(children) * isinstance(value, dict)
        if left < 0:
            return _MANY
        todo += [(child, depth + 1) for child in children]
    return ""


def _place(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def _problem(error: yaml.MarkedYAMLError) -> str:
    if error.problem and "'\\t'" in error.problem:
        return "a tab indents this line; YAML wants spaces"
    return " ".join(filter(None, (error.context, error.problem)))


def _items(content: Any) -> list[Any]:
    if isinstance(content, dict) and content.get("kind") in ("List", "PodList"):
        match content.get("items"):
            case list() as items:
                return items
    return [content]


def _at(kind: Any, value: Any, path: str) -> tuple[Any, Any]:
    """The type and the value at a path such as `spec.rules[0].filters[1].type`."""
    for name, index in _STEP.findall(path):
        kind = _plain(kind)
        if name:
            fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
            kind, value = fields[name], value[name]
        elif index == "...":
            return _plain(get_args(kind)[-1]), value
        else:
            kind, value = get_args(kind)[0], value[int(index)]
    return _plain(kind), value


def _plain(kind: Any) -> Any:
    """`kind` without Annotated and without None."""
    while get_origin(kind) in (Annotated, Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    return kind


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
