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
    **dict.fromkeys(
        ("StructuredOutputsParams", "GuidedDecodingParams"),
        'write SamplingParams(structured_outputs={"json": schema}), or regex, choice or grammar',
    ),
    **dict.fromkeys(
        ("RequestOutput", "CompletionOutput"),
        "LLM.generate returns Answer and Completion (quire.engine.library.answers)",
    ),
    "TokensPrompt": "a prompt is a text or a list of token ids",
    "TextPrompt": "a prompt is a text or a list of token ids",
    "LoRARequest": "there are no LoRA adapters: merge the adapter into the model's weights",
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
    text = f"module 'quire' has no attribute {name!r}; "
    if name in _INSTEAD:  # `from quire import` replaces the text of an AttributeError
        raise ImportError(text + _INSTEAD[name])
    raise AttributeError(f"{text}it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
