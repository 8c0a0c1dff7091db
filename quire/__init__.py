"""Quire: a small, fast, exact LLM inference and serving engine.

    from quire import LLM, AsyncLLM, SamplingParams

Importing the package costs next to nothing: names are looked up when they are first used. BLAS is
held to one thread, which must happen before NumPy loads: threads are the executors' own business.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.base.sampling_params import SamplingParams
    from quire.engine.library.async_llm import AsyncLLM
    from quire.engine.library.llm import LLM

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]


_MODULES = {
    "SamplingParams": "quire.base.sampling_params",
    "LLM": "quire.engine.library.llm",
    "AsyncLLM": "quire.engine.library.async_llm",
}


# Names that users of vLLM look for.
_INSTEAD = {
    "EngineArgs": "give settings to LLM(...) as keyword arguments",
    "AsyncEngineArgs": "give settings to AsyncLLM(...) as keyword arguments",
    "AsyncLLMEngine": "use AsyncLLM",
    "LLMEngine": "use LLM, or AsyncLLM in an event loop",
    "StructuredOutputsParams": "see quire.base.grammar, and SamplingParams.structured_outputs",
    "GuidedDecodingParams": "see quire.base.grammar, and SamplingParams.structured_outputs",
    "PoolingParams": "use LLM.embed with its arguments",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        from quire.base.native_module import names_missing_build

        with names_missing_build():
            return getattr(import_module(_MODULES[name]), name)
    if name == "__version__":
        from quire.base.version import installed_version

        return installed_version()
    advice = _INSTEAD.get(name, f"it has {', '.join(__all__)}")
    raise AttributeError(f"module 'quire' has no attribute {name!r}; {advice}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
