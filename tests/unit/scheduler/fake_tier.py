"""A tier without bytes: the content of FakeWorker's pool slots by place; copies end on request."""

from __future__ import annotations

from random import Random

import numpy as np

from quire.base.block_copies import BlockCopies, CopiesEnded, Tier


class FakeTier:
    """`size`: positions of a block. `wrong` collects impossible requests."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: dict[int, tuple[bytes, list[int]]] = {}
        # In order: (tier, block or place there, digest, what to write or where to read from).
        self.under_way: list[tuple[int, int, bytes, list[int] | int]] = []
        self.is_broken = self._told = False
        self.wrong: list[str] = []
        self.num_saved = self.num_fetched = 0

    def begin(self, copies: BlockCopies, content: list[int]) -> None:
        """Read saves at once, before the plan writes anything."""
        for at in range(len(copies)):
            digest = copies.digests[at].tobytes()
            source, target = int(copies.from_blocks[at]), int(copies.to_blocks[at])
            if copies.from_tiers[at] == Tier.POOL:
                held = content[source * self._size : (source + 1) * self._size]
                if 0 in held or 1 in held:
                    self.wrong.append(f"block {source} is saved and is not whole: {held}")
                self.under_way.append((Tier.DISK, target, digest, held))
            else:
                self.under_way.append((Tier.POOL, target, digest, source))

    def end(self, random: Random, content: list[int], *, most: int = 1000) -> CopiesEnded | None:
        """End some copies in progress, loads before saves or after; some loads fail."""
        ended: list[tuple[int, int, bool]] = []
        num_bad = fetched = saved = 0
        for _ in range(min(most, len(self.under_way))):
            # Loads may overtake saves, except those of the place they read from.
            at = random.choice(range(len(self.under_way))) if random.random() < 0.5 else 0
            tier, target, digest, what = self.under_way[at]
            place = target if tier == Tier.DISK else what
            earlier = [one for one in self.under_way[:at] if _place(one) == place]
            if earlier:
                continue
            self.under_way.pop(at)
            if isinstance(what, list):
                if not self.is_broken:
                    self._held[target] = (digest, what)
                ended.append((tier, target, not self.is_broken))
                saved += 1
                continue
            known = self._held.get(what)
            if known is None or known[0] != digest:
                self.wrong.append(f"place {what} was asked for what it does not hold")
            arrives = known is not None and random.random() < 0.9 and not self.is_broken
            if arrives and known is not None:
                content[target * self._size : (target + 1) * self._size] = known[1]
            num_bad += not arrives
            fetched += arrives
            ended.append((tier, target, arrives))
        self.num_saved += saved
        self.num_fetched += fetched
        if not ended and self._told == self.is_broken:
            return None
        self._told = self.is_broken
        return CopiesEnded(
            to_tiers=np.array([one[0] for one in ended], np.int32),
            to_blocks=np.array([one[1] for one in ended], np.int32),
            arrived=np.array([one[2] for one in ended], np.bool_),
            num_bad=num_bad,
            fetched=fetched,
            fetch_ms=float(fetched),
            saved=saved,
            save_ms=float(saved),
            broken=self.is_broken,
        )


def _place(copy: tuple[int, int, bytes, list[int] | int]) -> object:
    """Return the tier's place of a copy."""
    tier, target, _, what = copy
    return target if tier == Tier.DISK else what
