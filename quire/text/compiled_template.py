"""A compiled template: variables to text, with errors attributed to the template or the client.

A template that cannot be compiled, violates the sandbox, or does too much work for a short
conversation, raises TokenizerError; a conversation that the template rejects, fails on, or that is
too long, raises InvalidParameter. Both name the template, and its line if known.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from functools import cached_property
from typing import Any, cast

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError

from quire.base.errors import InvalidParameter, QuireError, TokenizerError
from quire.text.template_filters import AccountedContext
from quire.text.template_sandbox import TemplateSandbox
from quire.text.template_work import LimitExceeded, Limits, Work

MAX_SOURCE_CHARS = 500_000
# Below this length of the conversation an exceeded limit is attributed to the template.
_SHORT_CHARS = 200_000
_MAX_MESSAGE_CHARS = 2_000
_MAX_REASON_CHARS = 300
_TEMPLATE_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    AssertionError,
    NameError,
    RuntimeError,
)
_TOO_DEEP = (RecursionError, MemoryError)
_UNCOMPILED = (SyntaxError, TypeError, ValueError, ArithmeticError, RecursionError, MemoryError)


class CompiledTemplate:
    """A template that can be rendered, in several threads at once.

    Raises TokenizerError with its name and line if it cannot be compiled.
    """

    def __init__(
        self,
        sandbox: TemplateSandbox,
        name: str,
        source: str,
        *,
        limits: Limits,
        clock_s: Callable[[], float],
    ) -> None:
        self.name = name
        self.source = source
        self._limits = limits
        self._clock_s = clock_s
        self._sandbox = sandbox
        self._template = self._compiled()

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text. Raises InvalidParameter or TokenizerError (see the module docstring)."""
        try:
            return self._run(variables)
        except (LimitExceeded, *_TOO_DEEP) as error:
            raise self._too_much(error, variables) from error
        except SecurityError as error:
            raise TokenizerError(
                f"{self._place(error)} does what a template must not: {_cut(error)}; the template "
                "is at fault: use another (--chat-template)"
            ) from error
        except _TEMPLATE_FAILURES as error:
            raise self._rejection(error) from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """Return the names read before they are set; others cannot affect the output."""
        return frozenset(meta.find_undeclared_variables(self._sandbox.parse(self.source)))

    @cached_property
    def open_variables(self) -> frozenset[str]:
        """Return those never set, or set only if undefined: the ones worth listing to users."""
        parsed = self._sandbox.parse(self.source)
        set_here = {name.name for name in parsed.find_all(nodes.Name) if name.ctx != "load"}
        tested = {
            test.node.name
            for test in parsed.find_all(nodes.Test)
            if test.name in ("defined", "undefined") and isinstance(test.node, nodes.Name)
        }
        return self.variables - (set_here - tested)

    def _run(self, variables: Mapping[str, Any]) -> str:
        context = self._template.new_context(dict(variables))
        assert isinstance(context, AccountedContext), "the environment's context_class"
        context.work = Work(self._limits, self._clock_s)
        num_chars, pieces = 0, []
        written = self._template.root_render_func(context)
        for piece in written:
            num_chars += len(piece)
            if num_chars > self._limits.text_chars:
                where_it_is = cast("Generator[str, None, None]", written)
                where_it_is.throw(LimitExceeded(f"more than {self._limits.text_chars} characters"))
            pieces.append(str(piece))
        return "".join(pieces)

    def _too_much(self, error: BaseException, variables: Mapping[str, Any]) -> QuireError:
        reason = _cut(error) if isinstance(error, LimitExceeded) else type(error).__name__
        num_chars = _chars_in(variables)
        if num_chars < _SHORT_CHARS:
            return TokenizerError(
                f"{self._place(error)} exceeds a limit: {reason}, for a conversation of "
                f"{num_chars} characters; the template is at fault: use another (--chat-template)"
            )
        return InvalidParameter(
            f"{self._place(error)} exceeds a limit for these messages: {reason}, for {num_chars} "
            "characters; shorten them",
            param="messages",
        )

    def _rejection(self, error: Exception) -> InvalidParameter:
        raised_on_purpose = isinstance(error, TemplateError) and not isinstance(
            error, TemplateRuntimeError
        )
        if raised_on_purpose:
            words = str(error)[:_MAX_MESSAGE_CHARS]
            message = f"the model's chat template refuses these messages: {words}"
        else:
            message = (
                f"{self._place(error)} cannot render these messages: "
                f"{type(error).__name__}: {_cut(error)}; check roles, contents and tools"
            )
        return InvalidParameter(message, param="messages")

    def _place(self, error: BaseException) -> str:
        """Return the template's name and, if the traceback has it, the line."""
        line, step = None, error.__traceback__
        while step is not None:
            if step.tb_frame.f_code.co_filename == self._template.filename:
                line = self._template.get_corresponding_lineno(step.tb_lineno)
            step = step.tb_next
        where = "" if line is None else f", line {line},"
        return f"chat template {self.name!r}{where}"

    def _compiled(self) -> Template:
        name, source = self.name, self.source
        if len(source) > MAX_SOURCE_CHARS:
            raise TokenizerError(
                f"chat template {name!r} has {len(source)} characters; at most "
                f"{MAX_SOURCE_CHARS} are allowed"
            )
        try:
            code = self._sandbox.compile(source, name=name, filename=f"<chat template {name}>")
        except TemplateSyntaxError as error:
            raise TokenizerError(
                f"chat template {name!r}, line {error.lineno}: {_cut(error.message)}"
            ) from error
        except _UNCOMPILED as error:
            raise TokenizerError(
                f"chat template {name!r} is nested too deeply, or has a number too long "
                f"({type(error).__name__}: {_cut(error)})"
            ) from error
        return Template.from_code(self._sandbox, code, self._sandbox.make_globals(None))


def _cut(error: object) -> str:
    text = str(error)
    return text if len(text) <= _MAX_REASON_CHARS else text[:_MAX_REASON_CHARS] + "..."


def _chars_in(variables: Mapping[str, Any]) -> int:
    """Return the characters of all texts, plus one for every other value."""
    waiting, num_chars = list(variables.values()), 0
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            waiting += item
        num_chars += len(item) if isinstance(item, str) else 1
    return num_chars
