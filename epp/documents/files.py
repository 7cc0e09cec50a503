"""YAML documents out of files and directories, and strict shapes out of documents. Errors say where."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from epp.documents.strict import documents
from epp.errors import ConfigError

T = TypeVar("T")

Stamp = tuple[tuple[str, int, int, int], ...]

MAX_FILE: Final = 16 * 1024 * 1024
_ENDINGS: Final = (".yaml", ".yml", ".json")
_PLACE: Final = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN: Final = re.compile(r"unknown field `(.*)`")


class Document(msgspec.Struct, frozen=True):
    """One YAML document. `where` is its place for people: `file#n`, counted from 1."""

    where: str
    content: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.content.get("kind", ""))

    @property
    def group(self) -> str:
        return str(self.content.get("apiVersion", "")).rpartition("/")[0]

    def shape(self, shape: type[T]) -> T:
        """The content as `shape`, or ConfigError with document, path, value and expectation."""
        try:
            return msgspec.convert(self.content, shape)
        except msgspec.ValidationError as error:
            raise self._wrong(str(error), shape) from None
        except RecursionError:
            raise self.error("", "nested too deeply, or a part of itself") from None

    def error(self, path: str, message: str) -> ConfigError:
        """An error at a path such as `spec.targetPorts[0].number` of this document."""
        return ConfigError(f"{self.where}: {path}" if path else self.where, message)

    def _wrong(self, text: str, shape: type[Any]) -> ConfigError:
        found = _PLACE.match(text)
        what, path = (found["what"], found["path"] or "") if found else (text, "")
        if (unknown := _UNKNOWN.search(what)) is not None:
            names = _field_names(shape)
            near = get_close_matches(unknown[1], names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            return self.error(f"{path}.{unknown[1]}".lstrip("."), f"unknown field{hint}")
        return self.error(path.lstrip("."), f"got {_value_at(self.content, path)}; {what[:1].lower()}{what[1:]}")


def files_in(paths: Sequence[Path]) -> list[Path]:
    """The files named, and those in the directories named (not below them), sorted; ConfigError if one is missing."""
    found: list[Path] = []
    for path in paths:
        try:
            if path.is_dir():
                inside = (each for each in path.iterdir() if each.suffix in _ENDINGS and each.is_file())
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
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE + 1)  # of what may grow, or be no regular file, no more than that
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    if len(text) > MAX_FILE:
        raise ConfigError(str(path), f"more than {MAX_FILE} bytes; expected at most {MAX_FILE}")
    try:
        contents = documents(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.path}" if error.path else str(path), error.message) from None
    return list(_unrolled(path, contents))


def _unrolled(path: Path, contents: list[Any]) -> Iterable[Document]:
    for number, content in enumerate(contents, 1):
        where = f"{path}#{number}"
        if content is None:
            continue
        if not isinstance(content, dict):
            raise ConfigError(where, f"got {_short(content)}; expected a mapping")
        if content.get("kind") in ("List", "PodList") and isinstance(content.get("items"), list):
            for index, item in enumerate(content["items"]):
                if not isinstance(item, dict):
                    raise ConfigError(f"{where}: items[{index}]", f"got {_short(item)}; expected a mapping")
                yield Document(f"{where}: items[{index}]", item)
        else:
            yield Document(where, content)


def _value_at(content: Any, path: str) -> str:
    for key, index in re.findall(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]", path):
        if index == "...":
            break  # one of those in here; which, msgspec does not say
        try:
            content = content[key] if key else content[int(index)]
        except (KeyError, IndexError, TypeError, ValueError):
            return "a wrong value"
    return _short(content)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


def _field_names(shape: Any, seen: frozenset[Any] = frozenset()) -> list[str]:
    """The names of a shape's fields and of the shapes within it."""
    names: list[str] = []
    for field in msgspec.structs.fields(shape):
        names.append(field.encode_name)
        for part in (field.type, *getattr(field.type, "__args__", ())):
            if isinstance(part, type) and issubclass(part, msgspec.Struct) and part not in seen:
                names += _field_names(part, seen | {part})
    return names


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
