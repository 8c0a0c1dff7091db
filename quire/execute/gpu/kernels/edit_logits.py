"""What changes logits before a token is chosen: bias, penalties, bans, and masks of grammars.

Twin: steps 2 to 4 of quire/sampling/batch.py, as sampling/reference.py does them, bit for bit. The
host makes one entry for each token id that anything names (`entries_of`); a kernel changes these
logits, and another goes over the rows that have a mask. A row with a last token that only the
device has gets one more entry, into which a kernel puts that token, unless the row has an entry of
it. Always holds: an id is named once per row, so the order of entries does not matter. Knows no
rare parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from quire.base.records import NO_FLOATS, NO_INTS
from quire.execute.gpu.kernels.device_params import ToDevice
from quire.execute.gpu.kernels.launch import EXACT, cdiv
from quire.sampling.batch import SampleBatch
from quire.sampling.parts import NO_MASKS, WHOLE, Words

AT_ONCE = 256
BLOCK = 1024
IS_BIASED, IS_SEEN, IS_BANNED = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
ENTRY_WORDS = 8


@dataclass(frozen=True, slots=True)
class Edits:
    """entries: int32 [8, E]: row, token id (-1: nothing is named), what is to be done, count in the
    output, and as f32 bits bias, repetition, frequency and presence penalty. late: int32 [3, L]:
    slots, and of each one's row the first entry, and the last, which names nothing yet. masked:
    int32 [2, M]: rows and which of `masks` int32 [any, ceil(V / 32)] each has."""

    entries: torch.Tensor
    late: torch.Tensor
    masked: torch.Tensor
    masks: torch.Tensor

    @classmethod
    def of(cls, batch: SampleBatch, to_device: ToDevice = torch.from_numpy) -> Edits | None:
        """Return those of a batch, or None where there are none."""
        named = _rows_with_entries(batch)
        of_rows = [_row_entries(batch, row) for row in named.tolist()]
        entries = np.concatenate([np.empty((ENTRY_WORDS, 0), np.int32), *of_rows], axis=1)
        masked, words = _masked(batch)
        if not entries.shape[1] and not masked.shape[1]:
            return None
        return cls(
            entries=to_device(entries),
            late=to_device(_late(batch, named, of_rows)),
            masked=to_device(masked),
            masks=to_device(np.array(words).view(np.int32)),
        )


def _masked(batch: SampleBatch) -> tuple[NDArray[np.int32], Words]:
    """Return rows with a mask and which one each has [2, M], and the words of the masks."""
    if batch.masks is None:
        return np.empty((2, 0), np.int32), NO_MASKS
    rows = np.flatnonzero(batch.masks.rows >= 0).astype(np.int32)
    return np.stack([rows, batch.masks.rows[rows]]).astype(np.int32), batch.masks.words


def _rows_with_entries(batch: SampleBatch) -> NDArray[np.intp]:
    """Return rows that name an id, or will: in most steps none, and then no row costs the host a
    call."""
    some = np.zeros(len(batch.temperature), np.bool_)
    if batch.penalties is not None and batch.history is not None:
        penalties = batch.penalties
        penalized = penalties.repetition != 1.0
        penalized |= (penalties.frequency != 0.0) | (penalties.presence != 0.0)
        some |= penalized & (np.diff(batch.history.tokens.starts) > 0)
    if batch.logit_bias is not None:
        some |= np.diff(batch.logit_bias.tokens.starts) > 0
    if batch.banned is not None:
        some |= np.diff(batch.banned.starts) > 0
    if batch.history is not None and batch.history.late_slots is not None:
        some |= batch.history.late_slots >= 0
    return np.flatnonzero(some)


def _late(
    batch: SampleBatch, named: NDArray[np.intp], of_rows: list[NDArray[np.int32]]
) -> NDArray[np.int32]:
    """As Edits has it, of the entries of the rows `named`."""
    late_slots = None if batch.history is None else batch.history.late_slots
    if late_slots is None:
        return np.empty((3, 0), np.int32)
    counts = np.array([entries.shape[1] for entries in of_rows], np.int64)
    ends = np.cumsum(counts)
    is_late = late_slots[named] >= 0
    late = late_slots[named][is_late], (ends - counts)[is_late], (ends - 1)[is_late]
    return np.stack(late).astype(np.int32)


def _row_entries(batch: SampleBatch, row: int) -> NDArray[np.int32]:
    """Of each id that a row names; with one more at the end where the last token is late."""
    repetition, frequency, presence = _penalties(batch, row)
    history, output, is_late = _history(batch, row)
    if repetition == 1.0:
        history = NO_INTS
    if frequency == 0.0 and presence == 0.0:
        output = NO_INTS
    biased, biases = _biases(batch, row)
    banned = NO_INTS if batch.banned is None else batch.banned[row]
    named = (biased, history, output, banned)
    ids = np.unique(np.concatenate(named))
    if is_late:
        ids = np.append(ids, np.int32(-1))
    entries = np.zeros((ENTRY_WORDS, len(ids)), np.int32)
    if not len(ids):
        return entries
    entries[0], entries[1] = row, ids
    places = [np.searchsorted(ids[ids >= 0], part) for part in named]
    for flag, place in ((IS_BIASED, 0), (IS_SEEN, 1), (IS_BANNED, 3)):
        entries[2, places[place]] |= flag.value
    np.add.at(entries[3], places[2], 1)
    entries[4].view(np.float32)[places[0]] = biases
    for word, penalty in enumerate((repetition, frequency, presence), start=5):
        entries[word].view(np.float32)[:] = penalty
    return entries


def _penalties(batch: SampleBatch, row: int) -> tuple[float, float, float]:
    """Return a row's repetition, frequency and presence penalty."""
    penalties = batch.penalties
    if penalties is None or _last_n(batch, row) == 0:
        return 1.0, 0.0, 0.0
    return penalties.repetition[row], penalties.frequency[row], penalties.presence[row]


def _last_n(batch: SampleBatch, row: int) -> int:
    """Return Penalties.last_n of a row."""
    last_n = None if batch.penalties is None else batch.penalties.last_n
    return WHOLE if last_n is None else int(last_n[row])


def _history(batch: SampleBatch, row: int) -> tuple[NDArray[np.int32], NDArray[np.int32], bool]:
    """Return the tokens that repetition and that the other penalties count in, and whether the last
    one is late."""
    if batch.history is None:
        return NO_INTS, NO_INTS, False
    tokens, late_slots = batch.history.tokens[row], batch.history.late_slots
    is_late = late_slots is not None and bool(late_slots[row] >= 0)
    last_n = _last_n(batch, row)
    if last_n != WHOLE:
        first = 0 if last_n < 0 else max(0, len(tokens) + is_late - last_n)
        return tokens[first:], tokens[first:], is_late
    return tokens, tokens[batch.history.num_prompt_tokens[row] :], is_late


def _biases(batch: SampleBatch, row: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the ids that a row biases, and by how much."""
    bias = batch.logit_bias
    if bias is None:
        return NO_INTS, NO_FLOATS
    return bias.tokens[row], bias.values[bias.tokens.starts[row] : bias.tokens.starts[row + 1]]


@triton.jit(do_not_specialize=["count"])
def _edit(entries, logits, count, V: tl.constexpr, AT_ONCE: tl.constexpr):
    at = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = at < count
    row = tl.load(entries + at, mask=inside, other=0).to(tl.int64)
    token = tl.load(entries + count + at, mask=inside, other=-1)
    place = logits + row * V + token
    inside = token >= 0
    todo = tl.load(entries + 2 * count + at, mask=inside, other=0)
    times = tl.load(entries + 3 * count + at, mask=inside, other=0)
    bias = _f32(tl.load(entries + 4 * count + at, mask=inside, other=0))
    repetition = _f32(tl.load(entries + 5 * count + at, mask=inside, other=1065353216))
    frequency = _f32(tl.load(entries + 6 * count + at, mask=inside, other=0))
    presence = _f32(tl.load(entries + 7 * count + at, mask=inside, other=0))
    value = tl.load(place, mask=inside, other=0.0)
    value = tl.where((todo & IS_BIASED) != 0, value + bias, value)
    penalized = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
    value = tl.where((todo & IS_SEEN) != 0, penalized, value)
    value = tl.where(times > 0, value - (frequency * times.to(tl.float32) + presence), value)
    value = tl.where((todo & IS_BANNED) != 0, float("-inf"), value)
    tl.store(place, value, mask=inside)


@triton.jit(do_not_specialize=["count", "num_late"])
def _add_late(entries, late, last, count, num_late, BLOCK: tl.constexpr):
    number = tl.program_id(0)
    token = tl.load(last + tl.load(late + number))
    place = tl.load(late + num_late + number)
    spare = tl.load(late + 2 * num_late + number)
    found = 0
    while place < spare:
        at = place + tl.arange(0, BLOCK)
        is_it = (at < spare) & (tl.load(entries + count + at, mask=at < spare, other=-1) == token)
        todo = tl.load(entries + 2 * count + at, mask=is_it, other=0)
        times = tl.load(entries + 3 * count + at, mask=is_it, other=0)
        tl.store(entries + 2 * count + at, todo | IS_SEEN, mask=is_it)
        tl.store(entries + 3 * count + at, times + 1, mask=is_it)
        found += tl.sum(is_it.to(tl.int32), axis=0)
        place += BLOCK
    is_new = (found == 0) & (token >= 0)  # -1: the row that chose it had failed
    tl.store(entries + count + spare, token, mask=is_new)
    tl.store(entries + 2 * count + spare, IS_SEEN, mask=is_new)
    tl.store(entries + 3 * count + spare, 1, mask=is_new)


@triton.jit
def _f32(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["count"])
def _mask(masked, masks, logits, count, V: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.load(masked + tl.program_id(0)).to(tl.int64)
    mask = tl.load(masked + count + tl.program_id(0)).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < V
    word = tl.load(masks + mask * WORDS + ids // 32, mask=inside, other=-1)
    forbidden = inside & (((word >> (ids % 32)) & 1) == 0)
    tl.store(logits + row * V + ids, tl.full([BLOCK], float("-inf"), tl.float32), mask=forbidden)


def add_late_tokens(edits: Edits, last: torch.Tensor) -> None:
    """Late rows' entries, in place, with the last token of their slots: last int32 [slots]."""
    if num_late := edits.late.shape[1]:
        count = edits.entries.shape[1]
        _add_late[num_late,](
            edits.entries, edits.late, last, count, num_late, BLOCK=BLOCK, num_warps=4
        )


def edit_logits(logits: torch.Tensor, edits: Edits) -> None:
    """Change logits f32 [R, V], side by side, in place."""
    vocabulary = logits.shape[1]
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits are {logits.dtype}, strides {logits.stride()}; f32 is needed")
    if count := edits.entries.shape[1]:
        _edit[cdiv(count, AT_ONCE),](
            edits.entries, logits, count, V=vocabulary, AT_ONCE=AT_ONCE, num_warps=4, **EXACT
        )
    if rows := edits.masked.shape[1]:
        _mask[rows, cdiv(vocabulary, BLOCK)](
            edits.masked,
            edits.masks,
            logits,
            rows,
            V=vocabulary,
            WORDS=cdiv(vocabulary, 32),
            BLOCK=BLOCK,
            num_warps=4,
            **EXACT,
        )
