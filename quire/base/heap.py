"""Keep what a process has loaded out of its garbage collections.

Python looks through all objects in a full collection, with the interpreter lock held: those of the
imported modules alone take 0.1 s, and several times that on a busy machine. Meanwhile no thread of
the process runs, not even one that sends signs of life. Knows nothing of what is loaded.
"""

from __future__ import annotations

import gc

# A server of a thousand streams makes Python's 700 young objects in one step, and most live until
# the next one. The second is small, since those of so many first collections are looked at at once.
_YOUNG_OBJECTS, _NUM_COLLECTIONS = 5_000, 4


def settle_heap() -> None:
    """Collect once, and look at none of the objects that are left again; to be called once a
    process is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _NUM_COLLECTIONS)
