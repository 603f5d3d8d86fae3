"""A chat template may be any program: it ends, in bounded time and memory, or is refused in one line."""

import re
import resource
from datetime import datetime

import jinja2
import pytest

from jaxtrain.data.finetuning import ChatTemplate, template_limits
from jaxtrain.errors import UserError
from tests.fuzz.importers import bounded

HUGE = 3_000_000_000
LONG = "{% set x = 'a' * 100000 %}"


def repeated(body: str, begin: str = "'a'") -> str:
    """A template that repeats the assignment of `ns.x` often enough to fill any memory if it doubles its value."""
    return f"{{% set ns = namespace(x={begin}) %}}{{% for i in range(64) %}}{body}{{% endfor %}}{{{{ ns.x|length }}}}"


ENDLESS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "recursive loops": "{% for x in [1,2] recursive %}{% if loop.depth < 50 %}{{ loop([1,2]) }}{% endif %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}x{% endmacro %}{{ f(60) }}",
    "filters": "{% for i in range(99999) %}{{ range(99999)|select('odd')|list|length }}{% endfor %}",
    "sums": "{% for i in range(99999) %}{{ range(99999)|sum }}{% endfor %}",
    "nested lists": repeated("{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.x }}",
    "nested dicts": repeated("{% set ns.x = dict(a=ns.x, b=ns.x) %}") + "{{ ns.x|tojson }}",
    "compared": "{% set a = namespace(x=1, y=1) %}{% for i in range(64) %}{% set a.x = [a.x, a.x] %}"
    "{% set a.y = [a.y, a.y] %}{% endfor %}{{ a.x == a.y }}",
}
LARGE = {
    "repetition": f"{{{{ 'a' * {HUGE} }}}}",
    "reversed repetition": f"{{{{ {HUGE} * [1] }}}}",
    "concatenation": repeated("{% set ns.x = ns.x ~ ns.x %}"),
    "addition": repeated("{% set ns.x = ns.x + ns.x %}"),
    "lists": repeated("{% set ns.x = ns.x + ns.x %}", "[1]"),
    "blocks": repeated("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "numbers": repeated("{% set ns.x = ns.x * ns.x %}", "9"),
    "powers": "{{ (9 ** 9999) ** 99999 }}",
    **{name: f"{{{{ 'a'.{name}({HUGE}) }}}}" for name in ("center", "ljust", "rjust", "zfill")},
    **{f"filter {name}": f"{{{{ ['a']|{name}({HUGE})|list }}}}" for name in ("batch(1, 0)|batch", "slice")},
    "filter center": f"{{{{ 'a'|center({HUGE}) }}}}",
    "named width": f"{{{{ 'a'|center(width={HUGE}) }}}}",
    "filter block": f"{{% filter center({HUGE}) %}}a{{% endfilter %}}",
    "mapped": f"{{{{ ['a']|map('center', {HUGE})|list }}}}",
    "indent": f"{{{{ 'a'|indent({HUGE}, true) }}}}",
    "indented lines": "{% set x = 'a\n' * 100000 %}{{ x|indent(100000) }}",
    "indented json": f"{{{{ [[1]]|tojson(indent={HUGE}) }}}}",
    "tabs": f"{{{{ '\t'.expandtabs({HUGE}) }}}}",
    "bytes": f"{{{{ (1).to_bytes({HUGE}, 'little')|length }}}}",
    "percent": f"{{{{ '%{HUGE}d' % 1 }}}}",
    "starred percent": f"{{{{ '%*d' % ({HUGE}, 1) }}}}",
    "filter format": f"{{{{ '%{HUGE}d'|format(1) }}}}",
    "format": f"{{{{ '{{:{HUGE}d}}'.format(1) }}}}",
    "nested format": f"{{{{ '{{:{{w}}d}}'.format(1, w={HUGE}) }}}}",
    "format_map": f"{{{{ '{{x:{HUGE}}}'.format_map({{'x': 1}}) }}}}",
    "many fields": LONG + "{{ ('{0}' * 100000).format(x)|length }}",
    "many percents": LONG + "{{ ('%(x)s' * 100000) % {'x': x} }}",
    "replace": LONG + "{{ x.replace('a', x)|length }}",
    "filter replace": LONG + "{{ x|replace('a', x)|length }}",
    "join": LONG + "{{ x.join(x)|length }}",
    "filter join": LONG + "{{ ([x] * 99999)|join|length }}",
    "translate": LONG + "{{ x.translate({97: x})|length }}",
    "wordwrap": LONG + "{{ x|wordwrap(1, true, x)|length }}",
    "sum": "{{ ([[1] * 10000] * 10000)|sum(start=[])|length }}",
    "positional sum": "{{ ([[1] * 10000] * 10000)|sum(none, [])|length }}",
    "text of a list": LONG + "{{ [x] * 99999 }}",
    "round": "{{ 1.5|round(1000000000, 'ceil') }}",
    "kept": "{% set ns = namespace(x=[]) %}"
    "{% for i in range(99999) %}{% set ns.x = ns.x + ['a' * 100000] %}{% endfor %}",
    "static": "{% set y %}{% for i in range(99999) %}" + "x" * 100000 + "{% endfor %}{% endset %}",
    "caller": "{% macro m() %}{% for i in range(99999) %}{{ caller() }}{% endfor %}{% endmacro %}{% call m() %}"
    + "x" * 100000
    + "{% endcall %}",
    "block": "{% block b %}" + "x" * 10**5 + "{% endblock %}{% for i in range(99999) %}{{ self.b() }}{% endfor %}",
}
INVALID = {
    "long": "{{ a }}" * 30000,
    "deep": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "deep loops": "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


def render(source: str) -> str:
    template = ChatTemplate(source, "chat_template.jinja", {}, datetime(2026, 1, 1))
    return template.render([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("name", [*ENDLESS, *LARGE, *INVALID])
def test_a_template_that_does_not_end_or_fit_is_refused(name, monkeypatch):
    monkeypatch.setattr(template_limits, "_SECONDS", 0.3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with bounded(), pytest.raises(UserError) as refused:
        render({**ENDLESS, **LARGE, **INVALID}[name])
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("chat_template.jinja")
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10 < 500


def test_ten_thousand_generation_blocks_take_linear_time():
    source = "{% for i in range(30000) %}{% generation %}a{% endgeneration %}{% endfor %}"
    template = ChatTemplate(source, "chat_template.jinja", {}, datetime(2026, 1, 1))
    with bounded():
        text, spans = template.render_spans([])
    assert (text, len(spans), spans[-1]) == ("a" * 30000, 30000, (29999, 30000))


def test_a_long_conversation_is_rendered():
    source = "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}<{{ m.role }}>"
    source += "{{ m.content|trim }}{{ '%s' % m['content'][:2] }}{% endfor %}{{ messages|tojson|length }}"
    template = ChatTemplate(source, "chat_template.jinja", {}, datetime(2026, 1, 1))
    text = template.render([{"role": "user", "content": f" {i} " + "x" * 1000}] * 2000 if (i := 7) else [])
    assert text.count("<user>") == 2000


TEXT, NUMBERS, ROWS = "'a bc <d>\\nef'", "[3, 1, 2, 1]", "[{'k': 'b', 'n': 2}, {'k': 'a', 'n': 1}, {'k': 'b', 'n': 3}]"
FILTERS = {
    TEXT: (
        *("capitalize", "center(20)", "center(width=20)", "count", "d('x')", "default('x')", "e", "escape", "first"),
        *("forceescape", "indent", "indent(2)", "indent('> ', true)", "indent(3, first=true, blank=true)"),
        *("int(7)", "join", "join('-')", "last", "length", "list", "lower", "map('upper')|list", "random|length"),
        *("replace('a', 'xy')", "replace('a', 'b', 1)", "reverse", "safe", "sort|list", "string", "striptags", "title"),
        *("trim", "trim('af')", "truncate(5, true, '…', 0)", "unique|list", "upper", "urlencode", "wordcount"),
        *("wordwrap(4)", "wordwrap(4, true, '| ')", "wordwrap(2, break_long_words=false)"),
    ),
    NUMBERS: (
        *("batch(3)|list", "batch(3, 0)|list", "first", "join", "join(', ')", "last", "length", "list", "max", "min"),
        *("map('string')|list", "reject('odd')|list", "select('odd')|list", "reverse|list", "slice(3)|list"),
        *("slice(3, 0)|list", "sort", "sort(reverse=true)", "sum", "sum(start=5)", "unique|list"),
    ),
    ROWS: (
        *("groupby('k')|list", "map(attribute='n')|list", "map(attribute='x', default=0)|list", "sum('n', 1)"),
        *("rejectattr('k', 'equalto', 'a')|list", "selectattr('n', 'gt', 1)|list", "sort(attribute='k,n')"),
        *("join('; ', attribute='k')", "min(attribute='n')", "first|items|list", "first|dictsort", "first|xmlattr"),
        *("first|attr('k')", "sum(attribute='n')", "unique(attribute='k')|list"),
    ),
    "-2.5": ("abs", "float", "int", "round", "round(1)", "round(0, 'floor')", "filesizeformat"),
    "'%s of %05.1f'": ("format('a', 2)", "format(none, 1.25)"),
}


@pytest.mark.parametrize("value", FILTERS, ids=["text", "numbers", "rows", "number", "format"])
def test_filters_are_those_of_jinja2(value):
    sources = [f"{{{{ {value}|{call} }}}}" for call in FILTERS[value]]
    environment = jinja2.Environment()
    assert [*map(render, sources)] == [environment.from_string(source).render() for source in sources]


def test_every_filter_of_jinja2_is_compared_or_left_out():
    compared = {name for calls in FILTERS.values() for call in calls for name in re.findall(r"(?:^|\|)(\w+)", call)}
    assert compared | {*template_limits._WITHOUT, "tojson"} == jinja2.filters.FILTERS.keys() | {"lipsum"}


def test_what_templates_use_is_computed_as_before():
    source = (
        "{{ 'x' * 3 }}{{ '%s-%03d' % ('a', 5) }}{{ ['a', 'b']|join(', ') }}{{ '{:>4}'.format('a') }}"
        "{% set a, b = 1, 2 %}{{ a ~ b }}{% for k, v in {'k': 1}.items() %}{{ k }}{{ v }}{% endfor %}"
        "{{ {'a': [1, (2, 3)]} }}"
        "{{ 'a b'.split(' ')[1] }}{{ 'ab'|replace('a', 'c') }}{{ [3, 1]|sort|first }}{{ [1, 2]|sum }}{{ none }}"
        "{{ {'a': 1}|tojson(indent=2) }}{{ ' a '|trim }}{{ 'a'.center(3) }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ undefined_name }}"
    )
    expected = "xxxa-005a, b   a12k1{'a': [1, (2, 3)]}bcb13None{\n  \"a\": 1\n}a a 10243"
    assert render(source) == expected
