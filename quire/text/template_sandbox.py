"""The sandbox of chat templates: Jinja with accounting of all work.

A template is an untrusted program published with a model. It gets plain values only, reaches no
Python internals, and cannot make the process hang, crash or exhaust memory: counters are inserted
into the compiled template (template_counters.py), and everything it may call is bounded
(template_filters.py, template_methods.py) by one account (template_work.py). Otherwise it renders
as in `transformers`. Knows nothing of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from quire.text import template_filters as filters
from quire.text import template_methods as methods
from quire.text.own_filters import OWN_FILTERS, word_count
from quire.text.template_counters import (
    HELD,
    LOOKED,
    MADE,
    ROUND,
    WRITTEN,
    GenerationBlock,
    InsertCounters,
)
from quire.text.template_filters import AccountedContext, work_of
from quire.text.template_work import LimitExceeded, Work

_MAX_RANGE = 1_000_000
_MAX_FORMAT_CHARS = 200


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment of one model's templates. `now` is the clock that strftime_now reads."""

    context_class = AccountedContext
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, GenerationBlock],
            optimized=False,  # evaluate constants on the account, not while compiling
        )
        del self.globals["lipsum"]  # random: a prompt must be deterministic
        self.globals["dict"] = _Dictionaries()
        self.globals["namespace"] = _namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["range"] = _bounded_range
        self.globals["strftime_now"] = lambda format: _formatted_time(now, format)
        for name in filters.LEFT_OUT:
            del self.filters[name]
        self._account_for_filters()
        self._account_for_tests()

    def _account_for_filters(self) -> None:
        for name, original in dict(self.filters).items():
            self.filters[filters.PLAIN + name] = original
            self.filters[name] = filters.accounted_filter(name)
        self.filters |= OWN_FILTERS
        self.filters[filters.PLAIN + "wordcount"] = word_count
        self.filters[MADE] = _made
        self.filters[WRITTEN] = _written
        self.filters[LOOKED] = _looked
        self.filters[HELD] = _held
        self.filters[ROUND] = _round_begun

    def _account_for_tests(self) -> None:
        for name, original in dict(self.tests).items():
            if name not in filters.SHALLOW_TESTS:
                self.tests[filters.PLAIN + name] = original
                self.tests[name] = filters.accounted_test(name)

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        """Insert the counters between parsing and compiling."""
        counted = InsertCounters().visit(source)
        return super()._generate(counted, name, filename, defer_init)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check arithmetic that could create a huge value."""
        work = work_of(context)
        work.add(1)
        if operator == "%" and isinstance(left, str):
            methods.check_printf(work, left, right)
        elif operator == "**" and not (_is_small(left, 10_000) and _is_small(right, 16)):
            raise LimitExceeded("a power of large numbers")
        elif operator == "*":
            _check_repeated(work, left, right)
        for value in (left, right):
            work.check_number(value)
        return work.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Charge for a call, its arguments and its result."""
        work = work_of(__context)
        work.add(1)
        if not isinstance(__obj, Macro | LoopContext):  # these only pass on their arguments
            for value in (*args, *kwargs.values()):
                work.looked(value)
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, BuiltinMethodType) or isinstance(owner, str):
            args = methods.check_method(work, owner, __obj.__name__, args, kwargs)
        if isinstance(__obj, _BoundedFormat):
            methods.check_braces(work, __obj.template, [*args, *kwargs.values()])
        return work.made(super().call(__context, __obj, *args, **kwargs))

    def call_filter(
        self,
        name: str,
        value: Any,
        args: Any = None,
        kwargs: Any = None,
        context: Context | None = None,
        eval_ctx: EvalContext | None = None,
    ) -> Any:
        """Call a filter by a name that the template computes, as `map` does."""
        self._check_name(name)
        return super().call_filter(name, value, args, kwargs, context, eval_ctx)

    def call_test(
        self,
        name: str,
        value: Any,
        args: Any = None,
        kwargs: Any = None,
        context: Context | None = None,
        eval_ctx: EvalContext | None = None,
    ) -> Any:
        """Call a test by a name that the template computes, as `select` does."""
        self._check_name(name)
        return super().call_test(name, value, args, kwargs, context, eval_ctx)

    def _check_name(self, name: Any) -> None:
        if not isinstance(name, str) or " " in name:
            raise SecurityError(f"{str(name)[:40]!r} is not the name of a filter or test")

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Get an item; a tuple as key must be flat, to bound hashing."""
        if isinstance(argument, tuple) and any(isinstance(part, tuple) for part in argument):
            raise LimitExceeded("a key of lists in lists")
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Wrap `str.format` as Jinja does; `call` bounds it."""
        wrapped = super().wrap_str_format(value)
        return None if wrapped is None else _BoundedFormat(value.__self__, wrapped)


class _BoundedFormat:
    """The `format` method of a text."""

    def __init__(self, template: str, run: Callable[..., str]) -> None:
        self.template = template
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        return self._run(*args, **kwargs)


class _Dictionaries:
    """Replace `dict` in templates: the class itself has methods that could modify an object."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


@pass_context
def _made(context: Context, value: Any) -> Any:
    return work_of(context).made(value)


@pass_context
def _written(context: Context, value: Any) -> Any:
    """Charge for a value that becomes part of a text."""
    work = work_of(context)
    if isinstance(value, str):
        return work.made(value)
    work.make(4 * work.looked(value).chars)
    return value


@pass_context
def _looked(context: Context, value: Any) -> Any:
    work_of(context).looked(value)
    return value


@pass_context
def _held(context: Context, value: Any) -> Any:
    """Return what something is looked for in: an object finds a key without walking its values."""
    if not isinstance(value, dict):
        work = work_of(context)
        work.looked(value)
        if isinstance(value, range):
            work.add(len(value))
    return value


@pass_context
def _round_begun(context: Context, value: Any, cost: int) -> Any:
    work_of(context).add(cost)
    return value


def _is_small(value: Any, limit: int) -> bool:
    return not isinstance(value, int | float) or abs(value) <= limit


def _check_repeated(work: Work, left: Any, right: Any) -> None:
    for sized, number in ((left, right), (right, left)):
        if isinstance(number, int) and number > 0:
            if isinstance(sized, str):
                work.check_chars(len(sized) * number)
            elif isinstance(sized, list | tuple):
                work.check_entries(len(sized) * number)


def _formatted_time(now: Callable[[], datetime], format: Any) -> str:
    if isinstance(format, str) and len(format) > _MAX_FORMAT_CHARS:
        raise LimitExceeded(f"a time format of more than {_MAX_FORMAT_CHARS} characters")
    return now().strftime(format)


def _bounded_range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > _MAX_RANGE:
        raise LimitExceeded(f"a range of more than {_MAX_RANGE} numbers")
    return numbers


def _namespace(*args: Any, **kwargs: Any) -> Namespace:
    attributes = dict(*args, **kwargs)
    for name in attributes:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"the namespace attribute {name!r} starts with an underscore")
    return Namespace(attributes)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))
