"""How byte-level tokenizers of GGUF files split text before merging, by name.

A GGUF file names its split (tokenizer.ggml.pre) without describing it. The known splits are those
of the models' own tokenizer.json files. Any other name is rejected, since a wrong split silently
yields almost correct ids. Source of the names: llama-vocab.cpp and convert_hf_to_gguf_update.py
(ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import tokenizers
from tokenizers import normalizers, pre_tokenizers

from quire.text.word_patterns import CL100K_WORDS, O200K_WORDS, QWEN_WORDS, cased_words

Steps = Callable[[], list[pre_tokenizers.PreTokenizer]]


def _gpt_2_words() -> list[pre_tokenizers.PreTokenizer]:
    """Split as GPT-2 does, and write the words as bytes."""
    return [pre_tokenizers.ByteLevel(add_prefix_space=False)]


def _digits_alone() -> list[pre_tokenizers.PreTokenizer]:
    """Make each digit a word, then split as GPT-2 does."""
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt_2_words()]


def _falcon_words() -> list[pre_tokenizers.PreTokenizer]:
    """Split off punctuation, then as GPT-2 does, then numbers into groups of three digits."""
    return [
        pre_tokenizers.Punctuation("contiguous"),
        *_gpt_2_words(),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(tokenizers.Regex("[0-9][0-9][0-9]"), "isolated"),
    ]


def _by(*patterns: str, digits_alone: bool = False) -> Steps:
    """Return steps that split by each pattern in turn, then write bytes."""

    def steps() -> list[pre_tokenizers.PreTokenizer]:
        cuts = [pre_tokenizers.Split(tokenizers.Regex(text), "isolated") for text in patterns]
        digits = [pre_tokenizers.Digits(individual_digits=True)] if digits_alone else []
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return [*cuts, *digits, to_bytes]

    return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The steps of a pre-tokenizer, in order.

    whole_words: a word in the vocabulary is one token without merging. adds_bos: the default if the
    file has no flag. composes: normalize to Unicode NFC first.
    """

    steps: Steps = _gpt_2_words
    whole_words: bool = False
    adds_bos: bool = False
    composes: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        """Return the normalizer, if any."""
        return normalizers.NFC() if self.composes else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Return the pre-tokenizer, which splits into words and writes them as bytes."""
        steps = self.steps()
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


# DeepSeek's letters with capitals, as the first models' tokenizer.json lists them.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_IDEOGRAPHS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

_GPT_2 = Split()
_DIGITS = Split(steps=_digits_alone)
_LLAMA_3 = Split(steps=_by(CL100K_WORDS), whole_words=True, adds_bos=True)
_CL100K = Split(steps=_by(CL100K_WORDS))
_GPT_4O = Split(steps=_by(O200K_WORDS))
_TEKKEN = Split(steps=_by(cased_words("", r"\p{N}")), whole_words=True, adds_bos=True)
_NEOX = Split(composes=True)
_DEEPSEEK_LLM = Split(
    steps=_by(
        r"[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _IDEOGRAPHS,
        digits_alone=True,
    ),
)
_DEEPSEEK_CODER = Split(
    steps=_by(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, digits_alone=True),
)

SPLITS: Mapping[str, Split] = MappingProxyType(
    {
        "llama-bpe": _LLAMA_3,
        "llama3": _LLAMA_3,
        "llama-v3": _LLAMA_3,
        "dbrx": _CL100K,  # Phi-4 and OLMo 2 as well
        "smaug-bpe": _CL100K,
        "qwen2": Split(steps=_by(QWEN_WORDS), composes=True),
        "deepseek-r1-qwen": Split(steps=_by(QWEN_WORDS)),
        "stablelm2": Split(steps=_by(QWEN_WORDS)),
        "gpt-2": _GPT_2,
        "phi-2": _GPT_2,
        "olmo": _GPT_2,
        "smollm": _DIGITS,
        "starcoder": _DIGITS,
        "refact": _DIGITS,  # Granite as well
        "gpt-4o": _GPT_4O,  # Phi-4-mini as well
        "tekken": _TEKKEN,
        "falcon": Split(steps=_falcon_words),
        "deepseek-llm": _DEEPSEEK_LLM,
        "deepseek-coder": _DEEPSEEK_CODER,
        "mpt": _NEOX,
        "gpt-neox": _NEOX,
    }
)
# Files of these architectures have no name: all their byte-level tokenizers use one split.
BY_ARCHITECTURE: Mapping[str, str] = MappingProxyType({"gptneox": "gpt-neox"})
