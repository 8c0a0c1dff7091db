"""A running engine holds its weights, its KV cache and little else, measured in its own process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.checkpoints import tokenizer_json
from quire.bench.floor import program_of
from tests.tiny_models import write_tiny_llama

# 38 M elements of weights, and 256 KiB of f32 keys and values per token: 1,536 tokens fill 384
# MiB. The interpreter and its modules alone take 28 MiB, and a step's rows of this wide model 20:
# smaller caches could not hide them. Narrow layers with wide heads have few operations per byte.
SHAPE = {
    "hidden_size": 256, "intermediate_size": 1536, "num_attention_heads": 64, "head_dim": 128,
    "num_key_value_heads": 64, "vocab_size": 512, "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
}  # fmt: skip
KV_TOKENS = 1536
MAX_RATIO = 1.15
LIMIT_S = 300

CHILD = """
import json, sys
from quire.base.sampling_params import SamplingParams
from quire.engine.library.llm import LLM

def sampling(**more):
    return SamplingParams(temperature=0.9, seed=1, max_tokens=8, ignore_eos=True, **more)

with LLM(sys.argv[1], **json.loads(sys.argv[2])) as llm:
    prompts = [[(at * number) % 500 + 5 for at in range(1, 289)] for number in range(1, 6)]
    llm.generate(prompts, sampling(logprobs=5))
    llm.generate(prompts[:1], sampling(prompt_logprobs=5, top_p=0.9, repetition_penalty=1.2))
    llm.generate([prompt[:20] for prompt in prompts], sampling(n=2))
"""


def held_bytes(pid: int | str) -> int:
    """Return anonymous memory of a process; 0 when it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    kinds = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", status, re.M)
    return sum(1024 * int(kilobytes) for kilobytes in kinds)


def peak_held(model: Path, settings: dict[str, Any]) -> int:
    """Return the peak of an engine, from its start to the end of requests that fill its cache."""
    words = [sys.executable, "-c", CHILD, str(model), json.dumps(settings)]
    most, deadline_s = 0, time.monotonic() + LIMIT_S
    with subprocess.Popen(words) as child:
        while child.poll() is None:
            most = max(most, held_bytes(child.pid))
            if time.monotonic() > deadline_s:
                child.kill()
            time.sleep(0.002)
    assert child.returncode == 0
    return most


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("big"), dtype="bf16", **SHAPE)


@pytest.mark.skipif(sys.platform != "linux", reason="counts what Linux tells of a process")
@pytest.mark.parametrize("precision", [{"dtype": "f32"}, {"quantization": "int8"}])
def test_a_running_engine_holds_little_beyond_weights_and_cache(
    model: Path, precision: dict[str, Any]
) -> None:
    program = program_of(str(model), {"kv_cache_dtype": "f32", **precision})
    kv_bytes = KV_TOKENS * program.caches[0].token_bytes
    settings = {"kv_cache_dtype": "f32", "kv_cache_memory_bytes": kv_bytes, "num_threads": 2}
    most = peak_held(model, settings | precision)
    needed = program.weight_bytes + kv_bytes
    print(f"{most} bytes held, {needed} of weights and cache: {most / needed:.3f} times")
    assert needed > 430e6
    assert needed < most <= MAX_RATIO * needed  # less: the cache was not filled


TOKENIZER_CHILD = """
import sys
from pathlib import Path
from quire import _native
from quire.config.groups import (ModelConfig)
from quire.engine.client.tokenizer_side import load_tokenizer_side
from tests.unit.engine.test_memory import held_bytes

side = load_tokenizer_side(ModelConfig(model=sys.argv[1]))
held = held_bytes("self")
_native.give_back_freed_memory()
print(held - held_bytes("self"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts what Linux tells of a process")
def test_memory_of_a_large_tokenizer_file_is_released(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path, vocab_size=60_000)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer_json(60_000)))
    (model / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    words = [sys.executable, "-c", TOKENIZER_CHILD, str(model)]
    told = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert int(told) < 2e6  # of some 60 MB read and created on the way
