"""The command lines of a compile: one container each, without a network, at fixed paths."""

from __future__ import annotations

import csv
import io
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from sparkforge.build.compile.builder import PYTHON
from sparkforge.build.compile.natives import Decision
from sparkforge.build.jobs import CXX_GIB, KEEP_GIB, NVCC_GIB
from sparkforge.pins.pins import Upstream

BUILD = "/build"
TREE, OUT, CMAKE, EXTERNALS = (f"{BUILD}/{name}" for name in ("tree", "out", "cmake", "externals"))
NATIVE = f"{OUT}/native"
# Without these, nvcc puts temporary names and random symbols into its objects (measured)
NVCC_FLAGS = "-objtemp --frandom-seed=1"
_UMASK = 'umask 022 && exec "$@"'


class Step(NamedTuple):
    """A command that runs in one container."""

    title: str
    words: list[str]
    once: bool = False
    """A continued build skips it. vLLM's CMake writes a header of torch's each time, and ninja
    would compile everything that includes it again."""


@dataclass(frozen=True)
class Recipe:
    """The settings of a compile; all but ``jobs`` determine the result."""

    upstream: Upstream
    decision: Decision
    arch: str | None
    """Value of TORCH_CUDA_ARCH_LIST; None compiles nothing for a GPU."""
    epoch: int
    redirects: Mapping[str, str]
    """Variables that point at sources which the build would fetch, with the folder below
    ``/build/externals``."""
    jobs: int
    """Compilers at once."""

    def environment(self) -> dict[str, str]:
        """Return the variables of the build that do not depend on the machine."""
        plan = self.upstream.compile
        more = plan.variables_all if self.decision.everything else {}
        variables = {
            "SOURCE_DATE_EPOCH": str(self.epoch),
            "SETUPTOOLS_SCM_PRETEND_VERSION": self.upstream.version,
            "LC_ALL": "C.UTF-8",
            "TZ": "UTC",
            "PYTHONHASHSEED": "0",
            "HOME": f"{BUILD}/tmp",
            "TMPDIR": f"{BUILD}/tmp",
            "PIP_NO_INPUT": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_CACHE_DIR": "1",
            **plan.variables,
            **more,
        }
        if self.upstream.commit is not None:
            # the commit as git describes it, as in upstream's release job
            node = f'{{node="g{self.upstream.commit[:9]}"}}'
            variables["SETUPTOOLS_SCM_PRETEND_METADATA"] = node
        if self.arch is not None:
            variables |= {"TORCH_CUDA_ARCH_LIST": self.arch, "NVCC_APPEND_FLAGS": NVCC_FLAGS}
        if self.decision.fetches:
            variables |= {name: f"{EXTERNALS}/{path}" for name, path in self.redirects.items()}
        return variables

    def limits(self) -> dict[str, str]:
        """Return the variables of parallel jobs and of ccache."""
        gib = NVCC_GIB if self.arch is not None else CXX_GIB
        return {
            "MAX_JOBS": str(self.jobs),
            "NVCC_THREADS": "1",
            "CMAKE_BUILD_PARALLEL_LEVEL": str(self.jobs),
            "CCACHE_DIR": f"{BUILD}/ccache",
            "CCACHE_COMPILERCHECK": "content",
            "CCACHE_MAXSIZE": "20G",
            # only files that the cache lacks wait for memory
            "CCACHE_PREFIX": f"{BUILD}/gate/gate.py",
            "SPARKFORGE_SLOTS": f"{BUILD}/gate/slots",
            "SPARKFORGE_JOBS": str(self.jobs),
            "SPARKFORGE_JOB_MIB": str(int(gib * 1024)),
            "SPARKFORGE_RESERVE_MIB": str(int(KEEP_GIB * 1024)),
        }

    def steps(self) -> list[Step]:
        """Return the commands in the container, in order."""
        pip = [
            *(PYTHON, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation"),
            *("--no-index", "--wheel-dir", OUT, TREE),
        ]
        result: list[Step] = []  # natives first: they are most likely to fail
        for device in dict.fromkeys(native.device for native in self.decision.compiled):
            targets = [
                native.target for native in self.decision.compiled if native.device == device
            ]
            folder = f"{CMAKE}/{device}"
            configure = ["cmake", "-S", TREE, "-B", folder, *self._cmake(device)]
            result.append(Step(f"configure for {device}", configure, once=True))
            build = ("cmake", "--build", folder, "--parallel", str(self.jobs), "--target")
            result.append(Step(f"compile {', '.join(targets)}", [*build, *targets]))
            install = ("cmake", "--install", folder, "--strip", "--prefix", NATIVE, "--component")
            result += [Step(f"install {target}", [*install, target]) for target in targets]
        return [*result, Step("wheel", pip)]

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
    MMA compile without a warning and hold a trap (docs/kernels.md); ``a`` of 12.0 does not load on
    12.1. vLLM's CMake reads 12.1f as 12.0 where a file needs no more, and builds 12.0f where it
    needs the family's instructions (every file's flags: tests/patches/golden/cuda-archs.json).
    """
    if cuda_arch is None:
        return None
    return f"{cuda_arch}f" if int(cuda_arch.partition(".")[0]) >= 10 else cuda_arch


def container(
    image: str,
    name: str,
    work: str,
    ccache: str,
    user: str,
    environment: Mapping[str, str],
    words: Sequence[str],
    labels: Mapping[str, str],
) -> list[str]:
    """Return the ``docker run`` of one step.

    Args:
        work: folder of the machine that is ``/build`` inside.
        ccache: folder of the machine for ccache, which builds share.
        user: ``UID:GID`` that owns both.
    """
    mounts = [(work, BUILD), (ccache, f"{BUILD}/ccache"), (f"{work}/tmp", "/tmp")]
    command = [
        # never: a missing builder must not be looked up in a public registry
        *("docker", "run", "--pull", "never", "--rm", "--init", "--name", name),
        *("--network", "none", "--read-only", "--user", user, "--cap-drop", "ALL"),
        *("--security-opt", "no-new-privileges", "--workdir", TREE),
    ]
    for key, value in labels.items():
        command += ["--label", f"{key}={value}"]
    for source, target in mounts:
        command += ["--mount", _fields("type=bind", f"source={source}", f"target={target}")]
    for key, value in environment.items():
        command += ["--env", f"{key}={value}"]
    return [*command, image, "sh", "-c", _UMASK, "sh", *words]


def container_name(work: Path) -> str:
    """Return the name of the container that works on a folder; one folder has one at a time."""
    # the whole path: two stores may compile the same wheel in one engine
    return f"sparkforge-{work.name}-{sha256(os.fspath(work).encode()).hexdigest()[:8]}"


def _fields(*fields: str) -> str:
    """Return the fields of a --mount, which docker reads as a line of CSV."""
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(fields)
    return out.getvalue()


def shown(recipe: Recipe, image: str, work: Path, ccache: Path, user: str) -> list[str]:
    """Return the command lines as a user would type them (``--dry-run``)."""
    variables = {**recipe.environment(), **recipe.limits()}
    return [
        "$ "
        + shlex.join(
            container(
                image, container_name(work), str(work), str(ccache), user, variables, words, {}
            )
        )
        for _, words, _ in recipe.steps()
    ]
