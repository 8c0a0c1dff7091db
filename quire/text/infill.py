"""Fill in the middle: build infill prompts for models with infill tokens.

Models trained for infilling have three special tokens: they read a prefix and a suffix, then write
the text between. The spelling of the tokens gives their order. Knows no requests. Always holds: a
format is used only if each of its marks is a single token.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Form:
    """Marks before the first text, between the texts and after the second."""

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
    """Return the infill prompt for two texts; None where the model has no infill tokens."""
    for form in _FORMS:
        if all(tokenizer.token_id(mark) is not None for mark in form.marks if mark):
            first, second = (prefix, suffix) if form.prefix_first else (suffix, prefix)
            before, between, behind = form.marks
            return f"{before}{first}{between}{second}{behind}"
    return None
