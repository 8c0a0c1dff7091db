"""The audit of the cache's books: tables, holds, reference counts, free blocks, prefix index.

Knows how the books relate and nothing of what they are for. Runs when the engine is idle and
after each operation of the property tests; costs a few vector operations over all blocks. Where
blocks are wrong it names the requests that last had them. It reports and can repair; it never
raises for a contradiction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.cache.pool import BlockPool, Int32s
from quire.cache.prefix_index import PrefixIndex
from quire.cache.table import BlockTable


def check(
    pool: BlockPool,
    index: PrefixIndex,
    tables: BlockTable,
    holds: Sequence[tuple[int, Int32s]],
    *,
    repair: bool = False,
) -> list[str]:
    """Return contradictions between tables, references, free blocks and index, in words.

    With `repair`, reference counts and free blocks are derived anew from tables and holds, and the
    marks of findable blocks from the index: leaked blocks return, nothing is lost.
    """
    due, names = _references_due(pool.num_blocks, tables, holds), tables.last_holders()
    keyed = index.known
    found = [
        *_table_problems(tables),
        *_named(pool.references > due, "blocks leaked (more references than holders)", names),
        *_named(pool.references < due, "blocks with fewer references than holders", names),
        *_named(pool.findable != keyed, "blocks where findable mark and index entry disagree"),
        *_free_problems(pool, names),
        *index.problems(),
    ]
    if found and repair:
        pool.findable[:] = keyed
        pool.rebuild(due)
    return found


def has_leaks(pool: BlockPool, tables: BlockTable, holds: Sequence[tuple[int, Int32s]]) -> bool:
    """Return whether references and holders disagree, as a bug of the scheduler would cause."""
    due = _references_due(pool.num_blocks, tables, holds)
    return bool((pool.references != due).any())


def _references_due(
    num_blocks: int, tables: BlockTable, holds: Sequence[tuple[int, Int32s]]
) -> Int32s:
    entries = tables.blocks[tables.held()]
    named = np.concatenate((entries, *(blocks for _, blocks in holds)))
    inside = named[(named >= 0) & (named < num_blocks)]
    return np.bincount(inside, minlength=num_blocks).astype(np.int32)


def _table_problems(tables: BlockTable) -> list[str]:
    found = []
    if ((tables.blocks >= 0) != tables.held()).any():
        found.append("tables: entries and counts disagree")
    if (tables.capacities != tables.counts * tables.block_size).any():
        found.append("tables: capacities and counts disagree")
    return found


def _free_problems(pool: BlockPool, names: NDArray[Any]) -> list[str]:
    plain, findable = pool.free_blocks()
    times_free = np.bincount(np.concatenate((plain, findable)), minlength=pool.num_blocks)
    found = [
        *_named(times_free > 1, "blocks free more than once", names),
        *_named((times_free > 0) & (pool.references > 0), "blocks free and in use at once", names),
        *_named(
            (times_free == 0) & (pool.references == 0), "blocks neither free nor in use", names
        ),
    ]
    again = pool.protected_blocks()
    if (pool.protected & ~pool.findable).any():
        found.append("blocks are protected that cannot be found")
    if np.count_nonzero(pool.protected[findable]) != len(again) or not pool.protected[again].all():
        found.append("free blocks lie in the wrong queue (used once or again)")
    if pool.findable[plain].any() or not pool.findable[findable].all():
        found.append("free blocks lie in the wrong list (plain or findable)")
    if len(plain) + len(findable) != pool.num_free:
        found.append(f"{len(plain) + len(findable)} blocks are free, {pool.num_free} are counted")
    return found


def _named(wrong: NDArray[np.bool_], what: str, names: NDArray[Any] | None = None) -> list[str]:
    """Which blocks, and the requests that last had them."""
    if not np.count_nonzero(wrong):
        return []
    blocks = np.flatnonzero(wrong)
    finding = f"{len(blocks)} {what}: {_shown(blocks.tolist())}"
    holders = [] if names is None else dict.fromkeys(filter(None, names[blocks].tolist()))
    return [f"{finding}; last held by {_shown(list(holders))}" if holders else finding]


def _shown(some: Sequence[object]) -> str:
    return ", ".join(map(str, some[:8])) + (", ..." if len(some) > 8 else "")
