"""KeyProof: proof that both ends of a connection have one key, without sending it.

Each end draws a nonce and sends it. A proof is an HMAC-SHA-256 under the key of the side that
proves and of both nonces, so that none can be used on another connection, or by the side to which
it was sent. Knows no socket and no message; which side proves first is its protocol's. Always
holds: proofs are compared in constant time.
"""

from __future__ import annotations

import hmac
import secrets

NONCE_BYTES = PROOF_BYTES = 32


class KeyProof:
    """One end. is_server: it accepted the connection. nonce: what the other end needs of it."""

    def __init__(self, key: bytes, *, is_server: bool) -> None:
        self._key, self._is_server = key, is_server
        self.nonce = secrets.token_bytes(NONCE_BYTES)

    def own(self, other_nonce: bytes) -> bytes:
        """Return the proof for an end with that nonce."""
        return self._proof(other_nonce, of_server=self._is_server)

    def accepts(self, proof: bytes, other_nonce: bytes) -> bool:
        """Return whether the other end, with that nonce, has the key."""
        wanted = self._proof(other_nonce, of_server=not self._is_server)
        return hmac.compare_digest(proof, wanted)

    def _proof(self, other_nonce: bytes, *, of_server: bool) -> bytes:
        ends = (other_nonce, self.nonce) if self._is_server else (self.nonce, other_nonce)
        side = b"accepts\0" if of_server else b"connects\0"
        return hmac.digest(self._key, side + b"".join(ends), "sha256")
