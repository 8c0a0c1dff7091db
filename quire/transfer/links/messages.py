"""Messages of a transfer connection: a kind, a length and a fixed layout each; nothing is pickled.

    Hello, Proof               version, nonces and proofs of the shared key
    Identity, Refusal          what computes the blocks on this side; why the other side is refused
    Load                       how fast this side computes prompts, and how many come first
    Segment, Agent             where this side's blocks lie in shared memory, or for NIXL
    Prefill, Fetch             compute a prompt for me; send me the blocks with these digests
    Release                    nothing is fetched of a transfer, its lease can end
    Block, End                 a block or where it lies, with its checksum; no more blocks follow
    Landed                     so many blocks are here
    Beat, Done                 a sign of life; the blocks are here, the lease can end

Integers are little-endian, texts UTF-8 with a 16-bit length. Always holds: `unpack` accepts exactly
what `pack` gives, checks every length, and raises MessageError for anything else.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

from quire.base.key_proof import NONCE_BYTES, PROOF_BYTES
from quire.base.prefill_load import PrefillLoad

VERSION = 5
MAGIC = b"QuireKVX"
FINGERPRINT_BYTES = 32
DIGEST_BYTES = 16
TRANSFER_ID_BYTES = 16
MAX_TEXT_BYTES = 4096

_TEXT = struct.Struct("<H")


class MessageError(ValueError):
    """Bytes that are no message, or not the one that must come now."""


class Message(Protocol):
    """A message. max_bytes: the longest payload that is read."""

    kind: ClassVar[int]
    max_bytes: ClassVar[int]

    def pack(self) -> bytes:
        """Return the payload."""

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Return the message of a payload. Raises MessageError."""


class _Reader:
    """Reads a payload from front to back."""

    def __init__(self, payload: bytes) -> None:
        self._payload, self._at = payload, 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        found = self._payload[self._at : self._at + count]
        if len(found) != count:
            raise MessageError(f"a message ends after {len(self._payload)} bytes; it is cut")
        self._at += count
        return found

    def fields(self, layout: struct.Struct) -> tuple[int, ...]:
        """Return the next integers."""
        return layout.unpack(self.take(layout.size))

    def text(self) -> str:
        """Return the next text."""
        (count,) = self.fields(_TEXT)
        if count > MAX_TEXT_BYTES:
            raise MessageError(f"a text has {count} bytes; at most {MAX_TEXT_BYTES} are allowed")
        try:
            return self.take(count).decode()
        except UnicodeDecodeError as error:
            raise MessageError("a text is not UTF-8") from error

    def rest(self) -> bytes:
        """Return what is left."""
        return self.take(len(self._payload) - self._at)

    def end(self) -> None:
        """Raise MessageError unless all was read."""
        if self._at != len(self._payload):
            raise MessageError(f"a message has {len(self._payload) - self._at} bytes too many")


def _exactly(payload: bytes, count: int) -> bytes:
    """Return a payload that is one field. Raises MessageError where it has another length."""
    reader = _Reader(payload)
    field = reader.take(count)
    reader.end()
    return field


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "replace")[:MAX_TEXT_BYTES]
    raw = raw.decode("utf-8", "ignore").encode()  # a character is not cut
    return _TEXT.pack(len(raw)) + raw


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of both sides, before anything is known of the other."""

    version: int
    nonce: bytes

    kind = 1
    max_bytes = 64
    _LAYOUT: ClassVar[struct.Struct] = struct.Struct("<H")

    def pack(self) -> bytes:
        """See Message."""
        return MAGIC + self._LAYOUT.pack(self.version) + self.nonce

    @classmethod
    def unpack(cls, payload: bytes) -> Hello:
        """See Message."""
        reader = _Reader(payload)
        if reader.take(len(MAGIC)) != MAGIC:
            raise MessageError("the other side is no KV transfer port of quire")
        (version,) = reader.fields(cls._LAYOUT)
        nonce = reader.take(NONCE_BYTES)
        reader.end()
        return cls(version, nonce)


@dataclass(frozen=True, slots=True)
class Proof:
    """A proof that a side has the shared key (handshake.py)."""

    proof: bytes

    kind = 2
    max_bytes = PROOF_BYTES

    def pack(self) -> bytes:
        """See Message."""
        return self.proof

    @classmethod
    def unpack(cls, payload: bytes) -> Proof:
        """See Message."""
        return cls(_exactly(payload, PROOF_BYTES))


@dataclass(frozen=True, slots=True)
class Identity:
    """What a side's blocks are. backends: how it can hand bytes over, the preferred one first.

    fingerprint: of all that a block's bytes depend on (quire/runner/fingerprint.py). model, recipe
    and kv_dtype name a difference of fingerprints.
    """

    engine_id: str
    fingerprint: bytes
    block_size: int
    block_bytes: int
    model: str
    recipe: str
    kv_dtype: str
    backends: tuple[str, ...]

    kind = 3
    max_bytes = 8 * MAX_TEXT_BYTES
    _LAYOUT: ClassVar[struct.Struct] = struct.Struct("<IQ")

    def pack(self) -> bytes:
        """See Message."""
        texts = (self.engine_id, self.model, self.recipe, self.kv_dtype, ",".join(self.backends))
        numbers = self._LAYOUT.pack(self.block_size, self.block_bytes)
        return self.fingerprint + numbers + b"".join(map(_text, texts))

    @classmethod
    def unpack(cls, payload: bytes) -> Identity:
        """See Message."""
        reader = _Reader(payload)
        fingerprint = reader.take(FINGERPRINT_BYTES)
        block_size, block_bytes = reader.fields(cls._LAYOUT)
        engine_id, model, recipe, kv_dtype, backends = (reader.text() for _ in range(5))
        reader.end()
        return cls(
            engine_id=engine_id,
            fingerprint=fingerprint,
            block_size=block_size,
            block_bytes=block_bytes,
            model=model,
            recipe=recipe,
            kv_dtype=kv_dtype,
            backends=tuple(backends.split(",")),
        )


@dataclass(frozen=True, slots=True)
class _Reason:
    """One text."""

    reason: str

    max_bytes: ClassVar[int] = MAX_TEXT_BYTES + _TEXT.size

    def pack(self) -> bytes:
        """See Message."""
        return _text(self.reason)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """See Message."""
        reader = _Reader(payload)
        reason = reader.text()
        reader.end()
        return cls(reason)


@dataclass(frozen=True, slots=True)
class Refusal(_Reason):
    """Why a side goes no further."""

    kind = 4


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute a prompt and keep its blocks under `transfer_id`. token_ids: int32 bytes."""

    transfer_id: bytes
    salt: str
    token_ids: bytes

    kind = 5
    max_bytes = 16 << 20

    def pack(self) -> bytes:
        """See Message."""
        return self.transfer_id + _text(self.salt) + self.token_ids

    @classmethod
    def unpack(cls, payload: bytes) -> Prefill:
        """See Message."""
        reader = _Reader(payload)
        transfer_id, salt, token_ids = reader.take(TRANSFER_ID_BYTES), reader.text(), reader.rest()
        if not token_ids or len(token_ids) % 4:
            raise MessageError(f"a prompt has {len(token_ids)} bytes; int32 ids are expected")
        return cls(transfer_id, salt, token_ids)


@dataclass(frozen=True, slots=True)
class Fetch:
    """Send the blocks of `transfer_id` with these digests, in this order.

    is_inline: with their bytes; otherwise with where they lie in shared memory.
    """

    transfer_id: bytes
    digests: tuple[bytes, ...]
    is_inline: bool

    kind = 6
    max_bytes = 16 << 20

    def pack(self) -> bytes:
        """See Message."""
        return self.transfer_id + bytes((self.is_inline,)) + b"".join(self.digests)

    @classmethod
    def unpack(cls, payload: bytes) -> Fetch:
        """See Message."""
        reader = _Reader(payload)
        transfer_id, flag, rest = reader.take(TRANSFER_ID_BYTES), reader.take(1), reader.rest()
        if flag not in (b"\0", b"\1"):
            raise MessageError(f"a flag is {flag[0]}; 0 or 1 is expected")
        if not rest or len(rest) % DIGEST_BYTES:
            raise MessageError(f"digests have {len(rest)} bytes; {DIGEST_BYTES} each are expected")
        digests = (rest[at : at + DIGEST_BYTES] for at in range(0, len(rest), DIGEST_BYTES))
        return cls(transfer_id, tuple(digests), flag == b"\1")


@dataclass(frozen=True, slots=True)
class Block:
    """Block `index` of those fetched. offset: where it lies in shared memory; INLINE: its bytes
    follow. checksum: of its bytes (checksum.py)."""

    index: int
    checksum: int
    offset: int

    kind = 7
    INLINE: ClassVar[int] = (1 << 64) - 1
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<IQQ")
    max_bytes = LAYOUT.size

    def pack(self) -> bytes:
        """See Message; inline bytes are sent after these."""
        return self.LAYOUT.pack(self.index, self.checksum, self.offset)

    @classmethod
    def unpack(cls, payload: bytes) -> Block:
        """See Message."""
        reader = _Reader(payload)
        index, checksum, offset = reader.fields(cls.LAYOUT)
        reader.end()
        return cls(index, checksum, offset)


@dataclass(frozen=True, slots=True)
class End(_Reason):
    """No more blocks follow. reason: "", or why there are fewer than asked for."""

    kind = 8


@dataclass(frozen=True, slots=True)
class Segment:
    """The shared memory in which blocks lie: a descriptor of a process on the same machine.

    secret: what the segment begins with.
    """

    process_id: int
    descriptor: int
    num_bytes: int
    secret: bytes

    kind = 9
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<IIQ32s")
    max_bytes = LAYOUT.size

    def pack(self) -> bytes:
        """See Message."""
        return self.LAYOUT.pack(self.process_id, self.descriptor, self.num_bytes, self.secret)

    @classmethod
    def unpack(cls, payload: bytes) -> Segment:
        """See Message."""
        if len(payload) != cls.LAYOUT.size:
            raise MessageError(
                f"a segment has {len(payload)} bytes; {cls.LAYOUT.size} are expected"
            )
        process_id, descriptor, num_bytes, secret = cls.LAYOUT.unpack(payload)
        return cls(process_id, descriptor, num_bytes, secret)


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life."""

    kind = 10
    max_bytes = 0

    def pack(self) -> bytes:
        """See Message."""
        return b""

    @classmethod
    def unpack(cls, payload: bytes) -> Beat:
        """See Message."""
        _Reader(payload).end()
        return cls()


@dataclass(frozen=True, slots=True)
class Done:
    """The fetching side needs nothing more."""

    kind = 11
    max_bytes = 0

    def pack(self) -> bytes:
        """See Message."""
        return b""

    @classmethod
    def unpack(cls, payload: bytes) -> Done:
        """See Message."""
        _Reader(payload).end()
        return cls()


@dataclass(frozen=True, slots=True)
class Release:
    """Nothing more is fetched of a transfer: its lease can end."""

    transfer_id: bytes

    kind = 12
    max_bytes = TRANSFER_ID_BYTES

    def pack(self) -> bytes:
        """See Message."""
        return self.transfer_id

    @classmethod
    def unpack(cls, payload: bytes) -> Release:
        """See Message."""
        return cls(_exactly(payload, TRANSFER_ID_BYTES))


@dataclass(frozen=True, slots=True)
class Agent:
    """The memory in which blocks lie, registered with NIXL. metadata: NIXL's own, of this agent."""

    address: int
    num_bytes: int
    metadata: bytes

    kind = 13
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<QQ")
    max_bytes = 1 << 20

    def pack(self) -> bytes:
        """See Message."""
        return self.LAYOUT.pack(self.address, self.num_bytes) + self.metadata

    @classmethod
    def unpack(cls, payload: bytes) -> Agent:
        """See Message."""
        reader = _Reader(payload)
        address, num_bytes = reader.fields(cls.LAYOUT)
        metadata = reader.rest()
        if not metadata:
            raise MessageError("an agent has no metadata")
        return cls(address, num_bytes, metadata)


@dataclass(frozen=True, slots=True)
class Load:
    """How long prompts take at the handing side, sent after each handshake."""

    load: PrefillLoad

    kind = 14
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<ddddIB")
    max_bytes = LAYOUT.size

    def pack(self) -> bytes:
        """See Message."""
        load = self.load
        times_ms = (load.queue_ms, load.fixed_ms, load.token_ms, load.position_ms)
        return self.LAYOUT.pack(*times_ms, load.step_tokens, load.is_measured)

    @classmethod
    def unpack(cls, payload: bytes) -> Load:
        """See Message."""
        reader = _Reader(payload)
        *times_ms, step_tokens, flag = reader.fields(cls.LAYOUT)
        reader.end()
        if not all(0.0 <= one < math.inf for one in times_ms) or step_tokens < 1 or flag > 1:
            raise MessageError(f"a load has times of {times_ms} ms in steps of {step_tokens}")
        queue_ms, fixed_ms, token_ms, position_ms = times_ms
        return cls(
            PrefillLoad(
                queue_ms=queue_ms,
                fixed_ms=fixed_ms,
                token_ms=token_ms,
                position_ms=position_ms,
                step_tokens=step_tokens,
                is_measured=bool(flag),
            )
        )


@dataclass(frozen=True, slots=True)
class Landed:
    """So many of the fetched blocks, from the first on, are whole at the fetching side."""

    num_blocks: int

    kind = 15
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<I")
    max_bytes = LAYOUT.size

    def pack(self) -> bytes:
        """See Message."""
        return self.LAYOUT.pack(self.num_blocks)

    @classmethod
    def unpack(cls, payload: bytes) -> Landed:
        """See Message."""
        reader = _Reader(payload)
        (num_blocks,) = reader.fields(cls.LAYOUT)
        reader.end()
        return cls(num_blocks)


AnyMessage = (
    Hello
    | Proof
    | Identity
    | Refusal
    | Prefill
    | Fetch
    | Block
    | End
    | Segment
    | Beat
    | Done
    | Release
    | Agent
    | Load
    | Landed
)
_ALL = (
    *(Hello, Proof, Identity, Refusal, Prefill, Fetch, Block, End),
    *(Segment, Beat, Done, Release, Agent, Load, Landed),
)
KINDS: Mapping[int, type[AnyMessage]] = {message.kind: message for message in _ALL}
