"""generation_config.json: a model's own defaults for sampling, and the ids that end its text.

Values that SamplingParams can express become defaults; a setting that would change answers and
cannot be expressed is refused by name, unless it has the value that switches it off. Knows
nothing of requests: the engine merges these defaults into what a caller leaves open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.base.sampling_checks import MAX_REPEAT_TOKENS
from quire.base.show import show
from quire.models.config_reader import ConfigReader, load_config
from quire.models.decoder_config import eos_warnings
from quire.models.spec import GenerationSpec, ModelSpec

# Bookkeeping; length limits that the context length already sets; what only training reads; how
# transformers caches, compiles and drafts, which changes no answer.
PASSED_OVER = (
    "_from_model_config",
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "assistant_token_id",
    "cache_config",
    "cache_implementation",
    "chat_format",
    "compile_config",
    "continuous_batching_config",
    "decoder_start_token_id",
    "disable_compile",
    "early_stopping",
    "length_penalty",
    "low_memory",
    "max_cache_len",
    "max_length",
    "max_matching_ngram_size",
    "max_window_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "prefill_chunk_size",
    "return_dict_in_generate",
    "speculation_type",
    "target_lookbehind",
    "transformers_version",
    "trust_remote_code",
    "use_cache",
    "use_model_defaults",
    "use_mtp",
    "user_token_id",
)

# Ways of choosing tokens that are not here, and the values that mean "not used".
SWITCHED_OFF: Mapping[str, tuple[Any, ...]] = {
    "assistant_confidence_threshold": (0, 0.0, 0.4),
    "begin_suppress_tokens": (),
    "constraints": (),
    "diversity_penalty": (0, 0.0),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1, 1.0),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_bos_token_id": (),
    "forced_decoder_ids": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1, 1.0),
    "is_assistant": (False,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0, 0.0),
    "prompt_lookup_num_tokens": (),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "sequence_bias": (),
    "stop_strings": (),
    "temperature_last": (False,),
    "token_healing": (False,),
    "top_h": (),
    "watermarking_config": (),
}


def with_generation_defaults(spec: ModelSpec, path: Path) -> ModelSpec:
    """`spec` with the defaults of `path`; eos and bos ids there replace those of config.json.

    `do_sample: false` is a default temperature of 0. Raises ConfigError.
    """
    reader = ConfigReader(load_config(path), where=str(path))
    reader.pass_over(PASSED_OVER)
    for key, allowed in SWITCHED_OFF.items():
        off = "null" if not allowed else f"null or {allowed[0]}"
        reader.require(key, allowed, f"this way of choosing tokens is not supported; only {off} is")
    defaults: dict[str, float | int] = {}
    for key, low, high in (
        ("temperature", 0.0, 100.0),
        ("top_p", 1e-9, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 0.01, 100.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("typical_p", 1e-9, 1.0),
        ("epsilon_cutoff", 0.0, 1.0),
        ("eta_cutoff", 0.0, 1.0),
    ):
        if reader.has(key):
            defaults[key] = reader.number(key, low, high)
    if reader.has("top_k"):
        defaults["top_k"] = reader.whole("top_k", 0, 2**31 - 1)
    if reader.has("no_repeat_ngram_size"):
        defaults["no_repeat_ngram_size"] = reader.whole(
            "no_repeat_ngram_size", 0, MAX_REPEAT_TOKENS
        )
    if reader.has("max_new_tokens"):
        defaults["max_new_tokens"] = reader.whole("max_new_tokens", 1, 2**31 - 1)
    if not reader.flag("do_sample", default=True):
        defaults["temperature"] = 0.0
    bos_ids = reader.ids("bos_token_id", spec.vocab_size, past=True)
    eos_ids = reader.ids("eos_token_id", spec.vocab_size, past=True)
    reader.pass_over(["temperature", "top_p", "min_p", "repetition_penalty"])
    reader.pass_over(["presence_penalty", "frequency_penalty"])
    reader.pass_over(["typical_p", "epsilon_cutoff", "eta_cutoff"])
    reader.pass_over(["top_k", "no_repeat_ngram_size", "max_new_tokens"])
    banned: list[tuple[int, ...]] = [
        (id_,) for id_ in reader.ids("suppress_tokens", spec.vocab_size)
    ]
    banned += _bad_words(reader, spec.vocab_size, eos_ids or spec.generation.eos_ids)
    reader.finish()
    ending = eos_ids or spec.generation.eos_ids
    generation = GenerationSpec(
        bos_ids=bos_ids or spec.generation.bos_ids,
        eos_ids=ending,
        warnings=(
            *eos_warnings(reader, spec.vocab_size, ending),
            *(() if eos_ids else spec.generation.warnings),
        ),
        defaults=defaults,
        banned_sequences=tuple(dict.fromkeys(banned)),
    )
    return replace(spec, generation=generation)


def _bad_words(
    reader: ConfigReader, vocab_size: int, eos_ids: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """bad_words_ids: lists of ids. As in transformers, an end-of-text id alone does not count."""
    value = reader.take("bad_words_ids")
    if value is None:
        return []
    listed = value if isinstance(value, list) else [value]
    for ids in listed:
        if not isinstance(ids, list) or not ids or not all(_is_id(id_, vocab_size) for id_ in ids):
            reader.note(
                f"bad_words_ids holds {show(ids)}; lists of ids from 0 to {vocab_size - 1} "
                "(vocab_size) are allowed"
            )
            return []
    return [tuple(ids) for ids in listed if len(ids) > 1 or ids[0] not in eos_ids]


def _is_id(value: Any, vocab_size: int) -> bool:
    return type(value) is int and 0 <= value < vocab_size
