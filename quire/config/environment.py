"""Settings from environment variables: QUIRE_ and the flag's name, as in QUIRE_MAX_NUM_SEQS=64.

Values are parsed like those of flags. A variable without a value counts as not set. Several values
are separated by commas, except secrets, which may contain commas.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, get_origin

from quire.base.errors import SettingError
from quire.config.flags import flag_of, reader_of
from quire.config.sources import SETTINGS, Setting, Source, Sourced

# The variable of --config.
FILE_VARIABLE = "QUIRE_CONFIG"
_PREFIX = "QUIRE_"
# Variables that are not settings: an instruction set, and those of the tests and benchmarks.
_OTHERS = re.compile("QUIRE_(CONFIG|ISA|DATA|PEERS|EXACT_FIRST|STRUCTURED_ANSWERS|([A-Z]+_)*CASES)")
# Kubernetes sets these in every container next to a service that is called quire.
_SERVICE_LINK = re.compile(r"QUIRE_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_\w+)")
_SERVICE_ADDRESS = re.compile("(tcp|udp|sctp)://")
_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def read_environment(environment: Mapping[str, str]) -> tuple[dict[str, Sourced], list[str]]:
    """Return the settings of the environment by name, and warnings about unknown variables.

    Raises SettingError with the variable's name if a value cannot be parsed.
    """
    known = {setting.variable: setting for setting in SETTINGS.values()}
    values: dict[str, Sourced] = {}
    warnings = []
    for variable, text in environment.items():
        if not variable.startswith(_PREFIX) or not text:
            continue
        setting = known.get(variable)
        if setting is None:
            if not _OTHERS.fullmatch(variable) and not _SERVICE_LINK.fullmatch(variable):
                warnings.append(_unknown(variable, [*known, FILE_VARIABLE]))
        elif setting.name == "port" and _SERVICE_ADDRESS.match(text):
            warnings.append(
                f"{variable}={text} is ignored: Kubernetes sets it for a service called quire; "
                "rename the service, or set enableServiceLinks: false in the pod"
            )
        else:
            source = Source(kind="environment", place=variable)
            values[setting.name] = Sourced(value=_parsed(setting, text), source=source)
    return values, warnings


def _unknown(variable: str, known: list[str]) -> str:
    # Without the prefix, which makes any two variables alike.
    by_name = {name.removeprefix(_PREFIX): name for name in known}
    near = [
        by_name[name]
        for name in get_close_matches(variable.removeprefix(_PREFIX)[:60], by_name, 1, 0.75)
    ]
    hint = f"did you mean {near[0]}?" if near else "quire config show --env lists all variables"
    return f"the environment variable {variable} is not known and has no effect; {hint}"


def _parsed(setting: Setting, text: str) -> Any:
    if get_origin(setting.kind) is tuple:
        if setting.is_secret:
            return (text,)
        return tuple(part.strip() for part in text.split(",") if part.strip())
    value: Any = text
    where = f"{setting.variable} ({flag_of(setting.field)})"
    if setting.kind is bool:
        value = _WORDS.get(text.strip().lower(), text)
    elif setting.name.endswith("_bytes") or setting.kind in (int, float):
        try:
            value = reader_of(setting.field, setting.kind)(text)
        except (ValueError, argparse.ArgumentTypeError):
            raise SettingError(f"{where} is {text!r}; {setting.allowed} is expected") from None
    return setting.check(value, where)
