"""vLLM's CPU build behind the peers' protocol: its engine in this process, stepped here.

Runs in the environment "vllm". The environment variables below favour it: all cores compute (by
default it reserves one), its engine gets no separate process, and its recommended allocator and
OpenMP libraries are preloaded if installed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from bench.peers.protocol import Asked, Unsupported, serve


class Vllm:
    """See protocol.Driver."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._next_id = 0

    def load(self, model: str, threads: int, settings: dict[str, Any]) -> dict[str, Any]:
        if self._engine is not None:
            raise Unsupported("vLLM cannot be loaded twice in a process")
        import torch
        import vllm
        from vllm import EngineArgs, LLMEngine

        set_threads = torch.set_num_threads  # vLLM replaces it by a function that does nothing

        defaults = {
            "dtype": "bfloat16",
            "max_model_len": 4096,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
        }
        self._engine = LLMEngine.from_engine_args(EngineArgs(model=model, **(defaults | settings)))
        # In one process it leaves torch with the single thread it used for loading.
        set_threads(threads)
        return {
            "version": vllm.__version__,
            "torch_threads": torch.get_num_threads(),
            "kv_dtype": str(settings.get("kv_cache_dtype", "bf16")),
            "scheme": str(settings.get("quantization", "bf16")),
            "pid": os.getpid(),
        }

    def run(self, requests: list[Asked], static_batch: int) -> list[dict[str, Any]]:
        if self._engine is None:
            raise Unsupported("nothing is loaded")
        begin_s = time.perf_counter()
        if not static_batch:
            return self._together(requests, begin_s)
        answers: list[dict[str, Any]] = []
        for first in range(0, len(requests), static_batch):
            answers += self._together(requests[first : first + static_batch], begin_s)
        return answers

    def _together(self, requests: list[Asked], begin_s: float) -> list[dict[str, Any]]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        answers: dict[str, dict[str, Any]] = {}
        for one in requests:
            name = str(self._next_id)
            self._next_id += 1
            answers[name] = {"sent_s": 0.0, "first_s": 0.0, "last_s": 0.0, "token_ids": []}
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=one["output_tokens"],
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = TokensPrompt(prompt_token_ids=one["prompt_ids"])
            self._engine.add_request(name, prompt, sampling)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                now_s = time.perf_counter() - begin_s
                answer = answers[output.request_id]
                new_ids = list(output.outputs[0].token_ids)
                answer["token_ids"] += new_ids
                if new_ids:
                    answer["first_s"] = answer["first_s"] or now_s
                    answer["last_s"] = now_s
        return list(answers.values())

    def own_tool(self, workload: dict[str, Any]) -> dict[str, Any]:
        raise Unsupported("vLLM's own benchmark drives the same engine in the same way")

    def close(self) -> None:
        self._engine = None


def preloads() -> list[str]:
    """Return libraries to preload: Intel's OpenMP from the environment, tcmalloc if available."""
    found = list(Path(sys.prefix).glob("lib/libiomp5.so"))
    for pattern in ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"):
        found += Path("/usr/lib").glob(f"*/{pattern}")
    return [str(path) for path in found[:2]]


if __name__ == "__main__":
    # The loader reads LD_PRELOAD only at process start.
    if preloads() and "LD_PRELOAD" not in os.environ:
        os.environ["LD_PRELOAD"] = ":".join(preloads())
        os.execv(sys.executable, [sys.executable, "-m", "bench.peers.vllm_engine"])
    serve(Vllm())
