"""Products by themselves: each shape, precision and number of rows against a plain read of memory.

The weights of a shape are there so many times over that none stays in a cache; one sample goes
through all copies once, after a read of memory beside it (memory speed drifts). Told are medians:
microseconds a product, the share of the read that its weights' bytes come to, and of the
arithmetic peak of its precision (quire/bench/limits.py). Knows no model.
Run: python -m bench.kernels_linear [--precisions bf16,int8,int4-g32] [--rows 1,16,2048]
     [--shapes 1024x4096] [--threads N] [--isa NAME] [--samples 7] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from quire import _native
from quire.bench.limits import machine_limits, peak_gflops
from quire.bench.machine import machine_card
from quire.bench.reading import ReadProbe
from quire.config.machine import num_usable_cores
from quire.quant.scheme import SCHEMES, canonical

# K x N of a 0.6B model: qkv, o, gate and up, down, and a part of the head.
SHAPES = "1024x4096,2048x1024,1024x6144,3072x1024,1024x32768"
ROWS = "1,2,4,8,16,32,64,128,256,2048"
PRECISIONS = "bf16,int8,int4-g32,int4-g64,int4-g128"
COLD_BYTES = 400 << 20
PIECE_ROWS = 1024


class Product:
    """So many copies of one product, all run in turn by one call."""

    def __init__(self, pool: Any, precision: str, k: int, n: int, max_rows: int) -> None:
        scheme = "" if precision in ("bf16", "f32") else canonical(precision)
        dtype = precision if precision in ("bf16", "f32") else "bf16"
        row_bytes = SCHEMES[scheme].row_bytes(k) if scheme else k * (4 if dtype == "f32" else 2)
        self.weight_bytes = n * row_bytes
        self.copies = max(2, COLD_BYTES // self.weight_bytes)
        self.operations = 2 * k * n
        rng = np.random.default_rng(0)
        piece = rng.standard_normal((PIECE_ROWS, k)).astype(np.float32)
        raw = piece.view(np.uint8).reshape(-1)
        weights = []
        for _ in range(self.copies):
            weight = _native.Weight("matrix", dtype, n, k, scheme)
            for first in range(0, n, PIECE_ROWS):
                count = min(PIECE_ROWS, n - first)
                source = raw[: count * k * 4]
                weight.fill(pool, first, count, source, "f32", digested=False)
            weights.append(weight)
        x_bytes, y_bytes = (max_rows * (-(-width * 2 // 64) * 64) for width in (k, n))
        self._program = _native.Program(pool, x_bytes + y_bytes)
        self._program.add_buffer(0, 0, -(-k // 32) * 32, max_rows, "bf16")
        self._program.add_buffer(0, x_bytes, -(-n // 32) * 32, max_rows, "bf16")
        views = [(0, 0, k), (1, 0, n)]
        self._program.add_segment([("linear", views, [], [], [weight]) for weight in weights])
        x = rng.standard_normal((max_rows, k)).astype(np.float32)
        bits = (x.view(np.uint32) >> 16).astype(np.uint16)
        self._program.array(views[0], max_rows)[:] = bits

    def seconds(self, rows: int) -> float:
        """Of one product, the mean over all copies."""
        ids = np.zeros(rows, np.int32)
        batch = dict.fromkeys(("token_ids", "positions", "rope_positions", "kv_slots"), ids)
        begin = time.perf_counter()
        self._program.run(
            0,
            **batch,
            sample_rows=ids[:0],
            seq_starts=np.array([0, rows], np.int32),
            block_tables=np.zeros((1, 1), np.int32),
        )
        return (time.perf_counter() - begin) / self.copies


def measure(
    pool: Any, probe: ReadProbe, product: Product, rows: int, samples: int
) -> dict[str, float]:
    """Medians over samples, each with a read of memory before it."""
    product.seconds(rows)
    times, shares = [], []
    for _ in range(samples):
        read_gb_per_s = probe.gb_per_s(rounds=1)
        seconds = product.seconds(rows)
        times.append(seconds)
        shares.append(product.weight_bytes / seconds / 1e9 / read_gb_per_s)
    seconds = statistics.median(times)
    return {
        "us": 1e6 * seconds,
        "read_share": statistics.median(shares),
        "gops": product.operations * rows / seconds / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precisions", default=PRECISIONS)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--isa", default="")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pool = _native.Pool(args.threads, isa=args.isa)
    limits = machine_limits(args.threads)
    row_counts = [int(text) for text in args.rows.split(",")]
    results: list[dict[str, Any]] = []
    print(f"{pool.isa}, {args.threads} threads, limits {limits}")
    with ReadProbe(args.threads, num_bytes=256 << 20) as probe:
        for shape in args.shapes.split(","):
            k, n = (int(text) for text in shape.split("x"))
            for precision in args.precisions.split(","):
                product = Product(pool, precision, k, n, max(row_counts))
                peak = peak_gflops(limits, precision[:4])
                for rows in row_counts:
                    found = measure(pool, probe, product, rows, args.samples)
                    peak_share = found["gops"] / peak if peak else None
                    entry = {"k": k, "n": n, "precision": precision, "rows": rows, **found}
                    results.append(entry | {"peak_share": peak_share})
                    print(
                        f"{shape:>12} {precision:>10} {rows:>5} rows {found['us']:>10.1f} us "
                        f"{100 * found['read_share']:>5.0f} % of read {found['gops']:>9.0f} GOP/s "
                        + (f"{100 * peak_share:>5.1f} % of peak" if peak_share else ""),
                        flush=True,
                    )
    if args.out is not None:
        outcome = {"machine": machine_card(), "isa": pool.isa, "limits": limits}
        args.out.write_text(json.dumps(outcome | {"products": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
