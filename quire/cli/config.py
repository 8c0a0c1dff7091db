"""`quire config show` prints every setting with its source; `quire config check` checks a file.

Loads no model. The flags of `show` are those of `quire serve`, so that the same words show what a
server would use.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from typing import Any

from quire.cli.options import add_all_settings
from quire.config.config_file import read_config_file, write_config
from quire.config.flags import bytes_text, config_from_flags, engine_from_flags
from quire.config.server_and_engine import check_together
from quire.config.server_config import ServerConfig
from quire.config.sources import DEFAULT, SECRET, SETTINGS, Sourced


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `show` and `check`."""
    subcommands = parser.add_subparsers(
        dest="config_action", metavar="SUBCOMMAND", title="subcommands", required=True
    )
    show = subcommands.add_parser(
        "show",
        help="print every setting with its source",
        description="Print every setting with its source: default, file, environment or flag.",
    )
    show.set_defaults(parser=show)
    form = show.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--toml", action="store_true", help="print a configuration file")
    form.add_argument(
        "--env", action="store_true", help="print the environment variable of each setting"
    )
    add_all_settings(show)
    check = subcommands.add_parser(
        "check",
        help="check a configuration file",
        description="Check a configuration file, without the environment.",
    )
    check.set_defaults(parser=check)
    check.add_argument("file", metavar="FILE", help="a TOML file of settings")


def run(arguments: argparse.Namespace) -> int:
    """Print the settings, or that the file is valid. Raises SettingError."""
    if arguments.config_action == "check":
        return _check(arguments)
    values = effective(arguments)
    if arguments.toml:
        print(write_config(values), end="")
    elif arguments.json:
        print(json.dumps({SETTINGS[name].key: _entry(name, values[name]) for name in values}))
    else:
        _print_table(values, variables=arguments.env)
    return 0


def effective(arguments: argparse.Namespace) -> dict[str, Sourced]:
    """Return the value of every setting as the config groups hold it, with its source."""
    engine = engine_from_flags(arguments)
    parts: dict[str, Any] = {field.name: getattr(engine, field.name) for field in fields(engine)}
    parts["server"] = server = config_from_flags(ServerConfig, arguments)
    check_together(server, engine)
    sources = arguments.sources
    return {
        name: Sourced(
            value=getattr(parts[setting.group], name),
            source=sources[name].source if name in sources else DEFAULT,
        )
        for name, setting in SETTINGS.items()
    }


def _check(arguments: argparse.Namespace) -> int:
    arguments.sources, warnings = read_config_file(arguments.file)
    for name, sourced in arguments.sources.items():
        setattr(arguments, name, sourced.value)
    effective(arguments)
    for warning in warnings:
        print(f"warning: {warning}")
    print(f"{arguments.file} is valid; it gives {_settings(len(arguments.sources))}")
    return 0


def _shown(name: str, value: Any) -> Any:
    return SECRET if SETTINGS[name].is_secret and value else value


def _entry(name: str, sourced: Sourced) -> dict[str, Any]:
    source = sourced.source
    return {"value": _shown(name, sourced.value), "source": source.kind, "place": source.place}


def _text(value: Any) -> str:
    if value is None:
        return "(not set)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(value) or "(none)"
    return str(value) if value != "" else "(empty)"


def _print_table(values: dict[str, Sourced], *, variables: bool) -> None:
    rows = [("setting", "value", "environment variable" if variables else "source")]
    for name, sourced in values.items():
        setting = SETTINGS[name]
        last = setting.variable if variables else str(sourced.source)
        value = _shown(name, sourced.value)
        is_size = name.endswith("_bytes") and value is not None
        rows.append((setting.key, bytes_text(value) if is_size else _text(value), last))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    widths[1] = min(widths[1], 40)
    for key, value, last in rows:
        print(f"{key:{widths[0]}}  {value:{widths[1]}}  {last}")


def _settings(number: int) -> str:
    return "1 setting" if number == 1 else f"{number} settings"
