"""Chat templates: messages to the text a model was trained to continue.

A model folder names its template in chat_template.jinja, chat_template.json or
tokenizer_config.json (one, or a list of named ones). Rendering follows what `transformers` does
with the same files. Who is at fault is told apart: a template that cannot be compiled, or does
what the sandbox forbids, is a TokenizerError; messages a template refuses are InvalidParameter.
Knows no HTTP; messages come as plain dictionaries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError, TemplateRuntimeError

from quire.base.errors import InvalidParameter, TokenizerError
from quire.text.added_tokens import read_json
from quire.text.template_sandbox import (
    MAX_OUTPUT_CHARS,
    CountedContext,
    LimitExceeded,
    TemplateSandbox,
    Work,
)
from quire.text.tokenizer import Tokenizer

MAX_SOURCE_CHARS = 500_000
_DEFAULT = "default"
_TOOL_USE = "tool_use"
_PROBE = "quire-probe"
_CAUSED_BY_INPUT = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
    MemoryError,
)


class ChatTemplate:
    """The compiled templates of one model. Immutable; may be used from several threads.

    sources: template text by name. variables: what every rendering sees beside the messages
    (bos_token, eos_token, ...). now: the clock behind strftime_now.
    Raises TokenizerError for a template that does not compile, with its line.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        variables: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.sources = dict(sources)
        self._variables = dict(variables)
        self._sandbox = TemplateSandbox(now)
        self._templates = {
            name: self._compiled(name, source) for name, source in self.sources.items()
        }
        self.takes_parts = self._takes_parts()

    @classmethod
    def load(
        cls, path: Path, tokenizer: Tokenizer, *, now: Callable[[], datetime] = datetime.now
    ) -> ChatTemplate | None:
        """The template of a model folder, or in a file of its own; None where there is none."""
        sources = {_DEFAULT: _read_text(path)} if path.is_file() else _sources_in(path)
        if not sources:
            return None
        return cls(sources, variables=tokenizer.special_tokens, now=now)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_name: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The text for these messages; tokenize it without adding special tokens.

        A message's content is text, or a list of parts {"type": "text", "text": ...}, which are
        joined by line breaks for templates that know no parts. Further keyword arguments are
        variables of the template. Raises InvalidParameter where the template refuses the
        messages, and TokenizerError where the template does what it may not.
        """
        name = self._chosen(template_name, tools)
        if not self.takes_parts:
            messages = [_with_plain_content(message) for message in messages]
        variables = {
            **self._variables,
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "documents": None if documents is None else list(documents),
            "add_generation_prompt": add_generation_prompt,
            **kwargs,
        }
        try:
            return self._run(name, variables)
        except LimitExceeded as error:
            raise InvalidParameter(
                f"the chat template does too much for these messages: {error.message}; shorten "
                "them",
                param="messages",
            ) from error
        except SecurityError as error:
            raise TokenizerError(
                f"{self._place(name, error)} does what a template may not: {error.message}"
            ) from error
        except _CAUSED_BY_INPUT as error:
            self._refuse(name, error)

    def _run(self, name: str, variables: Mapping[str, Any]) -> str:
        template = self._templates[name]
        context = template.new_context(dict(variables))
        assert isinstance(context, CountedContext), "the environment's context_class"
        context.work = Work()
        num_chars, pieces = 0, []
        for piece in template.root_render_func(context):
            num_chars += len(piece)
            if num_chars > MAX_OUTPUT_CHARS:
                raise LimitExceeded(f"a text of more than {MAX_OUTPUT_CHARS} characters")
            pieces.append(str(piece))
        return "".join(pieces)

    def _refuse(self, name: str, error: Exception) -> NoReturn:
        raised_on_purpose = isinstance(error, TemplateError) and not isinstance(
            error, TemplateRuntimeError
        )
        if raised_on_purpose:
            message = f"the model's chat template refuses these messages: {error}"
        else:
            message = (
                f"{self._place(name, error)} cannot render these messages: "
                f"{type(error).__name__}: {error}; check their roles and contents"
            )
        raise InvalidParameter(message, param="messages") from error

    def _place(self, name: str, error: Exception) -> str:
        """The template and, where the traceback tells it, the line."""
        template, line = self._templates[name], None
        step = error.__traceback__
        while step is not None:
            if step.tb_frame.f_code.co_filename == template.filename:
                line = template.get_corresponding_lineno(step.tb_lineno)
            step = step.tb_next
        where = "" if line is None else f", line {line},"
        return f"chat template {name!r}{where}"

    def _chosen(self, name: str | None, tools: object) -> str:
        if name is None and tools and _TOOL_USE in self._templates:
            return _TOOL_USE
        chosen = _DEFAULT if name is None else name
        if chosen not in self._templates:
            raise InvalidParameter(
                f"the model has no chat template named {chosen!r}; it has "
                f"{', '.join(sorted(self._templates))}",
                param="chat_template",
            )
        return chosen

    def _compiled(self, name: str, source: str) -> Template:
        if len(source) > MAX_SOURCE_CHARS:
            raise TokenizerError(
                f"chat template {name!r} has {len(source)} characters; at most "
                f"{MAX_SOURCE_CHARS} are allowed"
            )
        try:
            code = self._sandbox.compile(source, name=name, filename=f"<chat template {name}>")
        except TemplateSyntaxError as error:
            raise TokenizerError(
                f"chat template {name!r}, line {error.lineno}: {error.message}"
            ) from error
        except (RecursionError, MemoryError) as error:
            raise TokenizerError(f"chat template {name!r} is nested too deeply") from error
        return Template.from_code(self._sandbox, code, self._sandbox.make_globals(None))

    def _takes_parts(self) -> bool:
        """Whether the template itself takes a list of parts apart, found by trying."""
        parts = [{"type": "text", "text": _PROBE}]
        try:
            text = self._run(
                self._chosen(None, None),
                {
                    **self._variables,
                    "messages": [{"role": "user", "content": parts}],
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": True,
                },
            )
        except (InvalidParameter, *_CAUSED_BY_INPUT):
            return False
        return _PROBE in text and "'text'" not in text and '"text"' not in text


def _with_plain_content(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise InvalidParameter(
                f"a message has a content part of type {str(kind)[:40]!r}; this model takes parts "
                'of the form {"type": "text", "text": "..."}',
                param="messages",
            )
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}


def _sources_in(folder: Path) -> dict[str, str]:
    """Templates by name. A file of its own counts over the field in tokenizer_config.json."""
    sources: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        value = read_json(folder / name).get("chat_template")
        if value is not None:
            sources.update(_named(value, folder / name))
    if (folder / "chat_template.jinja").is_file():
        sources[_DEFAULT] = _read_text(folder / "chat_template.jinja")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[file.stem] = _read_text(file)
    if sources and _DEFAULT not in sources:
        if len(sources) > 1:
            raise TokenizerError(
                f"{folder}: has the chat templates {', '.join(sorted(sources))}, but none named "
                f"{_DEFAULT!r}; name one so"
            )
        sources[_DEFAULT] = next(iter(sources.values()))
    return sources


def _named(value: object, file: Path) -> dict[str, str]:
    if isinstance(value, str):
        return {_DEFAULT: value}
    entries = value if isinstance(value, list) else [value]
    sources: dict[str, str] = {}
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else None
        source = entry.get("template") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not isinstance(source, str):
            raise TokenizerError(
                f"{file}: chat_template holds {json.dumps(entry)[:60]}; a string, or a list of "
                "objects with name and template, is allowed"
            )
        sources[name] = source
    return sources


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{file}: not valid UTF-8 ({error}); copy it again") from error
