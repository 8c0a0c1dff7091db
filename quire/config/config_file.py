"""The configuration file: a TOML file in which the names of flags are keys.

    model = "Qwen/Qwen3-0.6B"
    max-num-seqs = 64

    [server]
    port = 8080

Keys stand at the top level or in the table of their group (server, model, cache, scheduler,
executor), with dashes or underscores. Every error names the line. Relative paths are relative to
the working directory, as those of flags are.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from quire.base.errors import SettingError
from quire.config.foreign_flags import INSTEAD, near_or_family
from quire.config.sources import DEFAULT, GROUPS, SECRET, SETTINGS, Setting, Source, Sourced

MAX_FILE_BYTES = 1024 * 1024
_TABLE = re.compile(r"\s*\[\s*[\"']?([\w-]+)[\"']?\s*\]")
_NAME = r"[\"']?([\w-]+)[\"']?"
_ENTRY = re.compile(rf"\s*{_NAME}\s*(?:\.\s*{_NAME}\s*)?=")


def read_config_file(path: str) -> tuple[dict[str, Sourced], list[str]]:
    """Return the settings of a file by name, and warnings about secrets that others can read.

    Raises SettingError if the file cannot be read or has an invalid entry.
    """
    text, mode = _read(path)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        end = f"at line {text.count(chr(10)) + 1}"
        reason = str(error).replace("at end of document", end)
        raise SettingError(
            f"the configuration file {path} is not valid TOML: {reason}; write each setting once, "
            'as in port = 8000 or dtype = "bf16" (`quire config show --toml` prints all)'
        ) from None
    values: dict[str, Sourced] = {}
    warnings = []
    for table, key, value in _entries(document):
        place = f"{path}{_line_suffix(text, table, key)}"
        setting = _setting_of(table, key, value, place)
        if setting.name in values:
            first = values[setting.name].source.place
            raise SettingError(f"{place}: {key} is already set at {first}; keep one of them")
        value = setting.check(value, f"{place}: {key}")
        values[setting.name] = Sourced(value=value, source=Source(kind="file", place=place))
        if setting.is_secret and mode & (stat.S_IRGRP | stat.S_IROTH):
            warnings.append(
                f"{place}: {key} is a secret in a file that other users can read (mode "
                f"{stat.S_IMODE(mode):o}); run chmod 600 {path}, or prefer {key}-file"
            )
    return values, warnings


def write_config(values: Mapping[str, Sourced]) -> str:
    """Return all settings as a configuration file, each with its source as a comment.

    Settings without a value, and secrets, are comments. values: of every setting, by name.
    """
    lines = []
    for group in GROUPS:
        lines += ["", f"[{group}]"]
        for setting in SETTINGS.values():
            if setting.group == group:
                lines.append(_line(setting, values[setting.name]))
    return "\n".join(lines[1:]) + "\n"


def _line(setting: Setting, sourced: Sourced) -> str:
    place = "".join(one if one.isprintable() else "?" for one in str(sourced.source))
    source = "" if sourced.source == DEFAULT else f"  # {place}"
    if setting.is_secret and sourced.value:
        return f"# {setting.key}: {SECRET}{source}"
    if sourced.value is None:
        return f"# {setting.key}: not set"
    return f"{setting.key} = {_toml(sourced.value)}{source}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # The escapes of JSON are those of TOML, but for DEL, which TOML requires escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value)


def _read(path: str) -> tuple[str, int]:
    """Return the text and the mode of a file."""
    try:
        with open(os.path.expanduser(path), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(MAX_FILE_BYTES + 1)
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingError(
            f"the configuration file {path} cannot be read ({reason}); give a TOML file"
        ) from None
    if len(raw) > MAX_FILE_BYTES:
        raise SettingError(
            f"the configuration file {path} has more than {MAX_FILE_BYTES} bytes; give a TOML file "
            "of settings"
        )
    return text, mode


def _entries(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield table (empty at the top level), key and value of each entry."""
    for key, value in document.items():
        if isinstance(value, dict) and (key in GROUPS or not _find(key)):
            for inner, inner_value in value.items():
                yield key, inner, inner_value
            if not value and key not in GROUPS:
                yield key, "", None
        else:
            yield "", key, value


def _find(key: str) -> Setting | None:
    wanted = key.replace("_", "-")
    return next((setting for setting in SETTINGS.values() if setting.key == wanted), None)


def _setting_of(table: str, key: str, value: Any, place: str) -> Setting:
    """Return the setting of an entry. Raises SettingError if it is not known or in no place."""
    if table and table not in GROUPS:
        near = get_close_matches(table[:60], GROUPS, 1)
        hint = f"did you mean [{near[0]}]?" if near else f"there are: {', '.join(GROUPS)}"
        raise SettingError(f"{place}: there is no table [{table}]; {hint}")
    setting = _find(key)
    if setting is None:
        dashed = key.replace("_", "-")
        keys = [one.key for one in SETTINGS.values()]
        hint = INSTEAD.get(f"--{dashed}") or near_or_family(dashed, keys, cutoff=0.6)
        hint = hint or "quire config show lists all settings"
        raise SettingError(f"{place}: {key} is not a setting; {hint}")
    if table and setting.group != table:
        raise SettingError(
            f"{place}: {key} is in the table [{table}], but belongs in [{setting.group}] or at the "
            "top level, before the first table"
        )
    return setting


def _line_suffix(text: str, table: str, key: str) -> str:
    """Return ":LINE" of an entry; empty if it has no line of its own, as in an inline table.

    A line that looks like an entry may be part of a longer string or array; then the text before it
    is not valid TOML.
    """
    lines = text.splitlines(keepends=True)
    current = ""
    for number, line in enumerate(lines, 1):
        if header := _TABLE.match(line):
            if not _is_toml("".join(lines[: number - 1])):
                continue
            current = header[1]
            if not key and current == table:
                return f":{number}"
        elif entry := _ENTRY.match(line):
            found = (entry[1], entry[2]) if entry[2] else (current, entry[1])
            if found == (table, key) and _is_toml("".join(lines[: number - 1])):
                return f":{number}"
    return ""


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True
