"""Engines without a shared store do not load it."""

from __future__ import annotations

import subprocess
import sys


def test_an_engine_without_a_store_imports_nothing_of_it() -> None:
    code = (
        "import sys; from quire import LLM; LLM(threads=1).generate('a'); "
        "names = ('quire.kv_store', 'quire.engine.kv_store', 'quire.engine.assembly.kv_store', "
        "'quire.cache.store_map', 'mooncake'); "
        "print(*(one for one in sys.modules if one.startswith(names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
