"""The cells of the table: what is measured on which model, at which temperature and batch.

Plain values; loads nothing. A cell's name says all of them, so that results are found again and
parts of the table can be chosen by name.
"""

from __future__ import annotations

from dataclasses import dataclass

TEMPERATURES = (0.0, 0.6, 1.0)
BATCHES = (1, 4, 16, 64)
# Of a synthetic proposer; of the second shape fewer, as its steps are longer.
ACCEPTANCES = {"qwen3-0.6b": (0.3, 0.5, 0.7, 0.9), "llama-3.2-1b": (0.3, 0.7, 0.9)}
SHAPES = tuple(ACCEPTANCES)
PARTS = ("small", "shapes", "repeats", "history", "llama.cpp")
# Tokens of an answer: of a small model, and of a shape.
TOKENS, SHAPE_TOKENS = 128, 64
# Answers of each row in a turn of a small model, by batch: a turn takes a tenth of a second, as the
# machine drifts meanwhile. It begins with an engine that has no requests; half an answer of each
# row does not count, or beginnings would count too much.
TURN_ANSWERS = {1: 2, 4: 2, 16: 2, 64: 1}
# Steps without drafts in a round of a shape, by batch. At batch 1 it is half an answer: in a few
# tokens the number of right drafts varies more than the speed. First come some that do not count.
SHAPE_ROUND_STEPS = {1: SHAPE_TOKENS // 2, 4: 8, 16: 4, 64: 2}
RUN_IN_STEPS = {1: 12, 4: 8, 16: 4, 64: 2}
# Steps of the control before it is measured, by batch, on each engine.
WARM_UP_STEPS = {1: 512, 4: 384, 16: 256, 64: 128}
SHAPE_WARM_UP_STEPS = {1: 96, 4: 64, 16: 32, 64: 16}
# Likewise of each other side that has an engine of its own: one with a fixed number of drafts takes
# its first steps without, to be timed. Where sides share engines, what begins a turn and does not
# count is longer.
FIXED_WARM_UP_STEPS = 5
# Engines of a small model, which all sides share by turns. Equal ones differ by 2 % (their memory
# lies elsewhere), as much as the goals leave; in the ratio of two sides of one engine that cancels,
# and several show what is left of it. With eight, Student's t is 2.4; with four it is 3.2.
NUM_ENGINES = 8
# Seconds of a cell, with its warm-up: by part, and of a shape by batch. Steps of the second shape
# take twice as long.
CELL_S = {"small": 30.0, "repeats": 24.0, "history": 20.0, "llama.cpp": 90.0}
SHAPE_CELL_S = {1: 30.0, 4: 20.0, 16: 24.0, 64: 32.0}
SHAPE_TIMES = {"qwen3-0.6b": 1.0, "llama-3.2-1b": 2.0}
# Pairs of model and proposer in part `small`, and the batches: "independent" is a draft model with
# noise of its own, for comparison of what is accepted. "self" are the model's first layers, and
# "eagle" is the head that comes with the model.
SMALL = (
    *(("box", "ngram", BATCHES), ("box", "draft", BATCHES), ("box", "independent", (1,))),
    *(("box", "self", (1, 4)), ("box", "eagle", (1, 4))),
    *(("stories260K", "ngram", BATCHES), ("stories260K", "draft", BATCHES)),
)
# Of part `repeats`; the prompts of more would take longer to compute than is measured.
REPEATS_BATCHES = (1, 4, 16)
# Of requests with a prediction that matches nothing.
PREDICTION_BATCH = 4
# Goals of the speed with drafts over that without, and of the control over the best fixed k.
GOAL_SHAPES, GOAL_REPEATS, GOAL_LEAST, GOAL_CONTROL = 2.0, 2.5, 0.98, 0.97
GOAL_PEER = 1.0
# The acceptance of GOAL_SHAPES, at batch 1.
GOAL_ACCEPTANCE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """acceptance: of the proposer, where it is synthetic."""

    part: str
    model: str
    proposer: str
    batch: int
    temperature: float = 0.0
    acceptance: float | None = None

    @property
    def name(self) -> str:
        """Return part/model/proposer/t.../b..., with the acceptance in place of the temperature
        where there is one."""
        how = f"t{self.temperature:g}" if self.acceptance is None else f"a{self.acceptance:g}"
        return f"{self.part}/{self.model}/{self.proposer}/{how}/b{self.batch}"

    @property
    def is_small(self) -> bool:
        """Return whether its steps take about a millisecond."""
        return self.part == "small" or self.model == "stories260K"

    @property
    def predicts(self) -> bool:
        """Return whether requests have a prediction, which alone is asked for drafts."""
        return self.proposer == "prediction"

    @property
    def has_fixed(self) -> bool:
        """Return whether fixed numbers of drafts are compared: not where none are found."""
        return not self.predicts

    @property
    def shares_engines(self) -> bool:
        """Return whether the sides share engines by turns."""
        return self.part == "small"

    @property
    def max_num_seqs(self) -> int:
        """Return how many requests the engine runs at once."""
        return {"repeats": max(REPEATS_BATCHES), "history": 1}.get(self.part, max(BATCHES))

    @property
    def num_tokens(self) -> int:
        """Return the tokens of an answer."""
        return TOKENS if self.is_small else SHAPE_TOKENS

    @property
    def round_tokens(self) -> int:
        """Return the tokens of all requests in a round."""
        if self.shares_engines:
            return self.batch * TURN_ANSWERS[self.batch] * self.num_tokens
        return self.batch * SHAPE_ROUND_STEPS[self.batch]

    @property
    def run_in_tokens(self) -> int:
        """Return the tokens of all requests that do not count after they have begun: before the
        first round, or where sides share engines before each turn."""
        if self.shares_engines:
            return self.batch * self.num_tokens // 2
        return self.batch * RUN_IN_STEPS[self.batch]

    @property
    def warm_up_steps(self) -> int:
        """Return the steps of the control before it is measured."""
        return (WARM_UP_STEPS if self.is_small else SHAPE_WARM_UP_STEPS)[self.batch]

    @property
    def seconds(self) -> float:
        """Return how long it is measured where the time of a run is not bounded."""
        if self.part == "llama.cpp":
            return CELL_S[self.part]
        seconds = SHAPE_CELL_S[self.batch] if self.part == "shapes" else CELL_S[self.part]
        return seconds * SHAPE_TIMES.get(self.model, 1.0)

    @property
    def engine(self) -> tuple[str, str, str]:
        """Return what selects the engines; cells with the same one share them."""
        return self.part, self.model, self.proposer

    @property
    def goal(self) -> float:
        """Return the least speed with drafts over that without, or over that of a peer."""
        if self.part == "llama.cpp":
            return GOAL_PEER
        if self.batch == 1 and self.part == "repeats":
            return GOAL_REPEATS
        if self.batch == 1 and self.acceptance == GOAL_ACCEPTANCE:
            return GOAL_SHAPES
        return GOAL_LEAST


def all_cells() -> list[Cell]:
    """Return the cells of the whole table, those of an engine together."""
    cells = [
        Cell(part="small", model=model, proposer=proposer, batch=batch, temperature=temperature)
        for model, proposer, batches in SMALL
        for batch in batches
        for temperature in TEMPERATURES
    ]
    cells.append(Cell(part="small", model="box", proposer="prediction", batch=PREDICTION_BATCH))
    cells += [
        Cell(part="shapes", model=shape, proposer="synthetic", batch=batch, acceptance=acceptance)
        for shape in SHAPES
        for batch in BATCHES
        for acceptance in ACCEPTANCES[shape]
    ]
    cells += [
        Cell(part="repeats", model=shape, proposer="ngram", batch=batch)
        for shape in SHAPES
        for batch in REPEATS_BATCHES
    ]
    cells += [Cell(part="history", model=shape, proposer="history", batch=1) for shape in SHAPES]
    cells += [
        Cell(part="llama.cpp", model=model, proposer=proposer, batch=1)
        for model, proposer in (("qwen3-0.6b", "ngram"), ("stories260K", "draft"))
    ]
    return cells


def quick_cells() -> list[Cell]:
    """Return the cells that have a goal of their own and the worst ones, the former first."""
    first = {
        ("shapes", "qwen3-0.6b", 0.7, 1),
        ("shapes", "qwen3-0.6b", 0.3, 1),
        ("shapes", "qwen3-0.6b", 0.3, 64),
    }
    chosen = [
        cell
        for cell in all_cells()
        if (cell.part, cell.model, cell.acceptance, cell.batch) in first
        or (cell.part in ("repeats", "history") and cell.model == "qwen3-0.6b" and cell.batch == 1)
        or (
            cell.part == "small"
            and (cell.model, cell.proposer) in (("box", "ngram"), ("box", "draft"))
            and cell.batch in (1, 16)
            and cell.temperature != 0.6
        )
    ]
    order = {"shapes": 0, "repeats": 1, "history": 2, "small": 3}
    return sorted(chosen, key=lambda cell: order[cell.part])
