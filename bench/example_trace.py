"""Write the example trace of `quire simulate`: a made-up minute of chat for a small context.

Run: python -m bench.example_trace

240 requests of at most 512 tokens in Mooncake's JSON lines, with a burst of 80 in the middle, so
that policies differ. Lengths are log-normal. The output is the same on every machine.
"""

from __future__ import annotations

import json
import random

from quire.obs.trace import EXAMPLE_TRACE

NUM_STEADY, NUM_BURST = 160, 80
STEADY_S, BURST_S = (0.0, 60.0), (25.0, 30.0)


def example_trace() -> str:
    """Return the lines of the trace, in order of arrival."""
    draw = random.Random(0)
    arrivals_s = [draw.uniform(*STEADY_S) for _ in range(NUM_STEADY)]
    arrivals_s += [draw.uniform(*BURST_S) for _ in range(NUM_BURST)]
    entries = [
        {
            "timestamp": round(1e3 * arrival_s),
            "input_length": _length(draw, median=120, highest=384),
            "output_length": _length(draw, median=40, highest=128),
        }
        for arrival_s in sorted(arrivals_s)
    ]
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def _length(draw: random.Random, *, median: int, highest: int) -> int:
    """Draw a number of tokens."""
    return min(max(round(median * draw.lognormvariate(0.0, 0.8)), 4), highest)


if __name__ == "__main__":
    EXAMPLE_TRACE.write_text(example_trace(), encoding="utf-8")
