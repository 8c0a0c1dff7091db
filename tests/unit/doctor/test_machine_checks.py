"""Checks of a machine at their thresholds, and its facts read from a made-up root."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.config.machine import MachineMemory
from quire.doctor import machine_checks as checks
from quire.doctor.finding import Finding, Verdict
from quire.doctor.machine_facts import MachineFacts, NativeModule, Place, read_machine, read_native
from tests.cases import each_case

GIB, GB = 2**30, 10**9
PLACE = Place(name="model cache", path=Path("/c"), free_bytes=50 * GB, is_writable=True)
GOOD = MachineFacts(
    python=(3, 11, 4),
    native=NativeModule(isa="avx512vnni", available=("avx512vnni", "avx512", "avx2", "portable")),
    architecture="x86_64",
    cpu_model="A CPU",
    cpu_flags=frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"}),
    asked_isa="",
    num_cpus=8,
    affinity=frozenset(range(8)),
    num_cores=4,
    is_smt=True,
    memory=MachineMemory(available_bytes=16 * GIB, limit="free memory"),
    total_bytes=32 * GIB,
    places=(PLACE,),
    temporary=replace(PLACE, name="temporary files"),
    huge_pages="madvise",
    governors=("performance",),
    governor_driver="acpi-cpufreq",
    load=0.2,
    open_files=(1024, 4096),
    shm_bytes=GIB,
    clock_source="tsc",
    nodes={"node0": frozenset(range(8)), "node1": frozenset(range(8, 16))},
    gpus=(),
    gpu_driver="",
    libraries=frozenset(),
    token_file=Path("/t/token"),
    token_mode=0o600,
)
OK, WARNING, PROBLEM = Verdict.OK, Verdict.WARNING, Verdict.PROBLEM


def test_a_good_machine_has_no_finding_that_needs_action() -> None:
    findings = checks.machine_findings(GOOD)
    assert {one.verdict for one in findings} == {OK}
    assert not [one for one in findings if one.action]
    assert len({one.check for one in findings}) == len(findings) == len(checks.CHECKS) + 1


def memory(num_bytes: int) -> MachineMemory:
    return MachineMemory(available_bytes=num_bytes, limit="control group")


@each_case(
    ("check", "change", "verdict", "said"),
    [
        ("python", {"python": (3, 10, 9)}, PROBLEM, "install Python 3.11"),
        ("native", {"native": NativeModule(error="no file")}, PROBLEM, "no file"),
        ("kernels", {"native": NativeModule(error="no file")}, PROBLEM, "repair"),
        ("kernels", {"cpu_flags": GOOD.cpu_flags | {"avx512_bf16"}}, WARNING, "avx512bf16"),
        ("kernels", {"cpu_flags": frozenset({"sse4_2"})}, WARNING, "AVX2"),
        ("kernels", {"cpu_flags": frozenset(), "architecture": "aarch64"}, OK, ""),
        ("cores", {"num_cores": 3}, WARNING, "CPU quota allows fewer than the 4 cores"),
        ("cores", {"num_cores": 1}, WARNING, "CPU limit to 2"),
        ("cores", {"is_smt": None, "num_cores": 8}, OK, "8 usable cores"),
        ("cores", {"num_cpus": 16}, OK, "leaves out 8 CPUs"),
        ("numa", {"affinity": frozenset((7, 8))}, WARNING, "numactl --cpunodebind=0"),
        ("numa", {"nodes": {}}, OK, "not readable"),
        ("load", {"load": 1.0}, OK, ""),
        ("load", {"load": 1.01}, WARNING, "stop other programs"),
        ("memory", {"memory": memory(GIB // 2)}, WARNING, "control group"),
        ("memory", {"memory": memory(GIB // 2 - 1)}, PROBLEM, "memory limit"),
        ("memory", {"memory": memory(4 * GIB)}, OK, ""),
        ("memory", {"memory": memory(4 * GIB - 1)}, WARNING, "quire plan MODEL"),
        ("huge_pages", {"huge_pages": "never"}, WARNING, "echo madvise"),
        ("huge_pages", {"huge_pages": ""}, OK, "not readable"),
        ("frequency", {"governors": ("performance", "powersave")}, WARNING, "cpupower"),
        (
            "frequency",
            {"governors": ("powersave",), "governor_driver": "intel_pstate"},
            OK,
            "powersave",
        ),
        ("frequency", {"governors": ()}, OK, "not readable"),
        ("open_files", {"open_files": (1023, 4096)}, WARNING, "ulimit -n 4096"),
        ("open_files", {"open_files": (255, None)}, PROBLEM, "191 connections"),
        ("open_files", {"open_files": (None, None)}, OK, "no limit"),
        ("shared_memory", {"shm_bytes": 64 << 20}, OK, "67 MB"),
        ("shared_memory", {"shm_bytes": 64 << 20, "gpus": ("H100",)}, WARNING, "--shm-size"),
        ("shared_memory", {"shm_bytes": None}, OK, "no /dev/shm"),
        ("clock", {"clock_source": "hpet"}, WARNING, "clocksource=tsc"),
        ("clock", {"clock_source": ""}, OK, "not readable"),
        ("gpu", {"gpus": ("H100",)}, WARNING, "pip install 'quire-llm[gpu]'"),
        (
            "gpu",
            {"gpus": ("H100",), "libraries": frozenset(("torch",))},
            WARNING,
            "not installed: triton",
        ),
        (
            "gpu",
            {"gpus": ("H100",), "libraries": frozenset(("torch", "triton"))},
            OK,
            "--executor torch",
        ),
        ("token", {"token_mode": 0o640}, WARNING, "chmod 600 /t/token"),
        ("token", {"token_mode": None}, OK, "public models need none"),
        ("temporary", {"temporary": replace(PLACE, is_writable=False)}, PROBLEM, "TMPDIR"),
        ("temporary", {"temporary": replace(PLACE, free_bytes=1)}, PROBLEM, "make room"),
    ],
)
def test_each_check_at_its_threshold(
    check: str, change: dict[str, object], verdict: Verdict, said: str
) -> None:
    finding: Finding = getattr(checks, f"check_{check}")(replace(GOOD, **change))  # type: ignore[arg-type]
    assert finding.verdict is verdict
    assert said in f"{finding.found} {finding.action}"
    assert bool(finding.action) is (verdict is not OK)


def test_an_instruction_set_that_was_asked_for_is_a_warning_only_if_it_is_not_the_best() -> None:
    slower = NativeModule(isa="avx2", available=GOOD.native.available)
    finding = checks.check_kernels(replace(GOOD, native=slower, asked_isa="avx2"))
    assert (finding.verdict, "QUIRE_ISA=avx2" in finding.action) == (WARNING, True)
    best = replace(GOOD, asked_isa="avx512vnni")
    assert checks.check_kernels(best).verdict is OK


@pytest.mark.parametrize(
    ("free_bytes", "verdict"),
    [(5 * GIB, OK), (5 * GIB - 1, WARNING), (GIB // 2, WARNING), (GIB // 2 - 1, PROBLEM)],
)
def test_a_directory_without_room(free_bytes: int, verdict: Verdict) -> None:
    assert checks.check_place(replace(PLACE, free_bytes=free_bytes)).verdict is verdict
    assert checks.check_place(replace(PLACE, is_writable=False)).verdict is PROBLEM


def test_the_kernels_that_a_cpu_can_run_follow_its_flags() -> None:
    flags = GOOD.cpu_flags
    assert checks.best_kernels(flags) == "avx512vnni"
    assert checks.best_kernels(flags - {"avx512_vnni"}) == "avx512"
    assert checks.best_kernels(flags - {"avx512f"}) == "avx2"
    more = {"avx512_bf16", "amx_bf16", "amx_int8"}
    assert checks.best_kernels(flags | more) == "amx"
    assert checks.best_kernels(frozenset()) == ""


def test_facts_are_read_below_the_root(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("proc/cpuinfo", "processor: 0\nmodel name : Some CPU\nflags: avx2 fma\n\nprocessor: 1\n")
    write("proc/meminfo", "MemTotal: 9 kB\nMemAvailable: 2048 kB\n")
    write("sys/devices/system/cpu/smt/active", "0\n")
    write("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n")
    write("sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "performance\n")
    write("sys/devices/system/cpu/cpu0/cpufreq/scaling_driver", "intel_pstate\n")
    write("sys/devices/system/node/node0/cpulist", "0-1,4\n")
    write("sys/devices/system/node/node1/cpulist", "\n")
    write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    write("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never\n")
    write("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "12\n")
    write("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n")
    write("proc/driver/nvidia/version", "NVRM version: 550\nGCC\n")
    write("proc/driver/nvidia/gpus/0000/information", "Model: \t H100\nIRQ: 1\n")
    facts = read_machine(tmp_path, places={"KV tier": tmp_path / "not" / "there"})
    assert (facts.cpu_model, facts.cpu_flags) == ("Some CPU", frozenset({"avx2", "fma"}))
    assert facts.memory.available_bytes == 2048 * 1024
    assert facts.is_smt is False
    assert facts.governors == ("performance", "powersave")
    assert facts.governor_driver == "intel_pstate"
    assert facts.nodes == {"node0": frozenset((0, 1, 4))}
    assert (facts.huge_pages, facts.clock_source) == ("never", "hpet")
    assert (facts.shared_huge_pages, facts.free_huge_pages) == ("advise", 12)
    shared = checks.check_huge_pages(replace(facts, huge_pages="madvise"))
    assert "share: advise, 12 reserved" in shared.found
    assert (facts.gpus, facts.gpu_driver) == (("H100",), "NVRM version: 550")
    assert facts.shm_bytes is None
    assert [place.name for place in facts.places] == ["model cache", "KV tier"]
    assert facts.places[1].is_writable
    assert facts.places[1].free_bytes > 0


def test_facts_of_an_empty_root_are_unknown_and_no_error(tmp_path: Path) -> None:
    facts = read_machine(tmp_path)
    assert (facts.governors, facts.nodes, facts.gpus, facts.is_smt) == ((), {}, (), None)
    assert checks.machine_findings(facts)


def test_an_unknown_instruction_set_is_an_error_of_the_native_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUIRE_ISA", "avx9")
    native = read_native()
    assert 'QUIRE_ISA is "avx9"' in native.error
    finding = checks.check_native(replace(GOOD, native=native, asked_isa="avx9"))
    assert (finding.verdict, finding.action) == (PROBLEM, "unset QUIRE_ISA")


def test_a_place_on_a_file_system_of_no_size_names_its_setting() -> None:
    found = checks.check_place(replace(PLACE, has_disk=False, free_bytes=0))
    assert found.verdict is PROBLEM
    assert "of size 0, such as /proc" in found.found
    assert found.action == "name a directory on a disk: HF_HOME"
    places = {"packed weights": Path("/proc/x"), "KV tier": Path("/proc/y")}
    in_proc = [one for one in read_machine(places=places).places if not one.has_disk]
    assert [checks.check_place(one).verdict for one in in_proc] == [PROBLEM, PROBLEM]


def test_too_little_address_space_is_answered_with_its_limit() -> None:
    left = replace(memory(0), limit="address space", remedy="raise the limit (`ulimit -v`)")
    assert checks.check_memory(replace(GOOD, memory=left)).action == left.remedy
