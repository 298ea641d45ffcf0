"""Chat templates: the text of the reference, faults found at load, and a bound on every render.

Invariant: any source renders, or raises TemplateError at load or TemplateRenderError at a render, in bounded time.
"""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tlserve.text.template import DEFAULT_TEMPLATE, MAX_SOURCE_SIZE, Template, TemplateError, TemplateRenderError

TEMPLATES = Path(__file__).parents[2] / "fixtures/text/templates"
REFERENCE = json.loads((TEMPLATES / "expected.json").read_text())
HI = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return Template.parse(source).render_chat(HI if messages is None else messages, **options)


def test_default_template_marks_each_role_and_opens_the_assistants_turn() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u\n"}]
    assert render(DEFAULT_TEMPLATE, messages) == "<|system|>\ns\n<|user|>\nu\n\n<|assistant|>\n"
    assert render(DEFAULT_TEMPLATE, messages, add_generation_prompt=False) == "<|system|>\ns\n<|user|>\nu\n\n"


@pytest.mark.parametrize("conversation", REFERENCE["conversations"])
@pytest.mark.parametrize("name", REFERENCE["expected"])
def test_templates_of_the_known_families_give_the_text_of_transformers(name: str, conversation: str) -> None:
    """Recorded by fixtures/make_text.py."""
    options = {"bos": "<s>", "eos": "</s>", **REFERENCE["conversations"][conversation]}
    text = render((TEMPLATES / name).read_text(), **options)
    assert text == REFERENCE["expected"][name][conversation]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages|tojson(ensure_ascii=False) }}", '[{"role": "user", "content": "<é\'&😀>"}]'),
        ("{{ messages[0].content|tojson }}", '"<é\'&😀>"'),
        ("{{ messages[0].content|tojson(ensure_ascii=True) }}", '"<\\u00e9\'&\\ud83d\\ude00>"'),
        ("{{ {'b': 1, 'a': [2]}|tojson(indent=1, sort_keys=true) }}", '{\n "a": [\n  2\n ],\n "b": 1\n}'),
        ("{{ {'b': 1, 'a': 2}|tojson(separators=(',', ':')) }}", '{"b":1,"a":2}'),
    ],
)
def test_tojson_is_json_and_not_html(source: str, text: str) -> None:
    """B090."""
    assert render(source, [{"role": "user", "content": "<é'&😀>"}]) == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("  {% if true %}\n  a\n  {% endif %}\n b", "  a\n b"),
        (
            "{% for i in [0, 1, 2, 3] %}{% if i == 1 %}{% continue %}{% endif %}{% if i > 2 %}{% break %}{% endif %}"
            "{{ i }}{% endfor %}",
            "02",
        ),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% macro m(x, y='!') %}<{{ x ~ y }}>{% endmacro %}{{ m('a') }}{{ m('b', y=1) }}", "<a!><b1>"),
        ("{% generation %}a{{ messages[0].role }}{% endgeneration %}", "auser"),
        ("{% for a in [1, [2, [3]]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}", "123"),
        ("{% for x in messages if x.role == 'tool' %}{{ x }}{% else %}none{% endfor %}", "none"),
        (
            "{{ messages|map(attribute='role')|join }}{{ messages|selectattr('role', 'equalto', 'x')|list|length }}",
            "user0",
        ),
        ("{{ dict(a=1).items()|list }}{{ 'a,b'.split(',')[::-1] }}", "[('a', 1)]['b', 'a']"),
        ("{{ '%s-%02d' % ('a', 7) }}{{ '{}/{x}'.format(1, x=2) }}{{ 'ab' * 2 }}{{ 2 ** 10 }}", "a-071/2abab1024"),
        ("{% filter upper %}a{% endfilter %}{% set x %}b{{ 1 }}{% endset %}{{ x }}", "Ab1"),
        ("{{ messages[0].missing }}|{{ messages[0].missing is defined }}|{{ tools is none }}", "|False|True"),
        ("{{ strftime_now('%Y')|length }}", "4"),
        (
            "{% for m in messages %}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.index0 }}{% endfor %}",
            "TrueTrue10",
        ),
        ("{{ messages[0]['content']|trim|upper|replace('H', '')|default('x') }}", "I"),
        ("{% set ns = namespace() %}{% set ns.index = 0 %}{{ ns.index }}{{ messages | length > 0 and 'y' }}", "0y"),
    ],
)
def test_what_hugging_faces_templates_use_works(source: str, text: str) -> None:
    assert render(source) == text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for m in messages %}", "endfor"),
        ("{% if true %}a", "endif"),
        ("{{ messages", "end of"),
        ("{% frobnicate %}", "frobnicate"),
        ("{% if false %}{{ 'a'|frobnicate }}{% endif %}", "filter 'frobnicate'"),
        ("{% macro m() %}{{ 'a' is frobnicated }}{% endmacro %}", "test 'frobnicated'"),
        ("{% if false %}{{ messages|map('frobnicate') }}{% endif %}", "filter 'frobnicate'"),
        ("{% if false %}{{ messages|selectattr('role', 'frobnicated') }}{% endif %}", "test 'frobnicated'"),
        ("{% include 'other' %}", "other templates"),
        ("{% import 'other' as o %}", "other templates"),
        ("{% extends 'other' %}", "other templates"),
        ("{% autoescape true %}{% endautoescape %}", "autoescape"),
        ("{{ ''.__class__.__mro__ }}", "__mro__"),
        ("{% if false %}{{ ''['__class__'] }}{% endif %}", "__class__"),
        ("{{ ''|attr('__class__') }}", "__class__"),
        ("{{ messages|map(attribute='content.__class__') }}", "__class__"),
        ("{{ cycler.__init__.__globals__ }}", "__globals__"),
        ("{{" + "(" * 5000, "compiled"),
        ("{% for a in b %}" * 60 + "{% endfor %}" * 60, "compiled"),
        ("a" * (MAX_SOURCE_SIZE + 1), str(MAX_SOURCE_SIZE)),
        ("{{a}}" * 20_000, "tokens"),
        ("{{ 1" + "+1" * 8000 + " }}", "compiled"),
        ("{{ " + "9" * 100_000 + " }}", "compiled"),
    ],
)
def test_a_broken_template_fails_at_load(source: str, reason: str) -> None:
    """Branches that would never run are read too; B092 for what reaches for Python's internals."""
    start = time.perf_counter()
    with pytest.raises(TemplateError, match=reason):
        Template.parse(source)
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 'a' + 1 }}", "concatenate"),
        ("{{ missing.attribute }}", "missing"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ ''|attr('__cla' ~ 'ss__') }}", "__class__"),
        ("{{ ''['__cla' ~ 'ss__'] }}", "__class__"),
        ("{{ '{0.__class__}'.format(1) }}", "__class__"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ messages[0].update(role='x') }}", "update"),
        ("{{ messages[0].pop('role') }}", "pop"),
        ("{{ lipsum() }}", "lipsum"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "_x"),
        ("{{ namespace(__class__=1) }}", "__class__"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_a_failing_render_says_why_and_changes_nothing(source: str, reason: str) -> None:
    """B092: no attribute is reached, and the messages stay as they were."""
    messages = copy.deepcopy(HI)
    with pytest.raises(TemplateRenderError, match=reason):
        render(source, messages)
    assert messages == HI


WORDS = (
    *("{{ ", " }}", "{% ", " %}", "{%- ", " -%}", "{#", "#}", "\n", " ", "text"),
    *("for x in messages", "endfor", "if ", "elif ", "else", "endif", "set x = ", "macro m(x)", "endmacro", "break"),
    *("set ns = namespace(a=1)", "set ns.a = ", "generation", "endgeneration", "block b", "endblock", "call m(1)"),
    *("messages", "x", "ns", "loop", "m", "self.b()", "range(9)", "raise_exception('a')", "none", "true", "'a'", "1"),
    *(
        "[0]",
        "['role']",
        ".role",
        ".items()",
        "()",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        ",",
        ":",
        "|",
        "|tojson",
        "|join",
        "|trim",
    ),
    *("|map('upper')", "|list", "|sort", "|length", " is ", "defined", "string", " not ", " in ", " ~ ", " + ", " * "),
    *(" ** ", " % ", " == ", " and ", " or ", "%s", ".format", "__class__", "|attr('a')", "[::-1]", "99999999999"),
)

DOUBLED = "{{% set x = {start} %}}" + "{{% set x = {step} %}}" * 60 + "{{{{ x }}}}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(50000) %}{% for j in range(50000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) if false %}{% endfor %}" * 200,
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in [[[1] * 999] * 999] * 999 recursive %}{{ loop(a) if a is iterable }}{% endfor %}",
        "{% block b %}{% for i in range(3) %}{{ self.b() }}{% endfor %}{% endblock %}",
        "{% set x = 'ab' * 2000000 %}{% for i in range(100000) %}{% if x ~ 1 == x ~ 2 %}{% endif %}{% endfor %}",
        "{% set x = 'ab' * 2000000 %}{% for i in range(100000) %}{% if 'abb' in x %}{% endif %}{% endfor %}",
        "{% set x = 'ab' * 2000000 %}{% for i in range(100000) %}{% set y = x[1:] %}{% endfor %}",
        "{% set x = range(100000)|list %}{% for i in x %}{% if 'a' in x %}{% endif %}{% endfor %}",
        "{{ range(100000)|map('center', 9999)|join }}",
        "{% for i in range(100000) %}{{ 'a' * 1000000 }}{% endfor %}",
        DOUBLED.format(start="'ab'", step="x ~ x"),
        DOUBLED.format(start="'ab'", step="x + x"),
        DOUBLED.format(start="'ab'", step="x.replace('a', x)"),
        DOUBLED.format(start="'ab'", step="x.join([x, x, x])"),
        DOUBLED.format(start="'ab'", step="'%s%s' % (x, x)"),
        DOUBLED.format(start="'ab'", step="'{0}{0}'.format(x)"),
        DOUBLED.format(start="['ab']", step="[x, x]"),
        DOUBLED.format(start="['ab']", step="(x, x)"),
        DOUBLED.format(start="['ab']", step="{'a': x, 'b': x}"),
        DOUBLED.format(start="['ab']", step="dict(a=x, b=x)"),
        DOUBLED.format(start="['ab']", step="(x + x)|batch(2)|list"),
        "{{ 'a' * 10 ** 10 }}",
        "{{ [0] * 10 ** 10 }}",
        "{{ 2 ** (10 ** 9) }}",
        "{{ 'a'.center(10 ** 9) }}",
        "{{ 'a'|center(10 ** 9) }}",
        "{{ '\t'.expandtabs(10 ** 9) }}",
        "{{ 'a\nb'|indent(10 ** 9) }}",
        "{{ 'a'.zfill(10 ** 9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d'|format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ 1.5|round(10 ** 9) }}",
        "{{ ([1],)|sum(start=[]) }}",
        "{{ messages|tojson(indent=10 ** 9) }}",
        "{{ messages|batch(10 ** 9, 'x')|list }}",
        "{{ messages|slice(10 ** 9)|list }}",
        "{{ ('a ' * 2000000)|title }}",
    ],
)
def test_no_template_holds_the_server(source: str) -> None:
    """B093 and its kind: time and memory of a render end, with or without output."""
    template = Template.parse(source)
    start = time.thread_time()
    with pytest.raises(TemplateRenderError):
        template.render_chat(HI)
    assert time.thread_time() - start < 1.5


def test_a_long_conversation_is_far_from_the_limits() -> None:
    """A thousand turns, and a message as long as a request body can be."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "word " * 20},
        {"role": "assistant", "content": "ok"},
    ] * 500
    for name in REFERENCE["expected"]:
        assert len(render((TEMPLATES / name).read_text(), messages, bos="<s>", eos="</s>")) > 1000
        assert len(render((TEMPLATES / name).read_text(), [{"role": "user", "content": "a" * 4_000_000}])) > 4_000_000


def test_the_reason_of_a_failure_is_short() -> None:
    with pytest.raises(TemplateRenderError) as caught:
        render("{{ raise_exception('x' * 100000) }}")
    assert len(str(caught.value)) < 1000


async def test_threads_share_a_template() -> None:
    template = Template.parse((TEMPLATES / "qwen3.jinja").read_text())
    texts: dict[int, str] = {}

    async def render_in_thread(number: int) -> None:
        messages = [{"role": "user", "content": str(number)}]
        texts[number] = await trio.to_thread.run_sync(template.render_chat, messages)

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(render_in_thread, number)
    assert texts == {n: f"<|im_start|>user\n{n}<|im_end|>\n<|im_start|>assistant\n" for n in range(20)}


@given(st.lists(st.sampled_from(WORDS), max_size=25).map("".join))
def test_any_template_renders_or_says_what_is_wrong(source: str) -> None:
    """Nothing but TemplateError at load and TemplateRenderError at a render, in bounded time."""
    start = time.thread_time()
    try:
        template = Template.parse(source)
        template.render_chat(HI)
    except (TemplateError, TemplateRenderError):
        pass
    assert time.thread_time() - start < 3
