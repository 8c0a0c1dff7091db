"""TokenizerSide: tokenizer and chat template of a model, as the engine's client needs them.

The engine itself knows ids only and loads neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire import _native
from quire.base.errors import InvalidParameter, QuireError, TokenizerError
from quire.base.gguf_open import gguf_read_once
from quire.base.log import Log
from quire.base.show import show
from quire.config.groups import ModelConfig
from quire.engine.assembly.model_files import model_folder
from quire.models.model_folder import read_vocab_size
from quire.text.chat_template import ChatTemplate
from quire.text.messages import checked_messages
from quire.text.tokenizer import Tokenizer

_TOOL = '{"type": "function", "function": {"name": "...", "parameters": {...}}}'
_DOCUMENT = '{"title": "...", "text": "..."}'
_MAX_NAMED = 4  # tokens in a warning
_ARGUMENTS = (
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "documents",
    "chat_template",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSide:
    """What turns text into ids and back for one model."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


def load_tokenizer_side(config: ModelConfig) -> TokenizerSide:
    """Tokenizer and template. Raises ConfigError, TokenizerError, and SettingError where
    chat_template names no template. One of the model's own that cannot be used is kept and
    refuses (ChatTemplate.problems): the model can do without."""
    folder = model_folder(config)
    with gguf_read_once():
        try:
            tokenizer = Tokenizer.load(folder, vocab_size=read_vocab_size(folder))
            template = ChatTemplate.load(folder, tokenizer, chosen=config.chat_template)
        except QuireError:
            _check_supported(folder)
            raise
    if tokenizer.without_row:
        _warn_of_tokens_past_model(folder, tokenizer)
    # A large tokenizer's file is many times what stays of it.
    _native.give_back_freed_memory()
    return TokenizerSide(tokenizer=tokenizer, template=template)


def _warn_of_tokens_past_model(folder: Path, tokenizer: Tokenizer) -> None:
    """Log which tokens a text may not contain, before a request does."""
    named = [f"{token!r} ({id_})" for id_, token in sorted(tokenizer.without_row.items())]
    more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
    Log("tokenizer").warning(
        "the tokenizer has tokens that the model has no ids for; a text that contains one is "
        "refused: take tokenizer and model from the same checkpoint",
        model=str(folder),
        tokens=", ".join(named[:_MAX_NAMED]) + more,
        vocab_size=tokenizer.vocab_size,
    )


def _check_supported(folder: Path) -> None:
    """Raise ConfigError if the model is not supported: report that rather than its tokenizer."""
    from quire.models.registry import open_model  # all architectures

    try:
        open_model(folder)
    except QuireError as error:
        raise error from None  # the tokenizer's error would be shown before it


def _check_objects(name: str, given: object) -> None:
    """Raise InvalidParameter unless it is a list of objects, or nothing."""
    example = {"tools": _TOOL, "documents": _DOCUMENT}[name]
    if not isinstance(given, list | tuple | None):
        raise InvalidParameter(
            f"{name} is {show(given)}; a list of objects such as {example} is allowed", param=name
        )
    for at, entry in enumerate(given or ()):
        if not isinstance(entry, Mapping):
            raise InvalidParameter(
                f"{name}[{at}] is {show(entry)}; an object such as {example} is allowed",
                param=name,
            )
        function = entry.get("function", entry)
        if name == "tools" and not (
            isinstance(function, Mapping) and isinstance(function.get("name"), str)
        ):
            raise InvalidParameter(
                f"{name}[{at}] is {show(entry)}, without the name of a function; an object such as "
                f"{example} is allowed",
                param=name,
            )


def rendered(
    text_side: TokenizerSide, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> str:
    """Return a conversation as the model's template writes it. settings: as LLM.chat takes them.

    Raises InvalidParameter for what the template refuses or does not know, TokenizerError where
    there is none that can be used.
    """
    template = text_side.template
    if template is None:
        raise TokenizerError(
            "the model has no chat template; use generate with a prompt in the form it was "
            "trained on, put a chat_template.jinja in its folder, or name a file as chat_template"
        )
    variables = dict(settings)
    more = variables.pop("chat_template_kwargs", None) or {}
    if not isinstance(more, Mapping):
        raise InvalidParameter(
            f"chat_template_kwargs is {show(more)}; an object is allowed",
            param="chat_template_kwargs",
        )
    variables |= more
    given = {name: variables.pop(name) for name in _ARGUMENTS if name in variables}
    for argument in ("tools", "documents"):
        _check_objects(argument, given.get(argument))
    tools, name = given.get("tools") or None, given.get("chat_template")
    template.check_variables(variables, tools=tools, chat_template=name)
    for argument in ("tools", "documents"):
        if given.get(argument):
            template.check_reads(argument, tools=tools, chat_template=name)
    converted = template.with_argument_objects(
        checked_messages(messages), tools=tools, chat_template=name
    )
    return template.render(converted, **given, **variables)
