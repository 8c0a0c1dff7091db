"""freeze_heap: what is loaded is not collected again."""

from __future__ import annotations

import gc

from quire.base.heap import freeze_heap


def test_what_exists_is_left_out_of_collections_and_new_cycles_are_not() -> None:
    before, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    kept = [[number] for number in range(1000)]
    try:
        freeze_heap()
        assert gc.get_freeze_count() >= num_frozen + 1000
        assert not any(one is kept for one in gc.get_objects())
        ring: list[object] = []
        ring.append(ring)
        del ring
        assert gc.collect() >= 1
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
