"""Which instruction sets a CPU has, and hiding the better ones from torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkforge.runtime import isa
from tests.instruction_sets import hiding

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


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder of packages with a torch."""
    folder = tmp_path / "site-packages"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("")
    (folder / "torch" / "cpu.py").write_text(CPU)
    return folder


def seen(code: str, flag: str, env: dict[str, str]) -> tuple[bool, dict[str, object]]:
    """Return whether a program has AMX, and what its torch says of the CPU."""
    command = (sys.executable, flag, "-c", code)
    out = subprocess.run(command, env={**os.environ, **env}, stdout=subprocess.PIPE, check=True)
    amx, capabilities = json.loads(out.stdout)
    return amx, capabilities


@pytest.mark.parametrize(
    ("highest", "left"),
    [
        ("avx512_bf16", {"avx2", "avx512_f", "avx512_vnni", "avx512_bf16"}),
        ("avx2", {"avx2"}),
    ],
)
def test_a_process_and_its_children_see_no_better_set(
    highest: isa.InstructionSet, left: set[str], packages: Path
) -> None:
    hidden = hiding(highest)
    env = {**hidden, "PYTHONPATH": f"{hidden['PYTHONPATH']}:{packages}"}
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-P', '-c', {ASK!r}])"
    amx, found = seen(child, "-P", env)
    assert not amx
    assert {name for name, there in found.items() if there is True} == left
    assert found["sve_max_length"] == 16


def test_an_image_s_server_sees_no_amx_though_it_ignores_pythonpath(packages: Path) -> None:
    for name, file in isa.IN_IMAGE.items():
        (packages / name).write_bytes(file.read_bytes())
    code = f"import site; site.addsitedir({str(packages)!r}); {ASK}"
    amx, found = seen(code, "-I", isa.NO_AMX)
    assert not amx
    assert found["avx512_bf16"]
