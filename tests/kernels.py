"""A compiler of kernels for tests: a library with NVRTC's functions, in wheels as NVIDIA's are."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.project import Project
from tests.support import add_project, make_wheel, sha256

# Reads a source of lines such as `kernel NAME REGISTERS SHARED STACK SPILLS`, of one architecture
# with its name behind, and `error WHAT`. The machine code is the source with a header in front.
_NVRTC = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static __thread const char *source, *name;
static __thread char text[1 << 16], code[1 << 16];
int nvrtcCreateProgram(void **program, const char *from, const char *called) {
  *program = text, source = strdup(from), name = strdup(called);
  return 0;
}
int nvrtcCompileProgram(void *program, int n, const char **options) {
  const char *arch = "", *log = text;
  char *end = text, header[99] = "";
  for (int i = 0; i < n; i++) {
    if (!strncmp(options[i], "--gpu-architecture=", 19)) arch = options[i] + 19;
    if (strncmp(options[i], "--include-path=", 15)) continue;
    char path[4096];
    snprintf(path, sizeof path, "%s/cuda_bf16.h", options[i] + 15);
    FILE *file = fopen(path, "r");
    if (file) fgets(header, sizeof header, file);
  }
  char *copy = strdup(source);
  int number = 0, failed = 0;
  for (char *line = strsep(&copy, "\n"); line; line = strsep(&copy, "\n")) {
    char kernel[99], only[99] = "";
    int registers, shared, stack, spills;
    number++;
    if (!strncmp(line, "error ", 6)) {
      end += sprintf(end, "%s(%d): error: %s\n  ^\n\n", name, number, line + 6);
      failed = 6;
    }
    if (!strcmp(line, "fatal")) {
      end += sprintf(end, "ptxas fatal : out of luck\n");
      failed = 6;
    }
    int found = sscanf(line, "kernel %s %d %d %d %d %s", kernel, &registers, &shared, &stack,
                       &spills, only);
    if (found < 5 || (*only && strcmp(only, arch))) continue;
    end += sprintf(end, "ptxas info    : Compiling entry function '%s' for '%s'\n", kernel, arch);
    end += sprintf(end, "ptxas info    : Function properties for %s\n", kernel);
    end += sprintf(end, "ptxas         .     %d bytes stack frame, ", stack);
    end += sprintf(end, "%d bytes spill stores, 0 bytes spill loads\n", spills);
    end += sprintf(end, "ptxas info    : Used %d registers, used 1 barriers", registers);
    end += shared ? sprintf(end, ", %d bytes smem\n", shared) : sprintf(end, "\n");
  }
  snprintf(code, sizeof code, "%s for %s\n%s%s", name, arch, header, source);
  return failed;
}
int nvrtcGetProgramLogSize(void *p, size_t *n) { *n = strlen(text) + 1; return 0; }
int nvrtcGetProgramLog(void *p, char *out) { strcpy(out, text); return 0; }
int nvrtcGetCUBINSize(void *p, size_t *n) { *n = strlen(code); return 0; }
int nvrtcGetCUBIN(void *p, char *out) { memcpy(out, code, strlen(code)); return 0; }
"""
HEADER = b"// header\n"
LOCK = "requirements/kernels.txt"
SOURCE = "own/csrc/kernels.cu"
FILES: Mapping[str, bytes] = {
    "own/pyproject.toml": b"""\
[project]
name = "demo-own"
version = "1.5"
description = "Kernels of a test"
requires-python = ">=3.10"
license = "Apache-2.0"
license-files = ["TERMS"]
entry-points = {"some.plugins" = {own = "demo_own:register"}, "more" = {a = "b:c", d = "e:f"}}
""",
    "own/TERMS": b"to be passed on\n",
    "own/demo_own/__init__.py": b"def register() -> None: ...\n",
    "own/demo_own/deep/down.py": b"",
    "own/csrc/more.cuh": b"// more\n",
}


def toolchain(folder: Path) -> dict[str, Path]:
    """Return wheels of a compiler, by project."""
    folder.mkdir(parents=True, exist_ok=True)
    source, library = folder / "nvrtc.c", folder / "nvrtc.so"
    source.write_text(_NVRTC)
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-o", library, source], check=True)
    lib, include = "nvidia/cu13/lib", "nvidia/cu13/include"
    files: Mapping[str, Mapping[str, bytes]] = {
        "nvidia_cuda_nvrtc": {
            f"{lib}/libnvrtc.so.13": library.read_bytes(),
            f"{lib}/libnvrtc.alt.so.13": b"not this one",
            f"{lib}/libnvrtc-builtins.so.13.0": library.read_bytes(),
        },
        "nvidia_cuda_runtime": {f"{include}/cuda_bf16.h": HEADER, f"{lib}/libcudart.so": b"no"},
    }
    return {
        name.replace("_", "-"): make_wheel(folder, name, "13.0.1", held)
        for name, held in files.items()
    }


def with_kernels(
    project: Project, wheels: Mapping[str, Path], source: bytes, spills: str = ""
) -> None:
    """Give a project a plugin with kernels, and the compiler for them."""
    lines = ""
    for name, wheel in wheels.items():
        data = wheel.read_bytes()
        add_project(project.server, name, {wheel.name: data})
        lines += f"{name}=={wheel.name.split('-')[1]} --hash=sha256:{sha256(data)}\n"
    (project.root / LOCK).write_text(lines)
    write(project.root, {**FILES, SOURCE: source})
    project.edit_pins(
        "images: {}\n",
        "plugin:\n"
        "  folder: own/\n"
        "  architectures: [90a, 121a]\n"
        f"  requirements: {LOCK}\n"
        f"  spills: [{spills}]\n"
        "images: {}\n",
    )


def write(root: Path, files: Mapping[str, bytes]) -> None:
    """Write files of a plugin into a checkout."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
