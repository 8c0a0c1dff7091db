"""Fill in the middle: build infill prompts for models with infill tokens.

Models trained for infilling have three special tokens: they read a prefix and a suffix, then write
the text between. The spelling of the tokens gives their order. Some have further ones, for other
files of a repository (arXiv 2409.12186). Knows no requests. Always holds: a format is used only if
each of its marks is a single token.
"""

from __future__ import annotations

from collections.abc import Sequence
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
# Marks before the name of the repository, and before the name of each file.
_REPOSITORY_MARKS = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")
_FILE_MARK = "<|file_sep|>"  # Qwen, Granite
# Separates texts for models without the mark of a file, and names for what clients do not name.
_SNIPPET = "\n\n--- snippet ---\n\n"
_REPOSITORY, _THIS_FILE = "myproject", "filename"


@dataclass(frozen=True, slots=True)
class FileText:
    """The text of another file, which precedes an infill prompt."""

    name: str
    text: str


def infill_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> str | None:
    """Return the infill prompt for two texts; None where the model has no infill tokens."""
    for form in _FORMS:
        if all(tokenizer.token_id(mark) is not None for mark in form.marks if mark):
            first, second = (prefix, suffix) if form.prefix_first else (suffix, prefix)
            before, between, behind = form.marks
            return f"{before}{first}{between}{second}{behind}"
    return None


def repository_context(tokenizer: Tokenizer, files: Sequence[FileText]) -> str:
    """Return what precedes an infill prompt to show these files.

    Each has its name behind the mark of a file, the name of the file with the gap comes last; a
    model without that mark gets the texts alone.
    """
    repository = next((m for m in _REPOSITORY_MARKS if tokenizer.token_id(m) is not None), None)
    begins = "" if repository is None else f"{repository}{_REPOSITORY}\n"
    if tokenizer.token_id(_FILE_MARK) is None:
        return begins + "".join(f"{_SNIPPET}{file.text}" for file in files)
    named = "".join(f"{_FILE_MARK}{file.name}\n{file.text}" for file in files)
    return f"{begins}{named}{_FILE_MARK}{_THIS_FILE}\n"
