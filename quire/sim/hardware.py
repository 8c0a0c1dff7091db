"""Devices to plan for: memory, bandwidth and peak arithmetic rates, with their sources.

Rates are the manufacturers' peaks, dense (without sparsity), so predictions from them are upper
bounds of speed; but those of CPUs are at base clock and without integer products, so a CPU may be
faster in prefill. Memory of GPUs is the total that the driver reports (nvidia-smi), which differs a
little from the nominal size. The memory of a CPU depends on the machine and must be given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from quire.base.errors import SettingError

THIS = "this"
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device in numbers: bytes, 10^9 bytes per second, and 10^9 operations per second.

    peak_gflops: by precision of products (f32, bf16, int8, int4); one that is missing computes at
    the rate of bf16, else of f32. memory_bytes: None where it must be given. isa: instruction set
    of a CPU's kernels. has_fp8: whether it computes with fp8 weights.
    """

    name: str
    about: str
    memory_bytes: int | None
    gb_per_s: float
    peak_gflops: Mapping[str, float]
    is_gpu: bool = True
    is_measured: bool = False
    isa: str = ""
    has_fp8: bool = False

    def peak_precision(self, precision: str) -> str:
        """Return the precision of peak_gflops that is the rate of products in `precision`."""
        return next(name for name in (precision, "bf16", "f32") if name in self.peak_gflops)

    def gflop_per_s(self, precision: str) -> float:
        """Return the peak rate of products in a precision."""
        return self.peak_gflops[self.peak_precision(precision)]


def find_device(name: str) -> Device:
    """Return a device of the table by its name; case, blanks, dashes and makers do not matter.

    Raises SettingError naming the nearest device, or all.
    """
    asked = _key(name)
    by_key = {_key(one.name): one for one in DEVICES}
    if asked in by_key:
        return by_key[asked]
    near = [by_key[key].name for key in get_close_matches(asked[:40], by_key, 2)]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    listed = ", ".join(one.name for one in DEVICES)
    raise SettingError(
        f"there is no device {name[:60]!r} in the table; {hint}known: {THIS} (this machine, "
        f"measured), {listed}"
    )


def _key(name: str) -> str:
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia|geforce|intel|amd)+|(?<=\d)gb$", "", letters).replace("rtx", "")


def _gpu(
    name: str,
    about: str,
    *,
    mib: int,
    gb_per_s: float,
    bf16_tflops: float,
    f32_tflops: float,
    has_fp8: bool = True,
) -> Device:
    return Device(
        name=name,
        about=about,
        memory_bytes=mib * _MIB,
        gb_per_s=gb_per_s,
        peak_gflops={"bf16": 1e3 * bf16_tflops, "f32": 1e3 * f32_tflops},
        has_fp8=has_fp8,
    )


def _cpu(
    name: str,
    about: str,
    *,
    gb_per_s: float,
    f32_gflops: float,
    bf16_gflops: float | None = None,
    isa: str,
) -> Device:
    peaks = {"f32": f32_gflops} if bf16_gflops is None else {"f32": f32_gflops, "bf16": bf16_gflops}
    return Device(
        name=name,
        about=about,
        memory_bytes=None,
        gb_per_s=gb_per_s,
        peak_gflops=peaks,
        is_gpu=False,
        isa=isa,
    )


DEVICES: tuple[Device, ...] = (
    # NVIDIA H100 Tensor Core GPU data sheet, SXM column: 80 GB HBM3, 3.35 TB/s; BF16 1,979 TFLOPS
    # with sparsity, 989 dense; FP32 67.
    _gpu(
        "h100",
        "NVIDIA H100 SXM, 80 GB",
        mib=81559,
        gb_per_s=3350.0,
        bf16_tflops=989.0,
        f32_tflops=67.0,
    ),
    # NVIDIA H200 data sheet, SXM column: 141 GB HBM3e, 4.8 TB/s; arithmetic as H100.
    _gpu(
        "h200",
        "NVIDIA H200 SXM, 141 GB",
        mib=143771,
        gb_per_s=4800.0,
        bf16_tflops=989.0,
        f32_tflops=67.0,
    ),
    # NVIDIA A100 data sheet: 40 GB HBM2 1,555 GB/s; 80 GB HBM2e SXM 2,039 GB/s; BF16 312, FP32
    # 19.5.
    _gpu(
        "a100-40gb",
        "NVIDIA A100, 40 GB",
        mib=40960,
        gb_per_s=1555.0,
        bf16_tflops=312.0,
        f32_tflops=19.5,
        has_fp8=False,
    ),
    _gpu(
        "a100-80gb",
        "NVIDIA A100 SXM, 80 GB",
        mib=81920,
        gb_per_s=2039.0,
        bf16_tflops=312.0,
        f32_tflops=19.5,
        has_fp8=False,
    ),
    # NVIDIA L40S data sheet: 48 GB GDDR6, 864 GB/s; BF16 362.05 dense, FP32 91.6.
    _gpu(
        "l40s", "NVIDIA L40S, 48 GB", mib=46068, gb_per_s=864.0, bf16_tflops=362.0, f32_tflops=91.6
    ),
    # NVIDIA L4 data sheet: 24 GB GDDR6, 300 GB/s; BF16 242 with sparsity, 121 dense; FP32 30.3.
    _gpu("l4", "NVIDIA L4, 24 GB", mib=23034, gb_per_s=300.0, bf16_tflops=121.0, f32_tflops=30.3),
    # NVIDIA RTX Blackwell architecture white paper, GeForce RTX 5090: 32 GB GDDR7, 1,792 GB/s; BF16
    # with FP32 accumulation 209.5 dense; FP32 104.8.
    _gpu(
        "rtx-5090",
        "NVIDIA GeForce RTX 5090, 32 GB",
        mib=32607,
        gb_per_s=1792.0,
        bf16_tflops=209.5,
        f32_tflops=104.8,
    ),
    # NVIDIA Ada architecture white paper, GeForce RTX 4090: 24 GB GDDR6X, 1,008 GB/s; BF16 with
    # FP32 accumulation 165.2 dense; FP32 82.6.
    _gpu(
        "rtx-4090",
        "NVIDIA GeForce RTX 4090, 24 GB",
        mib=24564,
        gb_per_s=1008.0,
        bf16_tflops=165.2,
        f32_tflops=82.6,
    ),
    # NVIDIA Ampere GA102 white paper, GeForce RTX 3090: 24 GB GDDR6X, 936 GB/s; BF16 with FP32
    # accumulation 71 dense; FP32 35.6.
    _gpu(
        "rtx-3090",
        "NVIDIA GeForce RTX 3090, 24 GB",
        mib=24576,
        gb_per_s=936.0,
        bf16_tflops=71.0,
        f32_tflops=35.6,
        has_fp8=False,
    ),
    # Intel ARK, Xeon Platinum 8480+: 56 cores, 2.0 GHz base, 8 channels DDR5-4800 (38.4 GB/s each).
    # AMX: 2,048 bf16 operations a core and cycle; two AVX-512 FMA units: 64 in f32.
    _cpu(
        "xeon-8480",
        "Intel Xeon Platinum 8480+, one socket",
        gb_per_s=8 * 38.4,
        f32_gflops=56 * 2.0 * 64,
        bf16_gflops=56 * 2.0 * 2048,
        isa="amx",
    ),
    # AMD EPYC 9654 data sheet: 96 cores, 2.4 GHz base, 12 channels DDR5-4800. Zen 4: two 256-bit
    # FMA units, 32 operations a core and cycle in f32, 64 in bf16 (AVX512_BF16).
    _cpu(
        "epyc-9654",
        "AMD EPYC 9654, one socket",
        gb_per_s=12 * 38.4,
        f32_gflops=96 * 2.4 * 32,
        bf16_gflops=96 * 2.4 * 64,
        isa="avx512",
    ),
    # AMD EPYC 7763 data sheet: 64 cores, 2.45 GHz base, 8 channels DDR4-3200 (25.6 GB/s each).
    # Zen 3: two 256-bit FMA units, 32 operations a core and cycle in f32; no bf16 products.
    _cpu(
        "epyc-7763",
        "AMD EPYC 7763, one socket",
        gb_per_s=8 * 25.6,
        f32_gflops=64 * 2.45 * 32,
        isa="avx2",
    ),
)
