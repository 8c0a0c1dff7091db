"""Where chat templates run: Jinja in a sandbox, with bounds on size and work.

A template is a program somebody published with a model. It sees plain values only, reaches no
Python internals, and cannot make the process hang or grow without end: loops and calls are
counted, text and lists it builds are measured, `range` is bounded. Everything else renders as
`transformers` renders it. Knows nothing of messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from datetime import datetime
from typing import Any, cast

from jinja2 import (
    Environment,
    TemplateError,
    TemplateSyntaxError,
    nodes,
    pass_context,
    pass_environment,
)
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_OUTPUT_CHARS = 16_000_000
MAX_WORK = 1_000_000
_MAX_NUMBER = 1_000_000
_MAX_WIDTH = 10_000
# What of a text or list counts as a round: so the sum of all that is made is bounded, too.
_CHARS_A_ROUND = 256
_ENTRIES_A_ROUND = 64
_COUNTED = "counted loop"  # names with a space: no template can write them
_MEASURED = "measured text"
_WRITABLE = "writable value"
# No chat template needs these, and bounding each is more than it is worth.
_UNBOUNDED_FILTERS = (
    "batch",
    "filesizeformat",
    "pprint",
    "random",
    "slice",
    "urlize",
    "wordwrap",
    "xmlattr",
)
# These look at the entries of a list; all others may write it out as text.
_FILTERS_OF_LISTS = frozenset(
    [
        "attr", "count", "d", "default", "dictsort", "first", "groupby", "items", "join",
        "last", "length", "list", "map", "max", "min", "reject", "rejectattr", "reverse",
        "select", "selectattr", "sort", "sum", "unique",
    ]
)  # fmt: skip
_BRACE_WIDTH = re.compile(r":[^{}]*(\d{5,}|\{)")
_WIDTH = re.compile(r"%[^%a-zA-Z]*?(\*|\d{5,})")


class LimitExceeded(SecurityError):
    """A template did more than it may: too many rounds, or too large a text."""


class Work:
    """Rounds of loops and calls of one rendering."""

    def __init__(self) -> None:
        self.done = 0

    def add(self, amount: int) -> None:
        """Raises LimitExceeded past MAX_WORK."""
        self.done += amount
        if self.done > MAX_WORK:
            raise LimitExceeded(f"more than {MAX_WORK} rounds of loops and calls")


class CountedContext(Context):
    """A template's variables, with the work done so far."""

    work: Work | None = None

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        """As Jinja's, and the work counts on."""
        context = super().derived(locals)
        assert isinstance(context, CountedContext), "the environment's context_class"
        context.work = self.work
        return context


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment of one template. `now` is the clock that strftime_now reads."""

    context_class = CountedContext
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationBlock],
            finalize=_writable,
        )
        del self.globals["lipsum"]  # an answer must not depend on luck
        self.globals["range"] = _bounded_range
        self.globals["namespace"] = _namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: now().strftime(format)
        self.filters["tojson"] = _to_json
        self.filters[_COUNTED] = _counted
        self.filters[_MEASURED] = _measured
        for name in _UNBOUNDED_FILTERS:
            del self.filters[name]
        for name in ("center", "indent", "round", "truncate"):
            self.filters[name] = _narrow(self.filters[name])
        self.filters[_WRITABLE] = _writable
        self.filters["join"] = _join
        self.filters["replace"] = _replace
        self.filters["format"] = _format

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        """Jinja's hook between parsing and compiling: put the counters in."""
        bounded = _PutCounters().visit(source)
        return super()._generate(bounded, name, filename, defer_init)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic that could make something huge is looked at first."""
        if operator == "**" and not (_is_small(left, 10_000) and _is_small(right, 16)):
            raise LimitExceeded(f"{_shown(left)} ** {_shown(right)}")
        if operator == "*":
            _check_product(left, right)
        if operator == "%" and isinstance(left, str):
            _check_format(left)
            _writable(right)
        return _measured(context, super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls count as work; numbers handed to methods and sizes of results are bounded."""
        work = _work_of(__context)
        work.add(1)
        if isinstance(__obj, LoopContext) and args:  # a recursive loop's next level
            args = (_counted(__context, args[0]), *args[1:])
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_text_call(owner, __obj, args)
            for value in args:
                _writable(value)
        return _measured(__context, super().call(__context, __obj, *args, **kwargs))

    def call_filter(
        self,
        name: str,
        value: Any,
        args: Any = None,
        kwargs: Any = None,
        context: Context | None = None,
        eval_ctx: EvalContext | None = None,
    ) -> Any:
        """A filter called by its name, as `map` does: counted like one that is written out."""
        assert context is not None, "templates always have one"
        value = _counted(context, value) if name in _FILTERS_OF_LISTS else _writable(value)
        return _measured(context, super().call_filter(name, value, args, kwargs, context, eval_ctx))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` as Jinja guards it, with bounded widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        if _BRACE_WIDTH.search(value.__self__):
            raise LimitExceeded(f"the format {_shown(value.__self__)} has an unbounded width")

        def bounded(*args: Any, **kwargs: Any) -> str:
            _writable([*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return bounded


class _GenerationBlock(Extension):
    """`{% generation %}` marks what a model said, for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own shape

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _PutCounters(NodeTransformer):
    """Wraps what loops run over, and what is joined or captured, in the counting filters."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(cast(nodes.Expr, node.iter), _COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(part, _WRITABLE) for part in node.nodes]
        return _filtered(node, _MEASURED)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        if node.node is not None:
            bound = _COUNTED if node.name in _FILTERS_OF_LISTS else _WRITABLE
            node.node = _filtered(node.node, bound)
        return _filtered(node, _MEASURED)

    def visit_NSRef(self, node: nodes.NSRef) -> nodes.Node:
        if node.attr.startswith("_"):
            raise TemplateSyntaxError(f"attribute {node.attr!r} starts with '_'", node.lineno)
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = _filtered(node.filter, _MEASURED)  # without a filter: the body's text
        return node


def _filtered(node: nodes.Expr | None, name: str) -> nodes.Filter:
    line = 1 if node is None else node.lineno
    return nodes.Filter(node, name, [], [], None, None, lineno=line)


def _work_of(context: Context) -> Work:
    assert isinstance(context, CountedContext), "the environment's context_class"
    if context.work is None:
        context.work = Work()
    return context.work


@pass_context
def _counted(context: Context, items: Any) -> Any:
    work = _work_of(context)
    if isinstance(items, str):
        work.add(len(items) // _CHARS_A_ROUND)
        return items
    if isinstance(items, Sized):
        work.add(len(items))
        return items
    return _counting(work, items) if isinstance(items, Iterator) else items


def _counting(work: Work, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        work.add(1)
        yield item


@pass_context
def _measured(context: Context, value: Any) -> Any:
    """The value itself, its size counted. Raises LimitExceeded past MAX_OUTPUT_CHARS."""
    if isinstance(value, str | list | tuple):
        if len(value) > MAX_OUTPUT_CHARS:
            raise LimitExceeded(f"a {type(value).__name__} of more than {MAX_OUTPUT_CHARS} entries")
        size = _CHARS_A_ROUND if isinstance(value, str) else _ENTRIES_A_ROUND
        _work_of(context).add(len(value) // size)
    return value


def _writable(value: Any) -> Any:
    """The value itself. Raises LimitExceeded if it is a list whose text would be too large.

    A list of few entries may hold one long text, or another list, many times over.
    """
    if not isinstance(value, list | tuple | dict):
        return value
    waiting, num_chars = [value], 0
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            waiting += item
        num_chars += len(item) + 2 if isinstance(item, str | list | tuple | dict) else 8
        if num_chars > MAX_OUTPUT_CHARS or len(waiting) > MAX_OUTPUT_CHARS:
            raise LimitExceeded(f"a list whose text has more than {MAX_OUTPUT_CHARS} characters")
    return value


def _is_small(value: Any, limit: int) -> bool:
    return not isinstance(value, int | float) or abs(value) <= limit


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _check_product(left: Any, right: Any) -> None:
    for sized, number in ((left, right), (right, left)):
        if (
            isinstance(sized, str | list | tuple)
            and isinstance(number, int)
            and len(sized) * number > MAX_OUTPUT_CHARS
        ):
            raise LimitExceeded(f"a {type(sized).__name__} repeated {_shown(number)} times")
    if isinstance(left, int) and isinstance(right, int):
        for number in (left, right):
            if number.bit_length() > 4096:
                raise LimitExceeded("a number of more than 4096 bits")


def _check_format(template: str) -> None:
    if match := _WIDTH.search(template):
        raise LimitExceeded(f"the format {match[0]!r} asks for a width of {_MAX_WIDTH} or more")


def _check_text_call(owner: str, method: Any, args: tuple[Any, ...]) -> None:
    name = getattr(method, "__name__", "")
    if name in ("ljust", "rjust", "center", "zfill", "expandtabs"):
        _check_widths(args)
    elif name == "replace" and len(args) >= 2 and isinstance(args[1], str):
        _check_replacement(owner, args[1])
    elif name == "join" and args and isinstance(args[0], Sized):
        _check_replacement(args[0], owner)


def _check_replacement(places: Sized, text: str) -> None:
    """`text` put at up to as many places as there are entries, as replace and join do."""
    if (len(places) + 1) * len(text) > MAX_OUTPUT_CHARS:
        raise LimitExceeded(f"{len(text)} characters put in up to {len(places)} places")


def _check_widths(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MAX_WIDTH:
            raise LimitExceeded(f"a width of {value}, more than {_MAX_WIDTH}")


def _narrow(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's whose numbers are widths, with those bounded."""

    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_widths((*args, *kwargs.values()))
        return filter_(value, *args, **kwargs)

    return bounded


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    """Jinja's `format` filter: printf style."""
    template = str(value)
    _check_format(template)
    _writable([*args, *kwargs.values()])
    return template % (kwargs or args)


def _replace(value: Any, old: str, new: str, count: int = -1) -> str:
    """Jinja's `replace` filter."""
    text = str(value)
    _check_replacement(text, str(new))
    return text.replace(str(old), str(new), -1 if count is None else count)


@pass_environment
def _join(environment: Environment, value: Any, d: str = "", attribute: Any = None) -> str:
    """Jinja's `join` filter."""
    entries = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    texts, num_chars = [], 0
    for entry in entries:
        texts.append(str(_writable(entry)))
        num_chars += len(texts[-1]) + len(str(d))
        if num_chars > MAX_OUTPUT_CHARS:
            raise LimitExceeded(f"a text of more than {MAX_OUTPUT_CHARS} characters")
    return str(d).join(texts)


def _bounded_range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > _MAX_NUMBER:
        raise LimitExceeded(f"a range of {len(numbers)} numbers; {_MAX_NUMBER} are allowed")
    return numbers


def _namespace(*args: Mapping[str, Any], **kwargs: Any) -> Namespace:
    names = [*kwargs, *(name for mapping in args for name in mapping)]
    for name in names:
        if str(name).startswith("_"):
            raise SecurityError(f"the namespace attribute {name!r} starts with an underscore")
    return Namespace(*args, **kwargs)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, without Jinja's HTML escapes."""
    if isinstance(indent, int):
        _check_widths((indent,))
    _writable(value)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
