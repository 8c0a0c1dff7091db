"""The compiled module, for type checkers; native/bind has the definitions and docstrings."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Int32s = NDArray[np.int32]
_View = tuple[int, int, int]

MAX_HEAD_DIM: int
MAX_SCORE_TOP: int
PACKED_LAYOUT: int

class Aborted(RuntimeError): ...

class Pool:
    def __init__(self, num_threads: int, *, isa: str = "") -> None: ...
    def deal(self, n: int, body: Callable[[int, int, int], None]) -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def num_forks(self) -> int: ...
    @property
    def isa(self) -> str: ...

class Weight:
    def __init__(
        self,
        form: str,
        dtype: str,
        rows: int,
        columns: int,
        scheme: str = "",
        packed: NDArray[np.uint8] = ...,
    ) -> None: ...
    def fill(
        self,
        pool: Pool,
        first: int,
        count: int,
        source: NDArray[np.uint8],
        source_dtype: str,
        offset: float = 0.0,
        *,
        first_row: int = 0,
        of_rows: int = 0,
        transposed: bool = False,
        digested: bool = True,
    ) -> tuple[int, int] | None: ...
    def row(self, row: int) -> list[float]: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def coarse_rows(self) -> int: ...
    @property
    def packed(self) -> NDArray[np.uint8]: ...

OPERATIONS: Mapping[str, Mapping[str, str]]

class Program:
    def __init__(self, pool: Pool, arena_bytes: int, apart_bytes: int = 0) -> None: ...
    def add_buffer(
        self,
        rows: int,
        offset_bytes: int,
        stride: int,
        max_rows: int,
        dtype: str,
        apart: bool = False,
    ) -> None: ...
    def add_segment(self, ops: Sequence[tuple[str, dict[str, Any]]]) -> None: ...
    def set_rope(self, index: int, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> None: ...
    def allocate_cache(
        self,
        *,
        dtype: str,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        layers: int,
        num_blocks: int,
        ints: bool = False,
    ) -> None: ...
    def copy_blocks(self, copy_from: _Int32s, copy_to: _Int32s) -> None: ...
    def run(
        self,
        segment: int,
        *,
        token_ids: _Int32s,
        positions: _Int32s,
        rope_positions: _Int32s,
        kv_slots: _Int32s,
        seq_starts: _Int32s,
        block_tables: _Int32s,
        sample_rows: _Int32s,
        then: int = -1,
    ) -> None: ...
    def run_layers(
        self,
        segment: int,
        *,
        token_ids: _Int32s,
        positions: _Int32s,
        rope_positions: _Int32s,
        kv_slots: _Int32s,
        seq_starts: _Int32s,
        block_tables: _Int32s,
        sample_rows: _Int32s,
        first: int,
        end: int,
    ) -> None: ...
    def num_layers(self, segment: int) -> int: ...
    def abort(self) -> None: ...
    @property
    def ops_done(self) -> int: ...
    @property
    def pieces_read(self) -> int: ...
    def set_timed(self, timed: bool) -> None: ...
    def units(self, segment: int) -> list[tuple[int, int, int]]: ...
    def set_poison(self, poison: bool) -> None: ...
    def array(self, view: _View, rows: int) -> NDArray[Any]: ...
    @property
    def cache(self) -> NDArray[np.uint8]: ...

def isa(name: str = "") -> str: ...
def available_isas() -> list[str]: ...
def give_back_freed_memory() -> None: ...

class ChooseParams:
    def __init__(self, *, rare: dict[str, NDArray[Any]] | None, **arrays: NDArray[Any]) -> None: ...

def choose(
    pool: Pool,
    params: ChooseParams,
    logits: NDArray[np.float32],
    positions: _Int32s,
    token_ids: _Int32s,
    logprobs: NDArray[np.float32],
    top_ids: _Int32s,
    top_logprobs: NDArray[np.float32],
    mus: NDArray[np.float32],
    candidate_ids: _Int32s,
    candidate_scores: NDArray[np.float32],
    candidate_logprobs: NDArray[np.float32],
    /,
) -> None: ...
def score(pool: Pool, **arrays: NDArray[Any]) -> None: ...
def limit(pool: Pool, name: str, chunks: int, memory: NDArray[np.uint8]) -> tuple[int, float]: ...
def compute_ns() -> int: ...
def content_digest(content: NDArray[np.uint8], pool: Pool | None = None) -> tuple[int, int]: ...
def siphash128(message: bytes, key: bytes) -> tuple[int, int]: ...
def hash_chains(
    tokens: _Int32s,
    rows: _Int32s,
    firsts: _Int32s,
    counts: _Int32s,
    seeds: NDArray[np.uint64],
    block_size: int,
    key: bytes,
) -> NDArray[np.uint64]: ...

class DigestTable:
    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def find(self, digests: NDArray[np.uint64]) -> _Int32s: ...
    def longest_run(self, digests: NDArray[np.uint64]) -> _Int32s: ...
    def put(self, digests: NDArray[np.uint64], numbers: _Int32s) -> NDArray[np.int64]: ...
    def take(self, digests: NDArray[np.uint64]) -> _Int32s: ...
    def take_pairs(self, digests: NDArray[np.uint64], numbers: _Int32s) -> int: ...
    def clear(self) -> None: ...
