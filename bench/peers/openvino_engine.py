"""OpenVINO GenAI's continuous batching behind the peers' protocol.

Runs in the environment "openvino". Prompts are passed as ids; the pipeline is stepped here, so
tokens are timed when a step returns them. The KV cache's type is read from the compiled model if
possible, else it is the configured one.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from bench.peers.protocol import Asked, Unsupported, serve

# Scheduler settings; all others are device properties.
SCHEDULER = (
    *("max_num_batched_tokens", "max_num_seqs", "cache_size", "dynamic_split_fuse"),
    *("enable_prefix_caching", "num_kv_blocks"),
)


class OpenVino:
    """See protocol.Driver."""

    def __init__(self) -> None:
        self._pipeline: Any = None
        self._next_id = 0

    def load(self, model: str, threads: int, settings: dict[str, Any]) -> dict[str, Any]:
        self._pipeline = None
        scheduler = genai.SchedulerConfig()
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        for name, value in settings.items():
            if name in SCHEDULER:
                setattr(scheduler, name, value)
            else:
                properties[name] = value
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        core = ov.Core()
        known = {
            name: str(core.get_property("CPU", name))
            for name in ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "ENABLE_HYPER_THREADING")
        }
        return {
            "version": genai.__version__,
            "kv_dtype": str(properties.get("KV_CACHE_PRECISION", known["KV_CACHE_PRECISION"])),
            "device_defaults": known,
            "capabilities": list(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")),
            "pid": os.getpid(),
        }

    def run(self, requests: list[Asked], static_batch: int) -> list[dict[str, Any]]:
        if self._pipeline is None:
            raise Unsupported("nothing is loaded")
        begin_s = time.perf_counter()
        if not static_batch:
            return self._together(requests, begin_s)
        answers: list[dict[str, Any]] = []
        for first in range(0, len(requests), static_batch):
            answers += self._together(requests[first : first + static_batch], begin_s)
        return answers

    def _together(self, requests: list[Asked], begin_s: float) -> list[dict[str, Any]]:
        handles = []
        for one in requests:
            config = genai.GenerationConfig()
            config.max_new_tokens = one["output_tokens"]
            config.min_new_tokens = one["output_tokens"]
            config.ignore_eos = True
            config.do_sample = False
            ids = ov.Tensor(np.array([one["prompt_ids"]], np.int64))
            handles.append(self._pipeline.add_request(self._next_id, ids, config))
            self._next_id += 1
        answers: list[dict[str, Any]] = [
            {"sent_s": 0.0, "first_s": 0.0, "last_s": 0.0, "token_ids": []} for _ in requests
        ]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now_s = time.perf_counter() - begin_s
            for handle, answer in zip(handles, answers, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        answer["token_ids"] += list(output.generated_ids)
                        answer["first_s"] = answer["first_s"] or now_s
                        answer["last_s"] = now_s
        return answers

    def own_tool(self, workload: dict[str, Any]) -> dict[str, Any]:
        raise Unsupported("OpenVINO's llm_bench is not in the package index")

    def close(self) -> None:
        self._pipeline = None


if __name__ == "__main__":
    serve(OpenVino())
