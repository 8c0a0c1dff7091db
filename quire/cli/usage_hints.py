"""Tables of words that other tools take, with the arguments here that they correspond to.

Flags of `quire serve` have a table of their own (config/foreign_flags.py); these belong to the
other subcommands. Every entry names arguments, of which a subcommand has one or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_PROMPT_LENGTH = ("--prompt-tokens", "--prompts")
_OUTPUT_LENGTH = ("--output-tokens", "--outputs")
_NUM_REQUESTS = ("--requests", "--max-requests")
_REPEATS = ("--repeats", "--rounds")

# Flags of other engines' benchmarks and terminals, with the flags here that set the same.
EQUIVALENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "--input-len": _PROMPT_LENGTH,
        "--random-input-len": _PROMPT_LENGTH,
        "--random-input": _PROMPT_LENGTH,
        "--sonnet-input-len": _PROMPT_LENGTH,
        "--n-prompt": _PROMPT_LENGTH,
        "--output-len": _OUTPUT_LENGTH,
        "--random-output-len": _OUTPUT_LENGTH,
        "--random-output": _OUTPUT_LENGTH,
        "--sonnet-output-len": _OUTPUT_LENGTH,
        "--n-gen": _OUTPUT_LENGTH,
        "--num-prompts": _NUM_REQUESTS,
        "--num-prompt": _NUM_REQUESTS,
        "--num-requests": _NUM_REQUESTS,
        "--request-rate": ("--rates",),
        "--rate": ("--rates",),
        "--num-iters": _REPEATS,
        "--repetitions": _REPEATS,
        "--dataset-path": ("--trace",),
        "--dataset": ("--trace",),
        "--goodput": ("--ttft-goal",),
        "--output-json": ("--json",),
        "--save-result": ("--json",),
        "--result-filename": ("--json",),
        "--system-prompt": ("--system",),
        "--sys": ("--system",),
        "--key": ("--api-key",),
        "--duration": ("--seconds",),
    }
)

# Flags for what a subcommand takes without a flag, by the name of that argument.
WITHOUT_FLAG: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("--url", "--base-url", "--server", "--host", "--port"), "URL"),
        **dict.fromkeys(("--file", "--output", "--out", "-o", "--trace"), "FILE"),
        **dict.fromkeys(("--id", "--request", "--request-id"), "REQUEST_ID"),
        "--shell": "SHELL",
    }
)

# Words for actions of other tools, by subcommand.
ACTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "quire models": {
            **dict.fromkeys(("list", "ls", "show"), "quire models without an action lists them"),
            **dict.fromkeys(
                ("remove", "delete", "del", "prune"), "quire models rm NAME removes a model"
            ),
            **dict.fromkeys(("pull", "download", "add"), "quire pull ORG/NAME downloads a model"),
        },
        "quire config": {
            **dict.fromkeys(("list", "ls", "print", "get", "dump"), "quire config show"),
            **dict.fromkeys(("validate", "verify", "lint", "test"), "quire config check FILE"),
        },
        "quire bench": {
            "serving": "quire bench serve URL",
            "server": "quire bench serve URL",
            "offline": "quire bench throughput",
            "batch": "quire bench throughput",
        },
    }
)
