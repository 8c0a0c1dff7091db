"""Jinja's filters and tests as templates may call them, with bounds on their cost.

Jinja's own implementations do the work; this module charges and limits them before the call. A
filter that only visits the entries of a list is charged for each entry; any other may write its
value as text and is charged for all of its content. own_filters.py has those that are implemented
anew. Filters that are too hard to bound, or random, and that no chat template needs are removed:
pprint, random, striptags, urlencode, urlize, wordwrap, xmlattr.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import Environment, pass_context
from jinja2.runtime import Context

from quire.text.template_methods import Arguments, Named, check_product
from quire.text.template_work import LimitExceeded, Work

# Before the name of Jinja's own filter or test; with a space, so that no template can use it.
PLAIN = "plain "
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


class AccountedContext(Context):
    """A template's variables, and the account of their rendering."""

    work: Work

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        """Derive a context with the same account."""
        context = super().derived(locals)
        assert isinstance(context, AccountedContext), "the environment's context_class"
        context.work = self.work
        return context


def work_of(context: Context) -> Work:
    """Return the account of a rendering."""
    assert isinstance(context, AccountedContext), "the environment's context_class"
    return context.work


def plain_filter(context: Context, name: str, value: Any, args: Arguments, named: Named) -> Any:
    """Call Jinja's own filter without accounting."""
    return Environment.call_filter(
        context.environment, PLAIN + name, value, args, named, context, context.eval_ctx
    )


def accounted_filter(name: str) -> Callable[..., Any]:
    """Return Jinja's filter `name` with accounting."""

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        work = work_of(context)
        work.add(1)
        value = admitted(work, name, value, args, kwargs)
        return work.made(plain_filter(context, name, value, args, kwargs))

    return run


def accounted_test(name: str) -> Callable[..., Any]:
    """Return Jinja's test `name` with accounting."""

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        work = work_of(context)
        work.add(1)
        for part in (value, *args, *kwargs.values()):
            work.looked(part)
        return Environment.call_test(
            context.environment, PLAIN + name, value, args, kwargs, context, context.eval_ctx
        )

    return run


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
        check_product(extent.chars, args[0])
    elif name == "int" and extent.chars > _MAX_DIGITS:
        raise LimitExceeded(f"a number of more than {_MAX_DIGITS} digits")
    return value


def _check_path(name: str, args: Arguments, named: Named) -> None:
    at = _PATHS[name]
    path = named.get("attribute", args[at] if at is not None and at < len(args) else None)
    if isinstance(path, str) and path.count(".") + path.count(",") > _MAX_STEPS:
        raise LimitExceeded(f"an attribute of more than {_MAX_STEPS} steps")
