"""How much memory a program lacks: what weights must leave, where they do not all fit.

Knows no device and no weight. Always holds: the sum is that of the memory plan
(quire/config/memory.py).
"""

from __future__ import annotations

from quire.config.memory import DEFAULT_SHARE, RESERVE_BYTES
from quire.execute.executor import ExecutorMemory
from quire.program.program import Program

# Of a token of a running request in the tables of scheduler and worker: its id and its share of a
# block's entries (quire/config/memory.py).
TABLE_ENTRY_BYTES = 12


def missing_bytes(
    program: Program,
    whole: ExecutorMemory,
    available_bytes: int,
    *,
    kv_bytes: int | None,
    max_sequences: int,
    reserve_bytes: int = RESERVE_BYTES,
    buffer_bytes: int = 0,
) -> int:
    """Return the bytes by which weights do not fit beside buffers, reserve and KV cache; below 0
    where they fit.

    whole: what the program takes with all weights. kv_bytes: of the KV cache; None: the default
    share of what is left beside the buffers, and of the tables of max_sequences requests.
    buffer_bytes: of KV blocks on their way, beside those of a step.
    """
    left = max(available_bytes - reserve_bytes - whole.step_bytes - buffer_bytes, 0)
    if kv_bytes is None:
        kv_bytes = int(left * (1 - DEFAULT_SHARE))
    else:
        num_tokens = min(program.max_positions, kv_bytes // whole.token_bytes)
        kv_bytes += max_sequences * num_tokens * TABLE_ENTRY_BYTES
    return whole.weights_bytes + kv_bytes - left
