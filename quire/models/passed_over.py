"""Keys of a decoder's config.json that cannot change an answer, or may have one value only.

They qualify because code that computes logits from the configuration never reads them, in
transformers or anywhere else the checkpoints come from. A key with an uncertain meaning
is on no list here, and refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Bookkeeping of the library that wrote the file, and what only its Python face reads.
_BOOKKEEPING = (
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_flash_attn_2_enabled",
    "_name_or_path",
    "_num_labels",
    "attn_implementation",
    "chunk_size_feed_forward",
    "do_sample",
    "early_stopping",
    "finetuning_task",
    "id2label",
    "is_composition",
    "is_decoder",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "length_penalty",
    "max_length",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "prefix",
    "problem_type",
    "return_dict",
    "return_dict_in_generate",
    "task_specific_params",
    "tf_legacy_loss",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "use_bfloat16",
    "use_cache",
)
# Training, and the tools for it.
_TRAINING = (
    "attention_dropout",
    "embd_pdrop",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "hidden_dropout",
    "initializer_range",
    "resid_pdrop",
    "unsloth_fixed",
    "unsloth_version",
)
# Notes for the tokenizer, which has its own files; lengths beside max_position_embeddings.
_TOKENIZING = (
    "cls_token_id",
    "mask_token_id",
    "max_sequence_length",
    "model_max_length",
    "pad_token_id",
    "sep_token_id",
    "tokenizer_class",
    "tokenizer_model_max_length",
    "tokenizer_padding_side",
    "unk_token_id",
)
# Of embeddings and rerankers: pooling_files.py reads them.
_POOLING = (
    "classifier_from_token",
    "is_matryoshka",
    "is_original_qwen3_reranker",
    "matryoshka_dimensions",
)
# Of layers that predict further tokens (MTP), on which no answer depends: binding.py passes these
# layers over, too.
_DRAFTING = (
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    "num_nextn_predict_layers",
)
PASSED_OVER = (*_BOOKKEEPING, *_TRAINING, *_TOKENIZING, *_POOLING, *_DRAFTING)

# Keys with one supported value (null and absence count as that value), and why.
FIXED: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType(
    {
        "rope_interleaved": ((False,), "interleaved rotation is not supported; only false is"),
        "is_encoder_decoder": ((False,), "only false is supported"),
        "add_cross_attention": ((False,), "only false is supported"),
        "tie_encoder_decoder": ((False,), "only false is supported"),
        "pruned_heads": (({},), "pruned heads are not supported; only {} is"),
        # Falcon 3's word for what hidden_act "silu" and a gate make.
        "activation": (("swiglu",), "only 'swiglu', which says no more than hidden_act, is known"),
    }
)

# Old files hold every setting for sampling, mostly at these values, which say nothing.
SAMPLING_ELSEWHERE = "settings for sampling belong into generation_config.json; move it there"
SAMPLING_DEFAULTS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "diversity_penalty": (0.0, 0),
        "encoder_no_repeat_ngram_size": (0,),
        "min_length": (0,),
        "no_repeat_ngram_size": (0,),
        "num_beam_groups": (1,),
        "num_beams": (1,),
        "num_return_sequences": (1,),
        "remove_invalid_values": (False,),
        "repetition_penalty": (1.0, 1),
        "temperature": (1.0, 1),
        "top_k": (50, 0),
        "top_p": (1.0, 1),
        "typical_p": (1.0, 1),
    }
)
