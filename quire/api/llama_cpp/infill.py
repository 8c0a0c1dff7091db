"""The prompt of /infill: texts of other files, then the texts around the gap.

It has the order that llama.cpp's server gives it: `prompt`, what is already written in the gap,
ends the text before the gap, so that the answer begins after it. Always holds: without texts of
other files the prompt is that of /v1/completions with `suffix`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.show import show
from quire.text.infill import FileText, infill_prompt, repository_context
from quire.text.tokenizer import Tokenizer

MAX_FILES = 1024
# A text with more fills no context; tokens between the texts, with some that the cuts add.
MAX_CHARS_A_TOKEN = 16
NUM_MARKS = 8
PART_OF_CHARACTER = "\ufffd"
_DEFAULT_NAME = "tmp"
_FORM = '{"filename": "...", "text": "..."}'
_TEXTS = ("input_prefix", "input_suffix", "prompt")


class InfillTexts:
    """The texts of a request, checked. Raises InvalidParameter naming the field."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        for name in _TEXTS:
            value = given.get(name, "" if name == "prompt" else None)
            if not isinstance(value, str):
                found = "missing" if value is None else show(value)
                raise InvalidParameter(f"{name} is {found}; a text is needed", param=name)
        self._prefix = given["input_prefix"] + given.get("prompt", "")
        self._suffix = given["input_suffix"]
        self._sent = self._prefix, self._suffix
        self.files: Sequence[FileText] = _files(given.get("input_extra", []))

    def prompt(self, tokenizer: Tokenizer, first_file: int = 0) -> str:
        """Return the prompt with the files from `first_file` on. Raises InvalidParameter."""
        text = infill_prompt(tokenizer, self._prefix, self._suffix)
        if text is None:
            raise InvalidParameter(
                "the model's vocabulary has no tokens for infilling (such as <|fim_prefix|>); "
                "POST /completion continues a prompt",
                param="input_suffix",
            )
        files = self.files[first_file:]
        return f"{repository_context(tokenizer, files)}{text}" if files else text

    def shorten(self, tokenizer: Tokenizer, num_tokens: int) -> list[str]:
        """Keep `num_tokens` tokens: the last before the gap and the first after it, three to one as
        llama.cpp's server does; return what is left out of the texts that were sent."""
        num_before, num_after = num_tokens - num_tokens // 4, num_tokens // 4
        prefix, suffix = self._sent
        after = suffix[: MAX_CHARS_A_TOKEN * num_after]
        before = prefix[max(len(prefix) - MAX_CHARS_A_TOKEN * num_before, 0) :]
        self._prefix = _cut(tokenizer, before, -num_before)
        self._suffix = _cut(tokenizer, after, num_after)
        left_out = []
        if (num_chars := len(prefix) - len(self._prefix)) > 0:
            left_out.append(f"input_prefix[:{num_chars}]")
        if len(suffix) > len(self._suffix):
            left_out.append(f"input_suffix[{len(self._suffix)}:]")
        return left_out


def _cut(tokenizer: Tokenizer, text: str, num_tokens: int) -> str:
    """Return the first tokens of a text, or the last ones if the number is below 0."""
    if not num_tokens:
        return ""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) <= abs(num_tokens):
        return text
    kept = ids[:num_tokens] if num_tokens > 0 else ids[num_tokens:]
    part = tokenizer.decode(kept, skip_special_tokens=False)
    # At the cut only: beside the gap these may be the text's own.
    return part.rstrip(PART_OF_CHARACTER) if num_tokens > 0 else part.lstrip(PART_OF_CHARACTER)


def _files(extra: Any) -> list[FileText]:
    if not isinstance(extra, list) or len(extra) > MAX_FILES:
        found = f"a list of {len(extra)}" if isinstance(extra, list) else show(extra)
        raise _fault(f"input_extra is {found}; a list of up to {MAX_FILES} {_FORM} is allowed")
    return [_file(f"input_extra[{at}]", entry) for at, entry in enumerate(extra)]


def _file(place: str, entry: Any) -> FileText:
    text = entry.get("text") if isinstance(entry, dict) else None
    name = entry.get("filename", _DEFAULT_NAME) if isinstance(entry, dict) else None
    if not isinstance(text, str) or not isinstance(name, str):
        raise _fault(f"{place} is {show(entry)}; an object such as {_FORM} is allowed")
    return FileText(name, text)  # further keys, such as `time`, say nothing of the text


def _fault(message: str) -> InvalidParameter:
    return InvalidParameter(message, param="input_extra")
