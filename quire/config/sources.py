"""The sources of settings: defaults, a configuration file, environment variables and flags.

Each source overrides those before it. `SETTINGS` lists every setting once, with its key in the file
and its variable; both follow from the fields of the config groups (flags.py), as the flags do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from quire.base.errors import SettingError
from quire.config.flags import TYPE_NAMES, checked, flag_of, kind_of
from quire.config.foreign_values import instead_of_value
from quire.config.groups import EngineConfig
from quire.config.server_config import ServerConfig

# Shown in place of a secret.
SECRET = "(set)"
_PORTS = ("port", "admin_port")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting. group: the table of the file that may hold it; hint: its type annotation."""

    group: str
    field: Field[Any]
    hint: Any

    @property
    def name(self) -> str:
        """Return the name of its field."""
        return self.field.name

    @property
    def key(self) -> str:
        """Return its key in a configuration file: its flag without the dashes in front."""
        return flag_of(self.field)[2:]

    @property
    def variable(self) -> str:
        """Return its environment variable."""
        return "QUIRE_" + self.key.replace("-", "_").upper()

    @property
    def is_secret(self) -> bool:
        """Return whether its value must not be printed."""
        return bool(self.field.metadata.get("secret"))

    @property
    def kind(self) -> Any:
        """Return its type without `| None`."""
        return kind_of(self.hint)

    @property
    def allowed(self) -> str:
        """Return which values its type allows, for an error message."""
        if self.name.endswith("_bytes"):
            return 'a size in bytes, such as "2GiB" or 4096,'
        if get_origin(self.kind) is Literal:
            return f"one of {', '.join(map(str, get_args(self.kind)))}"
        if get_origin(self.kind) is tuple:
            return "a string or a list of strings"
        if self.name in _PORTS:
            return "a whole number from 0 to 65535"
        return TYPE_NAMES[self.kind]

    def shown(self, value: object) -> str:
        """Return a value as an error message shows it."""
        return SECRET if self.is_secret else repr(value)

    def check(self, value: Any, where: str) -> Any:
        """Return `value` as its field needs it.

        where: how the error names the setting. Raises SettingError if the type does not fit.
        """
        choices = get_args(self.kind) if get_origin(self.kind) is Literal else None
        try:
            if choices is None or value in choices:
                return checked(self.field, self.hint, value)
        except SettingError:
            pass
        hint = "" if choices is None else instead_of_value(self.name, value, choices)
        allowed = f"{self.allowed} is expected{hint and '; ' + hint}"
        raise SettingError(f"{where} is {self.shown(value)}; {allowed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The source of a value. place: a line of the file, a variable or a flag; empty: a default."""

    kind: Literal["default", "file", "environment", "flag"]
    place: str = ""

    def __str__(self) -> str:
        return self.place or self.kind


DEFAULT = Source(kind="default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sourced:
    """A value and its source."""

    value: Any
    source: Source


def _settings() -> dict[str, Setting]:
    groups = {"server": ServerConfig, **get_type_hints(EngineConfig)}
    found = {}
    for name, group in groups.items():
        hints = get_type_hints(group)
        for field in fields(group):
            found[field.name] = Setting(group=name, field=field, hint=hints[field.name])
    return found


# Every setting, by the name of its field.
SETTINGS: Mapping[str, Setting] = MappingProxyType(_settings())
# The tables of a configuration file.
GROUPS = tuple(dict.fromkeys(setting.group for setting in SETTINGS.values()))


def merged(
    given: Mapping[str, Any], environment: Mapping[str, Sourced], file: Mapping[str, Sourced]
) -> dict[str, Sourced]:
    """Return the settings that any source gives, by name. given: those of flags, by name."""
    flags = {
        name: Sourced(value=value, source=Source(kind="flag", place=_place_of_flag(name)))
        for name, value in given.items()
    }
    return {**file, **environment, **flags}


def _place_of_flag(name: str) -> str:
    return "MODEL" if name == "model" else flag_of(SETTINGS[name].field)


def with_sources(text: str, values: Mapping[str, Sourced]) -> str:
    """Add to the flags in an error message which line or variable set them."""
    for name, sourced in values.items():
        if sourced.source.kind in ("file", "environment"):
            flag = re.escape(flag_of(SETTINGS[name].field))
            place = sourced.source.place
            text = re.sub(
                rf"(?<![\w-]){flag}(?![\w-])",
                lambda found, place=place: f"{found[0]} ({place})",  # type: ignore[misc]
                text,
                count=1,
            )
    return text
