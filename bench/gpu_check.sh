#!/usr/bin/env bash
# What only a GPU can show, in one call: build, parity, exact mode, limits, timings.
#   bench/gpu_check.sh --out DIR [--time-budget-s N] [--only SECTION,...] [--dry-run-on-cpu]
# Writes DIR/gpu-check.json (grown section by section: a run that was stopped keeps what it had) and DIR/gpu-check.log.
# Needs Python 3.11 or newer (PYTHON, else python3) with NumPy, PyTorch and Triton; no network, no compiled module, no data.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m bench.gpu "$@"
