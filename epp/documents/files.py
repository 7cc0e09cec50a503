"""YAML documents out of files and directories, and msgspec shapes out of documents. An error says where.

For the endpoint picker and the gateway alike; what a document may hold is said by the shapes of each.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin

import msgspec

from epp.documents.strict import documents, nearest, short
from epp.errors import ConfigError

T = TypeVar("T")

Stamp = tuple[tuple[str, int, int, int], ...]

MAX_FILE: Final = 16 * 1024 * 1024
MANY: Final = 12
"""Names that one sentence cannot list."""
ENDINGS: Final = (".yaml", ".yml", ".json")
_LONGEST_NAME: Final = 300
_PIECE: Final = 64 * 1024
_PLACE: Final = re.compile(r"^(?P<what>.*?)(?: - at `(?P<key>key` in `)?\$\.?(?P<path>.*)`)?$", re.DOTALL)
_STEP: Final = re.compile(r"\.?([^.\[]+)|\[(\d+|\.\.\.)\]")
_WORDS: Final = {"array": "a list", "object": "a mapping", "str": "text", "int": "a whole number"}


class Document(msgspec.Struct, frozen=True):
    """One YAML document that is a mapping. `place`: `file#n`, counted from 1, and `: items[i]` in a List."""

    place: str
    content: dict[str, Any]

    @property
    def kind(self) -> str:
        """ "" where it has none."""
        return str(self.content.get("kind", ""))

    @property
    def group(self) -> str:
        return str(self.content.get("apiVersion", "")).rpartition("/")[0]

    @property
    def where(self) -> str:
        """Place and object, for people: `route.yaml#2: HTTPRoute default/chat`."""
        metadata = self.content.get("metadata")
        if not self.kind or not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
            return self.place
        named = f"{self.kind} {metadata.get('namespace', 'default')}/{metadata['name']}"
        return f"{self.place}: {named}" if len(named) <= _LONGEST_NAME else self.place

    def shape(self, shape: type[T]) -> T:
        """The content as `shape`. ConfigError with path, value, what is supported and the nearest valid name."""
        try:
            return msgspec.convert(self.content, shape)
        except msgspec.ValidationError as error:
            raise self._refusal(str(error), shape) from None
        except RecursionError:
            raise self.error("", "nested too deeply, or a part of itself") from None

    def error(self, path: str, message: str) -> ConfigError:
        """An error at a path such as `spec.targetPorts[0].number` of this document."""
        return ConfigError(f"{self.where}: {path}" if path else self.where, message)

    def _refusal(self, text: str, shape: Any) -> ConfigError:
        found = _PLACE.match(text)
        what, path = (found["what"], found["path"] or "") if found else (text, "")
        kind, value, path = _at(shape, self.content, path)
        if name := re.search(r"unknown field `(.*)`", what):
            names = [field.encode_name for field in msgspec.structs.fields(kind)]
            return self.error(f"{path}.{name[1]}".lstrip("."), "not supported; " + expectation(name[1], names))
        if name := re.search(r"missing required field `(.*)`", what):
            return self.error(f"{path}.{name[1]}".lstrip("."), "missing, but required")
        if what.startswith("Invalid enum value"):
            return self.error(path, f"{value} is not supported; {expectation(str(value), get_args(kind))}")
        if not what.startswith(("Expected", "Invalid", "Object")):
            return self.error(path, what)  # of a shape's own __post_init__
        plain = re.sub(r"`(\w+)`(, got .*)?", lambda type: _WORDS.get(type[1], type[0]), what)
        if found and found["key"]:
            value = next((key for key in value if not isinstance(key, str)), value)
            return self.error(path, f"got the key {short(value)}; {plain[0].lower()}{plain[1:]}")
        return self.error(path, f"got {short(value)}; {plain[0].lower()}{plain[1:]}")


def expectation(got: str, names: Sequence[str], *, there: str = "supported") -> str:
    """`supported: a, b; did you mean 'a'?`, without the names where there are many and one is near."""
    near = nearest(got, names) if len(names) > 1 else ""
    return near.removeprefix("; ") if near and len(names) > MANY else f"{there}: {', '.join(names)}{near}"


def files_in(paths: Sequence[Path]) -> list[Path]:
    """The files named, and those in the directories named (not below them), sorted; ConfigError if one is missing."""
    found: list[Path] = []
    for path in paths:
        try:
            if path.is_dir():
                inside = (each for each in path.iterdir() if each.suffix in ENDINGS and each.is_file())
                found += sorted(each for each in inside if each.stem != "kustomization")
            elif path.exists():
                found.append(path)
            else:
                raise ConfigError(str(path), "no such file or directory")
        except OSError as error:
            raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    return found


def read_documents(path: Path) -> list[Document]:
    """The documents of a file, Lists unrolled, empty ones left out. ConfigError if it is no YAML of mappings."""
    text = content_of(path, MAX_FILE)
    if len(text) > MAX_FILE:
        raise ConfigError(str(path), f"more than {MAX_FILE} bytes; expected at most {MAX_FILE}")
    try:
        contents = documents(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.path}" if error.path else str(path), error.message) from None
    return [each for number, content in enumerate(contents, 1) for each in _unrolled(f"{path}#{number}", content)]


def content_of(path: Path, most: int) -> bytes:
    """A file's bytes; of what may grow, or be no regular file, little more than `most`. Raises ConfigError.

    Piece by piece: Python sets aside all that is asked for at once, and cut to what was read it leaves a hole in the
    heap, into which the next does not fit.
    """
    text = bytearray()
    try:
        with path.open("rb") as file:
            while len(text) <= most and (piece := file.read(_PIECE)):
                text += piece
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    return bytes(text)


def stamp_of(paths: Sequence[Path]) -> Stamp:
    """What changes when the content of a file under `paths` does: name, inode, size and time of change of each."""
    found = []
    try:
        for path in files_in(paths):
            status = path.stat()
            found.append((str(path), status.st_ino, status.st_size, status.st_mtime_ns))
    except (ConfigError, OSError) as error:
        found.append((str(error), 0, 0, 0))
    return tuple(found)


def _unrolled(place: str, content: Any) -> list[Document]:
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ConfigError(place, f"got {short(content)}; expected a mapping")
    if content.get("kind") not in ("List", "PodList") or not isinstance(content.get("items"), list):
        return [Document(place, content)]
    for index, item in enumerate(content["items"]):
        if not isinstance(item, dict):
            raise ConfigError(f"{place}: items[{index}]", f"got {short(item)}; expected a mapping")
    return [Document(f"{place}: items[{index}]", item) for index, item in enumerate(content["items"])]


def _at(kind: Any, value: Any, path: str) -> tuple[Any, Any, str]:
    """The type, the value and the whole path at a path such as `spec.rules[0].labels[...]`.

    `[...]` is msgspec's for one of the values of a mapping: it is the first that is not of its type.
    """
    for name, index in _STEP.findall(path):
        kind = _plain(kind)
        if name:
            fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
            kind, value = fields[name], value[name]
        elif index == "...":
            kind = get_args(kind)[-1]
            key, value = next((key, item) for key, item in value.items() if not _fits(item, kind))
            path = path.replace("[...]", f".{key}", 1)
        else:
            kind, value = get_args(kind)[0], value[int(index)]
    return _plain(kind), value, path


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _plain(kind: Any) -> Any:
    """`kind` without Annotated and without None."""
    while get_origin(kind) in (Annotated, Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    return kind
