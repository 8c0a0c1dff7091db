"""ReferenceFirstLayers: the NumPy twin of NativeFirstLayers (native_first_layers.py).

An executor of the first layers of a model, with the weights and the KV cache of the model's
executor. Buffers are its own.
"""

from __future__ import annotations

from quire.execute.executor import StepLimits
from quire.execute.reference import ReferenceExecutor
from quire.program.program import Program


class ReferenceFirstLayers(ReferenceExecutor):
    """An Executor of `program`, the first layers of `model`'s."""

    def __init__(self, model: ReferenceExecutor, program: Program, limits: StepLimits) -> None:
        self._model = model
        self._weights, self._few, self._experts = model._weights, model._few, model._experts
        self._group = model._group
        self.coarse_rows, self.weights_digest = model.coarse_rows, model.weights_digest
        self._prepare(program, limits)

    def share_cache(self) -> None:
        """Take over the cache that the model has allocated."""
        model = self._model
        self._caches = model._caches
        self._num_blocks, self._block_size = model._num_blocks, model._block_size

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Raise: the cache is the model's."""
        raise ValueError(f"{self._program.name} has the cache of its model; see share_cache")
