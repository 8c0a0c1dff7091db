"""Devices to plan for: memory, bandwidth and peak arithmetic rates, with their sources.

Rates of GPUs are the manufacturers' peaks, dense (without sparsity), so predictions from them are
upper bounds of speed. Those of CPUs are derived as cores x base clock x operations per cycle, so a
CPU may be faster in prefill while its clock is higher. Memory of GPUs is the total that the driver
reports (nvidia-smi), which differs a little from the nominal size. The memory of a CPU depends on
the machine and must be given.
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
    the rate of bf16, else of f32. nominal_gb: the memory in the device's name, 0 for CPUs.
    memory_bytes: None where it must be given. isa: instruction set
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
    nominal_gb: int = 0

    def peak_precision(self, precision: str) -> str:
        """Return the precision of peak_gflops that is the rate of products in `precision`."""
        return next(name for name in (precision, "bf16", "f32") if name in self.peak_gflops)

    def gflop_per_s(self, precision: str) -> float:
        """Return the peak rate of products in a precision."""
        return self.peak_gflops[self.peak_precision(precision)]


def find_device(name: str) -> Device:
    """Return a device of the table by its name, as sellers and drivers write it.

    Case, separators, makers, form factors and kinds of memory do not matter; a size of memory picks
    one of several. Raises SettingError naming the nearest device, or all.
    """
    model, gb = _parsed(name)
    same_model = [one for one in DEVICES if _parsed(one.name)[0] == model]
    found = [one for one in same_model if gb in (None, one.nominal_gb)]
    if len(found) == 1:
        return found[0]
    near = found or same_model
    if not near:
        models = {_parsed(one.name)[0] for one in DEVICES}
        close = [key for key in models if re.match(rf"{key}(?!\d)", model)]
        close = close or get_close_matches(model[:40], sorted(models), 2)
        near = [one for key in close for one in DEVICES if _parsed(one.name)[0] == key]
    hint = f"did you mean {' or '.join(one.name for one in near)}? " if near else ""
    if same_model and not found:
        hint += "for another size of memory add --memory; "
    listed = ", ".join(one.name for one in DEVICES)
    raise SettingError(
        f"there is no device {name[:60]!r} in the table; {hint}known: {THIS} (this machine, "
        f"measured), {listed}"
    )


def _parsed(name: str) -> tuple[str, int | None]:
    """Return the model in lower case without what does not matter, and the GB if named."""
    text = re.sub(r"[^a-z0-9]+", " ", name.lower())
    text = re.sub(r"\b(nvidia|geforce|rtx|intel|xeon|platinum|amd|epyc)(?=\d|\b)", " ", text)
    text = re.sub(r"(sxm\d?|hbm\d?e?|gddr\dx?)\b|\b(tensor core )?gpu\b", " ", text)
    # "h10080gb" has no separator; the digits before "gb" are a size that GPUs have.
    size = re.search(r"(?:\b|(?<=\d))(16|24|32|40|48|64|80|94|96|141|192) ?gi?b\b", text)
    if size is None:
        size = re.search(r"(?<=\w )\d+ ?gi?b\b", text)
    gb = None
    if size is not None:
        gb = int(re.findall(r"\d+", size[0])[0])
        text = text[: size.start()] + text[size.end() :]
    return "".join(text.split()), gb


def _gpu(
    name: str,
    about: str,
    *,
    gb: int,
    mib: int,
    gb_per_s: float,
    bf16_tflops: float,
    f32_tflops: float,
    has_fp8: bool = True,
) -> Device:
    return Device(
        name=name,
        about=f"{about}, {gb} GB",
        memory_bytes=mib * _MIB,
        nominal_gb=gb,
        gb_per_s=gb_per_s,
        peak_gflops={"bf16": 1e3 * bf16_tflops, "f32": 1e3 * f32_tflops},
        has_fp8=has_fp8,
    )


def _cpu(
    name: str,
    about: str,
    *,
    cores: int,
    base_ghz: float,
    operations: Mapping[str, int],
    channels: int,
    channel_gb_per_s: float,
    isa: str,
) -> Device:
    """Return a CPU of one socket. operations: of a core in a cycle, by precision."""
    return Device(
        name=name,
        about=f"{about}, one socket, {cores} cores at {base_ghz:g} GHz",
        memory_bytes=None,
        gb_per_s=channels * channel_gb_per_s,
        peak_gflops={kind: cores * base_ghz * each for kind, each in operations.items()},
        is_gpu=False,
        isa=isa,
    )


DEVICES: tuple[Device, ...] = (
    # NVIDIA H100 Tensor Core GPU data sheet, SXM column: 80 GB HBM3, 3.35 TB/s; BF16 1,979 TFLOPS
    # with sparsity, 989 dense; FP32 67.
    _gpu(
        "h100",
        "NVIDIA H100 SXM",
        gb=80,
        mib=81559,
        gb_per_s=3350.0,
        bf16_tflops=989.0,
        f32_tflops=67.0,
    ),
    # NVIDIA H200 data sheet, SXM column: 141 GB HBM3e, 4.8 TB/s; arithmetic as H100.
    _gpu(
        "h200",
        "NVIDIA H200 SXM",
        gb=141,
        mib=143771,
        gb_per_s=4800.0,
        bf16_tflops=989.0,
        f32_tflops=67.0,
    ),
    # NVIDIA A100 data sheet: 40 GB HBM2 1,555 GB/s; 80 GB HBM2e SXM 2,039 GB/s; BF16 312, FP32
    # 19.5.
    _gpu(
        "a100-40gb",
        "NVIDIA A100",
        gb=40,
        mib=40960,
        gb_per_s=1555.0,
        bf16_tflops=312.0,
        f32_tflops=19.5,
        has_fp8=False,
    ),
    _gpu(
        "a100-80gb",
        "NVIDIA A100 SXM",
        gb=80,
        mib=81920,
        gb_per_s=2039.0,
        bf16_tflops=312.0,
        f32_tflops=19.5,
        has_fp8=False,
    ),
    # NVIDIA L40S data sheet: 48 GB GDDR6, 864 GB/s; BF16 362.05 dense, FP32 91.6.
    _gpu(
        "l40s", "NVIDIA L40S", gb=48, mib=46068, gb_per_s=864.0, bf16_tflops=362.0, f32_tflops=91.6
    ),
    # NVIDIA L4 data sheet: 24 GB GDDR6, 300 GB/s; BF16 242 with sparsity, 121 dense; FP32 30.3.
    _gpu("l4", "NVIDIA L4", gb=24, mib=23034, gb_per_s=300.0, bf16_tflops=121.0, f32_tflops=30.3),
    # NVIDIA RTX Blackwell architecture white paper, GeForce RTX 5090: 32 GB GDDR7, 1,792 GB/s; BF16
    # with FP32 accumulation 209.5 dense; FP32 104.8.
    _gpu(
        "rtx-5090",
        "NVIDIA GeForce RTX 5090",
        gb=32,
        mib=32607,
        gb_per_s=1792.0,
        bf16_tflops=209.5,
        f32_tflops=104.8,
    ),
    # NVIDIA Ada architecture white paper, GeForce RTX 4090: 24 GB GDDR6X, 1,008 GB/s; BF16 with
    # FP32 accumulation 165.2 dense; FP32 82.6.
    _gpu(
        "rtx-4090",
        "NVIDIA GeForce RTX 4090",
        gb=24,
        mib=24564,
        gb_per_s=1008.0,
        bf16_tflops=165.2,
        f32_tflops=82.6,
    ),
    # NVIDIA Ampere GA102 white paper, GeForce RTX 3090: 24 GB GDDR6X, 936 GB/s; BF16 with FP32
    # accumulation 71 dense; FP32 35.6.
    _gpu(
        "rtx-3090",
        "NVIDIA GeForce RTX 3090",
        gb=24,
        mib=24576,
        gb_per_s=936.0,
        bf16_tflops=71.0,
        f32_tflops=35.6,
        has_fp8=False,
    ),
    # A multiplication and an addition are two operations, of one lane.
    # Intel product page, Xeon Platinum 8480+: 56 cores, 2.0 GHz base, 8 channels DDR5-4800 (38.4
    # GB/s each). f32: two AVX-512 FMA units of 16 lanes. AMX: Intel gives 1,024 bf16 and 2,048 int8
    # operations a core and cycle (a 16 x 16 x 32 or 16 x 16 x 64 product in 16 cycles).
    _cpu(
        "xeon-8480",
        "Intel Xeon Platinum 8480+",
        cores=56,
        base_ghz=2.0,
        operations={"f32": 64, "bf16": 1024, "int8": 2048, "int4": 2048},
        channels=8,
        channel_gb_per_s=38.4,
        isa="amx",
    ),
    # AMD EPYC 9004 series data sheet, 9654: 96 cores, 2.4 GHz base, 12 channels DDR5-4800. Zen 4:
    # two 256-bit units for products: 8 lanes of f32; 16 of bf16 (AVX512_BF16), 32 of int8
    # (AVX512_VNNI). Its rates of operations are derived from these widths, not published.
    _cpu(
        "epyc-9654",
        "AMD EPYC 9654",
        cores=96,
        base_ghz=2.4,
        operations={"f32": 32, "bf16": 64, "int8": 128, "int4": 128},
        channels=12,
        channel_gb_per_s=38.4,
        isa="avx512",
    ),
    # AMD EPYC 7003 series data sheet, 7763: 64 cores, 2.45 GHz base, 8 channels DDR4-3200 (25.6
    # GB/s each). Zen 3: two 256-bit FMA units of 8 lanes of f32. int8: without a dot product (VNNI)
    # VPMADDUBSW and VPMADDWD take the place of one product of 32 lanes in two cycles of each unit.
    # Derived from these widths, not published. No bf16 products: they are computed in f32.
    _cpu(
        "epyc-7763",
        "AMD EPYC 7763",
        cores=64,
        base_ghz=2.45,
        operations={"f32": 32, "int8": 64, "int4": 64},
        channels=8,
        channel_gb_per_s=25.6,
        isa="avx2",
    ),
)
