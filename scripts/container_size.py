"""Compute the size of the image that deploy/Containerfile describes, from this environment.

`python scripts/container_size.py` adds the base image, the files of Quire's runtime dependencies as
they are installed here, those of Quire, and the bytecode of the modules that a server imports; what
the Containerfile strips or removes is left out. The base is not measured: its size is a constant,
rounded up. Exits 1 where the sum is over the limit. Sizes of wheels differ by platform.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_BYTES = 250_000_000
# python:3.13-slim for amd64, unpacked: Debian's base and Python with pip.
BASE_BYTES = 125_000_000
# As in the Containerfile.
STRIPPED = ("uvloop", "tokenizers", "hf_xet", "yaml", "httptools")
WITHOUT_TESTS = ("numpy",)
_SERVER = "quire.api.server, quire.api.workers.supervisor, quire.api.workers.worker"
_LOCAL = "quire.engine.library.async_llm, quire.cli.serve, quire.cli.complete"
_LIST_MODULES = (
    f"import sys, {_SERVER}, {_LOCAL}\n"
    "print(*{m.__file__ for m in list(sys.modules.values()) if getattr(m, '__file__', None)}, "
    "sep='\\n')"
)


def runtime_distributions() -> dict[str, metadata.Distribution]:
    """Return the installed distributions that a server needs, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found: dict[str, metadata.Distribution] = {}
    waiting = list(project["dependencies"])
    while waiting:
        text, _, marker = waiting.pop().partition(";")
        matched = re.match(r"[\w.-]+", text.strip())
        assert matched is not None, "requirements begin with a name"
        name = re.sub(r"[-_.]+", "-", matched[0]).lower()
        if name in found or "extra" in marker:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # of another platform or version of Python: its marker is not evaluated
        waiting += found[name].requires or []
    return found


def distribution_bytes(distribution: metadata.Distribution) -> int:
    """Return the size of a distribution's files in the image, without bytecode."""
    total = 0
    for file in distribution.files or []:
        top = file.parts[0]
        is_test = top in WITHOUT_TESTS and "tests" in file.parts
        path = Path(str(file.locate()))
        if file.suffix == ".pyc" or is_test or not path.is_file():
            continue
        is_stripped = file.suffix == ".so" and top in STRIPPED
        total += stripped_bytes(path) if is_stripped else path.stat().st_size
    return total


def stripped_bytes(library: Path) -> int:
    """Return the size of a shared library without symbols for debuggers."""
    strip = shutil.which("strip")
    if strip is None:
        return library.stat().st_size
    with tempfile.NamedTemporaryFile() as file:
        command = [strip, "--strip-unneeded", "-o", file.name, str(library)]
        subprocess.run(command, check=True)
        return Path(file.name).stat().st_size


def quire_bytes() -> int:
    """Return the size of the package's own files."""
    files = (ROOT / "quire").rglob("*")
    return sum(
        file.stat().st_size for file in files if file.is_file() and "__pycache__" not in file.parts
    )


def bytecode_bytes() -> int:
    """Return the size of the bytecode of the modules that a server imports, outside of Python's
    own; of a module without bytecode here, that of its source."""
    command = [sys.executable, "-c", _LIST_MODULES]
    listed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    total = 0
    for line in listed.splitlines():
        file = Path(line)
        if file.suffix != ".py" or not ("site-packages" in file.parts or ROOT in file.parents):
            continue
        cached = Path(importlib.util.cache_from_source(str(file)))
        total += (cached if cached.exists() else file).stat().st_size
    return total


def parts() -> dict[str, int]:
    """Return the size of each part of the image."""
    found = {name: distribution_bytes(one) for name, one in runtime_distributions().items()}
    largest = dict(sorted(found.items(), key=lambda item: -item[1]))
    return {
        "base image (not measured)": BASE_BYTES,
        "quire": quire_bytes(),
        **largest,
        "bytecode": bytecode_bytes(),
    }


def main() -> int:
    """Print the parts and their sum."""
    found = parts()
    for name, size in found.items():
        print(f"{size / 1e6:8.1f} MB  {name}")
    total = sum(found.values())
    print(f"{total / 1e6:8.1f} MB  of at most {LIMIT_BYTES / 1e6:.0f} MB")
    return int(total > LIMIT_BYTES)


if __name__ == "__main__":
    sys.exit(main())
