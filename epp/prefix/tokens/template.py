"""Chat templates: the Jinja program that comes with a model's tokenizer, run in a sandbox with a bound on everything.

A template is a program of others. It cannot reach beyond the values it is given (Jinja's immutable sandbox), what
it makes is bounded, in each step and in all (`sandbox`), and so is its time: every turn of a loop and every call looks
at the clock, so an endless template ends when its time is over, with `TemplateTooLong`, and its thread goes on to the
next request.

Which names and filters a template finds is what Hugging Face's `apply_chat_template` gives it, as vLLM 0.33 calls it,
but for a few that no chat has a use for.
"""

import json
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Literal

from jinja2 import Template, TemplateError, nodes

from epp.prefix.tokens.sandbox import Sandbox, TemplateTooLong, bounds

ContentFormat = Literal["string", "openai"]
"""How a template wants a message's content: one string, or a list of parts."""


class ChatTemplate:
    """A compiled chat template. Raises jinja2.TemplateError for one that cannot be compiled. Thread-safe."""

    def __init__(self, source: str) -> None:
        environment = Sandbox()
        environment.add_filter("tojson", _to_json)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.source = source
        self.content_format: ContentFormat = _content_format(environment.parse(source))
        self.knows_developer = '"developer"' in source or "'developer'" in source
        """Whether it has a role of that name; vLLM makes it `system` for those that have not."""
        try:
            code = environment.compile(environment.watched(source))
        except SyntaxError as error:  # Jinja takes slices where Python has none, as in `x[1:, 2]`
            raise TemplateError(f"what Jinja makes of it is no Python: {error.msg}") from None
        self._template = Template.from_code(environment, code, environment.make_globals(None))

    def render(self, values: Mapping[str, Any], seconds: float, longest: int) -> str:
        """The text. Raises TemplateTooLong beyond `seconds` or `longest` characters, TemplateError for its own errors.

        Anything else that a template can provoke (TypeError, OverflowError, RecursionError, …) becomes TemplateError.
        """
        pieces, size = [], 0
        bounds.until, bounds.longest = time.monotonic() + seconds, longest
        try:
            for piece in self._template.generate(values):
                size += len(piece)
                if size > longest:
                    raise TemplateTooLong(f"more than {longest} characters")
                pieces.append(piece)
        except (TemplateError, TemplateTooLong):
            raise
        except Exception as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        return "".join(pieces)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


# --- what a template wants content to be ----------------------------------------------------------------------------


def _content_format(tree: nodes.Template) -> ContentFormat:
    """`openai` for a template that loops over a message's content, as vLLM decides it.

    vLLM looks for the loops, not for what they do: over `content` of a loop variable over `messages` (or over another
    name for them, since 0.33 also one in a namespace), over a plain `content`, or over a macro's parameter that is
    given such content.
    """
    try:
        return "openai" if any(_loops_over_content(tree)) else "string"
    except _NotUnderstood:
        return "string"


class _NotUnderstood(Exception):
    """A construct at which vLLM's look at a template stops; it takes `string` then."""


def _loops_over_content(tree: nodes.Template) -> Iterator[bool]:
    items = list(_message_names(tree))
    in_macros: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        given = _given_content(tree, macro, items)
        for loop in macro.find_all(nodes.For):
            in_macros[id(loop)] = given | in_macros.get(id(loop), set())
    for loop in tree.find_all(nodes.For):
        over = loop.iter
        named = over.name if isinstance(over, nodes.Name) else None
        plain = named == "content" and id(loop) not in in_macros
        if any(_is(over, item, "content") for item in items) or plain or named in in_macros.get(id(loop), ()):
            _name_of(loop.target)
            yield True


def _message_names(tree: nodes.Template) -> Iterator[str]:
    """Names of loop variables over the messages."""
    lists = ["messages"]
    for name in lists:  # grows while it is walked
        for assignment in tree.find_all(nodes.Assign):
            lists += (other for other in _names_given(assignment, name) if other not in lists)
    for loop in tree.find_all(nodes.For):
        if any(_is(loop.iter, name) for name in lists):
            yield _name_of(loop.target)


def _names_given(assignment: nodes.Assign, name: str) -> Iterator[str]:
    """Other names that an assignment gives to `name`: `a`, or `a.b` in a namespace."""
    target, value = assignment.target, assignment.node
    if isinstance(target, nodes.Name):
        if _is(value, name):
            yield target.name
        elif isinstance(value, nodes.Call) and _is_name(value.node, "namespace"):
            yield from (f"{target.name}.{each.key}" for each in value.kwargs if _is(each.value, name))
    elif isinstance(target, nodes.NSRef) and _is(value, name):
        yield f"{target.name}.{target.attr}"


def _given_content(tree: nodes.Template, macro: nodes.Macro, items: list[str]) -> set[str]:
    """The macro's parameters that are given a message's content somewhere."""
    names = [argument.name for argument in macro.args]
    given: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        pairs = [*zip(names, call.args, strict=False), *((each.key, each.value) for each in call.kwargs)]
        given.update(
            name for name, value in pairs if name in names and any(_is(value, item, "content") for item in items)
        )
    return given


def _is(node: nodes.Node, name: str, key: str | None = None) -> bool:
    """Whether the expression is the variable (or, with `key`, its attribute), perhaps filtered, tested or sliced."""
    if isinstance(node, (nodes.Filter, nodes.Test)):
        return node.node is not None and _is(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is(node.node, name, key)
    if key is None:
        return _is_name(node, name)
    if isinstance(node, nodes.Getitem):
        return _is_name(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _is_name(node.node, name) and node.attr == key


def _is_name(node: nodes.Node, name: str) -> bool:
    if isinstance(node, nodes.Getattr):
        space, _, attribute = name.rpartition(".")
        return attribute == node.attr and _is_name(node.node, space)
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _name_of(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _NotUnderstood
    return target.name
