"""Chat templates: messages to the text a model was trained to continue.

A model has one template or several by name. Rendering follows what `transformers` does with the
same files and messages, byte for byte: keys without a value are left out, reasoning goes by all
its names, a final message may be left open. A template that cannot be used is kept with the
reason, which is raised when it is asked for: a model can do without. Knows no HTTP.
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
from quire.text.template_files import DEFAULT, named_source, sources_in
from quire.text.template_sandbox import TemplateSandbox
from quire.text.template_work import Limits
from quire.text.tokenizer import Tokenizer

# What `render` itself sets; no caller may set it a second time as a variable.
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
_PROBE = "quire-probe"
_MOST_LEVELS = 80
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Stands at the end of a message that is left open. The space at its end tells whether the template
# keeps space there; the characters for private use, that no text says it by chance.
_OPEN_END = "\ue0f7open end\ue0f7 "


class ChatTemplate:
    """The templates of one model. Immutable; may be used from several threads.

    sources: template text by name; one named "default" is used where none is named. variables:
    what every rendering sees beside the messages (bos_token, eos_token, ...). now: the clock
    behind strftime_now; clock_s: the one behind the time limit. `problems`: what is wrong with
    templates that cannot be used, by name.
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
        """The templates of a model's folder; None where there are none.

        chosen: the name of one of them, or a file with another, which then is the default.
        Raises SettingError where it is neither, or cannot be used.
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
            raise SettingError(f"chat_template {chosen!r}: {template.problems[DEFAULT]}")
        if chosen is not None and "messages" not in template._templates[DEFAULT].variables:
            raise SettingError(
                f"chat_template {chosen!r} never reads messages, so all conversations would look "
                "alike; give a Jinja template of a chat model"
            )
        return template

    @classmethod
    def _unusable(cls, error: TokenizerError) -> ChatTemplate:
        template = cls({}, variables={})
        template.problems[DEFAULT] = str(error)
        return template

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the templates, usable or not."""
        return tuple(sorted({*self._templates, *self.problems}))

    def with_source(self, source: str) -> ChatTemplate:
        """A template of the caller's own, for the same model. Raises TokenizerError."""
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
        """Raises the error that every rendering by the default template would raise."""
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
        """The text for these messages; tokenize it without adding special tokens.

        A message's content is text, or a list of parts {"type": "text", "text": ...}, which are
        joined by line breaks for templates that know no parts. add_generation_prompt: open an
        answer of the model's at the end; as told, else yes, unless continue_final_message: then
        the text ends where the content of the last message ends. chat_template: the name of one
        of the model's templates. Further keyword arguments are variables of the template.
        Raises InvalidParameter where the template refuses the messages, and TokenizerError where
        it cannot be used or does what it may not.
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
        if in_parts and not self._finds_probe(template, _in_parts()):
            said = [_with_plain_content(message) for message in said]
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
        return _render_open(template, values)

    def check_variables(
        self,
        names: Iterable[str],
        *,
        tools: object = None,
        chat_template: str | None = None,
    ) -> None:
        """Raises InvalidParameter for a variable that cannot change what the template renders."""
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
        """Whether a variable of this name can change what the template renders."""
        return name in self._named(chat_template, tools).variables

    def source(self, *, tools: object = None, chat_template: str | None = None) -> str:
        """The text of the template that renders such a conversation."""
        return self._named(chat_template, tools).source

    def check_reads(
        self, name: str, *, tools: object = None, chat_template: str | None = None
    ) -> None:
        """Raises InvalidParameter if the template has no place for `name`: tools or documents."""
        template = self._named(chat_template, tools)
        if name not in template.variables:
            raise InvalidParameter(
                f"chat template {template.name!r} has no place for {name}: they would not be in "
                f"the prompt; leave {name} out, or put them into a message",
                param=name,
            )

    def takes_argument_objects(
        self, *, tools: object = None, chat_template: str | None = None
    ) -> bool:
        """Whether a tool call's arguments should be an object in messages, not its JSON text.

        Found by trying: templates that write them out with `tojson` would quote a text again.
        """
        template = self._named(chat_template, tools)
        return self._finds_probe(template, _with_tool_call({_PROBE: 1}))

    def takes_argument_text(
        self, *, tools: object = None, chat_template: str | None = None
    ) -> bool:
        """Whether a tool call's arguments may be a text, of which the template shows what it says.

        One that goes through an object's entries does not.
        """
        template = self._named(chat_template, tools)
        return self._finds_probe(template, _with_tool_call(_PROBE))

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

    def _finds_probe(self, template: CompiledTemplate, messages: list[dict[str, Any]]) -> bool:
        """Whether a template takes apart an object with _PROBE in it, and does not just print."""
        nothing: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
        try:
            text = template.render({**self._variables, "messages": messages, **nothing})
        except (InvalidParameter, TokenizerError):
            return False
        return _PROBE in text and f"'{_PROBE}'" not in text and '"text"' not in text


def _in_parts() -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]


def _with_tool_call(arguments: object) -> list[dict[str, Any]]:
    function = {"name": "look", "arguments": arguments}
    call = {"id": "call12345", "type": "function", "function": function}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


def _render_open(template: CompiledTemplate, values: dict[str, Any]) -> str:
    """The text up to where the content of the last message ends."""
    messages = values["messages"]
    content = messages[-1].get("content") if messages else None
    said, opened = _opened(content)
    last = {**messages[-1], "content": opened} if messages else {}
    text = template.render({**values, "messages": [*messages[:-1], last]})
    mark = _OPEN_END.strip()
    if said.strip() not in text or mark not in text:
        raise InvalidParameter(
            f"continue_final_message is true, but chat template {template.name!r} does not write "
            "the content of the last message as it is, so the text cannot be cut where it ends; "
            "leave continue_final_message out",
            param="continue_final_message",
        )
    at = text.rindex(mark)
    if text.startswith(_OPEN_END, at):
        return text[:at]
    return text[:at].rstrip()  # the template takes space off the end of a message


def _opened(content: Any) -> tuple[str, Any]:
    """The last text of a message's content, and the content with the mark behind that text."""
    if isinstance(content, str):
        return content, content + _OPEN_END
    parts = list(content) if isinstance(content, list | tuple) else []
    for at in reversed(range(len(parts))):
        if isinstance(parts[at], dict) and isinstance(parts[at].get("text"), str):
            said = parts[at]["text"]
            parts[at] = {**parts[at], "text": said + _OPEN_END}
            return said, parts
    raise InvalidParameter(
        "continue_final_message is true, but the last message has no text to continue; give it "
        "content",
        param="continue_final_message",
    )


def _said(at: int, message: Any) -> dict[str, Any]:
    """A message as templates see it: plain values, none of them None, reasoning by all names."""
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


def _plain(value: Any, param: str, levels: int = _MOST_LEVELS) -> Any:
    """A copy made of what JSON has, which is all a template is shown."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if levels == 0:
        raise InvalidParameter(
            f"{param} is nested more than {_MOST_LEVELS} levels deep; make it flatter", param=param
        )
    if isinstance(value, Mapping):
        return {
            _plain(key, param, levels - 1): _plain(entry, param, levels - 1)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        entries = [_plain(entry, param, levels - 1) for entry in value]
        return tuple(entries) if isinstance(value, tuple) else entries
    for kind in (str, int, float):  # a class derived from one, an enum's value perhaps
        if isinstance(value, kind):
            return kind(value)
    raise InvalidParameter(
        f"{param} holds a value of type {type(value).__name__}; text, numbers, true, false, null, "
        "lists and objects are allowed",
        param=param,
    )


def _with_plain_content(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
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
