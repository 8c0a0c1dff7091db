"""How processes of ours are started: a fresh interpreter that runs `main` of a module.

Imports the standard library only, and nothing from the current folder. Knows no module.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Where our own package lies: installed, or a checkout that the new interpreter would not find.
_PACKAGES = str(Path(__file__).resolve().parents[2])
# -P: nothing is imported from the current folder, which may hold anything (a model's files). Our
# packages' folder comes after the standard library and before whatever else is installed.
_START = """
import sys
installed = (at for at, path in enumerate(sys.path) if path.endswith("-packages"))
sys.path.insert(next(installed, len(sys.path)), sys.argv.pop(1))
from importlib import import_module
sys.exit(import_module(sys.argv.pop(1)).main())
"""


def command_of(module: str) -> list[str]:
    """Return what starts a process of ours: `main` of a module, in a fresh interpreter."""
    return [sys.executable, "-P", "-c", _START, _PACKAGES, module]


def environment_of_ours() -> dict[str, str]:
    """Return this process's environment without the API key, which is passed by other means."""
    return {name: value for name, value in os.environ.items() if name != "QUIRE_API_KEY"}
