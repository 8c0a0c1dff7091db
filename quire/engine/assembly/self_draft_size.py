"""How many of a model's first layers draft for it (--speculate self), and the memory they need.

Asked before anything is loaded. Weights and KV cache are the model's, so that only buffers of a
pass, which computes one token per request, are needed besides.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.base.errors import SettingError
from quire.config.groups import EngineConfig
from quire.config.memory import DraftNeeds
from quire.execute.executor import ExecutorSizing, StepLimits
from quire.program.first_layers import first_layers, num_layers
from quire.program.program import Program

# By default one in so many layers drafts (docs/speculation.md has the reason).
LAYERS_PER_DRAFT_LAYER = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedSelfDraft:
    """The first layers of a model as a program. limits: its largest pass."""

    program: Program
    limits: StepLimits
    needs: DraftNeeds

    def note(self, max_model_len: int) -> str:
        """Return a line for the log."""
        return f"drafts: {self.program.name}, at most {self.limits.max_sequences} requests a pass"


def sized_self_draft(
    config: EngineConfig, program: Program, sizing: ExecutorSizing
) -> SizedSelfDraft:
    """Cut the first layers of `program` and size them. Raises SettingError where there are none."""
    total, given = num_layers(program), config.speculation.self_draft_layers
    if total < 2 or (given is not None and given >= total):
        wanted = "speculate is self" if given is None else f"self_draft_layers is {given}"
        raise SettingError(
            f"{wanted} and the model has {total} layers, of which fewer than all can draft; "
            + (f"set 1 to {total - 1}" if total > 1 else "set --speculate ngram or off")
        )
    num = max(total // LAYERS_PER_DRAFT_LAYER, 1) if given is None else given
    try:
        short = first_layers(program, num)
    except ValueError as error:
        raise SettingError(
            f"the first {num} layers cannot draft for this model ({error}); set another "
            "--self-draft-layers, or --speculate ngram, or give a --draft-model"
        ) from error
    max_num_seqs = config.scheduler.max_num_seqs
    limits = StepLimits(
        max_tokens=max_num_seqs,
        max_samples=sizing.head_rows(max_num_seqs),
        max_sequences=max_num_seqs,
    )
    return SizedSelfDraft(
        program=short,
        limits=limits,
        needs=DraftNeeds(
            weights_bytes=0,
            step_bytes=sizing.memory_for(short, limits).step_bytes,
            token_bytes=0,
            max_model_len=program.max_positions,
        ),
    )
