"""Keep what a process has loaded out of its garbage collections.

A full collection visits all objects, with the interpreter lock held: those of the imported modules
alone take 0.02 to 0.1 s, and several times that on a busy machine. Meanwhile no thread of the
process runs, not even one that sends signs of life. Knows nothing of what is loaded. For processes
of Quire's own (API, router, engine): a library leaves the collections of its program as they are.
"""

from __future__ import annotations

import gc

# New objects until a collection of the youngest generation. With a thousand streams Python's 700
# come in one step, and most of them live until the next one.
_YOUNG_OBJECTS = 5_000
# Such collections until one of the second generation, which visits what all of them have left.
_YOUNG_COLLECTIONS = 4


def freeze_heap() -> None:
    """Collect once, and leave what remains out of all later collections. Call it once, when the
    process has loaded what it keeps."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_COLLECTIONS)
