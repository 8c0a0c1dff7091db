"""ExecutorConfig: what computes, with how many processes and threads, and where weights lie.

Plain fields with help texts, as in groups.py; whether settings of several groups go together is
checked there. Always holds: an instance's own settings go together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from quire.base.errors import SettingError
from quire.config.key_file import MIN_KEY_BYTES
from quire.config.settings import at_least, at_most, one_of, setting

_DEGREES = ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size")
_GIB = r"\d{1,6}(\.\d{1,6})?"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """Execution."""

    executor: Literal["native", "reference", "torch"] = setting(
        "native",
        "native: compiled CPU kernels; reference: NumPy, slow and simple; torch: GPU kernels",
    )
    device: str | None = setting(
        None,
        "with --executor torch: auto (a GPU, else the CPU), cpu, cuda or cuda:N; default: auto",
    )
    numerics: Literal["exact", "fast"] | None = setting(
        None,
        "with --executor torch: exact, an answer does not depend on the batch; fast, products use "
        "the vendor's library and may differ in the last bits; default: exact",
    )
    enforce_eager: bool = setting(
        False,
        "with --executor torch: launch kernels one by one instead of replaying CUDA graphs: "
        "slower, but without the memory of the graphs",
    )
    num_threads: int | None = setting(
        None,
        "compute threads of this machine; default: the cores this process may use",
        flag="threads",
    )
    tensor_parallel_size: int = setting(
        1,
        "tensor parallelism: processes (ranks) that compute each step together, with a share of "
        "the weights, the KV cache and the threads; answers do not change (native and torch "
        "executors)",
        short_flag="-tp",
        section="Parallelism",
    )
    tp_mode: Literal["exact", "fast"] = setting(
        "exact",
        "with --tensor-parallel-size: exact, answers are those of one process; fast, half of the "
        "products are split by their inputs and summed in the order of ranks: fewer bytes are "
        "exchanged, and answers depend on the degree",
    )
    enable_expert_parallel: bool = setting(
        False,
        "with --tensor-parallel-size: distribute the experts of a mixture over the ranks instead "
        "of splitting each expert; answers do not change",
    )
    expert_load_file: str | None = setting(
        None,
        "with --enable-expert-parallel: place experts so that ranks have equal work, by the loads "
        "in this file: a copy of a server's /metrics, with quire_expert_tokens_total",
    )
    num_redundant_experts: int = setting(
        0,
        "with --expert-load-file: further copies of the most chosen experts of each layer, on "
        "other ranks",
    )
    data_parallel_size: int = setting(
        1,
        "data parallelism (quire serve): engine processes with the whole model behind one server, "
        "each with a share of the threads and the memory; a request goes where its prompt's "
        "beginning is cached, or to the least loaded one",
        short_flag="-dp",
    )
    pipeline_parallel_size: int = setting(
        1,
        "pipeline parallelism: groups of layers (stages) that compute several steps at once, each "
        "in a process of its own, or in as many as tensor_parallel_size says; answers do not "
        "change (native and torch executors)",
        short_flag="-pp",
    )
    context_parallel_size: int = setting(
        1,
        "context parallelism: ranks that divide the positions of the KV cache, in pieces of 256 "
        "tokens, instead of its heads; products are divided as by tensor_parallel_size, with "
        "which it is multiplied; answers do not change (native executor)",
    )
    distributed_executor_backend: Literal["mp", "ray", "external_launcher"] = setting(
        "mp",
        "how several ranks are started: mp, as processes of this machine; ray, as actors of a Ray "
        "cluster; external_launcher, by torchrun, Slurm or a script, which runs this command for "
        "each rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment",
    )
    distributed_key_file: str | None = setting(
        None,
        "with --distributed-executor-backend external_launcher: a file that only its owner can "
        f"read, with at least {MIN_KEY_BYTES} random bytes, the same for all ranks; needed unless "
        "MASTER_ADDR is this machine's loopback address",
    )
    distributed_timeout_s: float = setting(
        300.0,
        "with --distributed-executor-backend ray or external_launcher: seconds that the start "
        "waits for all ranks",
        flag="distributed-timeout-seconds",
    )
    pack_cache: str | None = setting(
        None,
        "directory that caches the packed weights, in a file of their size which the next start "
        "maps; default: weights are packed at each start",
        section="Packed and offloaded weights",
    )
    disk_offload_gb: str | None = setting(
        None,
        "GiB of weights, of all ranks together, that stay in the files of pack_cache and are read "
        "from them in each step, for models larger than memory; auto: as many as do not fit "
        "(native executor)",
    )
    cpu_offload_gb: str | None = setting(
        None,
        "with --executor torch: GiB of each GPU's memory to save by weights that stay in host "
        "memory and are copied in each step, two layers ahead, for models larger than the GPUs; "
        "auto: as many as do not fit",
    )
    record_plans: str | None = setting(
        None,
        "record every step's plan and result in this file, for replay",
        section="Recording of steps",
    )
    trace_file: str | None = setting(
        None,
        "write a trace of steps, requests and KV tiers to this file, for Perfetto and "
        "chrome://tracing; if it exists, to a new one with a number",
        flag="trace",
    )

    def __post_init__(self) -> None:
        one_of("executor", self.executor, ("native", "reference", "torch"))
        self._check_device()
        if self.num_threads is not None:
            at_least("num_threads", self.num_threads, 1)
            if self.num_threads > 1024:
                raise SettingError(f"num_threads is {self.num_threads}; at most 1024 are allowed")
        for name in _DEGREES:
            at_least(name, getattr(self, name), 1)
        if self.num_ranks > 1:
            self._check_executor_of_ranks()
        self._check_experts()
        self._check_backend()
        at_least("data_parallel_size", self.data_parallel_size, 1)
        at_most("data_parallel_size", self.data_parallel_size, 64, "engines of one server")
        if self.trace_file == "":
            raise SettingError("trace_file is empty; give a file, or leave it out")
        if self.pack_cache == "":
            raise SettingError("pack_cache is empty; give a directory, or leave it out")
        if self.disk_offload_gb is not None:
            self._check_offload(self.disk_offload_gb)
        if self.cpu_offload_gb is not None:
            self._check_cpu_offload(self.cpu_offload_gb)

    def _check_executor_of_ranks(self) -> None:
        if self.executor == "reference":
            raise SettingError(
                f"{self.ranks_text} and executor is reference: only the native executor and the "
                "torch executor compute with several ranks; take one of them"
            )

    @property
    def offloads(self) -> bool:
        """Whether weights lie on disk, or in host memory beside a GPU."""
        return self.disk_offload_gb is not None or self.cpu_offload_gb is not None

    @property
    def disk_offload_bytes(self) -> int | None:
        """The bytes of disk_offload_gb, None where it is auto."""
        assert self.disk_offload_gb is not None, "there is an offload"
        return None if self.disk_offload_gb == "auto" else int(float(self.disk_offload_gb) * 2**30)

    @property
    def cpu_offload_bytes(self) -> int | None:
        """The bytes of cpu_offload_gb, None where it is auto."""
        assert self.cpu_offload_gb is not None, "there is an offload"
        return None if self.cpu_offload_gb == "auto" else int(float(self.cpu_offload_gb) * 2**30)

    def _check_cpu_offload(self, size: str) -> None:
        given = f"cpu_offload_gb is {size}"
        if size != "auto" and not re.fullmatch(_GIB, size):
            raise SettingError(f"{given}; a number of GiB, as in 12 or 1.5, or auto is needed")
        if self.executor != "torch":
            raise SettingError(
                f"{given}: it is memory of a GPU that is saved; take --executor torch, or "
                "--disk-offload-gb for a model larger than a CPU's memory"
            )
        if self.device == "cpu":
            raise SettingError(
                f"{given} and device is cpu, so that there is no other memory than the host's: "
                "leave one of them out, or take --executor native and --disk-offload-gb for a "
                "model larger than memory"
            )

    def _check_offload(self, size: str) -> None:
        given = f"disk_offload_gb is {size}"
        if size != "auto" and not re.fullmatch(_GIB, size):
            raise SettingError(f"{given}; a number of GiB, as in 12 or 1.5, or auto is needed")
        if self.executor != "native":
            raise SettingError(
                f"{given} and executor is {self.executor}: only the native executor reads weights "
                "from disk; take --executor native, or leave it out"
            )
        if self.pack_cache is None:
            raise SettingError(
                f"{given} and pack_cache is not given: the weights are read from its file; give "
                "--pack-cache DIRECTORY, on a fast disk"
            )

    def _check_backend(self) -> None:
        backends = ("mp", "ray", "external_launcher")
        one_of("distributed_executor_backend", self.distributed_executor_backend, backends)
        backend = f"distributed_executor_backend is {self.distributed_executor_backend}"
        if self.distributed_executor_backend != "mp" and self.num_ranks == 1:
            raise SettingError(
                f"{backend} and there is one rank, which this process is: give "
                "tensor_, context_ or pipeline_parallel_size, or leave it out"
            )
        at_least("distributed_timeout_s", self.distributed_timeout_s, 1)
        if self.distributed_key_file == "":
            raise SettingError("distributed_key_file is empty; give a file, or leave it out")
        if self.distributed_key_file is not None and (
            self.distributed_executor_backend != "external_launcher"
        ):
            raise SettingError(
                f"distributed_key_file is given and {backend}, which needs no key file: only "
                "ranks of external_launcher read one; leave it out"
            )

    def _check_experts(self) -> None:
        one_of("tp_mode", self.tp_mode, ("exact", "fast"))
        if self.tp_mode == "fast" and self.tensor_parallel_size == 1:
            raise SettingError(
                "tp_mode is fast and tensor_parallel_size is 1: one process splits no product; "
                "give at least 2, or leave tp_mode out"
            )
        if self.tp_mode == "fast" and self.context_parallel_size > 1:
            raise SettingError(
                f"tp_mode is fast and context_parallel_size is {self.context_parallel_size}, which "
                "keeps sums whole; leave one of them out"
            )
        if self.enable_expert_parallel and self.ranks_of_stage == 1:
            raise SettingError(
                "enable_expert_parallel is given and tensor_parallel_size is 1: experts are "
                "distributed over its ranks; give at least 2, or leave enable_expert_parallel out"
            )
        if self.expert_load_file == "":
            raise SettingError("expert_load_file is empty; give a file, or leave it out")
        if self.expert_load_file is not None and not self.enable_expert_parallel:
            raise SettingError(
                "expert_load_file is given without enable_expert_parallel, which places experts; "
                "give both, or leave it out"
            )
        at_least("num_redundant_experts", self.num_redundant_experts, 0)
        if self.num_redundant_experts and self.expert_load_file is None:
            raise SettingError(
                f"num_redundant_experts is {self.num_redundant_experts} without expert_load_file, "
                "by which the most chosen experts are found; give both, or leave it out"
            )

    @property
    def num_ranks(self) -> int:
        """How many processes compute a model."""
        return self.ranks_of_stage * self.pipeline_parallel_size

    @property
    def ranks_of_stage(self) -> int:
        """How many processes share each layer."""
        return self.tensor_parallel_size * self.context_parallel_size

    @property
    def ranks_text(self) -> str:
        """The settings that ask for several ranks, in words."""
        asked = [(name, getattr(self, name)) for name in _DEGREES]
        return " and ".join(f"{name} is {value}" for name, value in asked if value > 1)

    def _check_device(self) -> None:
        for name, unset in (("device", None), ("numerics", None), ("enforce_eager", False)):
            if getattr(self, name) != unset and self.executor != "torch":
                raise SettingError(
                    f"{name} is {getattr(self, name)} and executor is {self.executor}: only the "
                    "torch executor supports it; give --executor torch, or leave it out"
                )
        if self.device is not None and not re.fullmatch(r"auto|cpu|cuda(:\d{1,2})?", self.device):
            raise SettingError(
                f"device is {self.device!r}; auto, cpu, cuda and cuda:N (as in cuda:0) are allowed"
            )
        if self.numerics is not None:
            one_of("numerics", self.numerics, ("exact", "fast"))
