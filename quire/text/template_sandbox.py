"""The sandbox of chat templates: Jinja with accounting of all work.

A template is an untrusted program published with a model. It gets plain values only, reaches no
Python internals, and cannot make the process hang, crash or exhaust memory: counters are inserted
into the compiled template (each loop iteration, each text written, each list created), and
everything it may call is bounded (template_filters.py) by one account (template_work.py). Otherwise
it renders as in `transformers`. Knows nothing of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, TypeVar, cast

from jinja2 import (
    TemplateError,
    TemplateSyntaxError,
    nodes,
    pass_context,
)
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from quire.text import template_filters as bounded
from quire.text.template_work import LimitExceeded, Work

Node = TypeVar("Node", bound=nodes.Node)

_MAX_RANGE = 1_000_000
_MAX_FORMAT_CHARS = 200
# Names with a space, which templates cannot use.
_PLAIN = "plain "  # before the name of Jinja's own filter or test
_MADE = "value made"
_WRITTEN = "value written"
_LOOKED = "value looked at"
_HELD = "value looked into"
_ROUND = "round begun"
_NODES_A_ROUND = 16
_NOT_POSSIBLE = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


class AccountedContext(Context):
    """A template's variables, and the account of their rendering."""

    work: Work

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        """Derive a context with the same account."""
        context = super().derived(locals)
        assert isinstance(context, AccountedContext), "the environment's context_class"
        context.work = self.work
        return context


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment of one model's templates. `now` is the clock that strftime_now reads."""

    context_class = AccountedContext
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationBlock],
            optimized=False,  # evaluate constants on the account, not while compiling
        )
        del self.globals["lipsum"]  # random: a prompt must be deterministic
        self.globals["dict"] = _Dictionaries()
        self.globals["namespace"] = _namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["range"] = _bounded_range
        self.globals["strftime_now"] = lambda format: _formatted_time(now, format)
        for name in bounded.LEFT_OUT:
            del self.filters[name]
        self._account_for_filters()
        self._account_for_tests()

    def _account_for_filters(self) -> None:
        for name, original in dict(self.filters).items():
            self.filters[_PLAIN + name] = original
            self.filters[name] = _accounted_filter(name)
        self.filters["format"] = _on_account(bounded.printf)
        self.filters["indent"] = _indent
        self.filters["join"] = _join
        self.filters["replace"] = _on_account(bounded.replace)
        self.filters["sum"] = _sum
        self.filters["tojson"] = _on_account(bounded.to_json)
        self.filters[_PLAIN + "wordcount"] = bounded.word_count
        self.filters[_MADE] = _made
        self.filters[_WRITTEN] = _written
        self.filters[_LOOKED] = _looked
        self.filters[_HELD] = _held
        self.filters[_ROUND] = _round_begun

    def _account_for_tests(self) -> None:
        for name, original in dict(self.tests).items():
            if name not in bounded.SHALLOW_TESTS:
                self.tests[_PLAIN + name] = original
                self.tests[name] = _accounted_test(name)

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        """Insert the counters between parsing and compiling."""
        counted = _InsertCounters().visit(source)
        return super()._generate(counted, name, filename, defer_init)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check arithmetic that could create a huge value."""
        work = _work_of(context)
        work.add(1)
        if operator == "%" and isinstance(left, str):
            bounded.check_printf(work, left, right)
        elif operator == "**" and not (_is_small(left, 10_000) and _is_small(right, 16)):
            raise LimitExceeded("a power of large numbers")
        elif operator == "*":
            _check_repeated(work, left, right)
        for value in (left, right):
            work.check_number(value)
        return work.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Charge for a call, its arguments and its result."""
        work = _work_of(__context)
        work.add(1)
        if not isinstance(__obj, Macro | LoopContext):  # these only pass on their arguments
            for value in (*args, *kwargs.values()):
                work.looked(value)
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, BuiltinMethodType) or isinstance(owner, str):
            args = bounded.check_method(work, owner, __obj.__name__, args, kwargs)
        if isinstance(__obj, _BoundedFormat):
            bounded.check_braces(work, __obj.template, [*args, *kwargs.values()])
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

    def call_plain_filter(
        self, context: Context, name: str, value: Any, args: Any, kwargs: Any
    ) -> Any:
        """Call Jinja's own filter without accounting."""
        return super().call_filter(_PLAIN + name, value, args, kwargs, context, context.eval_ctx)

    def call_plain_test(
        self, context: Context, name: str, value: Any, args: Any, kwargs: Any
    ) -> Any:
        """Call Jinja's own test without accounting."""
        return super().call_test(_PLAIN + name, value, args, kwargs, context, context.eval_ctx)

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


class _GenerationBlock(Extension):
    """Render the body of `{% generation %}`, which marks model output for training."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own shape

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _InsertCounters(NodeTransformer):
    """Insert the counting filters where a template can repeat or create much."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:
            test = cast(nodes.Expr, node.test)
            node.test = _filtered(test, _ROUND, _cost(test))
        return self._counting_rounds(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._counting_rounds(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._counting_rounds(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._counting_rounds(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(child, _WRITTEN) for child in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(part, _WRITTEN) for part in node.nodes]
        return _filtered(node, _LOOKED)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return _filtered(self.generic_visit(node), _MADE)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return _filtered(self.generic_visit(node), _MADE)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _MADE) if node.ctx == "load" else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filtered(node.key, _LOOKED)  # hashed by the dict
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _MADE) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        only = node.ops[0] if len(node.ops) == 1 else None
        if only is not None and only.op in ("in", "notin"):
            only.expr = _unless_constant(only.expr, _HELD)
            node.expr = _unless_constant(node.expr, _LOOKED)
        elif only is None or not isinstance(only.expr, nodes.Const):
            node.expr = _unless_constant(node.expr, _LOOKED)
            for operand in node.ops:
                operand.expr = _unless_constant(operand.expr, _LOOKED)
        return node

    def visit_NSRef(self, node: nodes.NSRef) -> nodes.Node:
        if node.attr.startswith("_"):
            raise TemplateSyntaxError(f"attribute {node.attr!r} starts with '_'", node.lineno)
        return node

    def generic_visit(self, node: Node, *args: Any, **kwargs: Any) -> Node:
        """Reject other templates: include, import and extends."""
        if isinstance(node, _NOT_POSSIBLE):
            raise TemplateSyntaxError(
                "a chat template stands alone: it cannot include, import or extend", node.lineno
            )
        return cast(Node, super().generic_visit(node, *args, **kwargs))

    def _counting_rounds(
        self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block
    ) -> nodes.Node:
        cost = _cost(*node.body)
        self.generic_visit(node)
        round_ = _filtered(nodes.Const(None, lineno=node.lineno), _ROUND, cost)
        node.body.insert(0, nodes.ExprStmt(round_, lineno=node.lineno))
        return node


def _cost(*parts: nodes.Node) -> int:
    """Return the number of rounds that one pass over parts of a template counts as."""
    return 1 + sum(1 for part in parts for _ in part.find_all(nodes.Node)) // _NODES_A_ROUND


def _filtered(node: nodes.Expr, name: str, *args: int) -> nodes.Filter:
    line = node.lineno
    given: list[nodes.Expr] = [nodes.Const(arg, lineno=line) for arg in args]
    return nodes.Filter(node, name, given, [], None, None, lineno=line)


def _unless_constant(node: nodes.Expr, name: str) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filtered(node, name)


def _work_of(context: Context) -> Work:
    assert isinstance(context, AccountedContext), "the environment's context_class"
    return context.work


def _environment_of(context: Context) -> TemplateSandbox:
    return cast(TemplateSandbox, context.environment)


def _accounted_filter(name: str) -> Callable[..., Any]:
    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        work = _work_of(context)
        work.add(1)
        value = bounded.admitted(work, name, value, args, kwargs)
        environment = _environment_of(context)
        return work.made(environment.call_plain_filter(context, name, value, args, kwargs))

    return run


def _accounted_test(name: str) -> Callable[..., Any]:
    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        work = _work_of(context)
        work.add(1)
        for part in (value, *args, *kwargs.values()):
            work.looked(part)
        return _environment_of(context).call_plain_test(context, name, value, args, kwargs)

    return run


def _on_account(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter of this package that takes the account."""

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        work = _work_of(context)
        for part in (value, *args, *kwargs.values()):
            work.looked(part)
        return work.made(filter_(work, value, *args, **kwargs))

    return run


@pass_context
def _join(context: Context, value: Any, d: Any = "", attribute: Any = None) -> Any:
    work = _work_of(context)
    bounded.admitted(work, "join", "", (d, attribute), {})
    return work.made(bounded.join(work, context.environment, value, d, attribute))


@pass_context
def _sum(context: Context, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    def add(left: Any, right: Any) -> Any:
        return environment.call_binop(context, "+", left, right)

    environment = _environment_of(context)
    work = _work_of(context)
    bounded.admitted(work, "sum", "", (attribute, start), {})
    return bounded.total(work, environment, add, value, attribute, start)


@pass_context
def _indent(
    context: Context, value: Any, width: Any = 4, first: bool = False, blank: bool = False
) -> Any:
    work = _work_of(context)
    work.looked(value)
    bounded.indent(work, value, width)
    given = (width, first, blank)
    return work.made(
        _environment_of(context).call_plain_filter(context, "indent", value, given, {})
    )


@pass_context
def _made(context: Context, value: Any) -> Any:
    return _work_of(context).made(value)


@pass_context
def _written(context: Context, value: Any) -> Any:
    """Charge for a value that becomes part of a text."""
    work = _work_of(context)
    if isinstance(value, str):
        return work.made(value)
    work.make(4 * work.looked(value).chars)
    return value


@pass_context
def _looked(context: Context, value: Any) -> Any:
    _work_of(context).looked(value)
    return value


@pass_context
def _held(context: Context, value: Any) -> Any:
    """What something is looked for in: an object finds a key without walking its values."""
    if not isinstance(value, dict):
        work = _work_of(context)
        work.looked(value)
        if isinstance(value, range):
            work.add(len(value))
    return value


@pass_context
def _round_begun(context: Context, value: Any, cost: int) -> Any:
    _work_of(context).add(cost)
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
