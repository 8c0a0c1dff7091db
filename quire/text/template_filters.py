"""Filters, tests and methods that templates may call, with bounds on their cost.

Jinja's own implementations do the work; this module charges and limits them before the call. A
filter that only visits the entries of a list is charged for each entry; any other may write its
value as text and is charged for all of its content. The cost of what multiplies its input (widths,
replacements, formats, joins) is estimated in advance. Filters that are too hard to bound, or
random, and that no chat template needs are removed: pprint, random, striptags, urlencode, urlize,
wordwrap, xmlattr.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import Environment
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter

from quire.text.template_work import LimitExceeded, Work

Arguments = tuple[Any, ...]
Named = Mapping[str, Any]

LEFT_OUT = ("pprint", "random", "striptags", "urlencode", "urlize", "wordwrap", "xmlattr")
# Filters that do not visit the content of a value.
_PASSING = frozenset({"abs", "attr", "count", "d", "default", "first", "last", "length", "items"})
_TAKING = frozenset({"batch", "list", "map", "reject", "rejectattr", "reverse", "select"})
_TAKING |= {"selectattr", "slice"}
_COMPARING = frozenset({"dictsort", "groupby", "max", "min", "sort", "unique"})
SHALLOW_TESTS = frozenset(
    {
        "boolean", "callable", "defined", "escaped", "false", "filter", "float", "integer",
        "iterable", "mapping", "none", "number", "sameas", "sequence", "string", "test", "true",
        "undefined",
    }
)  # fmt: skip
# The argument that is the path of an attribute, as in "function.name".
_PATHS = {
    "groupby": 0, "join": 1, "max": 1, "min": 1, "rejectattr": 0, "selectattr": 0, "sort": 2,
    "sum": 0, "unique": 1, "map": None,
}  # fmt: skip
_MAX_STEPS = 100
_MAX_DIGITS = 4300  # Python's own limit

_TEXT_METHODS = frozenset(
    {
        "capitalize", "casefold", "count", "endswith", "find", "format", "format_map", "index",
        "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower",
        "isnumeric", "isprintable", "isspace", "istitle", "isupper", "lower", "partition",
        "removeprefix", "removesuffix", "startswith", "swapcase", "title", "upper",
    }
)  # fmt: skip
_WIDENING = frozenset({"center", "ljust", "rjust", "zfill"})
# Python's work for these grows with the product of both lengths.
_TWO_SIDED = frozenset(
    {"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"}
)  # fmt: skip
_MAX_PRODUCT = 1 << 28
_BYTES_A_PIECE = 64
_LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_OTHER_METHODS: dict[type, frozenset[str]] = {
    dict: frozenset({"copy", "fromkeys", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    range: frozenset({"count", "index"}),
    int: frozenset({"bit_count", "bit_length"}),
    float: frozenset({"is_integer"}),
}
_BRACE_WIDTH = re.compile(r":[^{}]*(\d{5,}|\{)")
_PRINTF = re.compile(r"[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")


def admitted(work: Work, name: str, value: Any, args: Arguments, named: Named) -> Any:
    """Charge for filter `name` and return the value to pass to it. Raises LimitExceeded."""
    for argument in (*args, *named.values()):
        if not (name in _PASSING or isinstance(argument, Iterator)):
            work.looked(argument)
    if name in _PATHS:
        _check_path(name, args, named)
    if name in _PASSING:
        return value
    if name in _TAKING or name in _COMPARING:
        for argument in (*args, *named.values()):
            if name in ("batch", "slice"):
                work.check_width(argument)
        return work.gathered(value) if name in _COMPARING else work.consumed(value)
    extent = work.looked(value)
    if name in ("center", "round"):
        for argument in (*args, *named.values()):
            work.check_width(argument)
    elif name == "title":
        work.check_entries(extent.chars)  # it is split into words
    elif name == "trim" and args and isinstance(args[0], str):
        _check_product(extent.chars, args[0])
    elif name == "int" and extent.chars > _MAX_DIGITS:
        raise LimitExceeded(f"a number of more than {_MAX_DIGITS} digits")
    return value


def check_method(work: Work, owner: Any, name: str, args: Arguments, named: Named) -> Arguments:
    """Check the call of a method of the plain value `owner` and return its arguments.

    Raises LimitExceeded, and SecurityError for methods that no template needs.
    """
    given = (*args, *named.values())
    if isinstance(owner, str):
        return _check_text_method(work, owner, name, args, given)
    for kind, names in _OTHER_METHODS.items():
        if isinstance(owner, kind) and name in names:
            if name in ("count", "index"):  # compared with all entries
                work.looked(owner)
            return args
    raise SecurityError(f"the method {name!r} of a {type(owner).__name__} is not for templates")


def _check_text_method(
    work: Work, owner: str, name: str, args: Arguments, given: Arguments
) -> Arguments:
    work.looked(owner)
    if name in _WIDENING:
        for argument in given:
            work.check_width(argument)
    elif name == "expandtabs":
        for argument in given:
            work.check_width(argument)
            if isinstance(argument, int):
                work.check_chars(owner.count("\t") * argument)
    elif name == "replace":
        _check_replacement(work, owner, *args)
    elif name == "join" and args:
        return (_texts(work, args[0], owner), *args[1:])
    elif name in _TWO_SIDED or name in ("split", "splitlines"):
        for argument in given:
            if isinstance(argument, str) and name in _TWO_SIDED:
                _check_product(len(owner), argument)
        if name in ("split", "rsplit", "splitlines"):
            _check_pieces(work, owner, name, given)
    elif name not in _TEXT_METHODS:
        raise SecurityError(f"the method {name!r} of a text is not for templates")
    return args


def _check_pieces(work: Work, owner: str, name: str, given: Arguments) -> None:
    separator = next((argument for argument in given if isinstance(argument, str)), None)
    if name == "splitlines":
        num_pieces = _num_lines(owner)
    elif separator:
        num_pieces = owner.count(separator) + 1
    else:
        num_pieces = len(owner) // 2 + 1
        if num_pieces > work.limits.list_entries:
            num_pieces = len(owner.split(None, work.limits.list_entries + 1))
    limit = next((argument for argument in given if isinstance(argument, int)), -1)
    if name != "splitlines" and limit >= 0:
        num_pieces = min(num_pieces, limit + 1)
    work.check_entries(num_pieces)
    work.make(_BYTES_A_PIECE * num_pieces)


def _num_lines(text: str) -> int:
    return 1 + sum(text.count(end) for end in _LINE_ENDS)


def _check_product(num_chars: int, other: str) -> None:
    if num_chars * len(other) > _MAX_PRODUCT:
        raise LimitExceeded(f"{len(other)} characters looked for in {num_chars}")


def _check_replacement(work: Work, text: str, old: Any = "", new: Any = "", count: Any = -1) -> int:
    """Charge for replacing up to `count` occurrences, and return their number."""
    if not isinstance(old, str) or not isinstance(new, str):
        return 0
    num_places = text.count(old)
    if isinstance(count, int) and count >= 0:
        num_places = min(num_places, count)
    work.check_chars(len(text) + num_places * max(0, len(new) - len(old)))
    return num_places


def _check_path(name: str, args: Arguments, named: Named) -> None:
    at = _PATHS[name]
    path = named.get("attribute", args[at] if at is not None and at < len(args) else None)
    if isinstance(path, str) and path.count(".") + path.count(",") > _MAX_STEPS:
        raise LimitExceeded(f"an attribute of more than {_MAX_STEPS} steps")


def check_printf(work: Work, template: str, values: Any) -> None:
    """Bound widths and sizes of `template % values` and the `format` filter."""
    num_places, at = 0, template.find("%")
    while at >= 0:
        num_places += 1
        at = _end_of_key(template, at + 1)
        match = _PRINTF.match(template, at)
        assert match is not None, "the pattern matches the empty text"
        for number in match.groups():
            if number == "*" or (number and len(number) > 4):
                raise LimitExceeded(f"a width of {number[:20]} in a format")
        at = template.find("%", match.end() + 1)
    chars = work.looked(values).chars + work.limits.width
    work.check_chars(len(template) + num_places * chars)


def _end_of_key(template: str, at: int) -> int:
    """Return the end of the (key) that may follow a %; keys may contain parentheses."""
    if template[at : at + 1] != "(":
        return at
    depth = 0
    for end in range(at, len(template)):
        depth += {"(": 1, ")": -1}.get(template[end], 0)
        if depth == 0:
            return end + 1
    return len(template)


def check_braces(work: Work, template: str, values: Any) -> None:
    """Bound widths and sizes of `template.format(values)`."""
    if match := _BRACE_WIDTH.search(template):
        raise LimitExceeded(f"a width of {match[1][:20]} in a format")
    chars = work.looked(values).chars + work.limits.width
    work.check_chars(len(template) + template.count("{") * chars)


def _texts(work: Work, items: Any, separator: str) -> Any:
    """Return the entries to join, after checking the length of the joined text."""
    if not isinstance(items, Iterable):
        return items
    entries = list(work.consumed(items))
    chars = sum(len(entry) if isinstance(entry, str) else 0 for entry in entries)
    work.check_chars(chars + len(separator) * len(entries))
    return entries


def join(
    work: Work, environment: Environment, value: Any, d: Any = "", attribute: Any = None
) -> str:
    """Implement Jinja's `join` filter."""
    entries = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    if not isinstance(entries, Iterator):
        entries = iter(entries)
    separator, texts, num_chars = str(d), [], 0
    for entry in work.consumed(entries):
        work.looked(entry)
        texts.append(str(entry))
        num_chars += len(texts[-1]) + len(separator)
        work.check_chars(num_chars)
    return separator.join(texts)


def total(
    work: Work, environment: Environment, add: Callable[[Any, Any], Any],
    value: Any, attribute: Any = None, start: Any = 0,
) -> Any:  # fmt: skip
    """Implement Jinja's `sum` filter: numbers as Python sums them, lists concatenated by `add`."""
    items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    entries = list(work.consumed(iter(items)))
    if all(isinstance(entry, int | float) for entry in (start, *entries)):
        return sum(entries, start)
    if isinstance(start, str):
        raise TypeError("sum() can't sum strings [use ''.join(seq) instead]")
    result = start
    for entry in entries:
        result = add(result, entry)
    return result


def replace(work: Work, value: Any, old: Any, new: Any, count: Any = None) -> str:
    """Implement Jinja's `replace` filter."""
    text, old, new = str(value), str(old), str(new)
    limit = -1 if count is None else count
    _check_replacement(work, text, old, new, limit)
    return text.replace(old, new, limit)


def indent(work: Work, value: Any, width: Any = 4, first: bool = False, blank: bool = False) -> Any:
    """Check the arguments of Jinja's `indent` filter and return its value."""
    work.check_width(width)
    num_chars = len(width) if isinstance(width, str) else width
    if isinstance(value, str) and isinstance(num_chars, int):
        work.check_chars(len(value) + _num_lines(value) * max(num_chars, 0))
        work.check_entries(_num_lines(value))
    return value


def printf(work: Work, value: Any, *args: Any, **named: Any) -> str:
    """Implement Jinja's `format` filter."""
    if args and named:
        raise TypeError("format takes values by place or by name, not both")
    template = str(value)
    check_printf(work, template, dict(named) or args)
    return template % (named or args)


def word_count(value: Any) -> int:
    """Implement Jinja's `wordcount` filter."""
    return sum(1 for _ in re.finditer(r"\w+", str(value)))


def to_json(
    work: Work,
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without Jinja's HTML escapes; takes the arguments that `transformers` allows."""
    work.check_width(indent)
    extent = work.looked(value)
    indented = len(indent) if isinstance(indent, str) else indent
    if isinstance(indented, int):
        work.check_chars(extent.chars + extent.entries * extent.depth * max(indented, 0))
    if separators is not None:
        between = sum(len(text) for text in separators if isinstance(text, str))
        work.check_chars(extent.chars + extent.entries * between)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
