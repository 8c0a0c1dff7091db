"""ModelCard and Health: what an engine says of itself.

Plain frozen records; they cross the process border with `Ready` and are read by the HTTP edge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quire.base.kv_transfer import TransferCard
from quire.models.pooling_files import PoolingSpec

EngineState = Literal["starting", "ready", "paused", "draining", "restarting", "asleep", "dead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The model an engine serves, and what bounds a request.

    max_model_len: most tokens of prompt and output together. max_num_seqs: most requests of a
    step. fingerprint: digest of all an answer depends on beside the request. dtype: "f32" or
    "bf16". recipe: the instruction set that computes ("numpy" for the reference). created_s:
    seconds since 1970, when the engine became ready. banned_sequences: ids that its
    generation_config.json keeps out of every answer (TokenRules). quantization: how the weights
    of products are kept ("none": in dtype). kv_cache_dtype: how keys and values are: "f32", "bf16",
    "int8" or "fp8". aliases: further names that requests may give. block_bytes: of one KV block.
    max_draft_tokens: most draft tokens of a request in a step, 0 where none are verified.
    speculates: whether requests have drafts unless they say otherwise. pooling: how embeddings are
    made; None where none are. generates: whether the model has a head, so that it writes text.
    transfer: how KV blocks are exchanged with other engines; None where they are not.
    num_parameters: numbers in the weights, 0 where that is not known. queue_timeout_s: how long a
    prompt may wait for its first step, 0: for ever.
    """

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    fingerprint: str
    generation_defaults: Mapping[str, float | int | tuple[str, ...]]
    dtype: str
    recipe: str
    num_blocks: int
    block_size: int
    max_num_seqs: int
    created_s: int
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    quantization: str = "none"
    kv_cache_dtype: str = "f32"
    aliases: tuple[str, ...] = ()
    block_bytes: int = 0
    max_draft_tokens: int = 0
    speculates: bool = False
    pooling: PoolingSpec | None = None
    generates: bool = True
    transfer: TransferCard | None = None
    num_parameters: int = 0
    queue_timeout_s: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model; the first is the one that answers carry."""
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether the engine does what it should: ready, and busy while work is pending.

    ok is True only in state "ready". reason is empty where ok. pending counts open streams.
    silent_ms: since the engine process has sent anything, while it has work; it sends something
    five times a second at least.
    """

    ok: bool
    state: EngineState
    reason: str
    pending: int
    steps_total: int
    silent_ms: int = 0
