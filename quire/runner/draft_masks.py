"""DraftMasks: grammar masks of the positions after a row's drafts.

They come from a copy of the row's matcher, so that the matcher itself takes only tokens of the
answer. Drafts end at the first one that the grammar forbids or that ends the answer: no mask is
made behind it, and the row's run of tokens ends there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.structured.matcher import Matcher, MatcherError, without

Words = NDArray[np.uint32]
BEHIND_DRAFT = "the grammar does not allow a proposed token before this position"


class DraftMasks:
    """The masks of one row in one step. mask: of the position before its drafts.

    excludes_eos: masks leave out the ids that end the answer, where others are allowed. has_failed:
    whether the copy failed, which a draft may have caused.
    """

    def __init__(self, matcher: Matcher, mask: Words, *, excludes_eos: bool) -> None:
        self._original = matcher
        self._copy: Matcher | None = None
        self._mask: Words | None = mask
        self._excludes_eos = excludes_eos
        self.has_failed = False

    def after(self, draft_id: int) -> Words | None:
        """Return the mask after the next draft; None if the drafts end before it."""
        mask, self._mask = self._mask, None
        if mask is None or draft_id in self._original.eos_ids or not _allows(mask, draft_id):
            return None
        try:
            if self._copy is None:
                self._copy = self._original.copy()
            self._copy.take([draft_id])
            if self._copy.is_complete:
                return None
            self._mask = self._copy.mask()
        except MatcherError:
            self.has_failed = True
            return None
        if self._excludes_eos:
            longer = without(self._mask, self._original.eos_ids)
            self._mask = longer if longer.any() else self._mask
        return self._mask


def _allows(mask: Words, token_id: int) -> bool:
    word, bit = divmod(token_id, 32)
    return word < len(mask) and bool(int(mask[word]) >> bit & 1)
