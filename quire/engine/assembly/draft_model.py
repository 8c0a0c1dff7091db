"""The draft model of an engine (--draft-model): checked and sized before a byte is loaded, then
loaded beside the model, with its own KV cache.

It uses the engine's executor class and the precision settings of the model. It must have the
model's tokens; its architecture may differ. Where its context is shorter, requests have no drafts
beyond it. A draft model takes part in no fingerprint: it changes no answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quire.base.errors import ConfigError, ModelError, SettingError, TokenizerError
from quire.base.token_table import TokenTable
from quire.config.groups import EngineConfig, ModelConfig
from quire.config.memory import DraftNeeds
from quire.engine.assembly.draft_files import draft_folder
from quire.engine.assembly.model_files import model_folder
from quire.engine.assembly.precision import weights_if_there
from quire.engine.assembly.programs import engine_program
from quire.engine.assembly.sized_proposer import LoadedModel, SizedProposer, made_up_request
from quire.engine.assembly.vocabulary import model_tokenizer
from quire.execute.executor import ExecutorClass, ExecutorSizing, StepLimits
from quire.models.registry import open_model
from quire.models.spec import ModelSpec
from quire.program.program import Program
from quire.runner.draft_runner import DraftRunner
from quire.speculative.draft_model import ModelProposer
from quire.speculative.proposer import no_drafts
from quire.weights.binding import bind
from quire.weights.checkpoint import Checkpoint, open_checkpoint

# Token rows of a pass: known tokens that the draft model lacks are computed so many at a time.
PASS_TOKENS = 256
# Differences of vocabularies that an error lists.
MAX_LISTED = 5
# Rounds of passes that are timed before the first request.
_ROUNDS = 3
_PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedDraft(SizedProposer):
    """A draft model that fits the model and its executor. limits: its largest pass. checkpoint:
    None where only the configuration is there, which is enough to plan."""

    folder: Path
    checkpoint: Checkpoint | None
    program: Program
    limits: StepLimits
    needs: DraftNeeds

    def check(self, executor_class: ExecutorClass) -> None:
        """See SizedProposer. Raises WeightsError where there are no weights to load."""
        executor_class.check_program(self.program)
        if self.checkpoint is None:
            open_checkpoint(self.folder)

    def notes(self, max_model_len: int) -> list[str]:
        """See SizedProposer: where drafts end."""
        if self.program.max_positions >= max_model_len:
            return [f"draft model: {self.folder}"]
        return [
            f"draft model: {self.folder}; its context is {self.program.max_positions} tokens, "
            f"shorter than max-model-len {max_model_len}: requests have no drafts beyond it"
        ]

    def load(self, model: LoadedModel) -> ModelProposer:
        """See SizedProposer: on an executor and with a KV cache of its own."""
        assert self.checkpoint is not None, "check refuses a draft model without weights"
        num_slots = model.limits.max_num_seqs
        executor = model.executor_class(
            self.program, self.checkpoint, model.options_of(self.limits)
        )
        executor.allocate_cache(model.draft_blocks, model.block_tokens)
        sizes = model.draft_limits(
            max_model_len=self.program.max_positions, max_tokens=self.limits.max_tokens
        )
        runner = DraftRunner(
            executor,
            num_slots=num_slots,
            max_model_len=sizes.max_model_len,
            block_size=sizes.block_size,
            max_samples=self.limits.max_samples,
        )
        proposer = ModelProposer(runner, sizes, model.clock.now_ms)
        _time_passes(proposer, num_slots)
        return proposer


def sized_draft(config: EngineConfig, spec: ModelSpec, sizing: ExecutorSizing) -> SizedDraft:
    """Read the draft model's configuration, compare its tokens with the model's and its tensors
    with its configuration, and size it.

    Raises ModelError or SettingError for a draft model that cannot be used, WeightsError where
    weights and configuration disagree. Weights that are absent are refused by SizedDraft.check.
    """
    folder = draft_folder(config, "draft")
    try:
        own = open_model(folder)
    except ConfigError as error:
        raise ConfigError(f"--draft-model {error}") from None
    check_vocabulary(model_folder(config.model), spec.vocab_size, folder, own.vocab_size)
    checkpoint = weights_if_there(folder)
    longest = min(own.max_positions, config.model.max_model_len or spec.max_positions)
    model = replace(config.model, model=str(folder), max_model_len=longest, keep=())
    try:
        program = engine_program(replace(config, model=model), own, checkpoint)
    except SettingError as error:
        raise SettingError(f"draft model {folder}: {error}") from error
    if checkpoint is not None:  # before the model is loaded, and plans load nothing
        bind(program, checkpoint)
    max_num_seqs = config.scheduler.max_num_seqs
    limits = StepLimits(
        max_tokens=max(PASS_TOKENS, 2 * max_num_seqs),
        max_samples=sizing.head_rows(max_num_seqs),
        max_sequences=max_num_seqs,
    )
    needed = sizing.memory_for(program, limits)
    return SizedDraft(
        folder=folder,
        checkpoint=checkpoint,
        program=program,
        limits=limits,
        needs=DraftNeeds(
            name="draft model",
            weights_bytes=needed.weights_bytes,
            step_bytes=needed.step_bytes,
            token_bytes=needed.token_bytes,
            max_model_len=longest,
            advice="leave the draft model out",
        ),
    )


def check_vocabulary(model: Path, num_ids: int, draft: Path, num_draft_ids: int) -> None:
    """Raise ModelError where a token id means another token to the draft model, or may do.

    Tables padded to another length are no difference. Beside a model without a tokenizer, as when
    it is planned by its config.json alone, the draft model must have as many ids.
    """
    if num_ids == num_draft_ids and _same_file(model / "tokenizer.json", draft / "tokenizer.json"):
        return
    ours, theirs = _tokens(model, num_ids), _tokens(draft, num_draft_ids)
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        _check_same_tokens(ours, theirs, model, draft)
        return
    if isinstance(ours, TokenizerError) and num_ids == num_draft_ids:
        return
    error = theirs if isinstance(theirs, TokenizerError) else ours
    raise ModelError(
        f"{draft}: the draft model has {num_draft_ids} token ids, {model} has {num_ids}, and "
        f"their tokens cannot be compared ({error}); take a draft model with the same tokenizer"
    )


def _tokens(model: Path, num_ids: int) -> Mapping[int, str] | TokenizerError:
    """Return a model's tokens by id, or why its tokenizer cannot be read."""
    try:
        return model_tokenizer(ModelConfig(model=str(model)), vocab_size=num_ids).vocabulary()
    except TokenizerError as error:
        return error


def _check_same_tokens(
    ours: Mapping[int, str], theirs: Mapping[int, str], model: Path, draft: Path
) -> None:
    if ours == theirs:
        return
    ids = sorted(id_ for id_ in {*ours, *theirs} if ours.get(id_) != theirs.get(id_))
    listed = "; ".join(
        f"id {id_} is {_shown(theirs.get(id_))}, not {_shown(ours.get(id_))}"
        for id_ in ids[:MAX_LISTED]
    )
    more = f"; and {len(ids) - MAX_LISTED} more" if len(ids) > MAX_LISTED else ""
    raise ModelError(
        f"{draft}: the draft model's tokens differ from those of {model} in {len(ids)} of "
        f"{len({*ours, *theirs})} ids: {listed}{more}; take a draft model with the same tokenizer, "
        "usually a smaller model of the same family"
    )


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)


def _same_file(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes()


def _time_passes(proposer: ModelProposer, num_slots: int) -> None:
    """Time passes of one request and of all, and over a prompt, so that the first decisions know
    what drafts cost."""
    known = TokenTable(num_slots, _PROMPT_TOKENS)
    one = np.zeros(1, np.intp)
    for _ in range(_ROUNDS):
        known.admit(0, np.zeros(_PROMPT_TOKENS, np.int32), _PROMPT_TOKENS)
        proposer.begin(0, made_up_request())
        proposer.propose(known, one, np.ones(1, np.int32), no_drafts(1, 1))
    for num in sorted({1, num_slots}):
        slots, limits = np.arange(num), np.full(num, 3, np.int32)
        for slot in range(num):
            known.admit(slot, np.zeros(2, np.int32), 2)
            proposer.begin(slot, made_up_request())
        for _ in range(_ROUNDS):
            proposer.propose(known, slots, limits, no_drafts(num, 3))
        for slot in range(num):
            proposer.end(slot)
    proposer.begin_to_count()
