"""Handshake: both sides of a connection prove the shared key, then say what their blocks are.

    fetching side                        handing side
    Hello(version, nonce)          ->
                                   <-    Hello(version, nonce)
    Proof                          ->
                                   <-    Proof, or Refusal
    Identity                       ->
                                   <-    Identity, or Refusal

A proof (quire/base/key_proof.py) is made with a key derived from the shared key. Always holds:
before the other side has proved the key, it learns the protocol's version and nothing else; nothing
is transferred between engines that compute different blocks. Messages are encrypted only where the
connection is secured before (security.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from quire.base.key_proof import KeyProof
from quire.transfer.links.channel import Channel, LinkClosed
from quire.transfer.links.messages import (
    VERSION,
    Hello,
    Identity,
    MessageError,
    Proof,
    Refusal,
)

# All of a handshake's messages are small; an engine that takes longer is taken for gone.
STEP_S = 5.0


class LinkRefused(Exception):
    """The two sides cannot exchange blocks, and why."""


@dataclass(frozen=True, slots=True)
class TransferKeys:
    """Keys derived from the shared key. links: of proofs. digests: of the names of blocks."""

    links: bytes
    digests: bytes

    @classmethod
    def derive(cls, shared: bytes) -> TransferKeys:
        """Return the keys of a shared key."""
        return cls(
            hashlib.blake2b(shared, digest_size=32, person=b"quire-kv-links").digest(),
            hashlib.blake2b(shared, digest_size=16, person=b"quire-kv-names").digest(),
        )


def greet_as_fetcher(channel: Channel, key: bytes, own: Identity) -> Identity:
    """Open a connection from the fetching side; return the other side's identity.

    Raises LinkRefused, MessageError and OSError.
    """
    proof = KeyProof(key, is_server=False)
    channel.send(Hello(VERSION, proof.nonce), within_s=STEP_S)
    try:
        hello = channel.receive(Hello, within_s=STEP_S)
    except LinkClosed as error:
        raise LinkClosed(
            "the other engine closed the connection at once: it has too many, or takes them by TLS "
            "only (give this engine --kv-transfer-tls-ca)"
        ) from error
    assert isinstance(hello, Hello)
    if hello.version != VERSION:
        raise LinkRefused(_versions(other=hello.version))
    channel.send(Proof(proof.own(hello.nonce)), within_s=STEP_S)
    answer = channel.receive(Proof, Refusal, within_s=STEP_S)
    if isinstance(answer, Refusal):
        raise LinkRefused(answer.reason)
    assert isinstance(answer, Proof)
    if not proof.accepts(answer.proof, hello.nonce):
        raise LinkRefused("the other side does not have this engine's transfer key")
    channel.send(own, within_s=STEP_S)
    other = channel.receive(Identity, Refusal, within_s=STEP_S)
    if isinstance(other, Refusal):
        raise LinkRefused(other.reason)
    assert isinstance(other, Identity)
    if why := mismatch(own, other):
        raise LinkRefused(why)
    return other


def greet_as_server(channel: Channel, key: bytes, own: Identity) -> Identity:
    """Open a connection from the handing side; return the other side's identity.

    Raises LinkRefused, which the other side was sent too, MessageError and OSError.
    """
    hello = channel.receive(Hello, within_s=STEP_S)
    assert isinstance(hello, Hello)
    proof = KeyProof(key, is_server=True)
    channel.send(Hello(VERSION, proof.nonce), within_s=STEP_S)
    if hello.version != VERSION:
        raise LinkRefused(_versions(other=hello.version))
    answer = channel.receive(Proof, within_s=STEP_S)
    assert isinstance(answer, Proof)
    if not proof.accepts(answer.proof, hello.nonce):
        raise _refuse(channel, "the transfer keys of the two engines differ; give both one file")
    channel.send(Proof(proof.own(hello.nonce)), within_s=STEP_S)
    other = channel.receive(Identity, within_s=STEP_S)
    assert isinstance(other, Identity)
    if why := mismatch(other, own):
        raise _refuse(channel, why)
    channel.send(own, within_s=STEP_S)
    return other


def mismatch(fetching: Identity, handing: Identity) -> str:
    """Return why blocks of the handing side are not those of the fetching side; "" if they are."""
    for what, here, there in (
        ("tokens per block", fetching.block_size, handing.block_size),
        ("dtypes of keys and values", fetching.kv_dtype, handing.kv_dtype),
        ("bytes per block", fetching.block_bytes, handing.block_bytes),
        ("instruction sets or devices", fetching.recipe, handing.recipe),
    ):
        if here != there:
            return (
                f"{what} differ: {here} at the fetching engine ({fetching.model}), {there} at the "
                f"other ({handing.model}); start both with the same settings, on like machines"
            )
    if fetching.fingerprint != handing.fingerprint:
        return (
            f"the engines compute different blocks ({fetching.model} and {handing.model}): "
            "weights, precision, context length, --kv-store-encoding or version of quire differ; "
            "start both with the same model and settings"
        )
    return ""


def _refuse(channel: Channel, why: str) -> LinkRefused:
    channel.send(Refusal(why), within_s=STEP_S)
    return LinkRefused(why)


def _versions(other: int) -> str:
    return (
        f"the other side speaks version {other} of the transfer protocol, this engine {VERSION}; "
        "run one version of quire on both"
    )


__all__ = [
    "STEP_S",
    "LinkRefused",
    "MessageError",
    "TransferKeys",
    "greet_as_fetcher",
    "greet_as_server",
    "mismatch",
]
