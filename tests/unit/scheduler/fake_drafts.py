"""A draft source that knows the answers, and is right with a given probability."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from quire.base.records import Request
from quire.base.token_table import TokenTable
from quire.scheduler.interfaces import DraftCost

Int32s = NDArray[np.int32]
VOCAB = 11
GARBAGE = 1  # of fake_worker.py


class FakeDrafts:
    """answer: the tokens of a request run alone. right: the share of right drafts."""

    proposer_name, uses_cache, may_begin_late = "fake", False, False
    from_prediction = None
    asks_predictions_only = False
    num_proposer_errors = num_errors = 0
    plain_ms = 0.0

    def __init__(
        self,
        max_drafts: int,
        answer: Callable[[Request], Sequence[int]],
        *,
        right: float = 0.7,
    ) -> None:
        self.max_drafts = max_drafts
        self.drafting_ms = 0.0
        self.learns, self.notes_rests, self.notes_plain_steps = True, False, True
        self.learned: list[tuple[str, list[int]]] = []  # of which requests, and what
        self.reports: list[tuple[int, int]] = []  # drafted and accepted, by row
        self._answer, self._right = answer, right
        self._random = Random(max_drafts)
        self._live: dict[int, tuple[Request, Sequence[int]]] = {}

    def begin(self, slot: int, request: Request) -> None:
        assert slot not in self._live, "the slot was not ended"
        self._live[slot] = (request, self._answer(request))

    def end(self, slot: int) -> None:
        del self._live[slot]

    @property
    def rest_steps(self) -> int:
        return 0

    def note_rest(self, step: int, num_steps: int) -> None:
        raise AssertionError("these drafts take part in no other steps")

    def note_arrivals(self, num_new: int, num_running: int) -> None:
        pass

    def takes_plain_step(self) -> bool:
        return False

    def skips_step(self, tokens: TokenTable, able_slots: Callable[[], NDArray[np.intp]]) -> bool:
        return False

    def fail(self, error: Exception) -> None:
        raise error

    def learn(self, slot: int, output: Int32s) -> None:
        request, answer = self._live[slot]
        self.learned.append((request.request_id, output.tolist()))
        assert output.tolist() == list(answer[: len(output)])

    def note_kv(self, slots: NDArray[np.intp], block_tables: Int32s, capacities: Int32s) -> None:
        raise AssertionError("these drafts use no cache")

    def note_step(
        self,
        step_ms: float,
        gained_ms: float | None,
        computed_ms: float,
        num_steps: int = 1,
        added_ms: float = 0.0,
    ) -> None:
        assert step_ms >= 0.0
        assert num_steps == 1 or (num_steps > 1 and gained_ms is None)
        assert computed_ms >= 0.0

    def would_propose(
        self, tokens: TokenTable, index: NDArray[np.intp], limits: Int32s
    ) -> NDArray[np.bool_]:
        return np.array([self._random.random() < 0.8 for _ in index], np.bool_)

    def propose(
        self,
        tokens: TokenTable,
        index: NDArray[np.intp],
        limits: Int32s,
        cost: Callable[[], DraftCost],
    ) -> tuple[Int32s, Int32s]:
        assert cost().step_ms > 0
        assert cost().step_tokens >= len(index)
        assert len(cost().added_ms) == 1 + int(limits.sum())
        counts, ids = [], []
        for slot, limit in zip(index.tolist(), limits.tolist(), strict=True):
            request, answer = self._live[slot]
            done = int(tokens.lengths[slot]) - len(request.prompt_ids)
            following = answer[done : done + self._random.randint(0, limit)]
            is_right = [self._random.random() < self._right for _ in following]
            ids += [
                (token_id + (not right)) % VOCAB
                for token_id, right in zip(following, is_right, strict=True)
            ]
            counts.append(len(following))
        return np.array(counts, np.int32), np.array(ids, np.int32)

    def verified(self, index: NDArray[np.intp], drafted: Int32s, accepted: Int32s) -> None:
        assert (accepted <= drafted).all()
        self.reports += zip(drafted.tolist(), accepted.tolist(), strict=True)


class FakeKVDrafts(FakeDrafts):
    """Writes garbage wherever drafts may be computed, from the last known token on."""

    uses_cache = True
    content: list[int]  # of the worker's pool
    block_size: int

    def note_kv(self, slots: NDArray[np.intp], block_tables: Int32s, capacities: Int32s) -> None:
        self._noted = list(zip(block_tables.tolist(), capacities.tolist(), strict=True))

    def propose(
        self,
        tokens: TokenTable,
        index: NDArray[np.intp],
        limits: Int32s,
        cost: Callable[[], DraftCost],
    ) -> tuple[Int32s, Int32s]:
        for slot, (blocks, end) in zip(index.tolist(), self._noted, strict=True):
            assert slot in self._live, "only live requests draft"
            for position in range(int(tokens.lengths[slot]) - 1, end):
                block = blocks[position // self.block_size]
                self.content[block * self.block_size + position % self.block_size] = GARBAGE
        return super().propose(tokens, index, limits, cost)
