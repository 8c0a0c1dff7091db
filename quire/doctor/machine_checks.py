"""Checks of this machine: each returns one finding from the facts. docs/doctor.md explains them.

Pure functions: nothing here reads the system. The limits below are the thresholds of that page.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.api.http.connection import max_connections_of
from quire.config.machine import ADDRESS_SPACE
from quire.doctor.finding import Finding, ok, problem, warning
from quire.doctor.machine_facts import MachineFacts, Place

_GB, _GIB, _MIB = 10**9, 2**30, 2**20
# The oldest supported Python.
MIN_PYTHON = (3, 11)
# Free memory below which not even a small model starts, or only a small one.
LOW_MEMORY_BYTES, FEW_MEMORY_BYTES = _GIB // 2, 4 * _GIB
# Free disk below which nothing can be written, or not even a small model.
LOW_DISK_BYTES, FEW_DISK_BYTES = _GIB // 2, 5 * _GIB
LOW_TEMPORARY_BYTES = 64 * _MIB
# Shared memory that libraries (PyTorch, NCCL) need beside a GPU.
LOW_SHM_BYTES = 256 * _MIB
# Open files for few, and for some hundred connections.
LOW_FILES, FEW_FILES = 256, 1024
# Share of the usable cores that other programs may use.
MAX_OTHER_LOAD = 0.25
# What turns into a system call, of which each step makes several.
SLOW_CLOCKS = ("hpet", "acpi_pm", "refined-jiffies", "jiffies", "xen")
# Governors that keep the frequency low; with these drivers powersave does not.
SLOW_GOVERNORS = ("powersave", "conservative", "userspace")
SCALING_DRIVERS = ("intel_pstate", "amd-pstate-epp")
# Kernels by the flags of /proc/cpuinfo that they need, the best first (native/src/isa.cc).
_KERNELS = (
    ("amx", ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni")),
    ("avx512bf16", ("avx512_bf16", "avx512_vnni")),
    ("avx512vnni", ("avx512f", "avx512bw", "avx512vl", "avx512_vnni")),
    ("avx512", ("avx512f", "avx512bw", "avx512vl")),
    ("avx2vnni", ("avx2", "fma", "f16c", "avx_vnni")),
    ("avx2", ("avx2", "fma", "f16c")),
)
# The settings that name the places.
_SET_BY = {
    "model cache": "HF_HOME",
    "KV tier": "QUIRE_KV_TIER_PATH, or kv-tier-path in the configuration file",
    "packed weights": "QUIRE_PACK_CACHE, or pack-cache in the configuration file",
}
_SHOWN_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "avx_vnni")


def check_python(facts: MachineFacts) -> Finding:
    """Check the interpreter's version."""
    version = ".".join(map(str, facts.python))
    if facts.python < MIN_PYTHON:
        return problem("python", f"Python {version}", "install Python 3.11 or newer")
    return ok("python", f"Python {version}")


def check_native(facts: MachineFacts) -> Finding:
    """Check that the compiled module loads."""
    if facts.native.error and facts.asked_isa:
        return problem("native module", facts.native.error, "unset QUIRE_ISA")
    if facts.native.error:
        return problem(
            "native module",
            f"cannot be loaded: {facts.native.error}",
            "reinstall with pip install --force-reinstall quire-llm; in a checkout, run make build",
        )
    return ok("native module", f"loads; kernels for {', '.join(facts.native.available)}")


def check_kernels(facts: MachineFacts) -> Finding:
    """Check that the best kernels for this CPU are in use."""
    native, best = facts.native, best_kernels(facts.cpu_flags)
    flags = [flag for flag in _SHOWN_FLAGS if flag in facts.cpu_flags]
    found = f"{native.isa or 'no'} kernels on {facts.cpu_model}"
    evidence = {"/proc/cpuinfo": " ".join(flags) or "none of the flags that matter"}
    if native.error:
        return problem("kernels", found, "repair the native module first", **evidence)
    if facts.asked_isa and native.isa != native.available[0]:
        action = f"unset QUIRE_ISA={facts.asked_isa}, or keep it to compare kernels"
        return warning("kernels", found, action, **evidence)
    if best and best not in native.available:
        action = (
            f"the CPU has what {best} kernels need, but the system does not grant it (a sandbox, "
            "an old Linux kernel or hypervisor), or the module was built without them: run on "
            "Linux 5.16 or newer, or install a release's wheel"
        )
        return warning("kernels", found, action, **evidence)
    if facts.architecture == "x86_64" and not best:
        action = "products run several times slower than with AVX2; use a CPU that has it"
        return warning("kernels", found, action, **evidence)
    return ok("kernels", found, **evidence)


def best_kernels(flags: frozenset[str]) -> str:
    """Return the best kernels that an x86 CPU with these flags can run, "" for portable ones."""
    return next((name for name, needed in _KERNELS if flags.issuperset(needed)), "")


def check_cores(facts: MachineFacts) -> Finding:
    """Check how many cores are left by affinity and the control group's quota."""
    threads = len(facts.affinity)
    smt = {True: ", SMT on", False: ", SMT off", None: ""}[facts.is_smt]
    evidence = {
        "CPUs": f"{facts.num_cpus} of the machine, {threads} by affinity{smt}",
        "usable cores": str(facts.num_cores),
    }
    found = f"{facts.num_cores} usable cores"
    if facts.num_cores == 1:
        action = "HTTP, tokenization and kernels share it: raise the CPU limit to 2 or more"
        return warning("cores", "1 usable core", action, **evidence)
    expected = threads // 2 if facts.is_smt else threads
    if facts.num_cores < expected:
        action = (
            f"the control group's CPU quota allows fewer than the {expected} cores of the "
            "affinity: raise it (docker run --cpus, resources.limits.cpu)"
        )
        return warning("cores", found, action, **evidence)
    if threads < facts.num_cpus:
        found += f"; the affinity mask leaves out {facts.num_cpus - threads} CPUs"
    return ok("cores", found, **evidence)


def check_numa(facts: MachineFacts) -> Finding:
    """Check that the usable CPUs are of one NUMA node."""
    used = [name for name, cpus in facts.nodes.items() if cpus & facts.affinity]
    if len(used) > 1:
        number = used[0].removeprefix("node")
        return warning(
            "NUMA",
            f"the usable CPUs are of {len(used)} nodes, and weights lie on one",
            f"start one server a node: numactl --cpunodebind={number} --membind={number} quire "
            "serve ...",
        )
    return ok("NUMA", "one node" if facts.nodes else "not readable here")


def check_memory(facts: MachineFacts) -> Finding:
    """Check the memory that an engine could take now."""
    left, total = facts.memory.available_bytes, facts.total_bytes
    found = f"{_size(left)} of {_size(total)} can be used (limit: {facts.memory.limit})"
    action = "stop other programs, or raise the container's memory limit"
    if facts.memory.limit == ADDRESS_SPACE:
        action = facts.memory.remedy
    if left < LOW_MEMORY_BYTES:
        return problem("memory", found, action)
    if left < FEW_MEMORY_BYTES:
        hint = f"{action}; quire plan MODEL says what a model needs"
        return warning("memory", found, hint)
    return ok("memory", found)


def check_place(place: Place) -> Finding:
    """Check a directory of models, packed weights or a KV tier."""
    found = f"{_size(place.free_bytes)} free in {place.path}"
    if not place.has_disk:
        found = f"{place.path} is on a file system of size 0, such as /proc, which stores no files"
        return problem(place.name, found, f"name a directory on a disk: {_SET_BY[place.name]}")
    if not place.is_writable:
        action = f"give this user write access to {place.path}, or name another directory"
        return problem(place.name, f"{place.path} cannot be written", action)
    if place.free_bytes < LOW_DISK_BYTES:
        return problem(place.name, found, "make room: quire models rm removes what is not needed")
    if place.free_bytes < FEW_DISK_BYTES:
        action = "make room before a download: quire models lists what takes it"
        return warning(place.name, found, action)
    return ok(place.name, found)


def check_temporary(facts: MachineFacts) -> Finding:
    """Check the directory of the engine's sockets."""
    place = facts.temporary
    found = f"{_size(place.free_bytes)} free in {place.path}"
    if not place.is_writable:
        return problem(
            "temporary files",
            f"{place.path} cannot be written",
            "set TMPDIR to a directory that can: the engine's sockets are there",
        )
    if place.free_bytes < LOW_TEMPORARY_BYTES:
        return problem("temporary files", found, "make room, or set TMPDIR to another directory")
    return ok("temporary files", found)


def check_huge_pages(facts: MachineFacts) -> Finding:
    """Check that weights and KV blocks may lie in huge pages."""
    mode = facts.huge_pages
    if mode == "never":
        return warning(
            "huge pages",
            "transparent huge pages are off: more address translation in every product",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)",
        )
    if not mode:
        return ok("huge pages", "not readable here")
    shared = facts.shared_huge_pages or "not readable"
    found = f"transparent huge pages: {mode}; for memory that ranks share: {shared}"
    return ok("huge pages", f"{found}, {facts.free_huge_pages} reserved ones of 2 MiB free")


def check_frequency(facts: MachineFacts) -> Finding:
    """Check the CPU frequency governor."""
    slow = [name for name in facts.governors if name in SLOW_GOVERNORS]
    scales = facts.governor_driver in SCALING_DRIVERS and slow == ["powersave"]
    if slow and not scales:
        return warning(
            "CPU frequency",
            f"governor {', '.join(slow)}: the CPU may stay below its base frequency",
            "cpupower frequency-set -g performance (as root)",
        )
    found = ", ".join(facts.governors)
    return ok("CPU frequency", f"governor {found}" if found else "set by the host, not readable")


def check_load(facts: MachineFacts) -> Finding:
    """Check how busy other programs keep the cores."""
    found = f"load average {facts.load:.1f} on {facts.num_cores} usable cores"
    if facts.load > MAX_OTHER_LOAD * facts.num_cores:
        action = "stop other programs, or leave them cores with --threads"
        return warning("other load", found, action)
    return ok("other load", found)


def check_open_files(facts: MachineFacts) -> Finding:
    """Check how many connections the limit on open files allows."""
    soft, hard = facts.open_files
    if soft is None:
        return ok("open files", "no limit")
    found = f"at most {soft}, so {max_connections_of(soft)} connections at once"
    most = 4096 if hard is None or hard > 4096 or hard <= soft else hard
    action = f"ulimit -n {most} before the start, or LimitNOFILE= in the systemd unit"
    if soft < LOW_FILES:
        return problem("open files", found, action)
    if soft < FEW_FILES:
        return warning("open files", found, action)
    return ok("open files", found)


def check_shared_memory(facts: MachineFacts) -> Finding:
    """Check the size of /dev/shm, which only a GPU's libraries use."""
    if facts.shm_bytes is None:
        return ok("shared memory", "no /dev/shm")
    found = f"/dev/shm has {_size(facts.shm_bytes)}"
    if facts.gpus and facts.shm_bytes < LOW_SHM_BYTES:
        return warning("shared memory", found, "docker run --shm-size 1g: PyTorch may need it")
    return ok("shared memory", found)


def check_clock(facts: MachineFacts) -> Finding:
    """Check that reading the clock is cheap."""
    source = facts.clock_source
    if source in SLOW_CLOCKS:
        return warning(
            "clock source",
            f"{source}: each reading of the clock is a slow system call",
            "boot with clocksource=tsc, or select the hypervisor's clock",
        )
    return ok("clock source", source or "not readable here")


def check_gpu(facts: MachineFacts) -> Finding:
    """Check that GPUs can be used."""
    if not facts.gpus:
        return ok("GPU", "none; models run on the CPU")
    found = ", ".join(facts.gpus)
    missing = [name for name in ("torch", "triton") if name not in facts.libraries]
    if missing:
        action = "install PyTorch and Triton: pip install 'quire-llm[gpu]'"
        return warning("GPU", f"{found}; not installed: {', '.join(missing)}", action)
    return ok("GPU", f"{found}; use it with --executor torch", driver=facts.gpu_driver)


def check_token(facts: MachineFacts) -> Finding:
    """Check that no other user can read the Hugging Face token."""
    if facts.token_mode is None:
        return ok("hub token", "no token file; public models need none")
    found = f"{facts.token_file} has mode {facts.token_mode:03o}"
    if facts.token_mode & 0o077:
        return warning("hub token", f"{found}: others can read it", f"chmod 600 {facts.token_file}")
    return ok("hub token", found)


Check = Callable[[MachineFacts], Finding]
CHECKS: tuple[Check, ...] = (
    *(check_python, check_native, check_kernels, check_cores, check_numa, check_load),
    *(check_frequency, check_clock, check_memory, check_huge_pages, check_shared_memory),
    *(check_temporary, check_open_files, check_gpu, check_token),
)


def machine_findings(facts: MachineFacts) -> list[Finding]:
    """Return the findings of all checks, in the order of the page."""
    return [check(facts) for check in CHECKS] + [check_place(place) for place in facts.places]


def _size(num_bytes: int) -> str:
    if num_bytes < _GB:
        return f"{num_bytes / 1e6:.0f} MB"
    return f"{num_bytes / _GB:.1f} GB"
