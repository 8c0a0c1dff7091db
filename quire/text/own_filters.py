"""Filters of templates that are implemented here instead of by Jinja, with bounds on their cost.

Those of Jinja that build a text or a list from many parts cannot be charged from outside; tojson
and wordcount differ from Jinja's, as in `transformers`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

from jinja2 import pass_context
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedEnvironment

from quire.text.template_filters import admitted, plain_filter, work_of
from quire.text.template_methods import check_printf, check_replacement, num_lines
from quire.text.template_work import Work


def _on_account(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """Charge for the arguments and the result of a filter that takes the account."""

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        work = work_of(context)
        for part in (value, *args, *kwargs.values()):
            work.looked(part)
        return work.made(filter_(work, value, *args, **kwargs))

    return run


@pass_context
def _join(context: Context, value: Any, d: Any = "", attribute: Any = None) -> Any:
    work = work_of(context)
    admitted(work, "join", "", (d, attribute), {})
    entries = _attributes(context, value, attribute)
    if not isinstance(entries, Iterator):
        entries = iter(entries)
    separator, texts, num_chars = str(d), list[str](), 0
    for entry in work.consumed(entries):
        work.looked(entry)
        texts.append(str(entry))
        num_chars += len(texts[-1]) + len(separator)
        work.check_chars(num_chars)
    return work.made(separator.join(texts))


@pass_context
def _sum(context: Context, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Return the sum of numbers as Python computes it, or of lists as the sandbox adds them."""
    work = work_of(context)
    admitted(work, "sum", "", (attribute, start), {})
    entries = list(work.consumed(iter(_attributes(context, value, attribute))))
    if all(isinstance(entry, int | float) for entry in (start, *entries)):
        return sum(entries, start)
    if isinstance(start, str):
        raise TypeError("sum() can't sum strings [use ''.join(seq) instead]")
    result, environment = start, cast(SandboxedEnvironment, context.environment)
    for entry in entries:
        result = environment.call_binop(context, "+", result, entry)
    return result


def _attributes(context: Context, value: Any, attribute: Any) -> Any:
    if attribute is None:
        return value
    return map(make_attrgetter(context.environment, attribute), value)


@pass_context
def _indent(
    context: Context, value: Any, width: Any = 4, first: bool = False, blank: bool = False
) -> Any:
    work = work_of(context)
    work.looked(value)
    work.check_width(width)
    num_chars = len(width) if isinstance(width, str) else width
    if isinstance(value, str) and isinstance(num_chars, int):
        work.check_chars(len(value) + num_lines(value) * max(num_chars, 0))
        work.check_entries(num_lines(value))
    return work.made(plain_filter(context, "indent", value, (width, first, blank), {}))


def _replace(work: Work, value: Any, old: Any, new: Any, count: Any = None) -> str:
    text, old, new = str(value), str(old), str(new)
    limit = -1 if count is None else count
    check_replacement(work, text, old, new, limit)
    return text.replace(old, new, limit)


def _printf(work: Work, value: Any, *args: Any, **named: Any) -> str:
    if args and named:
        raise TypeError("format takes values by place or by name, not both")
    template = str(value)
    check_printf(work, template, dict(named) or args)
    return template % (named or args)


def word_count(value: Any) -> int:
    """Implement Jinja's `wordcount` filter."""
    return sum(1 for _ in re.finditer(r"\w+", str(value)))


def _to_json(
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


OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "format": _on_account(_printf),
    "indent": _indent,
    "join": _join,
    "replace": _on_account(_replace),
    "sum": _sum,
    "tojson": _on_account(_to_json),
}
