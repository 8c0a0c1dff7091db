"""The public hashes of a prompt's blocks, as replicas report them in KV events.

SipHash-2-4 with 128 bits of output, under a public key, over the digest of the block before and the
block's token ids; the last 8 bytes are the hash. Equal to what quire/cache/reporting.py reports
of blocks without a salt (a test compares the two). Knows no tokenizer.
"""

from __future__ import annotations

from array import array

from quire._native import published_hashes, siphash128

# As FIXED_KEY and seed_of("", FIXED_KEY) of quire/cache/chain.py, which needs NumPy.
PUBLIC_KEY = bytes(range(16))
_SEED = siphash128(b"\0", PUBLIC_KEY)
# Further blocks of a prompt hardly change which replica is the best.
MAX_BLOCKS = 2048


def block_hashes(token_ids: array[int], block_size: int) -> list[int]:
    """Return the hash of each full block of a prompt. token_ids: an array of type "i"."""
    return published_hashes(token_ids[: MAX_BLOCKS * block_size], block_size, _SEED, PUBLIC_KEY)
