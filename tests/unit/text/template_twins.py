"""Synthetic templates that use what chat templates use, each with the text it must render.

The text is that of the talk "two calls at once" of template_cases.py with a begun answer, and was
compared with `transformers`, as the live test still does for every other talk.
"""

from __future__ import annotations

TWINS: dict[str, tuple[str, str]] = {
    "blocks take their lines along": (
        "{# nothing #}\n"
        "  {% for m in messages[:2] %}\n"
        "    {% if m.role == 'system' %}\n"
        "  S\n"
        "    {%- else %}\n"
        "U {{- m.role }}  \n"
        "    {% endif %}\n"
        "  {% endfor %}\n"
        "end\n\n",
        "  SUuser  \nend\n",
    ),
    "generation": (
        "{% for m in messages %}\n{% if m.role == 'assistant' %}\n{% generation %}\n"
        "{{ m.content }}{{ eos_token }}\n{% endgeneration %}\n{% endif %}\n{% endfor %}\n",
        "I look.</s>\nSeven degrees, and 3.5.</s>\n",
    ),
    "today": ("{{ strftime_now('%d %b %Y, %A %H:%M') }}", "31 Jan 2026, Saturday 12:00"),
    "JSON": (
        "{{ tools[0].function.parameters.properties | tojson }}\n"
        "{{ {'b': [1, 2.5, none, true], 'a': '<é&\\'>'} | tojson(sort_keys=true) }}\n"
        "{{ ['é', {}] | tojson(ensure_ascii=true, indent=1) }}\n"
        "{{ {'a': [1]} | tojson(separators=(',', ':')) }}{{ {1: 2} | tojson(indent='--') }}",
        '{"city": {"type": "string", "description": "where"}, "unit": {"type": "string",'
        ' "enum": '
        '["C", "F"], "default": "C"}}\n{"a": "<é&\'>", "b": [1, 2.5, null, true]}\n'
        '[\n "\\u00e9",\n {}\n]\n{"a":[1]}{\n--"1": 2\n}',
    ),
    "break and continue": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% if m.tool_calls %}{% break %}{% endif %}{{ loop.index }}{{ m.role }}{% endfor %}",
        "2user",
    ),
    "namespace": (
        "{% set ns = namespace(n=0, last='', seen=[]) %}{% for m in messages %}"
        "{% set ns.n = ns.n + 1 %}{% set ns.last = m.role %}{% set ns.seen = ns.seen + ["
        "m.role] %}"
        "{% endfor %}{{ ns.n }}{{ ns.last }}{{ ns.seen }}{{ namespace({'a': 1}).a }}",
        "7user['system', 'user', 'assistant', 'tool', 'tool', 'assistant', 'user']1",
    ),
    "macros": (
        "{% macro wrap(text, mark='*') %}{{ mark }}{{ text | trim }}{{ mark }}{% endmacro %}"
        "{% macro all() %}{{ varargs }}{{ kwargs }}{% endmacro %}"
        "{% macro around(n) %}[{{ caller(n) }}]{% endmacro %}"
        "{{ wrap(messages[1].content) }}{{ wrap('a', mark='_') }}{{ all(1, a=2) }}"
        "{% call(x) around(3) %}{{ x + 1 }}{% endcall %}{{ wrap.name }}{{ wrap.arguments }}",
        "*Hi <b> & 'x' 🦙*_a_(1,){'a': 2}[4]wrap('text', 'mark')",
    ),
    "items": (
        "{% for name, value in tools[0].function.parameters.properties.items() %}"
        "{{ name }}:{{ value | items | list | length }};{% endfor %}"
        "{% for key in tools[0] %}{{ key }},{% endfor %}{{ tools[0].keys() | list }}"
        "{{ tools[0].get('none', 7) }}{{ 'type' in tools[0] }}{{ tools[0]['type'] }}",
        "city:2;unit:3;type,function,['type', 'function']7Truefunction",
    ),
    "slices": (
        "{{ messages[1:3] | map(attribute='role') | join('+') }}|{{ messages[::-1][0].role }}|"
        "{{ messages[-1].role }}|{{ 'abcdef'[1:-1:2] }}|{{ (messages | list)[-2].role }}|"
        "{{ messages[9:] }}{{ messages[9:] | length }}",
        "user+assistant|user|user|bd|assistant|[]0",
    ),
    "methods of texts": (
        "{{ ' a b '.strip() }}|{{ 'a,b,c'.split(',') }}|{{ 'a,b'.split(',')[-1] }}|{{ 'x"
        "'.upper() }}|"
        "{{ 'Abc'.startswith('A') }}|{{ 'abc'.endswith(('b', 'c')) }}|{{ 'aXbX'.replace("
        "'X', '-', 1) }}|"
        "{{ '\\n\\na'.lstrip('\\n') }}|{{ 'a</t>b'.split('</t>', 1)[1] }}|{{ 'a b'.title() }}|"
        "{{ '-'.join(['a', 'b']) }}|{{ 'abc'.find('c') }}|{{ 'a\\nb'.splitlines() }}|"
        "{{ 'abc'.rsplit('b')[0] }}|{{ 'ab'.center(6, '*') }}|{{ '%s=%d' % ('n', 3) }}|"
        "{{ '{}-{a}'.format(1, a=2) }}|{{ '{:>4}'.format('a') }}|{{ 'a\\tb'.expandtabs(4) }}|"
        "{{ 'abc'.partition('b') }}|{{ '7'.zfill(3) }}|{{ 'abab'.count('ab') }}|{{ 'ß'.c"
        "asefold() }}",
        "a b|['a', 'b', 'c']|b|X|True|True|a-bX|a|b|A B|a-b|2|['a', 'b']|a|**ab**|n=3|1-"
        "2|   a|a   b|"
        "('a', 'b', 'c')|007|2|ss",
    ),
    "filters": (
        "{{ messages | selectattr('role', 'equalto', 'tool') | map(attribute='content') "
        "| list }}|"
        "{{ messages | rejectattr('tool_calls', 'defined') | list | length }}|"
        "{{ [3, 1, 2] | sort }}{{ [3, 1] | sort(reverse=true) }}{{ ['b', 'A'] | sort }}|"
        "{{ [1, 1, 2] | unique | list }}|{{ [1, 2, 3] | sum }}|{{ [[1], [2]] | sum(start"
        "=[]) }}|"
        "{{ messages | groupby('role') | map('first') | list }}|{{ {'b': 1, 'a': 2} | di"
        "ctsort }}|"
        "{{ [1, 2, 3] | batch(2, 0) | list }}|{{ [1, 2, 3] | slice(2) | list }}|"
        "{{ 'abc' | first }}{{ 'abc' | last }}{{ 'abc' | length }}{{ 'abc' | reverse }}|"
        "{{ x | default('d') }}{{ '' | default('e', true) }}|{{ 'a\\nb' | indent(2) }}|"
        "{{ 'a\\nb' | indent('> ', first=true) }}|{{ 'Ab' | lower }}{{ 'Ab' | upper }}|"
        "{{ 'a b' | capitalize }}{{ 'a b' | title }}|{{ '<b>' | e }}|{{ 3.7 | int }}{{ '"
        "2.5' | float }}|"
        "{{ 2.345 | round(2) }}|{{ 'x' | center(5) }}|{{ 'a b c' | wordcount }}|"
        "{{ 'a b c d' | truncate(5, true, '..') }}|{{ '%s-%s' | format('a', 'b') }}|{{ -"
        "3 | abs }}|"
        "{{ [1, 2] | min }}{{ [1, 2] | max }}|{{ 'aba' | replace('a', 'c') }}|{{ [1, 'a'"
        "] | join }}|"
        "{{ [{'n': 1}, {'n': 2}] | sum(attribute='n') }}|{{ 1000000 | filesizeformat }}|"
        "{{ [1, none, 2] | select | list }}{{ [1, 2] | reject('odd') | list }}|{{ 7 | st"
        "ring }}",
        "['{\"degrees\": 7}', '3.5']|6|[1, 2, 3][3, 1]['A', 'b']|[1, 2]|6|[1, 2]|"
        "['assistant', 'system', 'tool', 'user']|[('a', 2), ('b', 1)]|[[1, 2], [3, 0]]|["
        "[1, 2], [3]]|"
        "ac3cba|de|a\n  b|> a\n> b|abAB|A bA B|&lt;b&gt;|32.5|2.35|  x  |3|a b c d|a-b|3"
        "|12|cbc|1a|3|"
        "1.0 MB|[1, 2][2]|7",
    ),
    "tests": (
        "{{ x is defined }}{{ messages is iterable }}{{ 'a' is string }}{{ {} is mapping }}"
        "{{ none is none }}{{ 1 is number }}{{ [] is sequence }}{{ 4 is divisibleby 2 }}"
        "{{ 3 is odd }}"
        "{{ 1 is in [1] }}{{ 2 is not in [1] }}{{ true is true }}{{ 1 is boolean }}{{ 1."
        "5 is float }}"
        "{{ 'a' is eq 'a' }}{{ 2 is gt 1 }}{{ 'a' is lower }}{{ x is undefined }}{{ 'upp"
        "er' is filter }}"
        "{{ range is callable }}{{ 1 is sameas true }}",
        "FalseTrueTrueTrueTrueTrueTrueTrueTrueTrueTrueTrueFalseTrueTrueTrueTrueTrueTrueT"
        "rueFalse",
    ),
    "loops": (
        "{% for m in messages if m.role == 'tool' %}{{ loop.index }}{{ loop.revindex }}{"
        "{ loop.first }}"
        "{{ loop.last }}{{ loop.length }}{{ loop.previtem.name if loop.previtem is defined }}"
        "{{ loop.nextitem.name if loop.nextitem is defined }}{{ loop.cycle('o', 'e') }}"
        "{{ loop.changed(m.role) }}{% else %}none{% endfor %}|{% for x in [] %}{% else %"
        "}empty{% endfor %}|"
        "{% for x in [[1, [2]], [3]] recursive %}{{ loop.depth }}{% if x is iterable %}("
        "{{ loop(x) }})"
        "{% else %}{{ x }}{% endif %}{% endfor %}|{% for a, b in [(1, 2)] %}{{ b }}{{ a "
        "}}{% endfor %}|"
        "{% for i in range(3, 0, -1) %}{{ i }}{% endfor %}|"
        "{% set row = cycler('a', 'b') %}{{ row.next() }}{{ row.next() }}{{ row.current }}|"
        "{% set comma = joiner(', ') %}{{ comma() }}a{{ comma() }}b",
        "12TrueFalse2addoTrue21FalseTrue2weathereFalse|empty|1(212(32))1(23)|21|321|aba|a, b",
    ),
    "reckoning": (
        "{{ 7 // 2 }}{{ 7 % 2 }}{{ 7 / 2 }}{{ 2 ** 10 }}{{ '-' * 3 }}{{ [0] * 2 }}{{ 1 +"
        " 2 * 3 - 4 }}"
        "{{ 'a' ~ 1 ~ none }}{{ 'a' if x else 'b' }}{{ 1 < 2 <= 2 }}{{ not x }}{{ x or 'o' }}"
        "{{ 1 == 1.0 }}{{ [1, {'a': (2,)}] == [1, {'a': (2,)}] }}{{ (1, 2) < (1, 3) }}{{"
        " -1 }}{{ +2 }}",
        "313.51024---[0, 0]3a1NonebTrueTrueoTrueTrueTrue-12",
    ),
    "blocks of text": (
        "{% set text %}{% for m in messages[:2] %}{{ m.role }};{% endfor %}{% endset %}{"
        "{ text }}"
        "{% set loud | upper %}a{{ text }}{% endset %}{{ loud }}{% filter replace('a', 'b') %}"
        "a{{ 1 }}a{% endfilter %}{% with z = 3 %}{{ z }}{% endwith %}{{ z }}{% set a, b "
        "= 1, 2 %}{{ b }}"
        "{% raw %}{{ x }}{% endraw %}{% block body %}in{% endblock %}{{ self.body() }}",
        "system;user;ASYSTEM;USER;b1b32{{ x }}inin",
    ),
    "nothing there": (
        "[{{ x }}{{ messages[0].nothing }}{{ messages[0]['none'] }}{{ x | default }}{{ x"
        " | length }}"
        "{% for i in x %}{% endfor %}{{ x ~ 'a' }}{{ x | list }}{{ none }}{{ dict(a=1).a }}]",
        "[0a[]None1]",
    ),
    "what is marked safe": (
        "{{ '<b>' | safe }}{{ ('<b>' | safe) + '<i>' }}{{ ('%s' | safe) % '<i>' }}"
        "{% autoescape true %}{{ '<b>' }}<hr>{% endautoescape %}{{ '<b>' | forceescape }}",
        "<b><b>&lt;i&gt;&lt;i&gt;&lt;b&gt;<hr>&lt;b&gt;",
    ),
    "all that is given": (
        "{{ bos_token }}{% for d in documents or [] %}{{ d.title }}{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}<quiet>{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasonin"
        "g_content }})"
        "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
        "<s><system>Be brief, <b>kind</b> & \"exact\".\n</s><user>  Hi <b> & 'x' 🦙\n</s>"
        '<assistant>I look.weather{"city": "東京", "unit": "C"}add{"numbers": [1, 2.5], '
        '"exact": null, '
        '"how": {"digits": 3}}</s><tool>{"degrees": 7}</s><tool>3.5</s>'
        "<assistant>Seven degrees, and 3.5.</s><user>吾輩は猫である。名前はまだ無い。</s"
        "><assistant>",
    ),
    "space taken off": (
        "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content | trim ~ '</>' }}{% endfor %}"
        "{{ '<assistant>' if add_generation_prompt }}",
        "<system>Be brief, <b>kind</b> & \"exact\".</><user>Hi <b> & 'x' 🦙</><assistant"
        ">I look.</>"
        '<tool>{"degrees": 7}</><tool>3.5</><assistant>Seven degrees, and 3.5.</>'
        "<user>吾輩は猫である。名前はまだ無い。</><assistant>",
    ),
}  # fmt: skip

# Templates that reject every talk, with their own message (None: an error of theirs).
REFUSING: dict[str, tuple[str, str | None]] = {
    "on purpose": ("{{ raise_exception('After ' ~ messages[0].role ~ ': no.') }}", "After "),
    "no such value": ("{{ messages[0].nothing.at_all }}", None),
    "no such function": ("{{ lookup(1) }}", None),
    "text and number": ("{{ messages[0].role + 1 }}", None),
    "a list that would grow": ("{% set x = messages.append(1) %}", None),
    "an object that would change": ("{% set x = messages[0].pop('role') %}", None),
    "internals": ("{{ ''.__class__.__mro__ }}", None),
    "JSON of nothing": ("{{ nothing | tojson }}", None),
    "an attribute of its own": ("{{ namespace(_x=1) }}", None),
}
