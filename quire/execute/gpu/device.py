"""Which device computes, and why one that was asked for cannot.

`look` asks PyTorch and Triton once; everything else decides by what it found, so that tests show
any machine. Always holds: what would fail later, in the middle of a load or a step, with a
library's words, is refused here in ours: no driver, one too old, a PyTorch built without the card,
a card without bf16, no Triton, one too old, one that cannot build what it launches kernels by.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from quire.base.errors import DeviceLost, SettingError
from quire.execute.executor import StepMemoryError

MIN_CAPABILITY = (8, 0)  # bf16 products; Ampere
FP8_CAPABILITY = (8, 9)  # products and conversions of e4m3; Ada and Hopper
MIN_TRITON = (3, 4)
# What PyTorch says where there is no GPU at all, or none is shown to this process.
NONE_THERE = ("Found no NVIDIA driver", "No CUDA GPUs are available", "No HIP GPUs are available")
# What the first line of an error says that comes from the driver: through PyTorch, or from Triton,
# which launches by itself. (PyTorch's next lines speak of device-side assertions whatever it is.)
OF_DRIVER = ("CUDA error", "HIP error", "Triton Error", "device-side assert", "ECC", "off the bus")
# Of those: memory that lacks outside PyTorch's allocator, for graphs, kernels, cuBLAS, the host;
OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
# and a call that was refused, after which the device works on. All others leave it unusable: every
# later call fails with the same.
REFUSED = (
    "captur",  # what may not be captured, or was not
    "invalid argument",
    "invalid configuration argument",
    "invalid device function",
    "invalid resource handle",
    "no kernel image",
    "kernel image is invalid",
    "unsupported toolchain",
    "too many resources requested",
    "not supported",
    "CUBLAS_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_INVALID_VALUE",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU. architecture: as PyTorch names what it was built for, "sm_90" or "gfx942"."""

    name: str
    capability: tuple[int, int]
    architecture: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What PyTorch says. built_for: "CUDA 12.8", "ROCm 6.3" or "" of a build without either;
    architectures: that it has kernels for; trouble: why no card can be used, where none can;
    triton_trouble: why Triton cannot be, where there is a card for it."""

    torch_version: str
    built_for: str
    architectures: tuple[str, ...]
    cards: tuple[Card, ...]
    trouble: str
    triton_trouble: str


def look() -> Machine:
    """Ask PyTorch, and Triton where there is a card; starts the driver where there is one."""
    built_for, trouble = "", ""
    if torch.version.cuda:
        built_for = f"CUDA {torch.version.cuda}"
    elif torch.version.hip:
        built_for = f"ROCm {torch.version.hip}"
    cards: tuple[Card, ...] = ()
    if built_for:
        try:
            torch.cuda.init()
            cards = tuple(_card(index) for index in range(torch.cuda.device_count()))
        except (RuntimeError, AssertionError) as error:
            trouble = first_line(error)
    return Machine(
        torch_version=torch.__version__,
        built_for=built_for,
        architectures=tuple(torch.cuda.get_arch_list()) if cards else (),
        cards=cards,
        trouble=trouble,
        triton_trouble=_triton_trouble() if cards else "",
    )


def choose(wanted: str, machine: Machine) -> torch.device:
    """Return the device meant by auto, cpu, cuda or cuda:N. auto: the first card, else the CPU; but
    where a card shows and cannot be used an error, since a slow start would not be what was meant.

    Raises SettingError: what was found, and what to do.
    """
    if wanted == "cpu" or (wanted == "auto" and _shows_no_card(machine)):
        return torch.device("cpu")
    if not machine.built_for:
        raise SettingError(
            f"device is {wanted}, but this PyTorch ({machine.torch_version}) was built without "
            "CUDA and ROCm; install a build that has one of them (pytorch.org says how), or give "
            "--device cpu"
        )
    if not machine.cards:
        raise SettingError(
            f"device is {wanted}, but no GPU can be used: "
            f"{machine.trouble or 'the driver shows none'}. This PyTorch "
            f"({machine.torch_version}) was built for {machine.built_for}: it needs a driver at "
            "least as new (nvidia-smi shows the driver's); install one, show the GPU to this "
            "process, or give --device cpu"
        )
    index = _index(wanted, len(machine.cards))
    _check_card(f"cuda:{index}", machine.cards[index], machine)
    return torch.device("cuda", index)


def reason(wanted: str, device: torch.device, machine: Machine) -> str:
    """Return why this device, for a line of the log."""
    if device.type == "cpu" and wanted == "cpu":
        return "--device cpu"
    if device.type == "cpu":
        without = f"this PyTorch ({machine.torch_version}) was built without CUDA and ROCm"
        shown = "the driver shows none" if machine.built_for else without
        return f"--device auto found no GPU: {machine.trouble or shown}"
    count = len(machine.cards)
    return (
        f"--device auto: the first of {count} found" if wanted == "auto" else f"--device {wanted}"
    )


def has_fp8(device: torch.device, machine: Machine) -> bool:
    """Return whether its kernels know e4m3; on the CPU plain PyTorch does."""
    if device.type == "cpu":
        return True
    card = machine.cards[device.index or 0]
    return not card.architecture.startswith("sm_") or card.capability >= FP8_CAPABILITY


def device_of(name: str) -> torch.device:
    """Return the device of a name like "cpu" or "cuda:1"."""
    return torch.device(name)


def device_after(name: str, rank: int) -> str:
    """Return the name of a rank's device, where rank 0 has `name`: the CPU for all, or a card
    each."""
    device = torch.device(name)
    return name if device.type == "cpu" else f"{device.type}:{(device.index or 0) + rank}"


def num_cards_from(device: torch.device) -> int:
    """Return how many cards there are from this one on."""
    return torch.cuda.device_count() - (device.index or 0)


@contextmanager
def device_errors(doing: str) -> Iterator[None]:
    """Turn PyTorch's errors into ours: memory that a step lacks makes it smaller, a device that is
    lost ends the engine."""
    try:
        yield
    except RuntimeError as error:
        if lacks_memory(error):
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # what is free in pieces may be whole
            raise StepMemoryError(
                f"{doing}: the device has no memory left for this step ({first_line(error)}); "
                "lower --max-num-batched-tokens or --kv-cache-memory"
            ) from error
        if not is_lost(error):
            raise
        raise DeviceLost(
            f"{doing}: the device is lost ({first_line(error)}); look for its errors in the "
            "system's log (dmesg), and start the engine again"
        ) from error


def lacks_memory(error: Exception) -> bool:
    """Return whether it says that the device, or the host for it, had no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return _says(error, OF_DRIVER) and _says(error, OF_MEMORY)


def is_lost(error: Exception) -> bool:
    """Return whether it says that the device can be used no more."""
    return _says(error, OF_DRIVER) and not _says(error, (*OF_MEMORY, *REFUSED))


def _shows_no_card(machine: Machine) -> bool:
    said = machine.trouble
    return not machine.cards and (not said or any(none in said for none in NONE_THERE))


def _says(error: Exception, words: Iterable[str]) -> bool:
    line = first_line(error)
    return any(word in line for word in words)


def _triton_trouble() -> str:
    """Return what stands in its way. It builds a part of itself at first use, by the system's
    compiler."""
    if find_spec("triton") is None:
        return "it is not installed"
    from triton import __version__ as version
    from triton.runtime import driver

    if _version(version) < MIN_TRITON:
        return f"it is {version}, and {_dotted(MIN_TRITON)} or newer is needed"
    try:
        driver.active.get_current_target()
    except Exception as error:  # noqa: BLE001  of a compiler, a linker, a folder, a driver
        return first_line(error)
    return ""


def _card(index: int) -> Card:
    # Properties only: what is free is known within a context, which takes half a GB of each card.
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    is_rocm = torch.version.hip is not None
    return Card(
        name=properties.name,
        capability=capability,
        architecture=properties.gcnArchName.split(":")[0]
        if is_rocm
        else f"sm_{capability[0]}{capability[1]}",
    )


def _index(wanted: str, num_cards: int) -> int:
    _, _, number = wanted.partition(":")
    index = int(number) if number else 0
    if index >= num_cards:
        last = f"cuda:0 to cuda:{num_cards - 1}" if num_cards > 1 else "only cuda:0"
        raise SettingError(f"device is {wanted}; there is {last}")
    return index


def _check_card(device: str, card: Card, machine: Machine) -> None:
    is_nvidia = card.architecture.startswith("sm_")
    if is_nvidia and card.capability < MIN_CAPABILITY:
        raise SettingError(
            f"{device} is a {card.name} of compute capability {_dotted(card.capability)}; "
            f"{_dotted(MIN_CAPABILITY)} and newer can multiply bf16 (Ampere and after); take "
            "another card, or --executor native"
        )
    if machine.architectures and not _is_built_for(card, machine.architectures):
        raise SettingError(
            f"{device} is a {card.name} ({card.architecture}), and this PyTorch "
            f"({machine.torch_version}, {machine.built_for}) was built for "
            f"{', '.join(machine.architectures)}: they do not fit; install a PyTorch built for "
            "the card"
        )
    if machine.triton_trouble:
        raise SettingError(
            f"{device}: the kernels are written in Triton, and it cannot be used: "
            f"{machine.triton_trouble}. Install it (pip install 'quire-llm[gpu]'); a C compiler "
            "(gcc, clang, or CC=...) and Python's headers (python3-dev), with which Triton builds "
            "a part of itself; and let it write its cache (TRITON_CACHE_DIR)"
        )


def _version(text: str) -> tuple[int, int]:
    major, minor = [*re.findall(r"\d+", text), "0", "0"][:2]
    return int(major), int(minor)


def _is_built_for(card: Card, architectures: tuple[str, ...]) -> bool:
    """Code for sm_80 runs on sm_86: on the same major version, from its minor version on. What is
    only listed as compute_N is compiled by the driver, for newer cards too."""
    if not card.architecture.startswith("sm_"):
        return card.architecture in architectures
    for listed in architectures:
        kind, _, digits = listed.partition("_")
        number = "".join(letter for letter in digits if letter.isdigit())
        if not number:
            continue
        version = (int(number[:-1]), int(number[-1]))
        if kind == "compute" and version <= card.capability:
            return True
        if version[0] == card.capability[0] and version <= card.capability:
            return True
    return False


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def first_line(error: Exception) -> str:
    """Return what an error says first; its kind where it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
