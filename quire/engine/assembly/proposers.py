"""The proposer of an engine, by its kind: read, compared with the model, and sized.

Imported only where the settings name a proposer (SpeculationConfig.is_set), and each kind only
where it is chosen. Always holds: an engine has one proposer of its own, beside the predictions that
requests bring.
"""

from __future__ import annotations

from typing import assert_never

from quire.config.groups import EngineConfig
from quire.engine.assembly.draft_files import proposer_of
from quire.engine.assembly.sized_proposer import SizedProposer
from quire.execute.executor import ExecutorSizing
from quire.models.spec import ModelSpec
from quire.program.program import Program
from quire.weights.checkpoint import Checkpoint


def sized_proposer(
    config: EngineConfig,
    spec: ModelSpec,
    program: Program,
    checkpoint: Checkpoint | None,
    sizing: ExecutorSizing,
) -> SizedProposer:
    """Read the configuration of what drafts, compare it with the model's program, and size it.

    checkpoint: of the model; None where nothing will be loaded. Raises ModelError or SettingError
    for what cannot be used.
    """
    name = proposer_of(config)
    match name:
        case "ngram":
            from quire.engine.assembly.lookup import sized_lookup

            return sized_lookup(config)
        case "draft":
            from quire.engine.assembly.draft_model import sized_draft

            return sized_draft(config, spec, sizing)
        case "self":
            from quire.engine.assembly.self_draft import sized_self_draft

            first_ids = spec.generation.bos_ids
            return sized_self_draft(config, program, sizing, next(iter(first_ids), 0))
        case "medusa" | "eagle":
            from quire.engine.assembly.heads import sized_heads

            return sized_heads(config, name, spec, program, checkpoint, sizing)
        case _:
            assert_never(name)
