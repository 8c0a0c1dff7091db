"""Build flags and keyword arguments from the fields of the config groups, and read them back.

The flag is the field's name with dashes (`max_num_seqs` -> `--max-num-seqs`) unless its metadata
gives another. Booleans get `--x` and `--no-x`, byte counts take 512MiB or 2GiB, tuple flags may be
repeated. Knows no individual setting.
"""

from __future__ import annotations

import argparse
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from quire.base.errors import CapacityError, SettingError
from quire.config.foreign_flags import instead_of_setting
from quire.config.groups import EngineConfig
from quire.config.server_config import ServerConfig

TYPE_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
Group = TypeVar("Group")
_cached_hints = cache(get_type_hints)

_SUFFIXES = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _SUFFIXES[f"{_letter}ib"] = 1024**_power
    _SUFFIXES[_letter] = 1024**_power
    _SUFFIXES[f"{_letter}b"] = 1000**_power


def _hints_of(group: Any) -> dict[str, Any]:
    """Return the types of the fields of a group, which stay as they are."""
    return _cached_hints(group)


def parse_bytes(text: str) -> int:
    """Parse "512MiB", "2GiB", "1.5GB" (powers of 1000), "2g" (of 1024) or "4096" into bytes."""
    stripped = text.strip().lower()
    number = stripped.rstrip("bikmgt ")
    factor = _SUFFIXES.get(stripped[len(number) :].strip())
    try:
        value = float(number) * factor if factor is not None else -1.0
    except ValueError:
        value = -1.0
    if factor == 1 and 0 < value < 2**63 and value % 1:
        raise SettingError(
            f"{text!r} is no whole number of bytes; it is a size, not a share of the memory: write "
            "it like 512MiB, 2GiB or 4096"
        )
    if not 0 <= value < 2**63:
        raise SettingError(f"{text!r} is not a size in bytes; write it like 512MiB, 2GiB or 4096")
    return int(value)


def flag_of(setting: Field[Any]) -> str:
    """Return the flag of a field, with its dashes."""
    return "--" + str(setting.metadata.get("flag", setting.name.replace("_", "-")))


def in_flags(text: str) -> str:
    """Replace names of settings in an error message by their flags.

    A name without underscore is replaced only at the beginning, since it may be an English word;
    one in double quotes is what a file says.
    """
    for group in (*_hints_of(EngineConfig).values(), ServerConfig):
        for setting in fields(group):
            at = r"(?<![\w\"-])" if "_" in setting.name else "^"
            text = re.sub(rf"{at}{setting.name}(?![\w-])", flag_of(setting), text)
    return text


@contextmanager
def keywords_in_errors() -> Iterator[None]:
    """Name keyword arguments in place of flags, in errors about settings.

    Errors about a model's files keep the flags: they are the same for every program.
    """
    try:
        yield
    except (SettingError, CapacityError) as error:
        error.text_in_flags = error.text_in_flags or str(error)
        error.args = (in_keywords(str(error)), *error.args[1:])
        raise


def in_keywords(text: str) -> str:
    """Replace flags in an error message by keyword arguments, values of a choice in quotes."""
    choices = {
        flag_of(setting): tuple(map(str, get_args(kind_of(hints[setting.name]))))
        for group in _hints_of(EngineConfig).values()
        for hints in (_hints_of(group),)
        for setting in fields(group)
    } | {"--matryoshka-dimensions": ("any",), "--quantization": ("int4", "int8")}

    def keyword(found: re.Match[str]) -> str:
        name, value = found[1][2:].replace("-", "_"), found[2] or ""
        if value.strip() in choices.get(found[1], ()):
            return f'{name}="{value.strip()}"'
        return name + value

    return re.sub(r"(?<![\w-])(--[a-z][a-z-]+)( [a-z0-9]+\b)?", keyword, text)


def add_flags(
    parser: argparse.ArgumentParser, *groups: type[Any], skip: frozenset[str] = frozenset()
) -> None:
    """Add a flag for each field of `groups` except those named in `skip`.

    The parsed arguments list the fields in `settings_taken`, which a configuration file and the
    environment may set too (sources.py).
    """
    before: frozenset[str] = parser.get_default("settings_taken") or frozenset()
    added = frozenset(setting.name for group in groups for setting in fields(group)) - skip
    parser.set_defaults(settings_taken=before | added)
    for group in groups:
        hints = _hints_of(group)
        section = parser.add_argument_group(str(group.__doc__).splitlines()[0].rstrip("."))
        for setting in fields(group):
            if (title := setting.metadata.get("section")) is not None:
                section = parser.add_argument_group(title)
            if setting.name not in skip:
                _add_flag(section, setting, hints[setting.name])


def config_from_flags(group: type[Group], arguments: argparse.Namespace) -> Group:
    """Build the group from parsed arguments. Raises SettingError for an invalid value."""
    given = vars(arguments)
    names = [setting.name for setting in fields(group)]  # type: ignore[arg-type]
    return group(**{name: given[name] for name in names if name in given})


def engine_from_flags(arguments: argparse.Namespace) -> EngineConfig:
    """Build an EngineConfig from parsed arguments. Raises SettingError for an invalid value."""
    groups = _hints_of(EngineConfig)
    return EngineConfig(**{name: config_from_flags(groups[name], arguments) for name in groups})


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Build an EngineConfig from keyword arguments by field or flag name, as in `LLM(**settings)`.

    Strings are parsed as their flags would parse them ("2GiB"). Raises SettingError for an unknown
    name, with the nearest known name.
    """
    left, known = dict(settings), list[str]()
    config = _engine_of(left, known)
    _refuse_unknown(left, known, of="the engine")
    return config


def server_and_engine_config(settings: Mapping[str, Any]) -> tuple[ServerConfig, EngineConfig]:
    """Build the configurations of a server and its engine, as engine_config builds the latter."""
    left, known = dict(settings), list[str]()
    server: ServerConfig = _group_of(ServerConfig, left, known)
    engine = _engine_of(left, known)
    _refuse_unknown(left, known, of="a server")
    return server, engine


def _engine_of(left: dict[str, Any], known: list[str]) -> EngineConfig:
    """Build an EngineConfig of its settings in `left`, which are taken out; add all to `known`."""
    hints = _hints_of(EngineConfig)
    return EngineConfig(
        **{part.name: _group_of(hints[part.name], left, known) for part in fields(EngineConfig)}
    )


def _group_of(group: type[Any], left: dict[str, Any], known: list[str]) -> Any:
    """Build a group of its settings in `left`, which are taken out; add their names to `known`."""
    hints = _hints_of(group)
    values, called = dict[str, Any](), dict[str, str]()
    for setting in fields(group):
        as_flag = flag_of(setting)[2:].replace("-", "_")  # as docs/flags.md has it
        known.append(as_flag)
        for name in dict.fromkeys((as_flag, setting.name)):
            if name in left:
                if setting.name in values:
                    raise SettingError(
                        f"{as_flag} and {setting.name} are the same setting; give one of them"
                    )
                called[setting.name] = name
                values[setting.name] = checked(
                    setting, hints[setting.name], left.pop(name), called=name
                )
    return _made(group, values, called)


def _refuse_unknown(left: Mapping[str, Any], known: Sequence[str], *, of: str) -> None:
    """Raise SettingError for settings that no group has taken."""
    if left:
        raise SettingError(
            "; ".join(
                _unknown_setting(name, sorted(known), of=of, alone=len(left) == 1) for name in left
            )
        )


def _unknown_setting(name: str, known: Sequence[str], *, of: str, alone: bool) -> str:
    near = get_close_matches(name, known, 1)
    listed = f"known: {', '.join(known)}" if alone else "leave it out"
    hint = instead_of_setting(name) or (f"did you mean {near[0]!r}?" if near else listed)
    return f"{name!r} is not a setting of {of}; {hint}"


def _add_flag(section: Any, setting: Field[Any], hint: Any) -> None:
    flag, text = flag_of(setting), str(setting.metadata.get("help", ""))
    default = setting.default if setting.default is not MISSING else None
    shown = default is not None and default != () and default != "" and default is not False
    shared = {
        "dest": setting.name,
        "default": argparse.SUPPRESS,
        "help": (text + (f" (default: {_default_text(setting)})" if shown else "")).replace(
            "%", "%%"
        ),
    }
    kind = kind_of(hint)
    short = setting.metadata.get("short_flag")
    names = (flag,) if short is None else (flag, short)
    if kind is bool:
        section.add_argument(*names, action=argparse.BooleanOptionalAction, **shared)
    elif get_origin(kind) is Literal:
        section.add_argument(*names, choices=get_args(kind), **shared)
    elif get_origin(kind) is tuple:
        action = _AppendToTuple
        section.add_argument(*names, action=action, metavar=_metavar(setting, str), **shared)
    else:
        read, metavar = reader_of(setting, kind), _metavar(setting, kind)
        section.add_argument(*names, type=read, metavar=metavar, **shared)


class _AppendToTuple(argparse.Action):
    """Collect repeated values of one flag in a tuple."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), values))


def reader_of(setting: Field[Any], kind: Any) -> Any:
    """Return the function that parses the text of a flag with one value."""
    if not setting.name.endswith("_bytes"):
        return kind

    def size(text: str) -> int:
        try:
            return parse_bytes(text)
        except SettingError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return size


_METAVARS = {"BYTES": "SIZE", "CACHE": "DIR", "PLANS": "FILE", "TENANTS": "FILE", "UDS": "PATH"}


def _metavar(setting: Field[Any], kind: Any) -> str:
    word = setting.name.rsplit("_", 1)[-1].upper()
    if kind in (int, float) and word not in ("BYTES", "PORT", "S", "MS"):
        return "NUM"
    return _METAVARS.get(word, word)


def _default_text(setting: Field[Any]) -> str:
    value: Any = setting.default
    return bytes_text(value) if setting.name.endswith("_bytes") else str(value)


def bytes_text(value: int) -> str:
    """Return a size in the largest binary unit that divides it."""
    for suffix, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value and value % factor == 0:
            return f"{value // factor}{suffix}"
    return str(value)


def kind_of(hint: Any) -> Any:
    """Return the annotation without `| None`."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(part for part in get_args(hint) if part is not type(None))
    return hint


def _made(group: type[Any], values: Mapping[str, Any], called: Mapping[str, str]) -> Any:
    """Return a group of settings. called: by field, the name by which each was given, which errors
    have."""
    try:
        return group(**values)
    except SettingError as error:
        text = str(error)
        for name, given in called.items():
            text = re.sub(rf"(?<![\w-]){name}(?![\w-])", given, text) if name != given else text
        raise SettingError(text) from error


def checked(setting: Field[Any], hint: Any, value: Any, *, called: str = "") -> Any:
    """Convert `value` to the annotation; sizes may be text, tuples a list or one string.

    called: the setting's name in errors, if not the field's.
    """
    called = called or setting.name
    kind = kind_of(hint)
    if value is None and kind is not hint:
        return None
    if setting.name.endswith("_bytes") and isinstance(value, str):
        return parse_bytes(value)
    if kind is str and hasattr(value, "__fspath__"):
        return str(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if get_origin(kind) is tuple:
        listed = (value,) if isinstance(value, str) else value
        if isinstance(listed, list | tuple) and all(isinstance(one, str) for one in listed):
            return tuple(listed)
        raise SettingError(f"{called} is {value!r}; a string or a list of strings is expected")
    wanted = (str,) if get_origin(kind) is Literal else (kind,)
    fits = isinstance(value, wanted) and (kind is bool or not isinstance(value, bool))
    if not fits:
        is_share = setting.name.endswith("_bytes") and isinstance(value, float)
        more = ", of bytes, or a text like '2GiB'; it is no share of the memory" if is_share else ""
        raise SettingError(f"{called} is {value!r}; {TYPE_NAMES[wanted[0]]} is expected{more}")
    return value
