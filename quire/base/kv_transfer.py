"""Transfer of KV blocks between engines: what a request, a model card and the counters say of it.

A prefill engine hands over the blocks of a prompt under a lease, named by a transfer id; a decode
engine fetches them. Plain records; they know no socket and no store.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Failure(StrEnum):
    """Why a decode engine computed blocks that it meant to fetch; labels of a metric."""

    UNREACHABLE = "unreachable"  # no connection to the peer
    REFUSED = "refused"  # another key, model, layout or version, or no room for the request
    CUT = "cut"  # the connection ended early, or its messages were malformed
    TIMEOUT = "timeout"  # no sign of life, or no block for too long
    BAD_BYTES = "bad_bytes"  # a block did not match its checksum
    EXPIRED = "expired"  # the peer knows no such transfer, or no longer
    MISSING = "missing"  # the peer lost blocks before they were fetched
    NO_ROOM = "no_room"  # the memory for arriving blocks was full
    NO_PEER = "no_peer"  # every prefill engine failed recently
    BUSY = "busy"  # computing here is faster than waiting for the prefill engine
    UNSUITED = "unsuited"  # the request needs its prompt computed here (prompt_logprobs, pooling)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransfer:
    """What a request wants transferred.

    hand_over: keep the prompt's blocks for another engine, under `transfer_id`; otherwise fetch
    them from the engine at host and port. engine_id: of that engine, "" for any. block_ids: which
    of the prompt's full blocks, in order; None: all.
    """

    transfer_id: str
    hand_over: bool
    host: str = ""
    port: int = 0
    engine_id: str = ""
    block_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCard:
    """What an engine offers. host, port: where it hands blocks over; port 0 where it does not.

    role: "prefill", "decode" or "both". peer_hosts: hosts that it fetches from, beside loopback,
    and networks (as in 10.0.0.0/8) of such hosts.
    """

    engine_id: str
    role: str
    host: str
    port: int
    peer_hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """Counters and gauges. failures: how often, by Failure; *_ms: time spent on the bytes alone.

    overlapped: sent, and received before the prompt was computed; early: loaded into the pool
    before the last block of the prompt had come.
    """

    leases: int = 0
    fetching: int = 0
    sent_blocks_total: int = 0
    sent_bytes_total: int = 0
    overlapped_bytes_total: int = 0
    early_blocks_total: int = 0
    received_blocks_total: int = 0
    received_bytes_total: int = 0
    receive_ms_total: float = 0.0
    transfers_total: int = 0
    failures_total: tuple[tuple[str, int], ...] = ()
