"""Fields of the configuration groups: a setting with its help text, and checks of single values.

The groups are in groups.py (engine) and server_config.py (HTTP server). Every check raises
SettingError with the setting's name, what was found and what is allowed.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any

from quire.base.errors import SettingError
from quire.config.foreign_values import instead_of_value


def setting(
    default: Any,
    text: str,
    *,
    flag: str | None = None,
    short_flag: str | None = None,
    secret: bool = False,
    section: str | None = None,
) -> Any:
    """Return a field with a default, the help text of its flag, and the flag if not its name.

    short_flag: another spelling of the flag, with its dash. secret: the value is never printed.
    section: the heading of `--help` that begins with this field of its group.
    """
    metadata: dict[str, Any] = {"help": text, "secret": secret, "short_flag": short_flag}
    if section is not None:
        metadata["section"] = section
    return field(default=default, metadata=metadata if flag is None else metadata | {"flag": flag})


def at_least(name: str, value: float, low: float) -> None:
    if not math.isfinite(value):
        raise SettingError(f"{name} is {value}; a finite number, at least {low}, is needed")
    if value < low:
        raise SettingError(f"{name} is {value}; at least {low} is needed")


def at_most(name: str, value: float, high: float, reason: str) -> None:
    if value > high:
        raise SettingError(f"{name} is {value}; at most {high} is allowed ({reason})")


def one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        listed = ", ".join(map(str, allowed))
        hint = instead_of_value(name, value, allowed)
        raise SettingError(f"{name} is {value!r}; allowed: {listed}{hint and '; ' + hint}")


def check_dimensions(name: str, value: str) -> None:
    """Check a list of sizes, such as 256,512, or "any"."""
    sizes = value.split(",")
    if value != "any" and not all(
        size.isascii() and size.isdigit() and int(size) for size in sizes
    ):
        raise SettingError(f"{name} is {value!r}; any, or a list such as 256,512, is allowed")
