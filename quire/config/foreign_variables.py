"""Environment variables of other engines that set what a setting here does.

Quire does not read them: a server says so once at its start and names what it reads instead. Knows
names only; values, which may be keys, are never shown. Every name here is of a setting, or HF_HOME.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from quire.config.sources import SETTINGS

_ADDRESS = ("host", "port")
_HUB = "HF_HOME"

# The names of the settings by variable; of the cache of models, the variable that is read.
INSTEAD: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "OLLAMA_HOST": _ADDRESS,
        "OLLAMA_MODELS": (_HUB,),
        "OLLAMA_NUM_PARALLEL": ("max_num_seqs",),
        "OLLAMA_MAX_QUEUE": ("max_queued_requests",),
        "OLLAMA_CONTEXT_LENGTH": ("max_model_len",),
        "OLLAMA_KV_CACHE_TYPE": ("kv_cache_dtype",),
        "OLLAMA_ORIGINS": ("cors_origin",),
        "OLLAMA_DEBUG": ("log_level",),
        "VLLM_API_KEY": ("api_key",),
        "VLLM_PORT": ("port",),
        "VLLM_LOGGING_LEVEL": ("log_level",),
        "VLLM_CPU_KVCACHE_SPACE": ("kv_cache_memory_bytes",),
        "VLLM_CPU_OMP_THREADS_BIND": ("num_threads",),
        "LLAMA_API_KEY": ("api_key",),
        "LLAMA_ARG_HOST": ("host",),
        "LLAMA_ARG_PORT": ("port",),
        "LLAMA_ARG_API_PREFIX": ("root_path",),
        "LLAMA_ARG_MODEL": ("model",),
        "LLAMA_ARG_HF_REPO": ("model",),
        "LLAMA_ARG_ALIAS": ("served_model_name",),
        "LLAMA_ARG_CTX_SIZE": ("max_model_len",),
        "LLAMA_ARG_N_PARALLEL": ("max_num_seqs",),
        "LLAMA_ARG_N_PREDICT": ("max_output_tokens",),
        "LLAMA_ARG_BATCH": ("max_num_batched_tokens",),
        "LLAMA_ARG_THREADS": ("num_threads",),
        "LLAMA_ARG_THREADS_HTTP": ("api_processes",),
        "LLAMA_ARG_CACHE_TYPE_K": ("kv_cache_dtype",),
        "LLAMA_ARG_CACHE_TYPE_V": ("kv_cache_dtype",),
        "LLAMA_ARG_MODEL_DRAFT": ("draft_model",),
        "LLAMA_ARG_DRAFT_MAX": ("max_draft_tokens",),
        "LLAMA_ARG_SPEC_TYPE": ("speculate",),
        "LLAMA_ARG_SPEC_DRAFT_MODEL": ("draft_model",),
        "LLAMA_ARG_SPEC_DRAFT_HF_REPO": ("draft_model",),
        "LLAMA_ARG_SPEC_DRAFT_N_MAX": ("max_draft_tokens",),
        "LLAMA_ARG_CHAT_TEMPLATE_FILE": ("chat_template",),
        "LLAMA_ARG_SSL_KEY_FILE": ("tls_key",),
        "LLAMA_ARG_SSL_CERT_FILE": ("tls_cert",),
        "LLAMA_ARG_TIMEOUT": ("request_timeout_s",),
    }
)
# Kubernetes sets VLLM_PORT to this next to a service that is called vllm.
_SERVICE_ADDRESS = "tcp://"


def unread_variables(environment: Mapping[str, str], given: Collection[str]) -> str:
    """Return a warning about variables of other engines that are set; "" for none.

    given: the names of settings that were given, which need no hint.
    """
    parts = []
    for variable, names in INSTEAD.items():
        value = environment.get(variable, "")
        left = [name for name in names if not _is_given(name, environment, given)]
        if left and value and not value.startswith(_SERVICE_ADDRESS):
            parts.append(f"{variable} (set {' and '.join(map(_variable_of, left))})")
    if not parts:
        return ""
    return (
        f"variables of other programs are set and not read: {', '.join(parts)}; quire config show "
        "--env lists those that are"
    )


def _variable_of(name: str) -> str:
    return name if name == _HUB else SETTINGS[name].variable


def _is_given(name: str, environment: Mapping[str, str], given: Collection[str]) -> bool:
    if name == _HUB:
        return bool(environment.get(_HUB) or environment.get("HF_HUB_CACHE"))
    return name in given
