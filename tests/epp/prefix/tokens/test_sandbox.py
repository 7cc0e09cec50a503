"""What one step of a template may make: no clock ends an operator, a filter or a method."""

import tracemalloc
from typing import Any

import pytest

from epp.prefix.tokens.sandbox import TemplateTooLong
from epp.prefix.tokens.template import ChatTemplate


def render(source: str, **values: Any) -> str:
    return ChatTemplate(source).render(values, 60.0, 10_000)


BIG = "{% set s = 'x' * 9000 %}"
TWINS = (
    "{% set ns = namespace(l=[], m=[], t=()) %}{% for i in range(99) %}{% set ns.l = [ns.l, ns.l] %}"
    "{% set ns.m = [ns.m, ns.m] %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}"
)
LIST = "{% set l = ['x' * 100] * 99 %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 10 ** 999999999999 }}",
        "{{ (9 ** 999) ** 999 }}",
        "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ 10 ** 12 * [1] }}",
        "{{ '%999999999999d' % 1 }}",
        "{{ '%*d' % (999999999999, 1) }}",
        BIG + "{{ '%s%s' % (s, s) }}",
        "{{ '{:>999999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, '>999999999999') }}",
        "{{ '{0:{1}}'.format(1, 999999999999) }}",
        "{{ '{a:999999999999}'.format_map({'a': 1}) }}",
        BIG + "{{ '{0}{0}'.format(s) }}",
        BIG + "{{ s + s }}",
        BIG + "{{ s ~ s }}",
        BIG + "{% set t %}{{ s }}{{ s }}{% endset %}",
        BIG + "{% macro m() %}{{ s }}{{ s }}{% endmacro %}{% set t = m() %}",
        "{% set ns = namespace(s='xx') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(l=['x']) %}{% for i in range(99) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
        "{% set ns = namespace(l=['x']) %}{% for i in range(99) %}{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}"
        "{{ ns.l | tojson }}",
        "{% set ns = namespace(l=['x']) %}{% for i in range(99) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}"
        "{{ ns.l | string | length }}",
        TWINS + "{{ ns.l == ns.m }}",
        TWINS + "{{ ns.l in [ns.m] }}",
        TWINS + "{{ {}[ns.t] }}",
        TWINS + "{{ {ns.t: 1} }}",
        BIG + "{{ [s, s] | join }}",
        BIG + "{{ s.join(['a', 'b', 'c']) }}",
        BIG + "{{ s | join('long') }}",
        BIG + "{{ s.replace('x', 'long') }}",
        BIG + "{{ s | replace('x', 'long') }}",
        BIG + "{{ s | replace('', 'long') }}",
        BIG + "{{ s.translate({120: 'long'}) }}",
        BIG + "{{ s.encode().join(['a'.encode(), 'b'.encode(), 'c'.encode()]) }}",
        "{{ ('\t' * 9000).expandtabs(999) }}",
        "{{ ('\t' * 9000).expandtabs(tabsize=999) }}",
        "{{ ('\n' * 9000) | indent(99, true) }}",
        "{{ ('\n' * 9000) | indent('long', true) }}",
        "{{ ([1] * 9000) | tojson(indent=9) }}",
        "{{ 'x'.center(999999999999) }}",
        "{{ 'x'.zfill(999999999999) }}",
        "{{ 1 .to_bytes(999999999999, 'big') }}",
        "{{ 1 .to_bytes(length=999999999999, byteorder='big') }}",
        LIST + "{{ [l] * 9 | sum(start=[]) }}",
        LIST + "{{ range(9000) | map('string') | map('replace', '', 'x' * 99) | list | length }}",
        LIST + "{{ '%s' | format(l) }}",
    ],
)
def test_no_step_makes_more_than_there_is_room_for(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TemplateTooLong):
            render(source)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_what_templates_do_with_texts_they_may() -> None:
    source = """{%- set parts = messages | map(attribute='content') | list -%}
{{ parts | join('\n') | indent(2) }}|{{ '%s: %5.2f' % ('a', 1.5) }}|{{ '{:>4}|{x}'.format('b', x=1) }}|
{{- '%d' | format(1700000000000) }}|{{ 1700000000000 | string }}|{{ 'a\tb'.expandtabs(4) }}|{{ '-' * 5 }}|
{{- 2 ** 10 * 3 }}|{{ ', '.join(parts) }}|{{ 'abc'.replace('b', 'x') | upper }}|{{ [1, 2] + [3] }}|
{{- 1 ~ 'a' ~ none }}|{{ messages[0] == messages[-1] }}"""
    messages = [{"content": "one"}, {"content": "two"}]
    assert render(source, messages=messages) == (
        "one\n  two|a:  1.50|   b|1|1700000000000|1700000000000|a   b|-----|3072|one, two|AXC|[1, 2, 3]|1aNone|False"
    )
    macro = "{% macro at(n) %}{{ n }}{% endmacro %}{{ at(1700000000000) }}"
    assert render(macro) == "1700000000000"
