"""TorchFirstLayers: runs the first layers of another executor's model, with its weights and cache.

As quire/execute/native_first_layers.py, on a device: the tensors of weights and of the KV pool are
those of `model`, buffers and captured steps are its own. Its work is queued in the model's order,
so that it follows steps in flight. Always holds: what it stores at a position is what the model
stores there for the same tokens, bit for bit.
"""

from __future__ import annotations

from quire.execute.executor import StepLimits
from quire.execute.gpu.executor import LaunchOptions, TorchExecutor
from quire.execute.gpu.graphs import Capture, capture_of
from quire.execute.gpu.kv_pool import KvPool
from quire.program.program import Program


class TorchFirstLayers(TorchExecutor):
    """An Executor of `program`, the first layers of `model`'s.

    capture: how steps are captured; None: as the model's are.
    """

    def __init__(
        self,
        model: TorchExecutor,
        program: Program,
        limits: StepLimits,
        *,
        capture: Capture | None = None,
        poison: bool = False,
    ) -> None:
        if capture is None and model._graphs is not None:
            capture = capture_of(model._device)
        super().__init__(
            program,
            model.weights,
            device=model._device,
            exact=model._place.exact,
            limits=limits,
            launch=LaunchOptions(
                kernels=model._attention is not None,
                capture=capture,
                stream=model._stream,
                ends=model._place.ends,
            ),
            poison=poison,
            pool=model._pool,
        )

    def share_cache(self) -> None:
        """Take over the cache that the model has allocated: captured steps know the last one."""
        if self._graphs is not None:
            self._graphs.clear()

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Raise: the cache is the model's."""
        raise ValueError(f"{self._program.name} has the cache of its model; see share_cache")

    def close(self) -> None:
        """Let go of buffers; the model stays open."""
        self._pool = KvPool(self._program, self._device, self._stream)
        super().close()

    def _leave(self) -> None:
        """Nothing: the ends of a rank are the model's."""
