"""Methods of plain values that templates may call, and formats of texts, with bounds on their cost.

The cost of what multiplies its input (widths, replacements, splits, joins) is estimated before the
call. Methods that no chat template needs are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jinja2.exceptions import SecurityError

from quire.text.template_work import LimitExceeded, Work

Arguments = tuple[Any, ...]
Named = Mapping[str, Any]

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
        check_replacement(work, owner, *args)
    elif name == "join" and args:
        return (_texts(work, args[0], owner), *args[1:])
    elif name in _TWO_SIDED or name in ("split", "splitlines"):
        for argument in given:
            if isinstance(argument, str) and name in _TWO_SIDED:
                check_product(len(owner), argument)
        if name in ("split", "rsplit", "splitlines"):
            _check_pieces(work, owner, name, given)
    elif name not in _TEXT_METHODS:
        raise SecurityError(f"the method {name!r} of a text is not for templates")
    return args


def _check_pieces(work: Work, owner: str, name: str, given: Arguments) -> None:
    separator = next((argument for argument in given if isinstance(argument, str)), None)
    if name == "splitlines":
        num_pieces = num_lines(owner)
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


def num_lines(text: str) -> int:
    return 1 + sum(text.count(end) for end in _LINE_ENDS)


def check_product(num_chars: int, other: str) -> None:
    if num_chars * len(other) > _MAX_PRODUCT:
        raise LimitExceeded(f"{len(other)} characters looked for in {num_chars}")


def check_replacement(work: Work, text: str, old: Any = "", new: Any = "", count: Any = -1) -> int:
    """Charge for replacing up to `count` occurrences, and return their number."""
    if not isinstance(old, str) or not isinstance(new, str):
        return 0
    num_places = text.count(old)
    if isinstance(count, int) and count >= 0:
        num_places = min(num_places, count)
    work.check_chars(len(text) + num_places * max(0, len(new) - len(old)))
    return num_places


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
