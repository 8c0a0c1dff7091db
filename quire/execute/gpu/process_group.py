"""ProcessGroupExchange: the exchange of tensors by torch.distributed, NCCL between GPUs or Gloo.

Knows no program. The ranks meet at a file, which only one machine's ranks share, when they connect;
none waits for another before. Always holds: only calls that move bytes are used (gathers,
broadcasts, all_to_all); a failure of the library is DeviceLost; `abort` ends what waits in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from quire.base.errors import DeviceLost
from quire.execute.gpu.device import first_line

Backend = Literal["nccl", "gloo"]


class ProcessGroupExchange:
    """A TensorExchange.

    rendezvous_file: a path that no other group uses, its folder on this machine; the maker of the
    ranks removes what a rank has left. timeout_s: the longest wait for a rank.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        rendezvous_file: str,
        rank: int,
        degree: int,
        timeout_s: float,
    ) -> None:
        self.rank, self.degree = rank, degree
        # Gloo's calls are the host's, NCCL's are kernels.
        self.is_captured = backend == "nccl"
        self._backend, self._file, self._timeout_s = backend, rendezvous_file, timeout_s
        self._group: dist.ProcessGroup | None = None

    def connect(self) -> None:
        """See TensorExchange."""
        if self._group is not None:
            return
        timeout = timedelta(seconds=self._timeout_s)
        with self._lost("the ranks cannot meet"):
            store = dist.FileStore(self._file, self.degree)
            store.set_timeout(timeout)
            if self._backend == "nccl":
                # Multicast by NVLink switches would take further memory with the first large
                # gather, when the KV cache has the rest already (limits.py counts rings only).
                os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group = dist.ProcessGroupNCCL(store, self.rank, self.degree, options)
            else:
                self._group = dist.ProcessGroupGloo(store, self.rank, self.degree, timeout)

    def all_gather(self, own: Tensor, every: Tensor) -> None:
        """See TensorExchange."""
        if own.numel():
            group = self._connected()
            with self._lost("an exchange of columns"):
                group._allgather_base(every.view(-1), own.view(-1)).wait()

    def all_to_all(self, own: Tensor, every: Tensor) -> None:
        """See TensorExchange."""
        if own.numel():
            group = self._connected()
            with self._lost("an exchange of parts"):
                group.alltoall_base(every.view(-1), own.view(-1), [], []).wait()

    def broadcast(self, values: Tensor) -> None:
        """See TensorExchange."""
        if values.numel():
            group = self._connected()
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            with self._lost("an exchange of tokens"):
                group.broadcast([values], options).wait()

    def abort(self) -> None:
        """Let calls that wait, here, end with an error. From any thread."""
        group = self._group  # which another thread may close meanwhile
        if group is not None:
            group.abort()

    def close(self) -> None:
        """See TensorExchange; removes the file: a maker on another machine cannot."""
        self._group = None
        with suppress(OSError):
            os.unlink(self._file)

    def _connected(self) -> dist.ProcessGroup:
        if self._group is None:
            raise ValueError("the exchange is not connected, or closed")
        return self._group

    @contextmanager
    def _lost(self, doing: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # as all of the library's are
            raise DeviceLost(f"{doing} ({self._backend}): {first_line(error)}") from error
