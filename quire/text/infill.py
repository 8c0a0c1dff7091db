"""Fill in the middle: a prompt between two texts, for models whose vocabulary has marks for that.

Models that were trained to fill in have three tokens, and read prefix, suffix and then write what
stands between. Which model writes them in which order is known by its tokens. Knows no requests.
Always holds: a form is used only if all of its marks are tokens of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Form:
    """What stands before the first text, between both and behind the second."""

    marks: tuple[str, str, str]
    prefix_first: bool = True


_BAR = "\N{FULLWIDTH VERTICAL LINE}"
_FORMS = (
    _Form(("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")),  # Qwen, CodeGemma
    _Form(("<fim_prefix>", "<fim_suffix>", "<fim_middle>")),  # StarCoder, Granite
    _Form(("<fim-prefix>", "<fim-suffix>", "<fim-middle>")),  # SantaCoder
    # DeepSeek
    _Form((f"<{_BAR}fim▁begin{_BAR}>", f"<{_BAR}fim▁hole{_BAR}>", f"<{_BAR}fim▁end{_BAR}>")),
    _Form(("[SUFFIX]", "[PREFIX]", ""), prefix_first=False),  # Codestral
)


def infill_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> str | None:
    """The text that asks for what stands between two texts; None where the model has no marks."""
    for form in _FORMS:
        if all(tokenizer.token_id(mark) is not None for mark in form.marks if mark):
            first, second = (prefix, suffix) if form.prefix_first else (suffix, prefix)
            before, between, behind = form.marks
            return f"{before}{first}{between}{second}{behind}"
    return None
