"""The script of a compile, which the Dockerfile's stage ``compile`` runs without a network."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from sparkforge.build.compile.builder import PYTHON
from sparkforge.build.compile.natives import reads_externals
from sparkforge.pins.compiling import Native
from sparkforge.pins.pins import Upstream

BUILD = "/build"
"""Folder in the builder. The same on every machine: it stays in compiled files."""
TREE, OUT, CMAKE, TMP, EXTERNALS = (
    f"{BUILD}/{name}" for name in ("tree", "out", "cmake", "tmp", "externals")
)
NATIVE = "native"
"""Folder of compiled native files, below ``OUT``."""
# Without these, nvcc puts temporary names and random symbols into its objects (measured)
NVCC_FLAGS = "-objtemp --frandom-seed=1"


@dataclass(frozen=True)
class Recipe:
    """What determines the result of a compile, besides the sources."""

    upstream: Upstream
    natives: tuple[Native, ...]
    """Native files to compile."""
    arch: str | None
    """Value of TORCH_CUDA_ARCH_LIST; None compiles nothing for a GPU."""
    epoch: int
    redirects: Mapping[str, str]
    """Variables that point at sources which the build would fetch, with the folder below
    ``EXTERNALS``."""

    def script(self, jobs: int, namespace: str) -> str:
        """Return the shell script that compiles ``TREE`` into ``OUT``.

        Args:
            jobs: compilers at once.
            namespace: of ccache; only builds with the same one share results.
        """
        variables = {
            **self._environment(),
            "MAX_JOBS": str(jobs),
            "NVCC_THREADS": "1",
            "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs),
            "CCACHE_DIR": f"{BUILD}/ccache",
            "CCACHE_COMPILERCHECK": "content",
            "CCACHE_MAXSIZE": "20G",
            "CCACHE_NAMESPACE": namespace,
        }
        lines = [
            "set -eux",
            "umask 022",
            *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
            *(shlex.join(words) for words in self._commands()),
        ]
        return "\n".join(lines) + "\n"

    def _environment(self) -> dict[str, str]:
        variables = {
            "SOURCE_DATE_EPOCH": str(self.epoch),
            "SETUPTOOLS_SCM_PRETEND_VERSION": self.upstream.version,
            "LC_ALL": "C.UTF-8",
            "TZ": "UTC",
            "PYTHONHASHSEED": "0",
            "HOME": TMP,
            "TMPDIR": TMP,
            "PIP_NO_INPUT": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_CACHE_DIR": "1",
            **self.upstream.compile.variables,
        }
        if self.upstream.commit is not None:
            # the commit as git describes it, as in upstream's release job
            node = f'{{node="g{self.upstream.commit[:9]}"}}'
            variables["SETUPTOOLS_SCM_PRETEND_METADATA"] = node
        if self.arch is not None:
            variables |= {"TORCH_CUDA_ARCH_LIST": self.arch, "NVCC_APPEND_FLAGS": NVCC_FLAGS}
        if reads_externals(self.natives):
            variables |= {name: f"{EXTERNALS}/{path}" for name, path in self.redirects.items()}
        return variables

    def _commands(self) -> list[list[str]]:
        """Return the commands, natives first: they are most likely to fail."""
        commands = []
        for device in dict.fromkeys(native.device for native in self.natives):
            targets = [native.target for native in self.natives if native.device == device]
            folder = f"{CMAKE}/{device}"
            commands.append(["cmake", "-S", TREE, "-B", folder, *self._cmake(device)])
            commands.append(["cmake", "--build", folder, "--target", *targets])
            install = ["cmake", "--install", folder, "--strip", "--prefix", f"{OUT}/{NATIVE}"]
            commands += [[*install, "--component", target] for target in targets]
        pip = [PYTHON, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation"]
        return [*commands, [*pip, "--no-index", "--wheel-dir", OUT, TREE]]

    def _cmake(self, device: str) -> list[str]:
        """Return the CMake options of upstream's setup.py, and the launchers."""
        ours = [word.replace("{device}", device) for word in self.upstream.compile.configure]
        words = [
            *("-G", "Ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo", *ours),
            *(f"-DVLLM_PYTHON_EXECUTABLE={PYTHON}", f"-DFETCHCONTENT_BASE_DIR={CMAKE}/fetched"),
            "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache",
        ]
        if device == "cuda":
            words += [
                "-DCMAKE_CUDA_COMPILER=/usr/local/cuda/bin/nvcc",
                "-DCMAKE_CUDA_COMPILER_LAUNCHER=ccache",
                "-DNVCC_THREADS=1",
            ]
        return words


def arch_list(cuda_arch: str | None) -> str | None:
    """Return TORCH_CUDA_ARCH_LIST for a target's architecture.

    From 10.0 on with the family's ``f``: kernels for plain 12.1 (and 12.0) that use block-scaled
    MMA compile without a warning and hold a trap; ``a`` of 12.0 does not load on 12.1. vLLM's CMake
    reads 12.1f as 12.0 where a file needs no more, and builds 12.0f where it needs the family's
    instructions (every file's flags: tests/patches/golden/cuda-archs.json).
    """
    if cuda_arch is None:
        return None
    return f"{cuda_arch}f" if int(cuda_arch.partition(".")[0]) >= 10 else cuda_arch
