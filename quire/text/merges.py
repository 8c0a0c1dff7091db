"""The merges of byte pair encoding, recovered from a vocabulary in order of priority.

tiktoken and SentencePiece store no merges: two neighbours merge where their concatenation is in the
vocabulary, the best first, of equals the leftmost. The `tokenizers` library needs an ordered list
of pairs. Each split of a token into two others is such a pair, and the pairs of one token are
adjacent, so the order of merges is the same. Only where two splits of one token overlap in a
repetitive text could the pair further right come first; vocabularies made by merging never reach
that case (tests compare both rules). Knows no files and no special tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def merges_of(tokens: Iterable[str], place: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return all pairs that form one of `tokens`, in the order of `tokens`.

    place: the parts that may be merged, with their rank in that order.
    """
    merges: list[tuple[str, str]] = []
    place_of = place.get
    for token in tokens:
        cuts = []
        for cut in range(1, len(token)):
            left = place_of(token[:cut])
            if left is not None:
                right = place_of(token[cut:])
                if right is not None:
                    cuts.append((left, right, cut))
        if len(cuts) > 1:
            cuts.sort()
        merges += [(token[:cut], token[cut:]) for _, _, cut in cuts]
    return merges
