"""Templates that loop, allocate, hash, compare or reach for Python are stopped as template errors.

The attacks run under small limits, so that each ends soon if it is stopped, and grows far beyond
the machine's resources if it is not. The clock advances on every read.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from quire.base.errors import InvalidParameter, TokenizerError
from quire.text.chat_template import ChatTemplate
from quire.text.template_work import Limits
from tests.cases import each_case

PLAIN = [{"role": "user", "content": "Hi"}]
SMALL = Limits(num_rounds=20_000, made_bytes=64 << 20, text_chars=1_000_000, list_entries=200_000)
# Prologues. b: a text of 800,000 characters. t: two lists that look like 2 ** 60 entries each.
BIG = "{% set b = 'ab' * 400000 %}"
LIST = "{% set l = range(150000) | list %}"
GROW = "{% set ns = namespace(s='ab', l=[1], t=(1,)) %}{% for i in range(99) %}"
TREES = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
DEEP = (
    "{% set ns = namespace(t=(1,), l=[1]) %}{% for i in range(3000) %}{% set ns.t = (ns.t,) %}"
    "{% set ns.l = [ns.l] %}{% endfor %}"
)

MUCH: dict[str, str] = {
    "nested loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "a loop over a long text": BIG + "{% for c in b %}{% endfor %}",
    "a filtered loop": "{% for i in range(999999) if false %}{% endfor %}",
    "a long test in a loop": "{% for i in range(9999) if " + "i or " * 90 + "false %}{% endfor %}",
    "a long body in a loop": (
        "{% for i in range(900) %}" + "{% if i.x %}{% endif %}" * 3_000 + "{% endfor %}"
    ),
    "a recursive loop": "{% for i in range(99) recursive %}{{ loop(range(99)) }}{% endfor %}",
    "macros that call themselves": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}"
    ),
    "a macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a block without end": "{% block b %}{{ self.b() }}{% endblock %}",
    "a caller without end": (
        "{% macro m() %}{{ caller() }}{% call m() %}{% endcall %}{% endmacro %}"
        "{% call m() %}{% endcall %}"
    ),
    "a long range": "{{ range(10 ** 9) }}",
    "a range looked through": "{% for i in range(99) %}{{ 'a' in range(1000000) }}{% endfor %}",
    "a text repeated": "{{ 'a' * 10 ** 12 }}",
    "a number times a text": "{{ 10 ** 12 * 'a' }}",
    "a list repeated": "{{ [1] * 10 ** 12 }}",
    "a tuple repeated": "{{ (1,) * 10 ** 12 }}",
    "a power of a power": "{{ 10 ** 10 ** 10 }}",
    "a large power": "{{ 99999 ** 99 }}",
    "squares of squares": (
        "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}"
        "{% endfor %}"
    ),
    "a division of long numbers": (
        "{{ (('f' * 4000) | int(base=16)) // (('f' * 2000) | int(base=16)) }}"
    ),
    "a number of many digits": BIG + "{{ b | int(base=36) }}",
    "a text doubled by ~": GROW + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "a text doubled by +": GROW + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "a text doubled by set": GROW + "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "a text doubled by %": GROW + "{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}",
    "a text doubled by a filter block": (
        GROW + "{% set ns.s %}{% filter upper %}{{ ns.s }}{{ ns.s }}{% endfilter %}{% endset %}"
        "{% endfor %}"
    ),
    "a list doubled": GROW + "{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "a list doubled by sum": GROW + "{% set ns.l = [ns.l, ns.l] | sum(start=[]) %}{% endfor %}",
    "one text written often into another": (
        BIG + "{% set x %}{% for i in range(9000) %}{{ b }}{% endfor %}{% endset %}"
    ),
    "literal text written often into another": (
        "{% set x %}{% for i in range(9000) %}" + "-" * 100_000 + "{% endfor %}{% endset %}"
    ),
    "literal text written often": "{% for i in range(9000) %}" + "-" * 100_000 + "{% endfor %}",
    "a text written often": BIG + "{% for i in range(9000) %}{{ b }}{% endfor %}",
    "one expression of many long texts": BIG + "{{ (" + "b ~ " * 3_000 + "b) | length }}",
    "copies kept": BIG + GROW + "{% set ns.l = [ns.l, b.upper() ~ i] %}{% endfor %}",
    "slices kept": LIST + GROW + "{% set ns.l = [ns.l, l[:]] %}{% endfor %}",
    "slices of texts kept": BIG + GROW + "{% set ns.l = [ns.l, b[1:]] %}{% endfor %}",
    "objects kept": (
        GROW + "{% for j in range(999) %}{% set ns.l = {0: ns.l} %}{% endfor %}{% endfor %}"
    ),
    "namespaces kept": (
        GROW + "{% for j in range(999) %}{% set ns.l = namespace(l=ns.l) %}{% endfor %}{% endfor %}"
    ),
    "many lists in a round": (
        "{% for i in range(9999) %}{% set x = [" + "[]," * 20_000 + "] %}{% endfor %}"
    ),
    "a text taken into characters": BIG + "{{ b | list | length }}",
    "many lists made": "{% for i in range(300) %}{% set x = range(150000) | list %}{% endfor %}",
    "replace with a long text": GROW + "{% set ns.s = ns.s | replace('a', ns.s) %}{% endfor %}",
    "replace of nothing": "{{ ('a' * 4000) | replace('', 'b' * 30000) | length }}",
    "the method replace": GROW + "{% set ns.s = ns.s.replace('a', ns.s) %}{% endfor %}",
    "the method replace by count": BIG + "{{ b.replace('a', b, 5) }}",
    "join with a long text": LIST + "{{ l | join('x' * 2000) | length }}",
    "join of long texts": "{{ (['x' * 100000] * 1000) | join | length }}",
    "join of an attribute": "{{ ([{'x': 'x' * 100000}] * 1000) | join(attribute='x') }}",
    "the method join": LIST + "{{ ('x' * 2000).join(l | map('string')) | length }}",
    "the method join of what comes one by one": (
        "{{ ''.join((['x' * 100000] * 1000) | map('string')) | length }}"
    ),
    "the method join of a list": "{{ ''.join(['x' * 100000] * 1000) | length }}",
    "indent of many lines": "{{ ('\\n' * 100000) | indent(10000, true, true) | length }}",
    "indent by a text": "{{ ('\\n' * 100000) | indent('x' * 1000, true, true) | length }}",
    "indent beyond measure": "{{ 'a' | indent(10 ** 11) }}",
    "center": "{{ 'a' | center(10 ** 11) }}",
    "the method center": "{{ 'a'.center(10 ** 11) }}",
    "the method ljust": "{{ 'a'.ljust(10 ** 11) }}",
    "the method zfill": "{{ 'a'.zfill(10 ** 11) }}",
    "the method expandtabs": "{{ ('\\t' * 100000).expandtabs(10000) | length }}",
    "the method expandtabs by name": "{{ '\\t'.expandtabs(tabsize=10 ** 11) | length }}",
    "center of marked text": "{{ ('a' | safe).center(10 ** 11) }}",
    "round to many places": "{{ 1.5 | round(3000000, 'ceil') }}",
    "batch by a large number": "{{ ['a'] | batch(300000000, 'y') | list }}",
    "slice by a large number": "{{ 'ab' | slice(30000000) | list }}",
    "sum of lists": LIST + "{{ ([l] * 1000) | sum(start=[]) | length }}",
    "a printf width": "{{ '%100000000000d' % 3 }}",
    "a printf width by name": "{{ '%(a)100000000000d' % {'a': 3} }}",
    "a printf width by a bracketed name": "{{ '%((a))100000000000d' % {'(a)': 3} }}",
    "a printf width as an argument": "{{ '%*d' % (10 ** 11, 3) }}",
    "a printf precision": "{{ '%.100000000000f' % 3 }}",
    "many printf widths": "{{ ('%9999d' * 200) % ((1,) * 200) }}",
    "one argument printed often": BIG + "{{ ('%(a)s' * 1000) % {'a': b} }}",
    "the filter format": "{{ '%100000000000d' | format(3) }}",
    "the filter format, often": BIG + "{{ ('%(a)s' * 1000) | format(a=b) }}",
    "a brace width": "{{ '{:>10000000000}'.format('a') }}",
    "a brace width as an argument": "{{ '{:>{}}'.format('a', 10 ** 11) }}",
    "many brace widths": "{{ ('{0:9999}' * 2000).format('a') | length }}",
    "one argument formatted often": BIG + "{{ ('{0}' * 1000).format(b) | length }}",
    "format_map": BIG + "{{ ('{a}' * 1000).format_map({'a': b}) | length }}",
    "JSON of a tree": TREES + "{{ ns.a | tojson | length }}",
    "JSON indented": LIST + "{{ l | tojson(indent=10000) | length }}",
    "JSON indented by a text": LIST + "{{ l | tojson(indent='x' * 10000) | length }}",
    "JSON with long separators": LIST + "{{ l | tojson(separators=('x' * 10000, ':')) | length }}",
    "trees compared": TREES + "{{ ns.a == ns.b }}",
    "trees ordered": TREES + "{{ ns.a < ns.b }}",
    "trees compared in a chain": TREES + "{{ 1 < ns.a < ns.b }}",
    "a tree among trees": TREES + "{{ ns.a in [ns.b] }}",
    "a tree not among trees": TREES + "{{ ns.a not in [ns.b] }}",
    "a tree tested": TREES + "{{ ns.a is eq(ns.b) }}",
    "a tree tested in": TREES + "{{ ns.a is in([ns.b]) }}",
    "a tree tested upper": TREES + "{{ ns.a is upper }}",
    "a tree selected": TREES + "{{ [ns.a] | select('eq', ns.b) | list }}",
    "a tree selected by an attribute": (
        TREES + "{{ [{'x': ns.a}] | selectattr('x', 'eq', ns.b) | list }}"
    ),
    "a tree written": TREES + "{{ ns.a }}",
    "a tree written by ~": TREES + "{{ 'a' ~ ns.a }}",
    "a tree written by string": TREES + "{{ ns.a | string }}",
    "a tree written by upper": TREES + "{{ ns.a | upper }}",
    "a tree written by %": TREES + "{{ '%s' % ns.a }}",
    "a tree written by % in a tuple": TREES + "{{ '%s' % (ns.a,) }}",
    "a tree written by format": TREES + "{{ '{}'.format(ns.a) }}",
    "a tree written by join": TREES + "{{ [ns.a] | join }}",
    "a tree written by map": TREES + "{{ [ns.a] | map('string') | list }}",
    "a tree written by replace": TREES + "{{ 'a' | replace('a', ns.a) }}",
    "a tree written by center": TREES + "{{ ns.a | center(9) }}",
    "a tree written by default": TREES + "{{ x | default(ns.a) }}",
    "a tree raised": TREES + "{{ raise_exception(ns.a) }}",
    "a tree seen by strftime": TREES + "{{ strftime_now(ns.a) }}",
    "a tree changed": (
        TREES + "{% for i in [1, 2] %}{{ loop.changed([ns.a, ns.b][i - 1]) }}{% endfor %}"
    ),
    "a tree counted": TREES + "{{ [ns.b].count(ns.a) }}",
    "a tree found": TREES + "{{ [ns.b].index(ns.a) }}",
    "trees sorted": TREES + "{{ [ns.a, ns.b] | sort | length }}",
    "trees grouped": TREES + "{{ [{'x': ns.a}, {'x': ns.b}] | groupby('x') | length }}",
    "the larger of two trees": TREES + "{{ [ns.a, ns.b] | max | length }}",
    "a tree in a namespace": TREES + "{{ ns }}",
    "a tree of namespaces": (
        "{% set ns = namespace(n=namespace(x=1)) %}{% for i in range(60) %}"
        "{% set ns.n = namespace(a=ns.n, b=ns.n) %}{% endfor %}{{ ns.n }}"
    ),
    "a tree in a view": TREES + "{{ {1: ns.a}.values() }}",
    "trees in views": TREES + "{{ {1: ns.a}.items() == {1: ns.b}.items() }}",
    "deep tuples as keys": DEEP + "{{ {ns.t: 1} | length }}",
    "deep tuples looked up": DEEP + "{{ {}[ns.t] }}",
    "deep tuples in an object": DEEP + "{{ ns.t in {} }}",
    "deep tuples by get": DEEP + "{{ {}.get(ns.t) }}",
    "deep tuples by dict": DEEP + "{{ dict([(ns.t, 1)]) | length }}",
    "deep tuples by fromkeys": DEEP + "{{ dict.fromkeys([ns.t]) | length }}",
    "deep tuples made unique": DEEP + "{{ [ns.t] | unique | list | length }}",
    "deep lists written": DEEP + "{{ ns.l }}",
    "deep lists compared": DEEP + "{{ ns.l == [ns.l] }}",
    "a long search in a loop": BIG + "{% for i in range(9999) %}{{ b.find('x') }}{% endfor %}",
    "a long membership in a loop": BIG + "{% for i in range(9999) %}{{ 'x' in b }}{% endfor %}",
    "a long comparison in a loop": (
        BIG + "{% set c = b.lower() %}{% for i in range(9999) %}{{ b == c }}{% endfor %}"
    ),
    "a long list looked through": LIST + "{% for i in l %}{{ 'x' in l }}{% endfor %}",
    "a search backwards": BIG + "{{ b.rfind('b' + b[:300000]) }}",
    "a split backwards": BIG + "{{ b.rsplit('b' + b[:300000]) | length }}",
    "a strip of many characters": BIG + "{{ b.strip('x' * 300000 + 'ab') | length }}",
    "a trim of many characters": BIG + "{{ b | trim('x' * 300000 + 'ab') | length }}",
    "a split into many": BIG + "{{ b.split('a') | length }}",
    "a split at spaces": "{{ ('a ' * 400000).split() | length }}",
    "a split into lines": "{{ ('a\\n' * 400000).splitlines() | length }}",
    "words in capitals": BIG + "{{ b | title | length }}",
    "a long path of attributes": (
        "{% set ns = namespace() %}{% set ns.a = ns %}"
        "{{ [ns] | map(attribute='a' ~ '.a' * 100000) | list | length }}"
    ),
    "a long path to sort by": (
        "{% set ns = namespace() %}{% set ns.a = ns %}"
        "{{ [ns] | sort(false, false, 'a' ~ '.a' * 100000) | length }}"
    ),
    "a long time format": "{{ strftime_now('%c' * 1000000) }}",
    "cycler of a tree": TREES + "{{ cycler(ns.a).next() }}",
}  # fmt: skip


@each_case("name", MUCH)
def test_work_and_size_are_bounded_as_template_errors(name: str) -> None:
    template = ChatTemplate({"default": "\n" + MUCH[name]}, variables={}, limits=SMALL)
    assert not template.problems
    with pytest.raises(
        TokenizerError, match=r"'default', line 2, exceeds a limit: .*--chat-template"
    ):
        template.render(PLAIN)


REACHING: dict[str, str] = {
    "the class of a text": "{{ ''.__class__.__mro__ }}",
    "by subscript": "{{ ''['__class__'] }}{{ ''['__class__']['__mro__'] }}",
    "by the filter attr": "{{ (''|attr('__class__')).__mro__ }}",
    "by map": "{{ ([''] | map(attribute='__class__') | list)[0].__mro__ }}",
    "by format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "by format in pieces": "{{ ('{0.__cla' ~ 'ss__}').format('') }}",
    "by format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "by a marked text": "{{ ('{0.__class__}' | safe).format('') }}",
    "by attr of format": "{{ ('{0.__class__.__mro__}' | attr('format'))('') }}",
    "globals of a function": "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.x }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m._func.x }}",
    "internals of cycler": "{{ cycler.__init__.__globals__ }}",
    "internals of joiner": "{{ joiner.__init__.__globals__ }}",
    "internals of a namespace": "{% set ns = namespace() %}{{ ns.__init__.__globals__ }}",
    "a namespace with internals": "{{ namespace(__class__=1) }}",
    "a namespace from an object": "{{ namespace({'_x': 1}) }}",
    "the context": "{{ self._TemplateReference__context.x }}",
    "the loop's internals": "{% for i in [1] %}{{ loop._iterator.x }}{% endfor %}",
    "a generator's frame": "{{ ([1] | map('string')).gi_frame.f_globals }}",
    "the order of classes": "{{ cycler.mro() }}",
    "a list that would grow": "{{ messages.append(1) }}",
    "a list that would shrink": "{{ messages.pop() }}",
    "an object that would change": "{{ messages[0].update({'role': 'system'}) }}",
    "an object that would change by dict": "{{ dict.update(messages[0], {'role': 'system'}) }}",
    "bytes": "{{ 'a'.encode() * 10 ** 12 }}",
    "bytes of a number": "{{ (5).to_bytes(10 ** 12, 'big') }}",
    "a table of replacements": "{{ ('a' * 9999).translate({97: 'b' * 9999}) }}",
    "a method of marked text": "{{ (('<' * 99999) | safe).striptags() }}",
    "a filter off the account": "{{ ['a'] | map('plain center', 10 ** 9) | list }}",
    "a test off the account": "{{ ['a'] | select('plain upper') | list }}",
}  # fmt: skip


HARMLESS = ("by format in pieces", "by format_map", "by a marked text")  # written as nothing
MISSING = ("internals of a namespace", "an object that would change by dict")


@each_case("name", REACHING)
def test_reaching_for_python_is_a_template_error(name: str) -> None:
    template = ChatTemplate({"default": "\n" + REACHING[name]}, variables={}, limits=SMALL)
    assert not template.problems
    if name in HARMLESS:
        assert template.render(PLAIN).strip() == ""
    elif name in MISSING:
        with pytest.raises(InvalidParameter, match="line 2, cannot render"):
            template.render(PLAIN)
    else:
        with pytest.raises(
            TokenizerError, match="'default', line 2, does what a template must not"
        ):
            template.render(PLAIN)
    assert PLAIN == [{"role": "user", "content": "Hi"}]


def test_a_template_gets_copies_of_the_callers_values() -> None:
    given: list[dict[str, Any]] = [{"role": "user", "content": "Hi", "tags": ["a"]}]
    template = ChatTemplate({"default": "{{ messages[0].tags.append('b') }}"}, variables={})
    with pytest.raises(TokenizerError):
        template.render(given)
    assert given[0]["tags"] == ["a"]
    with pytest.raises(InvalidParameter, match="holds a value of type object"):
        template.render([{"role": "user", "content": object()}])


def test_time_is_bounded_by_a_clock_read_with_every_charge() -> None:
    ticks = itertools.count()
    source = "{% for i in range(100) %}{{ i }}{% endfor %}"
    limits = Limits(time_s=50)
    template = ChatTemplate(
        {"default": source}, variables={}, limits=limits, clock_s=lambda: float(next(ticks))
    )
    with pytest.raises(TokenizerError, match="line 1, exceeds a limit: more than 50 seconds"):
        template.render(PLAIN)
    patient = ChatTemplate({"default": source}, variables={}, limits=limits, clock_s=lambda: 0.0)
    assert patient.render(PLAIN) == "".join(map(str, range(100)))


@pytest.mark.parametrize(
    ("source", "max_between"),
    [
        ("{% for i in range(500) %}" + "{% if i.x %}{% endif %}" * 50 + "{% endfor %}", 1),
        ("{% for i in range(500) %}{% if i is upper %}{% endif %}{% endfor %}", 1),
        ("{% for i in range(500) %}{% set x = [i] %}{% endfor %}", 1),
    ],
)  # fmt: skip
def test_no_iteration_passes_without_a_clock_read(source: str, max_between: int) -> None:
    looks = itertools.count()
    template = ChatTemplate({"default": source}, variables={}, clock_s=lambda: next(looks) * 0.0)
    before = next(looks)
    template.render(PLAIN)
    assert next(looks) - before > 500 // max_between


def test_a_too_long_conversation_is_rejected_with_advice() -> None:
    source = "{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}"
    template = ChatTemplate({"default": source}, variables={}, limits=SMALL)
    long = [{"role": "user", "content": "x" * 300_000}]
    with pytest.raises(
        InvalidParameter, match="line 1, exceeds a limit for these messages"
    ) as caught:
        template.render(long)
    assert caught.value.param == "messages"


def test_a_long_template_message_is_shortened_in_the_error() -> None:
    template = ChatTemplate({"default": "{{ raise_exception('x' * 100000) }}"}, variables={})
    with pytest.raises(InvalidParameter) as caught:
        template.render(PLAIN)
    assert 2_000 < len(str(caught.value)) < 2_200


def test_conversations_of_4096_messages_and_of_megabytes_are_within_all_limits() -> None:
    source = (
        "{% set ns = namespace(last=0) %}{% for m in messages[::-1] %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index %}{% endif %}{% endfor %}"
        "{% for m in messages %}"
        "{% if loop.index0 == (messages | length) - 1 or m not in messages[:2] %}"
        "{{ '<' + m.role + '>' + (m.content | trim) + '</>' }}{% endif %}{% endfor %}"
    )
    template = ChatTemplate({"default": source}, variables={})
    many = [{"role": "user", "content": f"message {at}"} for at in range(4096)]
    assert template.render(many).count("</>") == 4094
    large = [{"role": "user", "content": "長い文 " * 1_000_000}] * 3
    assert len(template.render(large)) > 3_999_999


def test_ordinary_arithmetic_and_formats_work() -> None:
    source = (
        "{{ 2 ** 10 }} {{ '-' * 3 }} {{ '%5.2f' % 2.5 }} {{ '%s-%s' | format('a', 'b') }} "
        "{{ '{:>4}|{}'.format('a', 7) }} {{ [[1], [2]] | sum(start=[]) }} {{ [1, 2.5] | sum }}"
    )
    template = ChatTemplate({"default": source}, variables={})
    assert template.render(PLAIN) == "1024 ---  2.50 a-b    a|7 [1, 2] 3.5"
