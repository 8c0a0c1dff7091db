"""The merges of byte pair encoding, recovered from a vocabulary in order of priority.

tiktoken and SentencePiece store no merges: two neighbours may merge wherever what they become is
in the vocabulary, the best first, of equals the leftmost. The `tokenizers` library wants pairs in
order. Each way to cut a token into two others is such a pair, and the pairs of one token stand
together, so what is merged first is the same. Only where two cuts of one token overlap in a text
that repeats itself could the pair further right go first; no vocabulary made by merging gets there
(tests hold this against a plain reading of both rules). Knows no files and no special tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def merges_of(tokens: Iterable[str], place: Mapping[str, int]) -> list[tuple[str, str]]:
    """All pairs that make one of `tokens`, which come the first to be merged first.

    place: the parts that may be merged, with their own place in that order.
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
