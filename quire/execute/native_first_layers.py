"""NativeFirstLayers: runs the first layers of another executor's model, with its weights and cache.

An executor of `first_layers(program, num)` that packs nothing: weights are those of `model`, and
layer i of its cache is layer i of the model's. Buffers are its own, so that steps of the two never
disturb each other. Always holds: what it stores at a position is what the model stores there for
the same tokens, bit for bit.
"""

from __future__ import annotations

from quire import _native
from quire.base.errors import CapacityError, SettingError
from quire.execute.executor import StepLimits
from quire.execute.native import NativeExecutor, place_buffers
from quire.execute.rope_table import RopeTable
from quire.program.program import Program


class NativeFirstLayers(NativeExecutor):
    """An Executor of `program`, the first layers of `model`'s.

    num_threads: of an own pool, for calls while the model computes in another thread; 0: the
    model's pool.
    """

    def __init__(
        self,
        model: NativeExecutor,
        program: Program,
        limits: StepLimits,
        *,
        num_threads: int = 0,
        poison: bool = False,
    ) -> None:
        self.check_program(program)
        self._model = model
        try:
            self.pool = _native.Pool(num_threads, isa=model.recipe) if num_threads else model.pool
            self._native = place_buffers(program, limits, self.pool)
        except MemoryError as error:
            raise CapacityError(
                f"{program.name}: buffers of a step of {limits.max_tokens} tokens do not fit into "
                "memory; lower max_num_seqs, or set --speculate ngram or off"
            ) from error
        except RuntimeError as error:  # its words say which threads cannot be started
            raise SettingError(str(error)) from error
        self.recipe = model.recipe
        self._program = program
        self._ropes = [RopeTable(spec) for spec in program.ropes]
        self._num_angles = 0
        self.weights_digest, self.coarse_rows = model.weights_digest, model.coarse_rows
        self._prepare(model.weights, poison=poison)

    def share_cache(self) -> None:
        """Take over the cache that the model has allocated."""
        self._native.share_cache(self._model._native, self._program.caches[0].layers)

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Raise: the cache is the model's."""
        raise ValueError(f"{self._program.name} has the cache of its model; see share_cache")

    def close(self) -> None:
        """Free buffers; the model stays open."""
        super().close()
        del self._model
