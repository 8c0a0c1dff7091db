"""What an engine says of itself: the fingerprint of its KV blocks, and its card.

A part of the wiring, like assemble.py. Knows no request. Always holds: blocks are interchangeable
between engines of one fingerprint.
"""

from __future__ import annotations

import time

from quire.config.executor_config import ExecutorConfig
from quire.config.groups import EngineConfig
from quire.engine.assembly.model_files import model_name
from quire.engine.assembly.sized_model import SizedModel
from quire.engine.model_card import ModelCard
from quire.execute.executor import Executor
from quire.models.registry import compute_dtype
from quire.program.kv_cache import kv_cache_text
from quire.program.program import Program
from quire.program.quantize import precision_text
from quire.runner.fingerprint import block_fingerprint, system_fingerprint
from quire.text.template_files import source_in_force


def engine_fingerprint(config: EngineConfig, program: Program, executor: Executor) -> bytes:
    """Return the fingerprint of what computes KV blocks, which names them outside the pool."""
    degree, recipe = _split_degree(config.executor), executor.recipe
    if degree > 1:
        recipe += f", sums of {degree} parts"
    if config.executor.context_parallel_size > 1:  # by which keys and values lie in a block
        recipe += f", pieces in blocks of {config.cache.block_size}"
    return block_fingerprint(
        program,
        executor=executor.name,
        recipe=recipe,
        weights_digest=executor.weights_digest,
        block_size=config.kv_block_tokens,
        block_bytes=executor.block_bytes,
    )


def model_card(
    config: EngineConfig, model: SizedModel, executor: Executor, *, max_num_seqs: int
) -> ModelCard:
    """Return the card that clients of the engine read."""
    spec, program, folder, memory = model.spec, model.program, model.folder, model.memory
    return ModelCard(
        name=model_name(config.model),
        aliases=config.model.served_model_name[1:],
        path=str(folder),
        max_model_len=memory.max_model_len,
        vocab_size=spec.vocab_size,
        eos_ids=spec.generation.eos_ids,
        fingerprint=system_fingerprint(
            program,
            folder,
            weights_digest=executor.weights_digest,
            recipe=executor.recipe,
            max_model_len=memory.max_model_len,
            parallel_degree=_split_degree(config.executor),
            chat_template=source_in_force(folder, config.model.chat_template),
        ),
        generation_defaults=dict(spec.generation.defaults),
        banned_sequences=spec.generation.banned_sequences,
        dtype=compute_dtype(spec, config.model.dtype).value,
        quantization=precision_text(program),
        kv_cache_dtype=kv_cache_text(program),
        recipe=executor.recipe,
        num_blocks=memory.num_blocks,
        block_size=config.kv_block_tokens,
        block_bytes=executor.block_bytes,
        max_num_seqs=max_num_seqs,
        created_s=int(time.time()),
        pooling=model.pooling,
        generates=spec.has_head,
        max_draft_tokens=config.speculation.max_draft_tokens,
        speculates=config.speculation.speculate != "off",
        queue_timeout_s=config.scheduler.queue_timeout_s or 0.0,
        num_parameters=sum(weight.size for weight in program.weights.values()),
    )


def _split_degree(settings: ExecutorConfig) -> int:
    """Return the degree of a parallelism that splits sums, on which answers depend."""
    return settings.tensor_parallel_size if settings.tp_mode == "fast" else 1
