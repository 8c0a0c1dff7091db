"""Chat templates: render messages into the text a model was trained to continue.

A model has one template, or several with names. Rendering equals that of `transformers` for the
same files and messages, byte for byte: keys without a value are dropped, reasoning is passed under
all its names, a final message may be left open. An unusable template is kept with the reason, which
is raised on use, since a model works without it. Knows no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from quire.base.errors import InvalidParameter, SettingError, TokenizerError
from quire.text.compiled_template import CompiledTemplate
from quire.text.message_forms import (
    argument_objects,
    render_open,
    takes_parts,
    with_plain_content,
)
from quire.text.template_files import DEFAULT, named_source, sources_in
from quire.text.template_sandbox import TemplateSandbox
from quire.text.template_work import Limits
from quire.text.tokenizer import Tokenizer

# Variables set by `render` itself; callers must not pass them as template variables.
OWN_VARIABLES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
    }
)
_TOOL_USE = "tool_use"
_MAX_LEVELS = 80
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The templates of one model. Immutable and thread-safe.

    sources: template text by name; "default" is used unless a name is given. variables: passed to
    every rendering besides the messages (bos_token, eos_token, ...). now: the clock of
    strftime_now; clock_s: the clock of the time limit. `problems`: why templates cannot be used, by
    name.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        variables: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
        limits: Limits | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.problems: dict[str, str] = {}
        self._variables = dict(variables)
        self._now, self._limits, self._clock_s = now, limits or Limits(), clock_s
        self._templates: dict[str, CompiledTemplate] = {}
        sandbox = TemplateSandbox(now)
        for name, source in sources.items():
            try:
                self._templates[name] = CompiledTemplate(
                    sandbox, name, source, limits=self._limits, clock_s=clock_s
                )
            except TokenizerError as error:
                self.problems[name] = str(error)

    @classmethod
    def load(
        cls,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        chosen: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> ChatTemplate | None:
        """Return the templates of a model's directory; None if there are none.

        chosen: the name of one of them, or a file with another, which becomes the default. Raises
        SettingError if it is neither, or unusable.
        """
        try:
            sources = sources_in(folder)
        except TokenizerError as error:
            if chosen is None:
                return cls._unusable(error)
            sources = {}
        if chosen is not None:
            sources[DEFAULT] = named_source(chosen, sources)
        if not sources:
            return None
        template = cls(sources, variables=tokenizer.special_tokens, now=now)
        if chosen is not None and DEFAULT in template.problems:
            raise SettingError(
                f"chat_template {chosen!r}: {template.problems[DEFAULT]}; correct the file, or "
                "name another"
            )
        if chosen is not None and "messages" not in template._templates[DEFAULT].variables:
            raise SettingError(
                f"chat_template {chosen!r} never reads messages, so every conversation would have "
                "the same prompt; give a Jinja template of a chat model"
            )
        return template

    @classmethod
    def _unusable(cls, error: TokenizerError) -> ChatTemplate:
        template = cls({}, variables={})
        template.problems[DEFAULT] = str(error)
        return template

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the templates, usable or not."""
        return tuple(sorted({*self._templates, *self.problems}))

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the texts of the usable templates."""
        return tuple(template.source for template in self._templates.values())

    def with_source(self, source: str) -> ChatTemplate:
        """Return a template given by the caller, for the same model. Raises TokenizerError."""
        template = ChatTemplate(
            {DEFAULT: source},
            variables=self._variables,
            now=self._now,
            limits=self._limits,
            clock_s=self._clock_s,
        )
        for problem in template.problems.values():
            raise TokenizerError(problem)
        return template

    def check_usable(self) -> None:
        """Raise the error that every rendering by the default template would raise."""
        self._named(None, None)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Return the text for these messages; tokenize it without adding special tokens.

        A message's content is text, or a list of parts {"type": "text", "text": ...}, which are
        joined by line breaks for templates that do not support parts. add_generation_prompt: open
        an answer of the model at the end; the default is the opposite of continue_final_message,
        which ends the text at the end of the last message's content. chat_template: the name of one
        of the model's templates. Further keyword arguments are variables of the template. Raises
        InvalidParameter if the template rejects the messages, and TokenizerError if it is unusable
        or violates the sandbox.
        """
        opens = (
            not continue_final_message if add_generation_prompt is None else add_generation_prompt
        )
        if opens and continue_final_message:
            raise InvalidParameter(
                "add_generation_prompt and continue_final_message are both true; an answer is "
                "either begun or continued: leave one out",
                param="continue_final_message",
            )
        template = self._named(chat_template, tools)
        said = [_said(at, message) for at, message in enumerate(messages)]
        in_parts = any(isinstance(message.get("content"), list) for message in said)
        if in_parts and not takes_parts(template, self._variables):
            said = [with_plain_content(message) for message in said]
        values = {
            **self._variables,
            "messages": said,
            "tools": _plain(tools, "tools"),
            "documents": _plain(documents, "documents"),
            "add_generation_prompt": opens,
            **{name: _plain(value, name) for name, value in variables.items()},
        }
        if not continue_final_message:
            return template.render(values)
        return render_open(template, values)

    def check_variables(
        self,
        names: Iterable[str],
        *,
        tools: object = None,
        chat_template: str | None = None,
    ) -> None:
        """Raise InvalidParameter for a variable that cannot affect the template's output."""
        template = self._named(chat_template, tools)
        known = template.open_variables - OWN_VARIABLES
        for name in names:
            if name in OWN_VARIABLES:
                raise InvalidParameter(
                    f"{name!r} is not a variable for chat_template_kwargs; give it as an argument "
                    "of its own",
                    param="chat_template_kwargs",
                )
            if name not in template.variables:
                near = get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                listed = ", ".join(sorted(known)) or "none"
                raise InvalidParameter(
                    f"chat template {template.name!r} has no variable {name[:60]!r}; {hint}it "
                    f"has: {listed}",
                    param="chat_template_kwargs",
                )

    def reads(self, name: str, *, tools: object = None, chat_template: str | None = None) -> bool:
        """Return whether a variable of this name can affect the template's output."""
        return name in self._named(chat_template, tools).variables

    def source(self, *, tools: object = None, chat_template: str | None = None) -> str:
        """Return the text of the template that renders such a conversation."""
        return self._named(chat_template, tools).source

    def check_reads(
        self, name: str, *, tools: object = None, chat_template: str | None = None
    ) -> None:
        """Raise InvalidParameter if the template does not use `name`: tools or documents."""
        template = self._named(chat_template, tools)
        if name not in template.variables:
            raise InvalidParameter(
                f"chat template {template.name!r} does not use {name}: they would not be in the "
                f"prompt; leave {name} out, or put them into a message",
                param=name,
            )

    def with_argument_objects(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: object = None,
        chat_template: str | None = None,
    ) -> Sequence[Mapping[str, Any]]:
        """Return messages with JSON text of tool calls' arguments parsed, if the template needs it.

        Raises InvalidParameter for text that is no object, if the template cannot write text.
        """
        if not any(message.get("tool_calls") for message in messages):
            return messages
        template = self._named(chat_template, tools)
        return argument_objects(template, self._variables, messages)

    def _named(self, name: str | None, tools: object) -> CompiledTemplate:
        if name is None and tools is not None and _TOOL_USE in self.names:
            name = _TOOL_USE
        chosen = DEFAULT if name is None else name
        if chosen in self.problems:
            raise TokenizerError(
                f"{self.problems[chosen]}; the model's chat template cannot be used: give another "
                "with --chat-template"
            )
        if chosen not in self._templates:
            raise InvalidParameter(
                f"the model has no chat template named {chosen[:60]!r}; it has "
                f"{', '.join(self.names)}: name one of them",
                param="chat_template",
            )
        return self._templates[chosen]


def _said(at: int, message: Any) -> dict[str, Any]:
    """Return a message as templates get it: plain values without None, reasoning by all names."""
    if not isinstance(message, Mapping):
        raise InvalidParameter(
            f"message {at} is of type {type(message).__name__}; an object with role and content "
            "is allowed",
            param="messages",
        )
    plain: dict[str, Any] = _plain(message, "messages")
    kept = {key: value for key, value in plain.items() if value is not None}
    reasoning = next((kept[name] for name in _REASONING if name in kept), None)
    if reasoning is None:
        return kept
    return {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _plain(value: Any, param: str, levels: int = _MAX_LEVELS) -> Any:
    """Return a copy with JSON types only, the only types passed to templates."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if levels == 0:
        raise InvalidParameter(
            f"{param} is nested more than {_MAX_LEVELS} levels deep; make it flatter", param=param
        )
    if isinstance(value, Mapping):
        return {
            _plain(key, param, levels - 1): _plain(entry, param, levels - 1)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        entries = [_plain(entry, param, levels - 1) for entry in value]
        return tuple(entries) if isinstance(value, tuple) else entries
    for kind in (str, int, float):  # a subclass, for example an enum
        if isinstance(value, kind):
            return kind(value)
    raise InvalidParameter(
        f"{param} holds a value of type {type(value).__name__}; text, numbers, true, false, null, "
        "lists and objects are allowed",
        param=param,
    )
