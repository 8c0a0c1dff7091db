"""transformers behind the peers' protocol: generate() on left-padded static batches, SDPA.

Runs in the environment "transformers". Without continuous batching, concurrent requests are
computed in groups of `batch_size` (a setting), each until its longest answer is done.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import transformers

from bench.peers.protocol import Asked, Unsupported, serve


class _Clock(transformers.StoppingCriteria):
    """A stopping criterion that reads the clock after each step and never stops anything."""

    def __init__(self, begin_s: float) -> None:
        self.times_s: list[float] = []
        self._begin_s = begin_s

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.times_s.append(time.perf_counter() - self._begin_s)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Transformers:
    """See protocol.Driver."""

    def __init__(self) -> None:
        self._model: Any = None
        self._batch_size = 16

    def load(self, model: str, threads: int, settings: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(threads)
        self._batch_size = int(settings.get("batch_size", 16))
        dtype = str(settings.get("dtype", "bfloat16"))
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        return {
            "version": f"{transformers.__version__}, torch {torch.__version__}",
            "kv_dtype": dtype,
            "scheme": dtype,
            "pid": os.getpid(),
        }

    def run(self, requests: list[Asked], static_batch: int) -> list[dict[str, Any]]:
        if self._model is None:
            raise Unsupported("nothing is loaded")
        begin_s = time.perf_counter()
        size = static_batch or self._batch_size
        answers: list[dict[str, Any]] = []
        for first in range(0, len(requests), size):
            answers += self._group(requests[first : first + size], begin_s)
        return answers

    def _group(self, requests: list[Asked], begin_s: float) -> list[dict[str, Any]]:
        width = max(len(one["prompt_ids"]) for one in requests)
        count = max(one["output_tokens"] for one in requests)
        ids = torch.zeros((len(requests), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(requests):
            prompt = one["prompt_ids"]
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        clock = _Clock(begin_s)  # generate() rejects a streamer for more than one row
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=transformers.StoppingCriteriaList([clock]),
            )
        answers = []
        for row, one in enumerate(requests):
            wanted = one["output_tokens"]
            answers.append(
                {
                    "sent_s": 0.0,
                    "first_s": clock.times_s[0],
                    "last_s": clock.times_s[wanted - 1],
                    "token_ids": out[row, width : width + wanted].tolist(),
                }
            )
        return answers

    def own_tool(self, workload: dict[str, Any]) -> dict[str, Any]:
        raise Unsupported("transformers has no benchmark tool")

    def close(self) -> None:
        self._model = None


if __name__ == "__main__":
    serve(Transformers())
