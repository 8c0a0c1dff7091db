"""Regular expressions with which published byte-level tokenizers split text into words.

Sources: tiktoken_ext/openai_public.py (openai/tiktoken), and the tokenizer files of the models that
adopted or changed these patterns.
"""

from __future__ import annotations

_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def words(digits: str) -> str:
    """Return the pattern of cl100k_base, with this pattern of digits."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def cased_words(ending: str, digits: str) -> str:
    """Return the pattern of o200k_base, with this ending of words and this pattern of digits.

    A new word begins where lower case is followed by upper case.
    """
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{before}[{_UPPER}]*[{_LOWER}]+{ending}|{before}[{_UPPER}]+[{_LOWER}]*{ending}|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


CL100K_WORDS = words(r"\p{N}{1,3}")
QWEN_WORDS = words(r"\p{N}")
O200K_WORDS = cased_words(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")
