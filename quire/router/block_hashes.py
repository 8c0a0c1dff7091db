"""The public hashes of a prompt's blocks, as replicas report them in KV events.

SipHash-2-4 with 128 bits of output, under a public key, over the digest of the block before and the
block's token ids; the last 8 bytes are the hash. Equal to what quire/cache/reporting.py reports
of blocks without a salt (a test compares the two). Knows no tokenizer.
"""

from __future__ import annotations

import struct
from array import array

from quire._native import siphash128

# As FIXED_KEY and seed_of("", FIXED_KEY) of quire/cache/chain.py, which needs NumPy.
PUBLIC_KEY = bytes(range(16))
_pack = struct.Struct("<QQ").pack
_SEED = _pack(*siphash128(b"\0", PUBLIC_KEY))
_BYTES_PER_TOKEN = 4
# Further blocks of a prompt hardly change which replica is the best.
MAX_BLOCKS = 2048


def block_hashes(token_ids: array[int], block_size: int) -> list[int]:
    """Return the hash of each full block of a prompt. token_ids: an array of type "i"."""
    raw, step = token_ids.tobytes(), _BYTES_PER_TOKEN * block_size
    num_blocks = min(len(raw) // step, MAX_BLOCKS)
    digest, hashes = _SEED, list[int]()
    for at in range(0, num_blocks * step, step):
        first, last = siphash128(digest + raw[at : at + step], PUBLIC_KEY)
        digest = _pack(first, last)
        hashes.append(last)
    return hashes
