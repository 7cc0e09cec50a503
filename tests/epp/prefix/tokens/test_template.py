"""Chat templates: what they can use, what they cannot do, and what content they want."""

import time
from typing import Any

import pytest
from jinja2 import TemplateError

from epp.prefix.tokens.sandbox import TemplateTooLong
from epp.prefix.tokens.template import ChatTemplate


def render(source: str, seconds: float = 5.0, longest: int = 10_000, **values: Any) -> str:
    return ChatTemplate(source).render(values, seconds, longest)


def test_blocks_leave_no_lines_of_their_own() -> None:
    source = "{% for m in messages %}\n    {% if m %}\n{{ m }}\n    {% endif %}\n{% endfor %}\n"
    assert render(source, messages=["a", "", "b"]) == "a\nb\n"


def test_json_is_written_as_it_is_not_for_html() -> None:
    assert render("{{ x | tojson }}", x={"a": "<é & 'ü'>"}) == '{"a": "<é & \'ü\'>"}'
    assert render("{{ x | tojson(indent=2) }}", x=[1]) == "[\n  1\n]"
    assert (
        render("{{ x | tojson(ensure_ascii=True, sort_keys=True) }}", x={"b": "é", "a": 1})
        == '{"a": 1, "b": "\\u00e9"}'
    )


def test_loops_can_be_left_and_generation_marks_say_nothing() -> None:
    source = "{% for x in xs %}{% if x == 2 %}{% continue %}{% elif x == 4 %}{% break %}{% endif %}{{ x }}{% endfor %}"
    assert render(source, xs=[1, 2, 3, 4, 5]) == "13"
    assert render("a{% generation %}b{{ x }}{% endgeneration %}c", x=1) == "ab1c"


def test_what_jinja_makes_no_python_of_is_an_error_of_the_template() -> None:
    with pytest.raises(TemplateError, match="no Python: invalid syntax"):
        ChatTemplate("{{ messages[1:, 2] }}")


def test_loop_variables_are_those_of_jinja() -> None:
    source = (
        "{% for x in xs %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }} {% else %}-{% endfor %}"
    )
    assert render(source, xs="ab") == "0TrueFalse2 1FalseTrue2 "
    assert render(source, xs="") == "-"
    assert (
        render(
            "{% for x in xs recursive %}{{ x.n }}{{ loop(x.c) }}{% endfor %}", xs=[{"n": 1, "c": [{"n": 2, "c": []}]}]
        )
        == "12"
    )


def test_the_date_of_today_can_be_had() -> None:
    assert render("{{ strftime_now('%Y') }}") in {time.strftime("%Y"), str(int(time.strftime("%Y")) + 1)}


def test_a_template_s_own_refusal_is_a_template_error() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ (messages | attr('__class__')).__base__ }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ range(10000000) | list }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_what_a_template_may_not_do_is_a_template_error(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source, messages=[])


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set xs = range(9999) | list %}{% for a in xs %}{% for b in xs %}{% for c in xs %}{% set d = c %}"
        "{% endfor %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(90) }}",
        "{% set xs = range(9999) | list %}{% for a in xs if a %}{% for b in xs %}{% for c in xs %}{% endfor %}"
        "{% endfor %}{% endfor %}",
    ],
    ids=["ranges", "lists", "macros", "filtered"],
)
def test_an_endless_template_ends_with_its_time(source: str) -> None:
    with pytest.raises(TemplateTooLong, match="time"):
        render(source, seconds=0.05)


def test_endless_output_ends_at_its_bound() -> None:
    with pytest.raises(TemplateTooLong, match="more than 1000 characters"):
        render("{% for a in range(99999) %}{{ a }}{% endfor %}", longest=1000)


def test_a_template_that_is_no_jinja_is_refused() -> None:
    with pytest.raises(TemplateError):
        ChatTemplate("{% for %}")


LOOP = "{% for m in messages %}%s{% endfor %}"


@pytest.mark.parametrize(
    ("wanted", "source"),
    [
        ("string", "{{ messages }}"),
        ("string", LOOP.replace("%s", "{{ m.content }}")),
        ("string", LOOP.replace("%s", "{% for c in m.parts %}{% endfor %}")),
        ("string", "{% for c in content.x %}{% endfor %}"),
        ("string", "{% macro m(content) %}{% for c in content %}{% endfor %}{% endmacro %}"),
        ("string", "{% for m in other %}{% for c in m.content %}{% endfor %}{% endfor %}"),
        ("openai", LOOP.replace("%s", "{% for c in m.content %}{% endfor %}")),
        ("openai", LOOP.replace("%s", "{% for c in m['content'] %}{% endfor %}")),
        ("openai", LOOP.replace("%s", "{% for c in m['content'] | list %}{% endfor %}")),
        ("openai", "{% for m in messages[1:] %}{% for c in m.content %}{% endfor %}{% endfor %}"),
        ("openai", "{% set t = messages[1:] %}{% for m in t %}{% for c in m.content %}{% endfor %}{% endfor %}"),
        ("openai", "{% set c = m.content %}{% for x in content %}{% endfor %}"),
        (
            "openai",
            "{% set ns = namespace(rest=messages[1:], n=0) %}"
            "{% for m in ns.rest %}{% for c in m.content %}{% endfor %}{% endfor %}",
        ),
        (
            "openai",
            "{% set ns = namespace() %}{% set ns.rest = messages %}{% set all = ns.rest | list %}"
            "{% for m in all %}{% for c in m.content %}{% endfor %}{% endfor %}",
        ),
        ("openai", "{% set a, b = messages %}" + LOOP.replace("%s", "{% for c in m.content %}{% endfor %}")),
        (
            "string",
            "{% set ns = namespace(rest=messages) %}"
            "{% for m in ns.other %}{% for c in m.content %}{% endfor %}{% endfor %}",
        ),
        (
            "string",
            "{% set ns = namespace(rest=messages) %}"
            "{% for m in rest %}{% for c in m.content %}{% endfor %}{% endfor %}",
        ),
        (
            "openai",
            "{% macro show(body) %}{% for c in body %}{% endfor %}{% endmacro %}"
            + LOOP.replace("%s", "{{ show(m.content) }}"),
        ),
        (
            "openai",
            "{% macro show(body) %}{% for c in body %}{% endfor %}{% endmacro %}"
            + LOOP.replace("%s", "{{ show(body=m['content']) }}"),
        ),
        (
            "string",
            "{% macro show(body) %}{% for c in body %}{% endfor %}{% endmacro %}"
            + LOOP.replace("%s", "{{ show(m.name) }}"),
        ),
        ("string", "{% for a, b in messages %}{% for c in a.content %}{% endfor %}{% endfor %}"),
    ],
)
def test_the_content_a_template_wants_is_reported_by_its_loops(wanted: str, source: str) -> None:
    assert ChatTemplate(source).content_format == wanted


def test_whether_a_template_knows_developers_is_seen() -> None:
    assert ChatTemplate("{{ messages[0].role == 'developer' }}").knows_developer
    assert not ChatTemplate("{# developer #}").knows_developer
