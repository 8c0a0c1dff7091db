"""Reports of the prefix cache: what one request was given, and what the whole cache holds.

Frozen records of numbers, sent as they are. Always holds: nothing here is a prompt's text or its
tokens, and no salt is spelled out: prefixes and salts are named by keyed digests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class MissReason(StrEnum):
    """Why the prefix that was found ends where it does."""

    FIRST_DIFFERENCE = "first_difference"  # the nearest known prompt goes on with other tokens
    NOT_SEEN = "not_seen"  # nothing known goes on from there
    NOT_FOUND = (
        "not_found"  # the only reason given where strangers share prefixes; see for_strangers
    )
    EVICTED = "evicted"  # it was known, and its block was given to others
    OTHER_SALT = "other_salt"  # the same tenant has it under another salt
    SCORED = "prompt_is_scored"  # its log-probabilities, or its mean, are computed
    DISABLED = "disabled"  # the server runs without prefix caching


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """The first token of a prompt that was not found, counted from 0, and why.

    For FIRST_DIFFERENCE it is the first token that differs, else where a block begins.
    """

    reason: MissReason
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUsage:
    """Prompt tokens found at first admission, by tier; miss is None where all that could be was.

    pinned_tokens: tokens after those, in blocks that are pinned once they are computed, by
    lifetime: (milliseconds, tokens).
    """

    pool_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    miss: Miss | None = None
    pinned_tokens: tuple[tuple[float, int], ...] = ()


def for_strangers(use: CacheUsage, block_size: int) -> CacheUsage:
    """Return what a client may know where unrelated clients share its prefixes.

    This reveals no more than the time to the first token: the number of blocks found. An exact
    first difference would let a client guess another's prompt token by token, where 16 tokens at
    once cannot be guessed; the other reasons reveal that there was a prompt.
    """
    if use.miss is None or use.miss.reason in (MissReason.SCORED, MissReason.DISABLED):
        return use
    token = use.miss.token // block_size * block_size
    return replace(use, miss=Miss(reason=MissReason.NOT_FOUND, token=token))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixUsage:
    """A prefix that was found at least once. digest: of its last block, in hex."""

    digest: str
    tokens: int
    hits: int
    tenant: str
    salt: str
    protected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerUsage:
    """The owner of cached blocks. salt: its keyed digest in hex, "" for no salt."""

    tenant: str
    salt: str
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """The current state of one cache.

    The blocks of the pool are used (a live request names them), once or again (free, still
    findable, by how often they were used), pinned (free, allocated last) or plain (free). Counters
    only grow; those of tokens count prompts that were looked up, those found in a tier among them.
    """

    prefix_caching: bool
    block_size: int
    blocks_total: int
    blocks_used: int
    blocks_once: int
    blocks_again: int
    blocks_again_most: int
    blocks_plain: int
    blocks_findable: int
    ghosts: int
    ghosts_most: int
    queried_tokens_total: int
    hit_tokens_total: int
    host_hit_tokens_total: int = 0
    disk_hit_tokens_total: int = 0
    evicted_blocks_total: int = 0
    blocks_pinned: int = 0
    prefixes: tuple[PrefixUsage, ...] = ()
    owners: tuple[OwnerUsage, ...] = ()
