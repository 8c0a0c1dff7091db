"""TextSide: tokenizer and chat template of a model, as the engine's client needs them.

The engine itself knows ids only and loads neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.base.errors import TokenizerError
from quire.config.groups import ModelConfig
from quire.engine.model_files import model_folder
from quire.models.registry import open_model
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer

_ARGUMENTS = (
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "documents",
    "chat_template",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSide:
    """What turns text into ids and back for one model."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


def load_text_side(config: ModelConfig) -> TextSide:
    """Tokenizer and template. Raises ConfigError, TokenizerError, and SettingError where
    chat_template names no template. One of the model's own that cannot be used is kept and
    refuses (ChatTemplate.problems): the model can do without."""
    folder = model_folder(config)
    tokenizer = Tokenizer.load(folder, vocab_size=open_model(folder).vocab_size)
    template = ChatTemplate.load(folder, tokenizer, chosen=config.chat_template)
    return TextSide(tokenizer=tokenizer, template=template)


def rendered(
    text_side: TextSide, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> str:
    """A conversation as the model's template writes it. settings: as LLM.chat takes them.

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
    variables |= variables.pop("chat_template_kwargs", None) or {}
    given = {name: variables.pop(name) for name in _ARGUMENTS if name in variables}
    template.check_variables(
        variables, tools=given.get("tools"), chat_template=given.get("chat_template")
    )
    return template.render(messages, **given, **variables)
