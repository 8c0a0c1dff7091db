"""Measure transformers' continuous batching on the same requests, random weights and shapes.

With its default attention if it is installed (without a flash attention package that is PyTorch's,
over a mask of all positions of all requests), and, for fairness, with PyTorch's variable-length
attention in its place; the result names each. Everything else has its defaults. Its startup
(memory, graphs) is not counted. The number of requests grows only while the remaining time
suffices.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from bench.gpu.models import LLAMA, TINY
from bench.gpu.requests import DRY, FEW, FULL, Load
from bench.gpu.stage import Stage

WAVES = (FEW, 128, 512)  # requests: a few, half of what ours runs, all
# Settings for it; the last is its own default if flash attention is installed.
WAYS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "its own attention": {},
        "PyTorch's varlen attention": {},
        "PyTorch's varlen attention, in graphs": {
            "use_cuda_graph": (True, False),
            "use_async_batching": True,
        },
    }
)
Answered = tuple[dict[str, Any], list[list[int]]]
VARLEN = "paged|varlen"  # not the name of a package, which it would look for


def peer(stage: Stage) -> None:
    """Report the rate with each attention, as far as time allows."""
    from transformers import LlamaConfig, LlamaForCausalLM, __version__
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    load = DRY if stage.is_dry else FULL
    shapes = {key: value for key, value in LLAMA.items() if key != "architectures"}
    torch.manual_seed(0)
    with torch.device(stage.device):
        config = LlamaConfig(**shapes | (TINY if stage.is_dry else {}))
        torch.set_default_dtype(stage.dtype)
        model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    ALL_ATTENTION_FUNCTIONS.register(VARLEN, by_lengths)
    found: dict[str, list[list[int]]] = {}
    for number, (title, settings) in enumerate(WAYS.items()):
        if number:
            model.set_attn_implementation(VARLEN)
        ends = time.monotonic() + (stage.ends - time.monotonic()) / (len(WAYS) - number)
        name = f"transformers {__version__}, {title}"
        try:
            found[name] = _waves(stage, partial(_asked, stage, model, settings, load), name, ends)
        except (RuntimeError, ValueError, TypeError, TimeoutError) as error:
            stage.report(f"{name}: ended", f"{type(error).__name__}: {str(error)[:300]}")
    for name, answers in found.items():
        one = next(iter(found.values()))
        same = [a[:1] == b[:1] for a, b in zip(one, answers, strict=True)]
        stage.report(f"{name}: first tokens as by its own", f"{sum(same)} of {len(same)}")


def _waves(
    stage: Stage, asked: Callable[[int, float], Answered], name: str, ends: float
) -> list[list[int]]:
    """Return the answers of the first wave."""
    waves = (DRY.requests,) if stage.is_dry else WAVES
    first: list[list[int]] = []
    took_s = 0.0
    for before, wave in zip([1, *waves], waves, strict=False):
        # More requests at once take less each: start any that may fit, and end it if it does not.
        if time.monotonic() + took_s * (wave / before) ** 0.5 > ends:
            stage.report(f"{name}: {wave} requests", "skipped: no time left")
            break
        began = time.monotonic()
        found, answers = asked(wave, ends)
        gc.collect()
        if stage.is_on_card:
            torch.cuda.empty_cache()  # memory kept by its cache
        took_s = time.monotonic() - began
        first = first or answers
        stage.report(f"{name}, {wave} requests", found)
    return first


def _asked(
    stage: Stage, model: Any, given: Mapping[str, Any], load: Load, count: int, ends: float
) -> Answered:
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 100, load.prompt).tolist() for _ in range(count)]
    small = {"num_blocks": 8, "max_batch_tokens": 64, "block_size": 16} if stage.is_dry else {}
    with model.continuous_batching_context_manager(
        generation_config=GenerationConfig(
            max_new_tokens=load.answer, do_sample=False, eos_token_id=-1
        ),
        continuous_batching_config=ContinuousBatchingConfig(**small, **given),
        workload_hints=WorkloadHints(load.prompt, load.answer, count),
    ) as manager:
        settings = manager.continuous_batching_config
        began = time.perf_counter()
        asked = manager.add_requests(inputs=prompts, max_new_tokens=load.answer)
        answers: dict[str, list[int]] = {}
        while len(answers) < count:
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                answers[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("its thread ended before all were answered")
            if time.monotonic() > ends:
                raise TimeoutError(f"{len(answers)} of {count} requests were answered in time")
        seconds = time.perf_counter() - began
        attention = model.config._attn_implementation
    answered = sum(map(len, answers.values()))
    found = {
        "seconds": seconds,
        "answered_tokens_per_s": answered / seconds,
        "is_whole": answered == count * load.answer,
        "attention": attention,
        "cuda_graphs": list(settings.cuda_graph_booleans),
        "asynchronous": settings.use_async_batching,
        "step_tokens": settings.max_batch_tokens,
        "running_at_most": settings.max_requests_per_batch,
    }
    return found, [answers[name] for name in asked]


def by_lengths(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention per sequence, as an attention function of transformers.

    Packed rows attend keys and values read from its cache, each sequence its own, by PyTorch's
    varlen_attn; on a CPU, which lacks it, one sequence after the other.
    """
    keys, values = given["cache"].update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=given["read_index"],
        write_index=given["write_index"],
    )
    lengths, longest = given["cu_seq_lens_k"], given["max_seqlen_k"]
    if isinstance(lengths, dict):
        lengths, longest = lengths["full_attention"], longest["full_attention"]
    rows = query.transpose(1, 2).squeeze(0).contiguous()
    attend: Callable[..., torch.Tensor] = _one_by_one
    if rows.is_cuda:
        from torch.nn.attention.varlen import varlen_attn as attend
    found = attend(
        rows,
        keys.contiguous(),
        values.contiguous(),
        given["cu_seq_lens_q"].to(torch.int32),
        lengths.to(torch.int32).clone(),
        given["max_seqlen_q"],
        longest,
        scale=module.scaling,
        window_size=(-1, 0),  # causal, from each sequence's last position back
    )
    return found.unsqueeze(0), None


def _one_by_one(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row_starts: torch.Tensor,
    key_starts: torch.Tensor,
    *_: int,
    scale: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    assert window_size == (-1, 0), "causal"
    found = torch.zeros_like(rows)
    bounds = zip(*(s.tolist()[i:] for s in (row_starts, key_starts) for i in (0, 1)), strict=False)
    for first, end, key_first, key_end in bounds:
        count, length = end - first, key_end - key_first
        if not count:
            continue
        seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        q, k, v = (
            part.transpose(0, 1)[None]
            for part in (rows[first:end], keys[key_first:key_end], values[key_first:key_end])
        )
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=scale, enable_gqa=True
        )
        found[first:end] = y[0].transpose(0, 1)
    return found
