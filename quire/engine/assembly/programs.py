"""The program an engine runs, as its settings ask for it: length, precision of weights, KV cache.

Knows settings and the model's configuration; loads no tensor, so that floors and simulations ask
the same function as the engine does.
"""

from __future__ import annotations

from quire.base.errors import SettingError
from quire.config.groups import EngineConfig, ModelConfig
from quire.engine.assembly.precision import with_precision
from quire.models.registry import build_program, compute_dtype
from quire.models.spec import ModelSpec
from quire.program.kv_cache import with_kv_cache_dtype
from quire.program.program import Program
from quire.weights.checkpoint import Checkpoint


def engine_program(config: EngineConfig, spec: ModelSpec, checkpoint: Checkpoint | None) -> Program:
    """For as many positions as were asked for, or as the model has; memory may allow fewer.

    checkpoint: what the weights' own precision is read from, if any. Raises SettingError.
    """
    program = with_precision(
        _plain(config.model, spec),
        config.model.quantization,
        checkpoint,
        head=config.model.head_precision,
        keep=config.model.keep,
        static=spec.static_activations,
    )
    return with_kv_cache_dtype(program, config.cache.kv_cache_dtype)


def _plain(config: ModelConfig, spec: ModelSpec) -> Program:
    wanted = config.max_model_len
    if wanted is not None and wanted > spec.max_positions:
        raise SettingError(
            f"--max-model-len is {wanted}; the model allows at most {spec.max_positions} "
            "positions (its config.json says how many); lower it or leave it out"
        )
    dtype = compute_dtype(spec, config.dtype)
    return build_program(spec, dtype=dtype, max_positions=wanted or spec.max_positions)
