"""`quire env`: a report of this installation and machine for bug reports, as Markdown.

Takes the flags of `quire serve` and lists the settings that differ from their defaults. Loads no
model. The report never contains keys, tokens, paths, addresses or names of hosts and users: a
setting's value is shown only if it is a number, a switch, one of a fixed list, or one of
`_PLAIN_TEXTS`; of other environment variables only the names are shown.
"""

from __future__ import annotations

import argparse
import getpass
import os
import platform
import re
import resource
import socket
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_origin

from quire.base.errors import ConfigError
from quire.base.user_path import user_path
from quire.base.version import DISTRIBUTION, installed_version, project_table
from quire.cli.options import add_all_settings
from quire.config.flags import bytes_text
from quire.config.sources import SECRET, SETTINGS, Sourced
from quire.hub.cache import snapshot_of
from quire.hub.names import HubName, hub_name

# Text settings with values that name formats and devices, not places.
_PLAIN_TEXTS = frozenset(
    {"quantization", "head_precision", "tool_call_parser", "reasoning_parser", "device"}
)
# Variables of other programs that change how Quire runs; only whether they are set is shown.
_VARIABLES = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HTTP_PROXY"),
    *("HTTPS_PROXY", "NO_PROXY", "LD_PRELOAD", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    *("MALLOC_ARENA_MAX", "CUDA_VISIBLE_DEVICES", "NOTIFY_SOCKET", "TMPDIR"),
)
_NVIDIA = Path("/proc/driver/nvidia/version")
_MIN_NAME_CHARS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quire serve`, which the report lists."""
    add_all_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the report."""
    sections = {
        "Quire": _quire(),
        "Machine": _machine(),
        "Native module": _native(),
        "Packages": _packages(),
        "Settings that are not defaults": _settings(arguments),
        "Environment variables that are set": _variables(),
    }
    lines = ["## Quire environment"]
    for title, rows in sections.items():
        lines += ["", f"### {title}", "", *(f"- {name}: {value}" for name, value in rows)]
    print(scrubbed("\n".join(lines)))
    return 0


def scrubbed(text: str) -> str:
    """Return the text without the home directory and the names of host and user.

    The report has none of them by construction; this holds for what other packages report.
    """
    names = {socket.gethostname(): "(host)", platform.node(): "(host)", _user(): "(user)"}
    home = str(Path.home())
    if len(home) > 1:
        text = text.replace(home, "~")
    for name, shown in names.items():
        if len(name) >= _MIN_NAME_CHARS:
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", shown, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in containers
        return ""


def _quire() -> Iterator[tuple[str, object]]:
    is_checkout = project_table(Path(__file__).parents[2]) is not None
    yield "version", installed_version()
    yield "installed as", "a checkout" if is_checkout else "a package"
    yield "Python", f"{platform.python_implementation()} {platform.python_version()}"
    yield "in a virtual environment", "yes" if sys.prefix != sys.base_prefix else "no"
    yield "UTF-8 mode", "yes" if sys.flags.utf8_mode else "no"


def _machine() -> Iterator[tuple[str, object]]:
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "C library", " ".join(platform.libc_ver()).strip() or "unknown"
    try:
        from quire.bench.machine import machine_card
    except ImportError:  # of the native module, which has a section of its own
        yield "processor", platform.processor() or "unknown"
        return
    card = machine_card()
    for name in ("cpu", "cores", "memory_gb"):
        yield name.replace("_", " "), card[name]
    found = card["instruction_sets"]
    yield "instruction sets", ", ".join(found) if isinstance(found, list) else found
    limits = card["limits"]
    assert isinstance(limits, dict)
    for name, value in limits.items():
        yield name.replace("_", " "), value
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield "open files", f"{soft} (hard limit {hard})"
    yield "GPU driver", _first_line(_NVIDIA) or "none"


def _native() -> Iterator[tuple[str, object]]:
    try:
        import quire._native as native
    except ImportError as error:
        yield "state", f"cannot be loaded ({type(error).__name__}); reinstall or build it"
        return
    yield "recipe on this machine", native.isa()
    yield "recipes it can run here", ", ".join(native.available_isas())
    yield "built for", sysconfig.get_config_var("EXT_SUFFIX")
    yield "packed layout", native.PACKED_LAYOUT


def _packages() -> Iterator[tuple[str, object]]:
    """Yield the version of each dependency; those of extras with the extra's name."""
    for requirement in _requirements():
        text, _, marker = requirement.partition(";")
        found = re.match(r"[\w.-]+", text.strip())
        assert found is not None, "requirements begin with a name"
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
        if extra is not None and extra[1] not in _RUNTIME_EXTRAS:
            continue
        try:
            version = metadata.version(found[0])
        except metadata.PackageNotFoundError:
            version = "not installed"
        yield found[0] + (f" (extra {extra[1]})" if extra else ""), version


# Extras that change what a server does; the others are for tests and development.
_RUNTIME_EXTRAS = ("gpu", "sentencepiece", "bench")


def _requirements() -> list[str]:
    project = project_table(Path(__file__).parents[2])
    if project is None:
        try:
            return metadata.requires(DISTRIBUTION) or []
        except metadata.PackageNotFoundError:
            return []
    extras = project.get("optional-dependencies", {})
    return [
        *project.get("dependencies", []),
        *(f"{one}; extra == '{name}'" for name, listed in extras.items() for one in listed),
    ]


def _settings(arguments: argparse.Namespace) -> Iterator[tuple[str, object]]:
    given = {
        SETTINGS[name].key: f"{_shown(name, sourced)} ({sourced.source.kind})"
        for name, sourced in sorted(arguments.sources.items())
        if sourced.value != SETTINGS[name].field.default
    }
    yield from (given or {"none": "all are defaults"}).items()


def _shown(name: str, sourced: Sourced) -> str:
    """Return a value that identifies no machine and no person, or that the setting is set."""
    setting, value = SETTINGS[name], sourced.value
    if setting.is_secret:
        return SECRET
    if name == "model":
        return _model(value)
    if name.endswith("_bytes") and isinstance(value, int):
        return bytes_text(value)
    if isinstance(value, bool | int | float) or get_origin(setting.kind) is Literal:
        return str(value)
    if name in _PLAIN_TEXTS and _is_plain(value):
        return str(value)
    return SECRET


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w:.+-]{1,40}", value) is not None


def _model(text: str) -> str:
    """Return the name of a model in the cache; of a path only what it is.

    A name that is not in the cache may be a relative path that does not exist.
    """
    name = hub_name(text)
    if name is not None:
        return str(name) if _is_in_cache(name) else "a name or a path"
    if not user_path(text).exists():
        return "a path that does not exist"
    return "a GGUF file" if text.endswith(".gguf") else "a directory"


def _is_in_cache(name: HubName) -> bool:
    try:
        return snapshot_of(name) is not None
    except ConfigError:  # its ref is damaged
        return False


def _variables() -> Iterator[tuple[str, object]]:
    found = {name: SECRET for name in _VARIABLES if os.environ.get(name)}
    yield from (found or {"none": "of those that matter here"}).items()


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").split("\n", 1)[0].strip()
    except OSError:
        return ""
