"""Teacher: the model that heads are trained for, computed over texts by the native executor.

Gives hidden states and logits of each position. So heads are trained on the hidden states that they
will be given, of any model that Quire runs and in the precision that an engine gives it, and no
model is written a second time. Knows no PyTorch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import SettingError
from quire.execute.executor import HEAD_ROWS, ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.models.registry import open_model
from quire.program.batch import CacheRows, ForwardBatch
from quire.program.program import Program
from quire.program.serialize import digest
from quire.program.taps import HEAD_INPUT, TAPS, with_head_input, with_taps
from quire.train.precision import AUTO, Precision, served_program
from quire.weights.checkpoint import open_checkpoint
from quire.weights.dtypes import from_bf16_bits

Float32s = NDArray[np.float32]
_BLOCK_SIZE = 16


class Lesson(NamedTuple):
    """Of each position of a text: what the head read [T, W], the tapped layers [T, L * H] (empty
    without any), and the logits [T, V]."""

    head_input: Float32s
    taps: Float32s
    logits: Float32s


class Teacher:
    """Computes texts of at most `max_tokens` tokens. layers: the tapped ones. precision: as the
    engine's settings. Raises SettingError or ModelError where an engine on this CPU would."""

    def __init__(
        self,
        folder: Path,
        *,
        max_tokens: int,
        num_threads: int,
        layers: Sequence[int] = (),
        precision: Precision = AUTO,
    ) -> None:
        self.spec = open_model(folder)
        self.checkpoint = open_checkpoint(folder)
        self.max_tokens = min(max_tokens, self.spec.max_positions)
        served = served_program(folder, self.spec, self.checkpoint, precision)
        self._program_digest = digest(served)
        self.layers = tuple(layers)
        self.program: Program = with_head_input(replace(served, max_positions=self.max_tokens))
        if layers:
            self.program = with_taps(self.program, layers)
        limits = StepLimits(max_tokens=self.max_tokens, max_samples=HEAD_ROWS, max_sequences=1)
        self._executor = NativeExecutor(
            self.program, self.checkpoint, ExecutorOptions(limits=limits, num_threads=num_threads)
        )
        self._num_blocks = -(-self.max_tokens // _BLOCK_SIZE)
        self._executor.allocate_cache(self._num_blocks, _BLOCK_SIZE)

    @property
    def head_width(self) -> int:
        """Return the columns of what the head reads."""
        return self.program.outputs[HEAD_INPUT].width

    @property
    def own(self) -> dict[str, Any]:
        """Return what lessons depend on beside the text: the tapped layers, and a digest of the
        model's weights and program, precision included."""
        both = f"{self._executor.weights_digest} {self._program_digest}"
        model = hashlib.blake2b(both.encode(), digest_size=8).hexdigest()
        return {"model": model, "taps": list(self.layers)}

    def lesson(self, ids: Sequence[int]) -> Lesson:
        """Compute a text. Raises SettingError for ids that the model does not have."""
        if not 0 <= min(ids) <= max(ids) < self.program.vocab_size:
            raise SettingError(
                f"a text has token ids from {min(ids)} to {max(ids)}; the model has 0 to "
                f"{self.program.vocab_size - 1}: delete texts.jsonl to generate it anew"
            )
        num_tokens = len(ids)
        numbers = np.arange(num_tokens, dtype=np.int32)
        batch = ForwardBatch(
            token_ids=np.array(ids, np.int32),
            positions=numbers,
            rope_positions=numbers,
            caches=(
                CacheRows(
                    kv_slots=numbers,
                    block_tables=np.arange(self._num_blocks, dtype=np.int32)[None],
                ),
            ),
            seq_starts=np.array([0, num_tokens], np.int32),
            sample_rows=numbers,
            keeps_taps=True,
        )
        self._executor.run_trunk(batch)
        taps = np.empty((num_tokens, 0), np.float32)
        if self.layers:
            taps = self._executor.output(TAPS, num_tokens).copy()
        inputs, logits = [], []
        for first in range(0, num_tokens, HEAD_ROWS):
            count = min(HEAD_ROWS, num_tokens - first)
            logits.append(self._executor.run_head(batch, first, count).copy())
            read = self._executor.output(HEAD_INPUT, count)
            inputs.append(from_bf16_bits(read) if read.dtype == np.uint16 else read.copy())
        return Lesson(np.concatenate(inputs), taps, np.concatenate(logits))

    def close(self) -> None:
        """Free the model."""
        self._executor.close()
