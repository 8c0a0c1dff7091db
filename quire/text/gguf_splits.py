"""How byte-level tokenizers of GGUF files split text before merging, by the name in the file.

A GGUF file names its way to split (tokenizer.ggml.pre) and does not describe it. Those of the
families that run are here, as their own tokenizer.json files have them; any other name is refused:
a wrong way gives almost right ids, silently. Source of the names: llama-vocab.cpp and
convert_hf_to_gguf_update.py (ggml-org/llama.cpp); of the patterns: the models' tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import tokenizers
from tokenizers import normalizers, pre_tokenizers

from quire.text.rank_file import LLAMA_3, QWEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A way to split. pattern: None is GPT-2's. digits_alone: each digit is a word, first of all.

    whole_words: a word that is a token is not merged to it. adds_bos: where the file says nothing.
    composes: Unicode NFC before all else.
    """

    pattern: str | None = None
    digits_alone: bool = False
    whole_words: bool = False
    adds_bos: bool = False
    composes: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        """What is done to a text first."""
        return normalizers.NFC() if self.composes else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """What cuts it into words and writes them as bytes."""
        if self.pattern is not None:
            cut = pre_tokenizers.Split(tokenizers.Regex(self.pattern), "isolated")
            to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            return pre_tokenizers.Sequence([cut, to_bytes])
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if not self.digits_alone:
            return plain
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])


# Words begin anew where small letters become capitals: o200k_base's, and Mistral's likewise.
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(ending: str, digits: str) -> str:
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{before}[{_UPPER}]*[{_LOWER}]+{ending}|{before}[{_UPPER}]+[{_LOWER}]*{ending}|"
        + digits
        + _REST
    )


_GPT_2 = Split()
_DIGITS = Split(digits_alone=True)
_LLAMA_3 = Split(pattern=LLAMA_3.pattern, whole_words=True, adds_bos=True)
_CL100K = Split(pattern=LLAMA_3.pattern)
_GPT_4O = Split(pattern=_cased(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"))
_TEKKEN = Split(pattern=_cased("", r"\p{N}"), whole_words=True, adds_bos=True)

SPLITS: Mapping[str, Split] = MappingProxyType(
    {
        "llama-bpe": _LLAMA_3,
        "llama3": _LLAMA_3,
        "llama-v3": _LLAMA_3,
        "dbrx": _CL100K,  # Phi-4 and OLMo 2 as well
        "smaug-bpe": _CL100K,
        "qwen2": Split(pattern=QWEN.pattern, composes=True),
        "deepseek-r1-qwen": Split(pattern=QWEN.pattern),
        "gpt-2": _GPT_2,
        "phi-2": _GPT_2,
        "olmo": _GPT_2,
        "smollm": _DIGITS,
        "starcoder": _DIGITS,
        "refact": _DIGITS,  # Granite as well
        "gpt-4o": _GPT_4O,  # Phi-4-mini as well
        "tekken": _TEKKEN,
    }
)
