"""LastTokens: the token that was chosen last for each slot, on the device, where steps take it.

At one address for ever, so that captured graphs find it. Knows no requests. Always holds: what is
taken is an id, 0 for a row that failed.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.execute.gpu.stream import Stream

Int32s = NDArray[np.int32]


class LastTokens:
    """Of `num_slots` slots. by_kernels: whether kernels move them, or plain PyTorch."""

    def __init__(
        self, num_slots: int, stream: Stream, device: torch.device, *, by_kernels: bool
    ) -> None:
        self._tokens = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._stream, self._by_kernels = stream, by_kernels

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> Tensor:
        """int32 [slots], -1 of a row that failed."""
        return self._tokens

    def take(self, token_ids: Tensor, late_slots: Tensor, num_rows: int) -> None:
        """Of the first rows, those with a slot get its token."""
        ids, slots = token_ids[:num_rows], late_slots[:num_rows]
        if self._by_kernels:
            from quire.execute.gpu.kernels.last_tokens import take_last_tokens

            take_last_tokens(ids, slots, self._tokens)
        else:
            last = self._tokens[slots.clamp(min=0).long()].clamp(min=0)
            ids.copy_(torch.where(slots >= 0, last, ids))

    def keep(self, slots: Int32s, token_ids: Tensor) -> None:
        """Keep these slots' tokens, which the device has; of a slot with several rows, any of
        them."""
        from quire.execute.gpu.kernels.last_tokens import keep_last_tokens

        keep_last_tokens(self._tokens, self._stream.to_device(slots), token_ids)

    def put(self, slots: Int32s, token_ids: Int32s) -> None:
        """Put these slots' tokens there, on CPU tensors."""
        self._tokens[torch.from_numpy(slots).long()] = torch.from_numpy(token_ids)
