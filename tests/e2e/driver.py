"""A made-up GPU driver of a Spark, for containers that the engine gives a GPU.

    python tests/e2e/driver.py DIR    # as root; then start the engine with DIR/bin on its PATH

Docker gives a container a GPU by a program of NVIDIA's container toolkit, which it looks for when
it starts: ``nvidia-container-runtime-hook``. The one in DIR/bin does what the real one does, and
more. It mounts into the container a libcuda.so.1 for arm64 with one GB10 (a few lines of
assembler), the driver's version in /proc, and the memory of a Spark: /proc/meminfo and the files of
a control group. So docker-compose.yml runs as it is. ``available`` changes what is free.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

GIB = 1 << 30
TOTAL_GIB, AVAILABLE_GIB = 119.7, 115.0
_LIMIT_GIB = 112  # Compose's for the Spark

# by cuda.h: 75 and 76 are the capability's two numbers, 18 is "integrated"
_ASSEMBLER = f"""\
.macro returns value
    mov w1, \\value
    str w1, [x0]
    mov w0, #0
    ret
.endm
.globl cuInit, cuDeviceGetCount, cuDriverGetVersion, cuDeviceGet, cuDeviceGetAttribute
.globl cuDeviceTotalMem_v2
cuInit:
    mov w0, #0
    ret
cuDeviceGetCount:
    returns #1
cuDriverGetVersion:
    returns #13000
cuDeviceGet:
    returns #0
cuDeviceGetAttribute:
    cmp w1, #75
    b.eq major
    returns #1
major:
    returns #12
cuDeviceTotalMem_v2:
    ldr x1, =0x{int(TOTAL_GIB * GIB):x}
    str x1, [x0]
    mov w0, #0
    ret
"""
_MOUNTS = """
folder=$1 root=$2 library=$2/usr/lib/aarch64-linux-gnu/libcuda.so.1
touch "$library"
mount --bind "$folder/libcuda.so.1" "$library"
mount -t tmpfs tmpfs "$root/proc/driver"
mkdir "$root/proc/driver/nvidia"
cp "$folder/version" "$root/proc/driver/nvidia/version"
mount --bind "$folder/meminfo" "$root/proc/meminfo"
mount --bind "$folder/cgroup" "$root/sys/fs/cgroup"
"""


def available(folder: Path, gib: float) -> None:
    """Have the machine say that so much memory is available; also to containers that run."""
    kib = {
        "MemTotal": TOTAL_GIB,
        "MemFree": gib - 1,
        "MemAvailable": gib,
        "Cached": 3,
        "Dirty": 0,
        "Shmem": 0.1,
        "SwapTotal": 0,
        "SwapFree": 0,
    }
    text = "".join(f"{name + ':':16}{int(value * (1 << 20)):8} kB\n" for name, value in kib.items())
    (folder / "meminfo").write_text(text)  # in place: it may be mounted


def make(folder: Path) -> None:
    """Write the driver, and the program that Docker calls."""
    if shutil.which("aarch64-linux-gnu-as") is None:
        subprocess.run(["apt-get", "-qq", "update"], check=True)
        subprocess.run(
            ["apt-get", "-qqy", "install", "--no-install-recommends", "binutils-aarch64-linux-gnu"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    (folder / "bin").mkdir(parents=True)
    compiled = folder / "cuda.o"
    subprocess.run(
        ["aarch64-linux-gnu-as", "-o", compiled, "-"], input=_ASSEMBLER, text=True, check=True
    )
    library = folder / "libcuda.so.1"
    subprocess.run(
        ["aarch64-linux-gnu-ld", "-shared", "-soname", library.name, "-o", library, compiled],
        check=True,
    )
    (folder / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build\n"
    )
    (folder / "cgroup").mkdir()
    for name, text in {
        "max": str(_LIMIT_GIB * GIB),
        "current": str(GIB),
        "peak": str(2 * GIB),
        "stat": "inactive_file 0\nactive_file 0",
    }.items():
        (folder / "cgroup" / f"memory.{name}").write_text(f"{text}\n")
    available(folder, AVAILABLE_GIB)
    program = folder / "bin" / "nvidia-container-runtime-hook"
    program.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" "{folder}" hook\n'
    )
    program.chmod(0o755)


def hook(folder: Path) -> None:
    """Mount it all into the container whose state is on standard input."""
    state = json.load(sys.stdin)
    bundle = Path(state["bundle"])
    root = bundle / json.loads((bundle / "config.json").read_text())["root"]["path"]
    subprocess.run(
        [
            *("nsenter", "--mount", "--target", str(state["pid"]), "sh", "-euc", _MOUNTS, "sh"),
            *(folder, root),
        ],
        check=True,
    )


if __name__ == "__main__":
    where = Path(sys.argv[1]).resolve()
    if len(sys.argv) > 2:
        hook(where)
    else:
        make(where)
