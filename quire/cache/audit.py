"""The audit of the cache's state: tables, holds, reference counts, free blocks, prefix index.

Knows how they relate and nothing of what they are for. Runs when the engine is idle and
after each operation of the property tests; costs a few vector operations over all blocks. Where
blocks are wrong it names the requests that last had them. It reports and can repair; it never
raises for a contradiction.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    held, keyed = tables.held(), index.known
    due = _references_due(pool.num_blocks, tables.blocks[held], holds)
    found = [
        *_table_problems(tables, held),
        *_named(pool.references > due, "blocks leaked (more references than holders)", tables),
        *_named(pool.references < due, "blocks with fewer references than holders", tables),
        *_named(pool.findable != keyed, "blocks where findable mark and index entry disagree"),
        *_free_problems(pool, tables),
        *index.problems(),
    ]
    if found and repair:
        pool.findable[:] = keyed
        pool.rebuild(due)
    return found


def has_leaks(pool: BlockPool, tables: BlockTable, holds: Sequence[tuple[int, Int32s]]) -> bool:
    """Return whether references and holders disagree, as a bug of the scheduler would cause."""
    due = _references_due(pool.num_blocks, tables.blocks[tables.held()], holds)
    return bool((pool.references != due).any())


def _references_due(
    num_blocks: int, entries: Int32s, holds: Sequence[tuple[int, Int32s]]
) -> Int32s:
    """Return the references of each block by table entries and holds."""
    named = np.concatenate((entries, *(blocks for _, blocks in holds)))
    inside = named[(named >= 0) & (named < num_blocks)]
    return np.bincount(inside, minlength=num_blocks).astype(np.int32)


def _table_problems(tables: BlockTable, held: NDArray[np.bool_]) -> list[str]:
    found = []
    if ((tables.blocks >= 0) != held).any():
        found.append("tables: entries and counts disagree")
    if (tables.capacities != tables.counts * tables.block_size).any():
        found.append("tables: capacities and counts disagree")
    return found


def _free_problems(pool: BlockPool, tables: BlockTable) -> list[str]:
    plain, findable = pool.free_blocks()
    times_free = np.bincount(np.concatenate((plain, findable)), minlength=pool.num_blocks)
    found = [
        *_named(times_free > 1, "blocks free more than once", tables),
        *_named((times_free > 0) & (pool.references > 0), "blocks free and in use at once", tables),
        *_named(
            (times_free == 0) & (pool.references == 0), "blocks neither free nor in use", tables
        ),
    ]
    again = pool.protected_blocks()
    kept = pool.kept.blocks()
    if ((pool.protected | pool.pinned) & ~pool.findable).any():
        found.append("blocks are protected or pinned that cannot be found")
    due = pool.protected & ~pool.pinned
    if np.count_nonzero(due[findable]) != len(again) or not due[again].all():
        found.append("free blocks lie in the wrong queue (used once or again)")
    if np.count_nonzero(pool.pinned[findable]) != len(kept) or not pool.pinned[kept].all():
        found.append("free blocks lie in the wrong queue (pinned or not)")
    if pool.findable[plain].any() or not pool.findable[findable].all():
        found.append("free blocks lie in the wrong list (plain or findable)")
    if len(plain) + len(findable) != pool.num_free:
        found.append(f"{len(plain) + len(findable)} blocks are free, {pool.num_free} are counted")
    return found


def _named(wrong: NDArray[np.bool_], what: str, tables: BlockTable | None = None) -> list[str]:
    """Return a line that names the blocks, and the requests that had them last."""
    if not np.count_nonzero(wrong):
        return []
    blocks = np.flatnonzero(wrong)
    finding = f"{len(blocks)} {what}: {_shown(blocks.tolist())}"
    names = [] if tables is None else tables.last_holders()[blocks].tolist()
    holders = dict.fromkeys(filter(None, names))
    return [f"{finding}; last held by {_shown(list(holders))}" if holders else finding]


def _shown(some: Sequence[object]) -> str:
    return ", ".join(map(str, some[:8])) + (", ..." if len(some) > 8 else "")
