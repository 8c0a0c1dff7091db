"""Keep what a process has loaded out of its garbage collections.

Python looks through all objects in a full collection, with the interpreter lock held: those of the
imported modules alone take 0.1 s, and several times that on a busy machine. Meanwhile no thread of
the process runs, not even one that sends signs of life. Knows nothing of what is loaded.
"""

from __future__ import annotations

import gc

# A server of a thousand streams allocates more than Python's default of 700 young objects in one
# step, and most live until the next one. The second is small: a collection of the second generation
# scans the survivors of that many collections of the first.
_YOUNG_OBJECTS, _NUM_COLLECTIONS = 5_000, 4


def freeze_heap() -> None:
    """Collect once, and exempt the objects that are left from later collections. Call it when a
    process has loaded its modules."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _NUM_COLLECTIONS)
