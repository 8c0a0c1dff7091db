"""KeyProof: both ends accept each other with one key, and nothing else."""

from __future__ import annotations

import itertools

from quire.base.key_proof import NONCE_BYTES, PROOF_BYTES, KeyProof

KEY, OTHER = b"a shared key", b"another key"


def test_two_ends_with_one_key_accept_each_other() -> None:
    connecting, accepting = KeyProof(KEY, is_server=False), KeyProof(KEY, is_server=True)
    assert len(connecting.nonce) == NONCE_BYTES
    assert len(connecting.own(accepting.nonce)) == PROOF_BYTES
    assert accepting.accepts(connecting.own(accepting.nonce), connecting.nonce)
    assert connecting.accepts(accepting.own(connecting.nonce), accepting.nonce)


def test_another_key_is_not_accepted() -> None:
    for keys in ((KEY, OTHER), (OTHER, KEY)):
        connecting, accepting = (KeyProof(key, is_server=at == 1) for at, key in enumerate(keys))
        assert not accepting.accepts(connecting.own(accepting.nonce), connecting.nonce)
        assert not connecting.accepts(accepting.own(connecting.nonce), accepting.nonce)


def test_a_proof_is_of_no_use_to_the_side_it_was_sent_to_or_elsewhere() -> None:
    """Of sides without the key, which return or repeat what they have heard."""
    connecting, accepting = KeyProof(KEY, is_server=False), KeyProof(KEY, is_server=True)
    heard = connecting.own(accepting.nonce)
    nonces = (connecting.nonce, accepting.nonce)
    assert not any(connecting.accepts(heard, nonce) for nonce in nonces)
    next_one = KeyProof(KEY, is_server=True)
    assert not any(next_one.accepts(heard, nonce) for nonce in nonces)
    for proof, nonce in itertools.product((b"", heard[:-1], bytes(PROOF_BYTES)), (b"", *nonces)):
        assert not accepting.accepts(proof, nonce)
    assert connecting.nonce != accepting.nonce != next_one.nonce
