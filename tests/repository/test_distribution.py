"""The distribution's name: `quire-llm` in pyproject.toml, in messages and in metadata look-ups."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import quire
from quire.base import version as versions
from quire.base.version import DISTRIBUTION, UNKNOWN, installed_version
from tests.repository.source_files import ROOT, code_files, name_of, text_files

_PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
_PROJECT = _PYPROJECT["project"]
_OTHER_PROJECT = re.compile(r"""(?:version|distribution|metadata|requires)\(\s*["']quire["']""")
_EXTRA = re.compile(r"quire-llm\[([\w,-]+)\]")


def test_pyproject_has_the_distributions_name_and_the_commands() -> None:
    assert _PROJECT["name"] == DISTRIBUTION == "quire-llm"
    assert _PROJECT["scripts"] == {"quire": "quire.cli.main:main"}


def test_no_module_reads_the_metadata_of_another_project() -> None:
    assert _OTHER_PROJECT.search("metadata.version(" + '"quire")')
    files = code_files("quire", "bench", "scripts", "examples")
    assert not [name_of(f) for f in files if _OTHER_PROJECT.search(f.read_text("utf-8"))]


def test_every_extra_that_is_named_exists() -> None:
    named = {
        extra
        for file in text_files()
        for found in _EXTRA.findall(file.read_text("utf-8"))
        for extra in found.split(",")
    }
    assert {"gpu", "sentencepiece", "bench"} <= named
    assert named <= set(_PROJECT["optional-dependencies"])


def test_a_checkout_has_the_version_of_its_pyproject() -> None:
    assert installed_version() == quire.__version__ == _PROJECT["version"]


def test_an_installed_package_has_the_version_of_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "version", {"quire-llm": "9.8.7"}.__getitem__)
    assert installed_version(tmp_path) == "9.8.7"


def test_the_pyproject_of_another_project_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\nversion = "3.0"\n')
    assert installed_version(tmp_path) == UNKNOWN


def test_the_command_prints_the_version() -> None:
    command = [sys.executable, "-m", "quire", "--version"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert said == f"quire {_PROJECT['version']}\n"


def test_one_wheel_serves_every_processor_of_an_architecture() -> None:
    """Instruction sets are chosen at run time, so only their own object files may use them."""
    cmake = (ROOT / "CMakeLists.txt").read_text("utf-8")
    assert not re.search(r"-march=|-mcpu=|-mtune=native", cmake)
    of_all = re.search(r"set\(quire_flags([^)]*)\)", cmake)
    assert of_all is not None
    assert "-m" not in of_all[1].split("-fvisibility")[0].replace("-fno-trapping-math", "")
    assert 'set(quire_isa_flags_portable "")' in cmake


def test_wheels_are_built_for_every_python_that_is_supported() -> None:
    settings = _PYPROJECT["tool"]["cibuildwheel"]
    assert settings["build"] == ["cp311-*", "cp312-*", "cp313-*", "cp314-*"]
    assert _PROJECT["requires-python"] == ">=3.11"
    assert settings["linux"]["archs"] == ["x86_64", "aarch64"]
    assert settings["macos"]["archs"] == ["arm64"]


def test_ci_builds_and_uses_the_wheel() -> None:
    assert ".ci/wheel" in (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    assert os.access(ROOT / ".ci" / "wheel", os.X_OK)
