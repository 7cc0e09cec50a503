"""Jinja's immutable sandbox with a bound on what each step of a template makes.

A step is what Python does at once, so no clock can end it: an operator, a filter, a method, the text that a value
becomes. Each is asked for the size of its result before it begins, and ends with `TemplateTooLong` beyond the bound.
Filters that chat templates have no use for, and that multiply what they are given, are not there.
"""

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from string import Formatter
from typing import Any, Final

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer

_MOST_BITS: Final = 4096
"""Of a whole number that is a product or a power."""
_GONE: Final = ("batch", "center", "pprint", "slice", "urlize", "wordwrap", "xmlattr")
_METHODS: Final = frozenset(("expandtabs", "join", "replace", "translate"))
"""Of texts: those that multiply what they are given. Widths are numbers, which are bounded for every call."""
_WIDE: Final = re.compile(r"\d{6}|%[^%a-zA-Z]*\*")
"""A width in a format that is beyond any use, or is given by an argument."""
_TICK: Final = "_warmpath_tick"
_JOIN: Final = "_warmpath_join"
_SHOW: Final = "_warmpath_show"


class TemplateTooLong(Exception):
    """The template took more time, or made more text, than it was given."""


class _Bounds(threading.local):
    """Of the template that runs in this thread: until when (monotonic clock), and the longest text."""

    until = 0.0
    longest = 1 << 20


bounds = _Bounds()


def tick() -> str:
    if time.monotonic() > bounds.until:
        raise TemplateTooLong("its time is over")
    return ""


def check(size: int) -> None:
    """Raises TemplateTooLong if no text of `size` characters, or list of as many items, may be."""
    if size > bounds.longest:
        raise TemplateTooLong(f"more than {bounds.longest} characters in one step")


def size_of(value: Any) -> int:
    """Characters of a value's text, at least about; the same object counts each time it is met, as in its text."""
    size, todo = 0, [value]
    while todo:
        each = todo.pop()
        if isinstance(each, (str, bytes)):
            size += len(each)
        elif isinstance(each, dict):
            todo += each.keys()
            todo += each.values()
            size += 4 * len(each)
            tick()
        elif isinstance(each, (list, tuple, set, frozenset)):
            todo += each
            size += 2 * len(each)
            tick()
        else:
            size += 8
        check(size + len(todo))
    return size


class Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_shown)
        for name in _GONE:
            del self.filters[name]
        del self.globals["lipsum"]
        for name, function in self.filters.items():
            self.filters[name] = _bounded(name, function)
        self.globals[_TICK] = tick
        self.globals[_SHOW] = _shown
        self.globals[_JOIN] = _texts_joined
        self.concat = _joined  # type: ignore[method-assign]

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """One of ours, bounded as Jinja's are."""
        self.filters[name] = _bounded(name, function)

    def watched(self, source: str) -> nodes.Template:
        """The program of a template, with our looks in it."""
        tree: nodes.Template = _Watched().visit(self.parse(source))
        return tree

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if function is tick or function is _shown or function is _texts_joined:
            return function(*args)
        tick()
        _check_call(function, args, kwargs)
        made = super().call(context, function, *args, **kwargs)
        if isinstance(made, (str, bytes, list)):
            check(len(made))
        return made

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:  # by far the most
            check(len(left) + len(right))
            return left + right
        if operator == "%":
            _check_format(left, right)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            if operator != "+" and (bits * right if operator == "**" else bits + right.bit_length()) > _MOST_BITS:
                raise TemplateTooLong(f"a number of more than {_MOST_BITS} bits")
        elif operator == "*":
            check(len(left) * right if hasattr(left, "__len__") else left * len(right))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            check(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        if super().wrap_str_format(value) is None:
            return None
        text, formatter = str(value.__self__), _Formatter(self)
        if value.__name__ == "format_map":
            return lambda values: formatter.vformat(text, (), values)
        return lambda *args, **kwargs: formatter.vformat(text, args, kwargs)


class _Formatter(SandboxedFormatter):
    """`str.format` with a bound on widths and on what all fields make."""

    def vformat(self, format_string: str, args: Any, kwargs: Any) -> str:
        fields = sum(1 for _ in Formatter().parse(format_string))
        check(len(format_string) + fields * max(map(size_of, (*args, *kwargs.values())), default=0))
        return super().vformat(format_string, args, kwargs)

    def format_field(self, value: Any, format_spec: str) -> Any:
        if _WIDE.search(format_spec):
            raise TemplateTooLong("a width of more than 99999 characters")
        return super().format_field(value, format_spec)


class _Watched(NodeTransformer):
    """Puts a look at the clock at the head of every loop's body, and bounds on `~`, on what is compared and on keys.

    (Calls look by themselves.)
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call(_TICK, [], node.lineno)).set_lineno(node.lineno))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if not any(isinstance(each, nodes.Const) for each in (node.expr, *(other.expr for other in node.ops))):
            node.expr = _call(_SHOW, [node.expr], node.lineno)
            for other in node.ops:
                other.expr = _call(_SHOW, [other.expr], node.lineno)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, (nodes.Const, nodes.Slice)):
            node.arg = _call(_SHOW, [node.arg], node.lineno)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _call(_SHOW, [node.key], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(_JOIN, node.nodes, node.lineno)


def _call(name: str, args: list[nodes.Expr], line: int) -> nodes.Expr:
    call = nodes.Call(nodes.Name(name, "load"), args, [], None, None)
    call.set_lineno(line)
    return call


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; to us its content is just content."""

    tags = {"generation"}  # noqa: RUF012 (the base class has it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _shown(value: Any) -> Any:
    """A value about to become text, to be compared or to be hashed: all of it is looked at, as often as it is in it."""
    if type(value) is not str:
        size_of(value)
    return value


def _texts_joined(*values: Any) -> str:
    """`~`."""
    return _joined(str(_shown(value)) for value in values)


def _joined(pieces: Iterable[str]) -> str:
    return "".join(_metered(pieces))


def _metered(items: Iterable[Any]) -> Iterator[Any]:
    """The same items, as long as they are not too many, or too much, together."""
    size = 0
    for item in items:
        size += 1 + (len(item) if isinstance(item, (str, bytes, list, tuple)) else 0)
        check(size)
        tick()
        yield item


def _check_format(text: Any, values: Any) -> None:
    """Of `text % values`."""
    if isinstance(text, (str, bytes)):
        shown = text if isinstance(text, str) else text.decode("latin-1")
        if _WIDE.search(shown):
            raise TemplateTooLong("a width of more than 99999 characters")
        check(len(shown) + shown.count("%") * size_of(values))


def _check_call(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Of a method of a text or a number. (Macros and functions have bounds of their own in them.)"""
    text = getattr(function, "__self__", None)
    if not isinstance(text, (str, bytes, int)):
        return
    for each in (*args, *named.values()):
        if isinstance(each, int):
            check(each)
    name = getattr(function, "__name__", "")
    if isinstance(text, int) or name not in _METHODS:
        return
    if name == "expandtabs":
        check(len(text) * (1 + int([*args, *named.values(), 8][0])))
    elif name == "replace" and len(args) > 1:
        check(len(text) + text.count(args[0]) * len(args[1]))
    elif name == "translate" and args and isinstance(args[0], dict):
        check(len(text) * max(map(size_of, args[0].values()), default=1))
    elif name == "join" and args and isinstance(args[0], (str, list, tuple, dict)):
        check(size_of(args[0]) + len(args[0]) * len(text))
    elif name == "join":
        raise TemplateTooLong("what is joined has no length")


# --- filters ----------------------------------------------------------------------------------------------------------


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with its bound. What a generator gives it is counted as it comes."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0
    before = _BEFORE.get(name)

    @functools.wraps(function)
    def bounded(*given: Any, **named: Any) -> Any:
        args = [_metered(each) if hasattr(each, "__next__") else each for each in given]
        if before is not None:
            args[skipped] = before(args[skipped], *args[skipped + 1 :], **named)
        made = function(*args, **named)
        if isinstance(made, (str, bytes, list)):
            check(len(made))
        return made

    return bounded


def _text(value: Any, *args: Any, **named: Any) -> Any:
    return _shown(value)


def _format(text: Any, *args: Any, **named: Any) -> Any:
    _check_format(str(_shown(text)), args or named)
    return text


def _indent(text: Any, width: Any = 4, *args: Any, **named: Any) -> Any:
    text = str(_shown(text))
    check(len(text) + (text.count("\n") + 1) * (len(width) if isinstance(width, str) else int(width)))
    return text


def _join(items: Any, d: Any = "", attribute: Any = None, **named: Any) -> Any:
    items = list(_metered(items))
    check(size_of(items) + len(items) * size_of(d))
    return items


def _json(value: Any, *args: Any, indent: Any = None, **named: Any) -> Any:
    check(size_of(value) * (1 + (indent if isinstance(indent, int) else 0)))
    return value


def _replace(text: Any, old: Any, new: Any, *args: Any, **named: Any) -> Any:
    text = str(_shown(text))
    check(len(text) + text.count(str(_shown(old))) * size_of(new))
    return text


def _sum(items: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, (int, float)):
        raise TemplateTooLong("a sum of something other than numbers")
    return items


_BEFORE: Final[dict[str, Callable[..., Any]]] = {
    **dict.fromkeys(("capitalize", "e", "escape", "forceescape", "lower", "string", "striptags", "title"), _text),
    **dict.fromkeys(("trim", "truncate", "upper", "urlencode", "wordcount"), _text),
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "sum": _sum,
    "tojson": _json,
}
"""Filter -> what looks at its arguments first and returns what it is to work on."""
