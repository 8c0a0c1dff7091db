"""Plan the memory of the KV cache: an itemized sum, or an error that names what to lower.

Pure arithmetic on measured numbers. Invariant: the planned blocks fit in the given memory, and one
request of max_model_len tokens fits in the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from quire.base.errors import CapacityError
from quire.config.machine import MachineMemory

# Kept free for the interpreter, tokenizer, HTTP and the rest of the machine.
RESERVE_BYTES = 256 * 1024 * 1024
# Tokens and block ids of a running request are int32, in the scheduler's and the worker's tables.
SLOT_ENTRY_BYTES = 2 * 4
EXCHANGE = "buffers of NCCL"
TRANSFER = "KV blocks in transfer"
# Default share of the remaining memory for the KV cache; OWN_SHARE on a device of our own.
DEFAULT_SHARE = 0.6
OWN_SHARE = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """One line of the sum."""

    what: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNeeds:
    """What a proposer takes besides the model; lines and errors call it `name`.

    step_bytes: buffers of its largest pass. token_bytes: KV of a token; its cache has as many
    blocks as the model's, as far as requests of max_model_len can use them; 0: there is none.
    host_bytes: what lies in host memory, whatever computes the model, on a line `host_what`.
    elsewhere_bytes: as much of the host's memory, where the sum is that of a device with memory of
    its own. advice: what to change where there is too little memory.
    """

    name: str
    weights_bytes: int = 0
    step_bytes: int = 0
    token_bytes: int = 0
    max_model_len: int = 0
    host_bytes: int = 0
    host_what: str = ""
    elsewhere_bytes: int = 0
    advice: str = ""

    @property
    def fixed_bytes(self) -> int:
        """Return all but the KV cache."""
        return self.weights_bytes + self.step_bytes + self.host_bytes

    def on_device(self) -> DraftNeeds:
        """Return what is needed of a device with memory of its own."""
        return replace(self, host_bytes=0, elsewhere_bytes=self.host_bytes)

    def fixed_lines(self) -> list[MemoryLine]:
        """Return what is needed, without the KV cache."""
        parts = (
            ("weights", self.weights_bytes),
            ("step buffers", self.step_bytes),
            (self.host_what, self.host_bytes),
        )
        return [
            MemoryLine(what=f"{self.name}: {what}", num_bytes=-num_bytes)
            for what, num_bytes in parts
            if num_bytes
        ]

    def lines(self, num_blocks: int, block_size: int) -> list[MemoryLine]:
        """Return the lines of the sum, with a KV cache of `num_blocks` blocks."""
        lines, kv_bytes = self.fixed_lines(), num_blocks * block_size * self.token_bytes
        if kv_bytes:
            what = f"{self.name}: KV cache ({num_blocks} blocks of {block_size} tokens)"
            lines.append(MemoryLine(what=what, num_bytes=-kv_bytes))
        return lines

    def notes(self) -> tuple[str, ...]:
        """Return what the sum leaves out."""
        if not self.elsewhere_bytes:
            return ()
        return (
            f"{self.name}: {self.host_what}: {mib(self.elsewhere_bytes)} of the host's memory, "
            "which the sum leaves out",
        )


NO_DRAFT = DraftNeeds(name="")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """What is known before anything is allocated.

    weights_bytes: as the executor stores them. step_bytes: buffers of the largest step.
    token_bytes: KV of one token over all layers, as the executor stores it. exchange_bytes: of a
    device, for exchanges with others. transfer_bytes: buffers of KV blocks that are moved to or
    from a tier, other engines or a store.
    """

    weights_bytes: int
    step_bytes: int
    token_bytes: int
    block_size: int
    max_num_seqs: int
    model_max_len: int
    max_model_len: int | None
    kv_cache_memory_bytes: int | None
    draft: DraftNeeds = field(default_factory=lambda: NO_DRAFT)
    exchange_bytes: int = 0
    transfer_bytes: int = 0

    def further_parts(self) -> tuple[tuple[str, int], ...]:
        """Return the names and bytes of what few engines need."""
        parts = ((EXCHANGE, self.exchange_bytes), (TRANSFER, self.transfer_bytes))
        return tuple((what, num_bytes) for what, num_bytes in parts if num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The number of KV blocks, the maximum tokens of a request, and the sum that led to them.

    draft_blocks: KV blocks of the proposer; kv_bytes does not include them.
    """

    num_blocks: int
    block_size: int
    draft_blocks: int = 0
    max_model_len: int
    kv_bytes: int
    lines: tuple[MemoryLine, ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        """Format the sum as aligned lines."""
        width = max(len(line.what) for line in self.lines)
        rows = [f"{line.what:<{width}}  {mib(line.num_bytes):>12}" for line in self.lines]
        return "\n".join([*rows, *self.notes])


def plan_memory(needs: MemoryNeeds, memory: MachineMemory) -> MemoryPlan:
    """Plan blocks and context length for a model on a machine.

    Without max_model_len the model's length is used, lowered (with a note) to what the cache can
    hold. Raises CapacityError if the weights, the requested KV memory, or one request of the
    requested length do not fit; the message says what is needed, what is available, and what to
    lower.
    """
    draft = needs.draft
    fixed_bytes = needs.weights_bytes + needs.step_bytes + RESERVE_BYTES
    fixed_bytes += draft.fixed_bytes + sum(num_bytes for _, num_bytes in needs.further_parts())
    slot_bytes = _slot_bytes(needs, memory.available_bytes - fixed_bytes)
    fixed_bytes += slot_bytes
    left_bytes = memory.available_bytes - fixed_bytes
    block_bytes = needs.block_size * needs.token_bytes
    draft_block_bytes = needs.block_size * draft.token_bytes
    if left_bytes < block_bytes + draft_block_bytes:
        raise CapacityError(
            f"the model does not fit: {mib(fixed_bytes + block_bytes + draft_block_bytes)} are "
            f"needed ({mib(needs.weights_bytes)} weights, {mib(needs.step_bytes)} step buffers, "
            f"{mib(slot_bytes)} slot tables, {_further_text(needs)}"
            f"{mib(RESERVE_BYTES)} reserve, {mib(block_bytes)} for one KV block), "
            f"{mib(memory.available_bytes)} are available ({memory.limit}); {memory.remedy}, "
            "take a smaller model, or lower --max-num-batched-tokens or --max-num-seqs"
            f"{f', or {draft.advice}' if draft.advice and draft.fixed_bytes else ''}"
        )
    num_blocks = _num_blocks(needs, memory, fixed_bytes)
    max_model_len, notes = _context(needs, num_blocks)
    draft_blocks = _draft_blocks(needs, num_blocks)
    lines = (
        MemoryLine(what=f"available ({memory.limit})", num_bytes=memory.available_bytes),
        MemoryLine(what="weights", num_bytes=-needs.weights_bytes),
        MemoryLine(what="step buffers", num_bytes=-needs.step_bytes),
        MemoryLine(what="slot tables", num_bytes=-slot_bytes),
        *(MemoryLine(what=what, num_bytes=-num_bytes) for what, num_bytes in needs.further_parts()),
        MemoryLine(what="reserve", num_bytes=-RESERVE_BYTES),
        MemoryLine(
            what=f"KV cache ({num_blocks} blocks of {needs.block_size} tokens)",
            num_bytes=-num_blocks * block_bytes,
        ),
        *draft.lines(draft_blocks, needs.block_size),
        MemoryLine(
            what="left free",
            num_bytes=left_bytes - num_blocks * block_bytes - draft_blocks * draft_block_bytes,
        ),
    )
    return MemoryPlan(
        num_blocks=num_blocks,
        block_size=needs.block_size,
        draft_blocks=draft_blocks,
        max_model_len=max_model_len,
        kv_bytes=num_blocks * block_bytes,
        lines=lines,
        notes=(*notes, *draft.notes()),
    )


def _num_blocks(needs: MemoryNeeds, memory: MachineMemory, fixed_bytes: int) -> int:
    """Return the blocks of the KV cache, beside which those of a proposer fit."""
    draft, left_bytes = needs.draft, memory.available_bytes - fixed_bytes
    block_bytes = needs.block_size * needs.token_bytes
    draft_block_bytes = needs.block_size * draft.token_bytes
    useful_blocks = needs.max_num_seqs * _blocks(needs.max_model_len or needs.model_max_len, needs)
    if needs.kv_cache_memory_bytes is None:
        share = OWN_SHARE if memory.is_own else DEFAULT_SHARE
        share_bytes = int(left_bytes * share)
        num_blocks = share_bytes // (block_bytes + draft_block_bytes)
        # What requests of the proposer cannot use is left to the model's cache.
        draft_bytes = _draft_blocks(needs, useful_blocks) * draft_block_bytes
        num_blocks = max(num_blocks, (share_bytes - draft_bytes) // block_bytes)
        num_blocks = min(num_blocks, useful_blocks)
        num_blocks = max(num_blocks, 1)
    else:
        num_blocks = needs.kv_cache_memory_bytes // block_bytes
        draft_blocks = _draft_blocks(needs, num_blocks)
        more = draft_blocks * draft_block_bytes
        if needs.kv_cache_memory_bytes + more > left_bytes:
            besides = ""
            if more:
                besides = f" (and {mib(more)} for {draft_blocks} KV blocks of the {draft.name})"
            raise CapacityError(
                f"--kv-cache-memory asks for {mib(needs.kv_cache_memory_bytes)}{besides}, but of "
                f"{mib(memory.available_bytes)} available ({memory.limit}) only {mib(left_bytes)} "
                f"are left beside weights, buffers, tables and reserve ({mib(fixed_bytes)}); lower "
                "--kv-cache-memory"
            )
        if num_blocks < 1:
            raise CapacityError(
                f"--kv-cache-memory is {needs.kv_cache_memory_bytes} bytes, less than one block of "
                f"{needs.block_size} tokens, which takes {block_bytes}; raise it or lower "
                "--block-size"
            )
    return num_blocks


def _draft_blocks(needs: MemoryNeeds, num_blocks: int) -> int:
    """Return the blocks of a proposer's cache beside `num_blocks` of the model's."""
    draft = needs.draft
    if not draft.token_bytes:
        return 0
    holds_tokens = num_blocks * needs.block_size
    longest = min(needs.max_model_len or needs.model_max_len, holds_tokens, draft.max_model_len)
    return min(num_blocks, needs.max_num_seqs * _blocks(longest, needs))


def num_blocks_of(num_tokens: int, block_size: int) -> int:
    """Return the KV blocks of one request with so many tokens."""
    return -(-num_tokens // block_size)


def mib(num_bytes: int) -> str:
    """Format bytes: KiB below one MiB, else MiB with one decimal."""
    if abs(num_bytes) < 2**20:
        return f"{num_bytes / 2**10:.1f} KiB"
    return f"{num_bytes / 2**20:.1f} MiB"


def _slot_bytes(needs: MemoryNeeds, left_bytes: int) -> int:
    """Return the bytes of all slots' rows, as long as a request can be in the remaining memory."""
    draft = needs.draft
    fitting_tokens = max(left_bytes, 0) // (needs.token_bytes + draft.token_bytes)
    num_tokens = min(needs.max_model_len or needs.model_max_len, fitting_tokens)
    drafted_tokens = min(num_tokens, draft.max_model_len)  # in the mirror of what drafts
    entries = num_tokens + _blocks(num_tokens, needs)
    draft_entries = drafted_tokens + _blocks(drafted_tokens, needs)
    return needs.max_num_seqs * (entries * SLOT_ENTRY_BYTES + draft_entries * SLOT_ENTRY_BYTES // 2)


def _further_text(needs: MemoryNeeds) -> str:
    """Return what few engines need, as part of an error; "" if that is nothing."""
    draft = needs.draft
    parts = [f"{mib(-line.num_bytes)} {line.what}" for line in draft.fixed_lines()]
    if draft.token_bytes:
        block_bytes = needs.block_size * draft.token_bytes
        parts.append(f"{mib(block_bytes)} for one KV block of the {draft.name}")
    parts += [f"{mib(num_bytes)} {what}" for what, num_bytes in needs.further_parts()]
    return "".join(f"{part}, " for part in parts)


def _context(needs: MemoryNeeds, num_blocks: int) -> tuple[int, tuple[str, ...]]:
    holds_tokens = num_blocks * needs.block_size
    if needs.max_model_len is None:
        if holds_tokens >= needs.model_max_len:
            return needs.model_max_len, ()
        return holds_tokens, (
            f"max-model-len is lowered from the model's {needs.model_max_len} to {holds_tokens}: "
            "more does not fit in the KV cache",
        )
    if holds_tokens < needs.max_model_len:
        needed_bytes = _blocks(needs.max_model_len, needs) * needs.block_size * needs.token_bytes
        raise CapacityError(
            f"one request of --max-model-len {needs.max_model_len} tokens needs "
            f"{mib(needed_bytes)} of KV cache; there are {num_blocks} blocks for "
            f"{holds_tokens} tokens ({mib(holds_tokens * needs.token_bytes)}); lower "
            f"--max-model-len to {holds_tokens}, raise --kv-cache-memory, or free memory"
        )
    return needs.max_model_len, ()


def _blocks(num_tokens: int, needs: MemoryNeeds) -> int:
    return num_blocks_of(num_tokens, needs.block_size)
