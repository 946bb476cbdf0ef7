"""Compile one CUDA source to machine code with NVRTC; runs as a program of its own.

    nvrtc.py LIBRARY SOURCE OUT OPTION…

NVRTC needs no other compiler and no headers of the system. The log goes to standard output, with
the report of ptxas on each kernel. Exit code 1: NVRTC refuses the source. The process is its own,
since the library cannot be unloaded or interrupted.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path


def main(library: str, source: str, out: str, *options: str) -> int:
    """Compile; returns the exit code."""
    nvrtc = ctypes.CDLL(library)
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    program = ctypes.c_void_p()

    def ask(function: str, *arguments: object) -> None:
        if code := nvrtc[function](*arguments):
            sys.exit(f"{function}: {nvrtc.nvrtcGetErrorString(code).decode()}")

    def read(kind: str) -> bytes:
        size = ctypes.c_size_t()
        ask(f"nvrtcGet{kind}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        ask(f"nvrtcGet{kind}", program, buffer)
        return buffer.raw

    text = Path(source).read_bytes()
    ask("nvrtcCreateProgram", ctypes.byref(program), text, source.encode(), 0, None, None)
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), words)
    sys.stdout.write(read("ProgramLog").rstrip(b"\0").decode(errors="replace"))
    if failed:
        return 1
    Path(out).write_bytes(read("CUBIN"))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
