"""Imports of the executor packages: nothing heavy, and nothing that may be missing.

The numeric packages must work without msgspec, pyzmq and the compiled module.
"""

from __future__ import annotations

import subprocess
import sys

from tests.repository.source_files import ROOT

IMPORTED = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in {refused!r}:
            raise ImportError(name + " is refused here")

sys.meta_path.insert(0, Refuse())
{lines}
print("heavy:", sorted({{"torch", "triton"}} & set(sys.modules)))
"""
ROOMS = ("program", "models", "execute", "runner", "weights")
WITHOUT = ("msgspec", "zmq", "quire._native")
NUMBERS_ROOMS = (
    "quire.base.records",
    "quire.config.groups",
    "quire.models.registry",
    "quire.program.quantize",
    "quire.program.kv_cache",
    "quire.program.cost",
    "quire.weights.checkpoint",
    "quire.weights.binding",
    "quire.execute.reference",
    "quire.runner.model_runner",
    "quire.sampling.reference",
)


def _import(modules: tuple[str, ...], refused: tuple[str, ...]) -> str:
    script = IMPORTED.format(refused=refused, lines="\n".join(f"import {m}" for m in modules))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_numeric_packages_need_neither_messages_nor_the_compiled_module() -> None:
    assert "heavy: []" in _import(NUMBERS_ROOMS, WITHOUT)


def test_every_module_of_the_numeric_packages_needs_no_messages() -> None:
    files = [path for room in ROOMS for path in sorted((ROOT / "quire" / room).rglob("*.py"))]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    wanted = tuple(name for name in modules if not name.startswith("quire.execute.gpu"))
    assert len(wanted) > 60
    assert "heavy: []" in _import(wanted, ("msgspec", "zmq"))


def test_an_engine_on_a_cpu_imports_no_pytorch() -> None:
    modules = ("quire.engine.assembly.assemble", "quire.execute.native", "quire.execute.reference")
    assert "heavy: []" in _import(modules, ())
