"""Probes that compute: an exactness self-test with the built-in model, and memory bandwidth.

They take about two seconds together. Everything else of `quire doctor` only reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.base.errors import QuireError
from quire.doctor.finding import Finding, ok, problem, warning

# The built-in model's most likely tokens in f32, from the NumPy twins (tests/unit/doctor).
PROMPTS: tuple[tuple[int, ...], ...] = ((5, 77, 420, 9), tuple(range(40, 80)))
EXPECTED: tuple[tuple[int, ...], ...] = (
    (268, 325, 320, 266, 375, 703, 476, 18, 203, 203, 432, 703, 476, 289, 398, 376),
    (18, 203, 203, 48, 1602, 360, 344, 16, 225, 62, 83, 73, 345, 324, 608, 331),
)
_SETTINGS: Mapping[str, Any] = {
    **{"dtype": "f32", "quantization": "none", "max_num_seqs": 4, "max_model_len": 128},
    **{"kv_cache_memory_bytes": 4 * 2**20, "enable_prefix_caching": False},
}
# Slower memory than one channel of DDR4 has.
SLOW_GB_PER_S = 5.0
_MAX_READ_BYTES, _MIN_READ_BYTES = 2**29, 2**26


def self_test(num_threads: int, *, executor: str = "native") -> Finding:
    """Compare the built-in model's tokens, alone and in a batch, with the expected ones."""
    action = "answers on this machine may be wrong: do not serve; send the output of quire doctor"
    try:
        alone, together = answers(num_threads, executor=executor)
    except QuireError as error:
        return problem("self-test", f"the built-in model does not start: {error}", action)
    if alone != together:
        found = "answers alone and in a batch differ"
        return problem("self-test", found, action, alone=str(alone), together=str(together))
    if alone != EXPECTED:
        found = "the built-in model gives other tokens than on the reference"
        return problem("self-test", found, action, answer=str(alone), expected=str(EXPECTED))
    count = sum(map(len, EXPECTED))
    return ok("self-test", f"{count} tokens of the built-in model as expected, alone and batched")


Tokens = tuple[tuple[int, ...], ...]


def answers(num_threads: int, *, executor: str = "native") -> tuple[Tokens, Tokens]:
    """Return the tokens of each prompt alone, with one thread, and of all in a batch."""
    return (
        _tokens([[prompt] for prompt in PROMPTS], 1, executor),
        _tokens([PROMPTS], num_threads, executor),
    )


def _tokens(
    batches: Sequence[Sequence[tuple[int, ...]]], num_threads: int, executor: str
) -> Tokens:
    from quire.base.sampling_params import SamplingParams
    from quire.engine.library.llm import LLM

    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with LLM(executor=executor, num_threads=num_threads, **_SETTINGS) as llm:
        return tuple(
            tuple(answer.outputs[0].token_ids)
            for batch in batches
            for answer in llm.generate([list(prompt) for prompt in batch], greedy, progress=False)
        )


def bandwidth(num_threads: int, available_bytes: int) -> Finding:
    """Measure the memory's reading speed, which bounds the speed of decoding."""
    from quire.bench.reading import ReadProbe

    num_bytes = min(_MAX_READ_BYTES, max(available_bytes // 4, _MIN_READ_BYTES))
    with ReadProbe(num_threads, num_bytes=num_bytes) as probe:
        return judged_bandwidth(probe.gb_per_s(), num_threads)


def judged_bandwidth(gb_per_s: float, num_threads: int) -> Finding:
    """Return the finding of a measured bandwidth."""
    found = f"{gb_per_s:.1f} GB/s with {num_threads} threads: a request decodes at most "
    found += f"{gb_per_s:.0f} tokens/s if a step reads 1 GB of weights"
    if gb_per_s < SLOW_GB_PER_S:
        action = (
            "other programs use the memory, or the virtual machine is throttled: try again idle"
        )
        return warning("memory speed", found, action)
    return ok("memory speed", found)
