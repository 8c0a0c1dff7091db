"""Map flags and subcommands of other engines to their counterparts here.

The tables are declarative, and the documentation is generated from them. These flags are rejected
with the message of their entry. Every flag that a message recommends is one of `quire serve`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import MappingProxyType

from quire.config.proposer_kinds import PROPOSERS, WITH_FILES, any_of

_MODEL = "the model is given without a flag: quire serve MODEL"
_REVISION = "a revision is part of the model's name: quire serve ORG/NAME@REVISION"
_HF_REPO = "a model is given by its name: quire serve ORG/NAME, or ORG/NAME:FILE.gguf"
_URL = "models are downloaded from the Hugging Face Hub only: quire pull ORG/NAME"
_TOKENIZER = "the tokenizer is the one in the model's directory; leave it out"
_CODE = (
    "code that comes with a model is never run, for security. Known architectures load without "
    "it, others are rejected by name; leave it out"
)
_CONTEXT = "the maximum length of prompt and output together is --max-model-len"
_MEMORY = "the KV cache's size is --kv-cache-memory, as in 2GiB"
_KV = "keys and values have one precision: --kv-cache-dtype auto, f32, bf16, int8 or fp8"
_HOST = "host memory for KV blocks evicted from a GPU is --kv-tier-host-size"
_DISK = "KV blocks that leave the cache are kept on disk with --kv-tier-path"
_EAGER = "CUDA graphs are turned off by --enforce-eager"
_THREADS = "threads are set by --threads N"
_SEQS = "the maximum number of running requests is --max-num-seqs"
_STEP = "the maximum number of tokens in a step is --max-num-batched-tokens"
_ONE_DEVICE = (
    "a model is served by one process, or by ranks of equal shares (--tensor-parallel-size, "
    "--pipeline-parallel-size); leave it out"
)
_MACHINES = (
    "ranks on several machines are started by torchrun, Slurm or Ray: "
    "--distributed-executor-backend"
)
_REPLICAS = (
    "engines of one server are --data-parallel-size; servers of their own have one address by "
    "quire route, and more processes that speak HTTP are --api-processes"
)
_RANKS = "the degree of tensor parallelism is --tensor-parallel-size"
_PIECES = "positions of the KV cache are divided over ranks by --context-parallel-size"
_EXPERT_RANKS = (
    "experts are distributed over the ranks of --tensor-parallel-size by --enable-expert-parallel"
)
_EXPERT_PLACES = (
    "experts are placed by measured load with --expert-load-file, and the most chosen ones copied "
    "with --num-redundant-experts"
)
_TRANSPORT = "how ranks exchange follows from where they are; leave it out"
_DEVICE = "the GPU is chosen by --device"
_LAYERS = (
    "a GPU computes all layers (--executor torch) or none; leave it out, and keep weights that "
    "do not fit in host memory with --cpu-offload-gb"
)
_KERNELS = "kernels are chosen by --executor and --numerics; leave it out"
_DRAFT = (
    f"speculative decoding is set by --speculate {any_of(('off', *PROPOSERS))}, with "
    "--draft-model and --max-draft-tokens"
)
# Of the JSON of vLLM's flag, which may also be written as flags with a dot.
_DRAFT_CONFIG = (
    f"{_DRAFT}: method ngram is --speculate ngram, draft_model --speculate draft, eagle3 "
    "--speculate eagle, medusa --speculate medusa; model is --draft-model, num_speculative_tokens "
    "--max-draft-tokens; other methods and keys are not served"
)
_DRAFT_MODEL = (
    "a draft model or draft heads are given by --draft-model, with --speculate "
    f"{any_of(WITH_FILES)}"
)
_DRAFT_TOKENS = "the maximum number of draft tokens is --max-draft-tokens"
_DRAFT_LENGTH = (
    "the number of draft tokens is chosen in each step by what they gain, up to --max-draft-tokens"
)
_DRAFT_LIKE_MODEL = "a draft model is computed as the model is; leave it out"
_DRAFT_REVISION = "a revision is part of the draft model's name: --draft-model ORG/NAME@REVISION"
_DRAFT_SAMPLING = (
    "drafts are sampled with the request's parameters, and a draft is accepted if it is the token "
    "that the model samples; leave it out"
)
_DRAFT_HEAD = "the layout of draft heads is read from their files; leave it out"
_DRAFT_LOOKUP = (
    "prompt lookup is --speculate ngram, with at most --max-draft-tokens drafts in a step; lengths "
    "and numbers of matches are not set"
)
_DRAFT_HISTORY = (
    "earlier answers are kept in memory and proposed with --speculate ngram and "
    "--speculate-history-tokens"
)
_LORA = "there are no LoRA adapters yet: merge the adapter into the model's weights"
_CHUNKS = "chunked prefill is always on; leave it out"
_TOOLS = "tool calls are parsed in every answer to a request with tools; leave it out"
_REASONING = "the format of reasoning is set by --reasoning-parser"
_TEMPLATE = "a chat is always rendered by the model's template, or by --chat-template; leave it out"
_KWARGS = "chat_template_kwargs is a field of a request; leave it out"
_EFFORT = "reasoning_effort is a field of a request; leave it out"
_TEXT_ONLY = "the model reads and writes text only; leave it out"
_CONVERT = (
    "a model with sentence-transformers files serves embeddings and scores beside generation, any "
    "other with --convert embed"
)
_POOLER = "how embeddings are pooled is read from the model's 1_Pooling/config.json; leave it out"
_GRAMMAR = "a grammar or schema is a field of a request, structured_outputs; leave it out"
_GRAMMARS = "grammars are compiled by one library; leave it out"
_SAMPLING = (
    "sampling parameters are fields of a request; their defaults are in the model's "
    "generation_config.json"
)
_ROPE = "position scaling is read from the model's config.json; leave it out"
_LOGS = "the log of requests is --access-log text, json or off"
_METRICS = "GET /metrics is always served; leave it out"
_PREFIX = "prefix caching is turned off by --no-enable-prefix-caching"
_OVERLAP = "steps overlap unless --plans-in-flight is 1"
_CORS = "pages of other origins are allowed by --cors-origin"
_TLS_KEY = "the TLS key is --tls-key"
_TLS_CERT = "the TLS certificate is --tls-cert"
_WORKERS = "the number of API processes is --api-processes"
_MMAP = "how weights are held in memory is not a choice, except --pack-cache; leave it out"
_PAGE = "the web page is turned off by --no-web-page"
_ONE_MODEL = "a server serves one model; start one for each, at different ports"
_PROMPT_CACHE = "prompts are cached unless --no-enable-prefix-caching is given; leave it out"
_EXPERTS = "a mixture of experts is computed by one device as a whole; leave it out"
_USAGE = "usage always has the cached tokens; leave it out"
_PLUGIN = "no code is loaded from files; leave it out"
_LEVEL = "the severity of log lines is --log-level"
_SLOTS = "a request is found by GET /v1/requests/ID; leave it out"

INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        # vLLM
        "--model": _MODEL,
        "--tokenizer": _TOKENIZER,
        "--tokenizer-mode": _TOKENIZER,
        "--trust-remote-code": _CODE,
        "--revision": _REVISION,
        "--tokenizer-revision": _TOKENIZER,
        "--download-dir": "the cache of downloaded models is set by HF_HOME or HF_HUB_CACHE",
        "--hf-token": "a token is read from HF_TOKEN, or stored by hf auth login",
        "--load-format": "safetensors and GGUF are recognised; leave it out",
        "--hf-overrides": "edit the model's config.json",
        "--max-seq-len": _CONTEXT,
        "--gpu-memory-utilization": _MEMORY,
        "--kv-cache-memory-bytes": _MEMORY,
        "--num-gpu-blocks-override": _MEMORY,
        "--swap-space": _HOST,
        "--kv-offloading-size": _HOST,
        "--kv-transfer-config": "engines that exchange KV blocks are set by --role and "
        "--kv-transfer-key-file, KV blocks on disk by --kv-tier-path, and a store that engines "
        "share by --kv-store",
        "--decode-context-parallel-size": _PIECES,
        "-dcp": _PIECES,
        "--prefill-context-parallel-size": _PIECES,
        "-pcp": _PIECES,
        "--node-rank": _MACHINES,
        "--master-addr": _MACHINES,
        "--master-port": _MACHINES,
        "--headless": _MACHINES,
        "--data-parallel-size-local": _REPLICAS,
        "-dpl": _REPLICAS,
        "--data-parallel-address": _REPLICAS,
        "-dpa": _REPLICAS,
        "--data-parallel-rank": _REPLICAS,
        "--data-parallel-start-rank": _REPLICAS,
        "--data-parallel-backend": _REPLICAS,
        "--data-parallel-rpc-port": _REPLICAS,
        "--enable-eplb": _EXPERT_PLACES,
        "--eplb-config": _EXPERT_PLACES,
        "--expert-placement-strategy": _EXPERT_PLACES,
        "--all2all-backend": _TRANSPORT,
        "--disable-custom-all-reduce": _TRANSPORT,
        "--max-parallel-loading-workers": "each rank loads its own weights; leave it out",
        "--speculative-config": _DRAFT_CONFIG,
        "-sc": _DRAFT_CONFIG,
        "--spec-method": _DRAFT_CONFIG,
        "--spec-model": _DRAFT_MODEL,
        "--spec-tokens": _DRAFT_TOKENS,
        "--num-speculative-tokens": _DRAFT_TOKENS,
        "--speculative-num-draft-tokens": _DRAFT_TOKENS,
        "--speculative-draft-tokens": _DRAFT_TOKENS,
        "--speculative-tokens": _DRAFT_TOKENS,
        "--draft-len": _DRAFT_TOKENS,
        "--draft-length": _DRAFT_TOKENS,
        "--draft-size": _DRAFT_TOKENS,
        "--speculative-model": _DRAFT_MODEL,
        "--speculative-disable-by-batch-size": _DRAFT_LENGTH,
        "--ngram-prompt-lookup-max": _DRAFT_LOOKUP,
        "--ngram-prompt-lookup-min": _DRAFT_LOOKUP,
        "--enable-lora": _LORA,
        "--lora-modules": _LORA,
        "--max-loras": _LORA,
        "--enable-chunked-prefill": _CHUNKS,
        "--no-enable-chunked-prefill": _CHUNKS,
        "--max-num-partial-prefills": "running long prompts are limited by --max-long-prompts",
        "--long-prefill-token-threshold": "long prompts are defined by --long-prompt-tokens",
        "--no-prefix-caching": _PREFIX,
        "--async-scheduling": _OVERLAP,
        "--no-async-scheduling": _OVERLAP,
        "--enable-auto-tool-choice": _TOOLS,
        "--enable-reasoning": _REASONING,
        "--tool-parser-plugin": _PLUGIN,
        "--middleware": _PLUGIN,
        "--chat-template-content-format": _TEMPLATE,
        "--default-chat-template-kwargs": _KWARGS,
        "--response-role": "answers have the role assistant; leave it out",
        "--enable-prompt-tokens-details": _USAGE,
        "--enable-force-include-usage": (
            "a stream has usage if the request sets stream_options.include_usage; leave it out"
        ),
        "--enable-request-id-headers": "responses always have x-request-id; leave it out",
        "--enable-tokenizer-info-endpoint": "GET /tokenizer_info is always served; leave it out",
        "--disable-fastapi-docs": "GET /docs is always served; leave it out",
        "--guided-decoding-backend": _GRAMMARS,
        "--structured-outputs-config": _GRAMMARS,
        "--compilation-config": _EAGER,
        "--attention-backend": _KERNELS,
        "--generation-config": _SAMPLING,
        "--override-generation-config": _SAMPLING,
        "--max-logprobs": "the bound of logprobs is fixed; leave it out",
        "--limit-mm-per-prompt": _TEXT_ONLY,
        "--runner": _CONVERT,
        "--task": _CONVERT,
        "--override-pooler-config": _POOLER,
        "--pooler-config": _POOLER,
        "--seed": "the seed is a field of a request; leave it out",
        "--allowed-origins": _CORS,
        "--allow-credentials": "requests of pages never carry cookies; leave it out",
        "--ssl-keyfile": _TLS_KEY,
        "--ssl-certfile": _TLS_CERT,
        "--ssl-ca-certs": "clients are identified by keys, not certificates; leave it out",
        "--enable-log-requests": _LOGS,
        "--disable-log-requests": _LOGS,
        "--disable-log-stats": _METRICS,
        "--uvicorn-log-level": _LOGS,
        "--disable-uvicorn-access-log": _LOGS,
        "--api-server-count": _WORKERS,
        # SGLang
        "--model-path": _MODEL,
        "--tokenizer-path": _TOKENIZER,
        "--context-length": _CONTEXT,
        "--mem-fraction-static": _MEMORY,
        "--max-total-tokens": _MEMORY,
        "--tp": _RANKS,
        "--tp-size": _RANKS,
        "--dp": _REPLICAS,
        "--dp-size": _REPLICAS,
        "--pp-size": "stages of a pipeline are set by --pipeline-parallel-size",
        "--ep-size": _EXPERT_RANKS,
        "--nnodes": _MACHINES,
        "--dist-init-addr": _MACHINES,
        "--max-running-requests": _SEQS,
        "--chunked-prefill-size": _STEP,
        "--max-prefill-tokens": _STEP,
        "--schedule-policy": "the scheduling policy is --scheduling-policy",
        "--disable-radix-cache": _PREFIX,
        "--page-size": "the number of tokens in a KV block is --block-size",
        "--hicache-size": _HOST,
        "--hicache-ratio": _HOST,
        "--enable-hierarchical-cache": _HOST,
        "--disable-cuda-graph": _EAGER,
        "--disable-overlap-schedule": _OVERLAP,
        "--sampling-backend": _KERNELS,
        "--enable-torch-compile": _KERNELS,
        "--grammar-backend": _GRAMMARS,
        "--speculative-algorithm": _DRAFT,
        "--speculative-algo": _DRAFT,
        "--speculative-draft-model-path": _DRAFT_MODEL,
        "--speculative-draft-model": _DRAFT_MODEL,
        "--speculative-draft-model-revision": _DRAFT_REVISION,
        "--speculative-num-steps": _DRAFT_LENGTH,
        "--speculative-adaptive": _DRAFT_LENGTH,
        "--speculative-adaptive-config": _DRAFT_LENGTH,
        "--speculative-accept-threshold-single": _DRAFT_SAMPLING,
        "--speculative-accept-threshold-acc": _DRAFT_SAMPLING,
        "--speculative-use-rejection-sampling": _DRAFT_SAMPLING,
        "--speculative-token-map": _DRAFT_HEAD,
        "--enable-multi-layer-eagle": _DRAFT_HEAD,
        "--speculative-attention-mode": _KERNELS,
        "--speculative-moe-runner-backend": _KERNELS,
        "--speculative-eagle-topk": "drafts are chains of tokens, not trees; leave it out",
        "--lora-paths": _LORA,
        "--enable-metrics": _METRICS,
        "--log-requests": _LOGS,
        "--watchdog-timeout": "the engine's watchdog is --watchdog-seconds",
        "--random-seed": "the seed is a field of a request; leave it out",
        # llama.cpp
        "-m": _MODEL,
        "-hf": _HF_REPO,
        "-hff": _HF_REPO,
        "-hft": "a token is read from HF_TOKEN, or stored by hf auth login",
        "--hf-repo": _HF_REPO,
        "--hf-file": _HF_REPO,
        "--model-url": _URL,
        "-mu": _URL,
        "--offline": "nothing is downloaded without --pull; leave it out",
        "--alias": "the model's name in the API is --served-model-name",
        "-a": "the model's name in the API is --served-model-name",
        "--ctx-size": _CONTEXT,
        "-c": _CONTEXT,
        "--predict": "the maximum number of output tokens is --max-output-tokens",
        "--n-predict": "the maximum number of output tokens is --max-output-tokens",
        "-n": "the maximum number of output tokens is --max-output-tokens",
        "--batch-size": _STEP,
        "-b": _STEP,
        "--ubatch-size": _STEP,
        "-ub": _STEP,
        "-t": _THREADS,
        "--threads-batch": _THREADS,
        "-tb": _THREADS,
        "--threads-http": _WORKERS,
        "--parallel": _SEQS,
        "-np": _SEQS,
        "--cont-batching": "requests are always batched continuously; leave it out",
        "-cb": "requests are always batched continuously; leave it out",
        "--no-cont-batching": f"requests are always batched continuously; {_SEQS}",
        "--n-gpu-layers": _LAYERS,
        "--gpu-layers": _LAYERS,
        "-ngl": _LAYERS,
        "-cmoe": _EXPERTS,
        "--cpu-moe": _EXPERTS,
        "-ncmoe": _EXPERTS,
        "--n-cpu-moe": _EXPERTS,
        "-ot": _LAYERS,
        "--override-tensor": _LAYERS,
        "--split-mode": _ONE_DEVICE,
        "-sm": _ONE_DEVICE,
        "--tensor-split": _ONE_DEVICE,
        "-ts": _ONE_DEVICE,
        "--main-gpu": _DEVICE,
        "-mg": _DEVICE,
        "--flash-attn": _KERNELS,
        "-fa": _KERNELS,
        "--cache-type-k": _KV,
        "-ctk": _KV,
        "--cache-type-v": _KV,
        "-ctv": _KV,
        "--cache-reuse": "prefixes are reused from the first token on; leave it out",
        "--cache-prompt": _PROMPT_CACHE,
        "--no-cache-prompt": _PREFIX,
        "-cram": _DISK,
        "--cache-ram": _DISK,
        "-kvu": "all requests share one KV cache; leave it out",
        "--kv-unified": "all requests share one KV cache; leave it out",
        "--mlock": _MMAP,
        "--no-mmap": _MMAP,
        "-lm": _MMAP,
        "--load-mode": _MMAP,
        "--numa": _THREADS,
        "--context-shift": "an answer ends where the context is full; leave it out",
        "--no-context-shift": "an answer ends where the context is full; leave it out",
        "--rope-scaling": _ROPE,
        "--rope-freq-base": _ROPE,
        "--yarn-orig-ctx": _ROPE,
        "--temp": _SAMPLING,
        "--temperature": _SAMPLING,
        "--top-k": _SAMPLING,
        "--top-p": _SAMPLING,
        "--min-p": _SAMPLING,
        "--repeat-penalty": _SAMPLING,
        "-s": "the seed is a field of a request; leave it out",
        "--grammar": _GRAMMAR,
        "--grammar-file": _GRAMMAR,
        "-j": _GRAMMAR,
        "--json-schema": _GRAMMAR,
        "-jf": _GRAMMAR,
        "--json-schema-file": _GRAMMAR,
        "--jinja": _TEMPLATE,
        "--no-jinja": _TEMPLATE,
        "--chat-template-file": "a template's file is given by --chat-template",
        "--chat-template-kwargs": _KWARGS,
        "--reasoning-format": _REASONING,
        "--reasoning-budget": _EFFORT,
        "-rea": _EFFORT,
        "--reasoning": _EFFORT,
        "--reasoning-effort": _EFFORT,
        "--model-draft": _DRAFT_MODEL,
        "-md": _DRAFT_MODEL,
        "-hfd": _DRAFT_MODEL,
        "-hfrd": _DRAFT_MODEL,
        "--hf-repo-draft": _DRAFT_MODEL,
        "--spec-draft-model": _DRAFT_MODEL,
        "--spec-draft-hf": _DRAFT_MODEL,
        "--spec-draft-model-path": _DRAFT_MODEL,
        "--model-url-draft": _DRAFT_MODEL,
        "-mud": _DRAFT_MODEL,
        "--spec-type": _DRAFT,
        "--draft": _DRAFT_TOKENS,
        "--draft-n": _DRAFT_TOKENS,
        "--draft-max": _DRAFT_TOKENS,
        "--spec-draft-n-max": _DRAFT_TOKENS,
        "--spec-draft-length": _DRAFT_TOKENS,
        "--draft-min": _DRAFT_LENGTH,
        "--draft-n-min": _DRAFT_LENGTH,
        "--spec-draft-n-min": _DRAFT_LENGTH,
        "--draft-p-min": _DRAFT_LENGTH,
        "--spec-draft-p-min": _DRAFT_LENGTH,
        "--draft-p-split": _DRAFT_LENGTH,
        "--spec-draft-p-split": _DRAFT_LENGTH,
        "--spec-draft-sampling": _DRAFT_SAMPLING,
        "--spec-draft-backend-sampling": _DRAFT_SAMPLING,
        "-cd": _DRAFT_LIKE_MODEL,
        "-td": _DRAFT_LIKE_MODEL,
        "-tbd": _DRAFT_LIKE_MODEL,
        "-ngld": _DRAFT_LIKE_MODEL,
        "-otd": _DRAFT_LIKE_MODEL,
        "-Cd": _DRAFT_LIKE_MODEL,
        "-Crd": _DRAFT_LIKE_MODEL,
        "-Cbd": _DRAFT_LIKE_MODEL,
        "-devd": _DRAFT_LIKE_MODEL,
        "-ctkd": _DRAFT_LIKE_MODEL,
        "-ctvd": _DRAFT_LIKE_MODEL,
        "-cmoed": _DRAFT_LIKE_MODEL,
        "-ncmoed": _DRAFT_LIKE_MODEL,
        "-lcs": _DRAFT_HISTORY,
        "--lookup-cache-static": _DRAFT_HISTORY,
        "-lcd": _DRAFT_HISTORY,
        "--lookup-cache-dynamic": _DRAFT_HISTORY,
        "--lora": _LORA,
        "--lora-scaled": _LORA,
        "--mmproj": _TEXT_ONLY,
        "--embedding": _CONVERT,
        "--embeddings": _CONVERT,
        "--pooling": _POOLER,
        "--reranking": _CONVERT,
        "--rerank": _CONVERT,
        "--models-dir": _ONE_MODEL,
        "--models-preset": _ONE_MODEL,
        "--models-max": _ONE_MODEL,
        "--metrics": _METRICS,
        "--slots": _SLOTS,
        "--no-slots": _SLOTS,
        "--props": _SLOTS,
        "--slot-save-path": "KV blocks on disk are set by --kv-tier-path",
        "--ssl-key-file": _TLS_KEY,
        "--ssl-cert-file": _TLS_CERT,
        "--timeout": "the time limit of a request is --request-timeout",
        "-to": "the time limit of a request is --request-timeout",
        "--verbose": _LOGS,
        "-v": _LOGS,
        "-lv": _LEVEL,
        "--verbosity": _LEVEL,
        "--log-verbosity": _LEVEL,
        "--log-file": "the log is written to standard error; redirect it, as in 2>FILE",
        "--log-jsonl": "the log is written as JSON with --log-format json",
        "--log-disable": _LOGS,
        "--no-webui": _PAGE,
        "--no-ui": _PAGE,
        "--cors-origins": _CORS,
        "--api-prefix": "the path prefix of a proxy is --root-path, as in /llm",
        "--sse-ping-interval": "the interval of comments in idle streams is --heartbeat-seconds",
        "--no-warmup": "the model is warmed up before requests are accepted; leave it out",
        # Ollama
        "--keepalive": "the model stays loaded until the server stops; leave it out",
        "--think": _EFFORT,
        # OpenVINO and transformers
        "--draft-device": _DRAFT_LIKE_MODEL,
        "--draft-source-model": _DRAFT_MODEL,
        "--assistant-model": _DRAFT_MODEL,
        "--num-assistant-tokens": _DRAFT_TOKENS,
        "--assistant-confidence-threshold": _DRAFT_LENGTH,
        "--prompt-lookup": _DRAFT_LOOKUP,
        "--prompt-lookup-num-tokens": _DRAFT_LOOKUP,
        "--max-ngram-size": _DRAFT_LOOKUP,
    }
)

# Further flags by the form of their names; the first form that fits decides. Engines have many
# flags for speculative decoding, and add some with each version.
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "--*-draft": _DRAFT_LIKE_MODEL,
        "--draft-*": _DRAFT_LIKE_MODEL,
        "--spec-draft-*": _DRAFT_LIKE_MODEL,
        "--no-spec-draft-*": _DRAFT_LIKE_MODEL,
        "--speculative-draft-*": _DRAFT_LIKE_MODEL,
        "--spec-ngram-*": _DRAFT_LOOKUP,
        "--speculative-ngram-*": _DRAFT_LOOKUP,
        "--spec-*": _DRAFT,
        "--speculative-*": _DRAFT,
        "--enable-speculative*": _DRAFT,
    }
)
# From so great a likeness on (difflib's ratio) a flag of a family is one of ours, misspelled.
_MISSPELLED = 0.9

_NO_STORE = (
    "models are files of the Hugging Face cache, which quire models lists; quire serve MODEL "
    "serves one, or a directory or GGUF file of yours"
)
_LIST = "quire models lists the models on this machine"
_SERVE = "quire serve MODEL starts the server"
_CHAT = "quire chat MODEL is a conversation in the terminal"

# Subcommands of Ollama, vLLM, SGLang and llama.cpp.
FOREIGN_SUBCOMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "run": _CHAT,
        "push": _NO_STORE,
        "download": "quire pull ORG/NAME downloads a model",
        "list": _LIST,
        "ls": _LIST,
        "rm": "quire models rm NAME removes a model",
        "cp": _NO_STORE,
        "create": _NO_STORE,
        "show": "quire program MODEL prints what the engine runs for a model",
        "ps": "GET /v1/models and GET /metrics show what a server runs",
        "launch": _SERVE,
        "stop": "end the server with Ctrl-C or SIGTERM",
        "start": _SERVE,
        "server": _SERVE,
        "launch_server": _SERVE,
        "launch-server": _SERVE,
        "cli": _CHAT,
        "generate": "quire complete MODEL continues one prompt",
        "run-batch": "LLM(MODEL).generate takes a list of prompts: docs/recipes/offline-batch.md",
        "bench_serving": "quire bench measures speed on this machine",
        "collect-env": "quire env prints a report of the installation and the machine",
        "version": "quire --version prints the version",
        "help": "quire --help lists the subcommands",
    }
)


def instead_of_setting(name: str) -> str:
    """Return `alternative` for a keyword of LLM, with flags written as keywords."""
    hint = alternative(f"--{name.replace('_', '-')}")
    return re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), hint)


def alternative(flag: str, known: Iterable[str] = ()) -> str:
    """Return what to use in place of an unknown flag; empty if nothing is near.

    known: the existing flags, of which the nearest is suggested for a flag of no other engine.
    Underscores are read as dashes, as other engines do. A key of a JSON value may follow a flag's
    name, as in --speculative-config.method.
    """
    flag = with_dashes(flag)
    name = flag.partition(".")[0]
    if hint := INSTEAD.get(name) or begun_with(flag, known):
        return hint
    names = [one.lstrip("-") for one in sorted(known) if one.startswith("--")]
    hint = near_or_family(flag[2:], names, cutoff=0.7) if flag.startswith("--") else ""
    return hint.replace("did you mean ", "did you mean --")


def near_or_family(name: str, known: Iterable[str], *, cutoff: float) -> str:
    """Return which of `known` an unknown name may stand for, or what to use in place of it by the
    form of its name, where it is not one of `known` but for a letter or two; empty for neither.

    Names are without dashes in front. cutoff: of how near is near (difflib's ratio).
    """
    flag = f"--{name.partition('.')[0]}"
    hint = next((hint for form, hint in FAMILIES.items() if fnmatchcase(flag, form)), "")
    near = get_close_matches(name[:60], list(known), 1, _MISSPELLED if hint else cutoff)
    return f"did you mean {near[0]}?" if near else hint


def with_dashes(flag: str) -> str:
    """Return a flag as it is spelled here: other engines also take underscores."""
    return flag.replace("_", "-")


def begun_with(flag: str, known: Iterable[str]) -> str:
    """Return a question that names the flags an abbreviation may stand for, empty for none."""
    begun = [name for name in sorted(known) if name.startswith(flag)]
    named = " or ".join(begun[:4])
    return f"did you mean {named}?" if begun and flag.startswith("--") else ""
