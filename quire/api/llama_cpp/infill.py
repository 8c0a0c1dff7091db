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
