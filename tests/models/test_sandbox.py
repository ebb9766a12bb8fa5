"""Tests of chat templates in the bounded sandbox: results as in Jinja's own sandbox, and limits."""

import threading
import time
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ssd_serve.base.errors import RequestError
from ssd_serve.models.text.chat import ChatTemplate
from ssd_serve.models.text.sandbox import BoundedEnvironment

MESSAGES = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "<think>x</think>y"}]
ORDINARY = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem }}|{{ loop.nextitem }}|{{ loop.revindex }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ m['content'] | trim | upper }}{% else %}none{% endfor %}",
    "{% for m in [] %}x{% else %}none{% endfor %}{% for c in missing %}x{% endfor %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "{% for a in [1, [2, [3]]] recursive %}{{ loop(a) if a is iterable else a }},{% endfor %}",
    "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k ~ v ~ none }}{% endfor %}{{ messages[0].content ~ '!' }}",
    "{% set n = namespace(t='') %}{% for m in messages %}{% set n.t = n.t + m.role %}{% endfor %}{{ n.t }}",
    "{% macro bold(x, n=2) %}{{ '*' * n }}{{ x }}{% endmacro %}{{ bold('a') }}{{ bold('b', 3) }}",
    "{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}in{% endcall %}",
    "{{ messages[1].content.split('</think>')[-1].lstrip('\\n') }}{{ 'a-b'.replace('-', '+') }}",
    "{{ ['a', 'b'] | join(', ') }}{{ messages | map(attribute='role') | join }}{{ ', '.join(['x', 'y']) }}",
    "{{ '%s is %5.1f' | format('x', 2) }}{{ 'n=%d' % 3 }}{{ '{:>4}'.format('r') }}{{ 7 % 3 }}{{ 2 ** 8 }}",
    "{{ range(3) | list }}{{ messages | length }}{{ 'ab'.center(6) }}{{ 'a\\nb' | indent(4) }}{{ 3 * 'xy' }}",
    "{% set captured %}{% for i in range(3) %}{{ i }}{% endfor %}{% endset %}{{ captured }}",
    "{% filter upper %}shout{{ 1 + 1 }}{% endfilter %}{{ {'a': [1]} | tojson }}{{ 'x' | default('y') }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ '%s%s' % ('a', 'b') }}",
]
ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ [0] * 10**9 }}",
    "{{ 10**(10**8) }}",
    "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(99) %}"
    "{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}{% endfor %}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ 'a'.center(1000000000) }}",
    "{{ 'a'.zfill(1000000000) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a\\nb\\nc' | indent(1000000000) }}",
    "{{ ('a\\t' * 9999).expandtabs(99999) }}",
    "{{ lipsum(n=1000000000) }}",
    "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "{{ (['a' * 99999] * 99999) | join }}",
    "{{ 'b'.join(['a' * 99999] * 99999) }}",
    "{{ ([['a' * 99999] * 999] * 99999) | map('join') | join }}",
]
GROWING = [
    "ns.s + ns.s",
    "ns.s ~ ns.s",
    "ns.s | replace('a', ns.s)",
    "ns.s.replace('a', ns.s)",
    "[ns.s, ns.s] | join",
    "'%s%s' % (ns.s, ns.s)",
    "'{0}{0}'.format(ns.s)",
    "'%(a)s%(a)s' % {'a': ns.s}",
]
GROWN = [
    f"{{% set ns = namespace(s='ab') %}}{{% for i in range(99) %}}{{% set ns.s = {more} %}}{{% endfor %}}"
    for more in GROWING
]
FAILING = [
    "{{ 1 // 0 }}",
    "{{ 1 % 0 }}",
    "{{ 'a' + 1 }}",
    "{{ messages['x']['y']['z'] }}",
    "{{ [][1].a }}",
    "{{ 1.0e308 * 10 | int }}{{ (1.0e308 * 10) | int }}",
    "{{ raise_exception('no') }}",
    "{{ strftime_now(5) }}",
    "{{ undefined_function() }}",
    "{% include 'other' %}",
]


@pytest.mark.parametrize("source", ORDINARY)
def test_ordinary_templates_render_as_in_jinja(source: str) -> None:
    options: dict[str, Any] = {"extensions": ["jinja2.ext.loopcontrols"], "trim_blocks": True}
    plain = ImmutableSandboxedEnvironment(**options)
    bounded = BoundedEnvironment(60.0, 10**6, **options)
    values: dict[str, object] = {"messages": MESSAGES}
    assert bounded.rendered(bounded.compiled(source), values) == plain.from_string(source).render(values)


@pytest.mark.parametrize("source", ENDLESS + GROWN)
def test_endless_template_is_stopped(source: str) -> None:
    template = ChatTemplate(source, {}, seconds=0.1, characters=200_000)
    began = time.monotonic()
    with pytest.raises(RequestError, match="does not accept these messages"):
        template.render(MESSAGES, add_generation_prompt=True)
    assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("source", FAILING)
def test_failing_template_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match=r"does not accept these messages: .") as failed:
        ChatTemplate(source, {}).render(MESSAGES, add_generation_prompt=True)
    assert failed.value.field == "messages"


def test_long_template_error_is_cut() -> None:
    with pytest.raises(RequestError) as failed:
        ChatTemplate("{{ raise_exception(messages[0].content) }}", {}).render(
            [{"content": "a" * 100_000}], add_generation_prompt=True
        )
    assert len(str(failed.value)) < 1_000


def test_each_rendering_has_its_own_budget() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {}, seconds=60.0, characters=100)
    answers = list[str]()

    def render(letter: str) -> None:
        for _ in range(50):
            answers.append(template.render([{"content": letter * 60}], add_generation_prompt=True))

    threads = [threading.Thread(target=render, args=(letter,)) for letter in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == ["a" * 60] * 50 + ["b" * 60] * 50


def test_bounded_operators_cannot_be_redefined() -> None:
    source = (
        "{% set counted = 1 %}{% set environment = 2 %}{% for a in range(99999) %}{% for b in range(99999) %}"
    )
    template = ChatTemplate(source + "{% endfor %}{% endfor %}", {}, seconds=0.2)
    with pytest.raises(RequestError, match="too long"):
        template.render(MESSAGES, add_generation_prompt=True)
