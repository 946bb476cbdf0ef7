"""Which instruction sets a CPU has, and hiding the better ones from torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkforge.build.launcher import mask_files
from sparkforge.runtime import isa

FLAGS = {
    "amx": "fpu sse4_2 avx2 avx512f avx512bw avx512_bf16 amx_bf16 amx_tile amx_int8",
    "avx512_bf16": "fpu sse4_2 avx2 avx512f avx512bw avx512_bf16",
    "avx512": "fpu sse4_2 avx2 avx512f avx512bw avx512_vnni",
    "avx2": "fpu sse4_2 avx2 fma",
}
NAMES = ["avx2", "avx512_f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16"]
# stands in for torch's: every set is there, and one number
CPU = f"""
from functools import lru_cache
@lru_cache(None)
def get_capabilities():
    return {{**dict.fromkeys({NAMES}, True), "fma4": False, "sve_max_length": 16}}
def _is_amx_tile_supported():
    return get_capabilities()["amx_tile"]
"""
ASK = "import json, torch.cpu as c; print(json.dumps([c._is_amx_tile_supported(), "
ASK += "dict(c.get_capabilities())]))"


def test_the_best_set_is_read_from_cpuinfo() -> None:
    for best in isa.INSTRUCTION_SETS:
        core = f"processor\t: 0\nflags\t\t: {FLAGS[best]}\nbugs\t\t: amx_tile\n\n"
        assert isa.best(core * 2) == best
    for text in ("", "flags\t\t: fpu sse4_2 avx", "Features\t: fp asimd sve"):
        assert isa.best(text) is None


def make_torch(folder: Path) -> None:
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("")
    (folder / "torch" / "cpu.py").write_text(CPU)


@pytest.mark.parametrize(
    ("highest", "left"),
    [
        ("avx512_bf16", {"avx2", "avx512_f", "avx512_vnni", "avx512_bf16"}),
        ("avx2", {"avx2"}),
    ],
)
def test_a_process_and_its_children_see_no_better_set(
    highest: isa.InstructionSet, left: set[str], tmp_path: Path
) -> None:
    make_torch(tmp_path)
    hidden = isa.hiding(highest)
    env = {**os.environ, **hidden, "PYTHONPATH": f"{hidden['PYTHONPATH']}:{tmp_path}"}
    code = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-P', '-c', {ASK!r}], check=True)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True
    )
    amx, seen = json.loads(done.stdout)
    assert amx == ("amx_tile" in left)
    assert {name for name, there in seen.items() if there is True} == left
    assert seen["sve_max_length"] == 16


def test_an_image_s_server_sees_no_amx_though_it_ignores_pythonpath(tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    make_torch(packages)
    for name, file in mask_files(tmp_path).items():
        (packages / name).write_bytes(file.read_bytes())
    code = f"import site; site.addsitedir({str(packages)!r}); {ASK}"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code],
        env={**os.environ, **isa.without_amx()},
        capture_output=True,
        text=True,
        check=True,
    )
    amx, seen = json.loads(done.stdout)
    assert not amx
    assert seen["avx512_bf16"]
