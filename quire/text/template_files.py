"""Find a model's chat templates in files and fields of its directory, by name.

A separate file overrides the field in tokenizer_config.json, as in `transformers`. Raises
TokenizerError for invalid files, with the path and what was found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from quire.base.errors import SettingError, TokenizerError
from quire.base.gguf_model import find_gguf
from quire.base.regular_file import is_present
from quire.base.user_path import user_path
from quire.text.added_tokens import read_json
from quire.text.tokenizer_files import read_file

DEFAULT = "default"


def sources_in(folder: Path) -> dict[str, str]:
    """Return templates by name; empty if there are none. A single one is also the default.

    folder: a model's directory, or a GGUF file, which contains its templates.
    """
    if (gguf := find_gguf(folder)) is not None:
        from quire.text.gguf_templates import read_gguf_templates

        sources = read_gguf_templates(gguf)
    else:
        sources = _in_files(folder)
    if len(sources) == 1:
        sources[DEFAULT] = next(iter(sources.values()))
    return sources


def _in_files(folder: Path) -> dict[str, str]:
    sources: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        value = read_json(folder / name).get("chat_template")
        if value is not None:
            sources.update(_named(value, folder / name))
    if is_present(folder / "chat_template.jinja"):
        sources[DEFAULT] = read_source(folder / "chat_template.jinja")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[file.stem] = read_source(file)
    return sources


def source_in_force(folder: Path, chosen: str | None) -> str | None:
    """Return the template that was chosen to replace the model's; None if none was.

    Raises SettingError like `named_source`.
    """
    if chosen is None:
        return None
    try:
        sources = sources_in(folder)
    except TokenizerError:
        sources = {}
    return named_source(chosen, sources)


def named_source(chosen: str, sources: Mapping[str, str]) -> str:
    """Return the template of this name, or the text of a file. Raises SettingError for neither."""
    if chosen in sources:
        return sources[chosen]
    file = user_path(chosen)
    if file.is_file():
        try:
            return read_source(file)
        except TokenizerError as error:
            raise SettingError(f"chat_template: {error}") from error
    names = ", ".join(sorted(sources)) or "none"
    raise SettingError(
        f"chat_template is {chosen!r}, which is neither a file nor the name of one of the model's "
        f"templates (it has: {names})"
    )


def read_source(file: Path) -> str:
    """Return the text of a template file."""
    try:
        return read_file(file).decode()
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{file}: not valid UTF-8 ({error}); copy it again") from error


def _named(value: object, file: Path) -> dict[str, str]:
    if isinstance(value, str):
        return {DEFAULT: value}
    entries = value if isinstance(value, list) else [value]
    sources: dict[str, str] = {}
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else None
        source = entry.get("template") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not isinstance(source, str):
            raise TokenizerError(
                f"{file}: chat_template holds {json.dumps(entry)[:60]}; a string, or a list of "
                "objects with name and template, is allowed"
            )
        sources[name] = source
    return sources
