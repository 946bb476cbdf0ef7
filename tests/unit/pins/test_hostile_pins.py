"""pins.yaml as somebody malicious or careless would write it: values that are no plain values."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparkforge.core import plain
from sparkforge.core.errors import PinsError
from sparkforge.pins import pins
from tests.support import ROOT

REAL = (ROOT / "pins.yaml").read_text()


def refusal(text: str) -> list[str]:
    """Return the lines in which a text in place of the real pins.yaml is refused."""
    with pytest.raises(PinsError) as caught:
        pins.parse(ROOT / "pins.yaml", text)
    return str(caught.value).splitlines()


def changed(old: str, new: str) -> str:
    assert old in REAL, old
    return REAL.replace(old, new, 1)


# the key that the refusal names, and what stands in pins.yaml; below it what stands there instead
VALUES = r"""
externals.cutlass.git | git: https://github.com/nvidia/cutlass.git
  git: 'ext::sh -c true'
  git: file:///root/.ssh
upstreams.vllm.git | git: https://github.com/vllm-project/vllm.git
  git: 'https://host.invalid/?a=#x.git'
cutlass.redirect | redirect: VLLM_CUTLASS_SRC_DIR
  redirect: 'PATH=/evil; x'
natives[0].target | target: spinloop,
  target: 'spinloop; touch x',
natives[0].file | {file: vllm/spinloop
  {file: ../../x
natives[0].sources[0] | [csrc/spinloop.cpp]
  [-x]
configure[0] | configure: ["-DVLLM_TARGET_DEVICE={device}"]
  configure: ['-DX={nope}']
  configure: ['-P evil.cmake']
paths[0].wheel | - {repo: vllm/, wheel: vllm/}
  - {repo: vllm/, wheel: ../../etc/}
paths[0].repo | - {repo: vllm/, wheel: vllm/}
  - {repo: ../, wheel: vllm/}
  - {repo: ':(exclude)x/', wheel: vllm/}
paths[1].repo | - {repo: vllm/, wheel: vllm/}
  - {repo: vllm/, wheel: vllm/}\n      - {repo: vllm/, wheel: vllm/}
paths[1].wheel | - {repo: vllm/, wheel: vllm/}
  - {repo: vllm/, wheel: vllm/}\n      - {repo: other/, wheel: vllm/}
vllm.version_file | version_file: vllm/_version.py
  version_file: /etc/passwd
kernels.subdirectory | subdirectory: python/triton_kernels
  subdirectory: ../x
cuda-devel.repository | repository: nvidia/cuda
  repository: '--privileged -v /:/x'
images.cuda-devel.tag | tag: 13.0.2-devel-ubuntu24.04
  tag: '--x'
cuda-devel.apt.snapshot | snapshot: 20261121T000000Z
  snapshot: ../20261121T000000Z
cuda-devel.apt.suites[0] | suites: [noble,
  suites: [noble main contrib,
gpt-oss-120b.repository | repository: openai/gpt-oss-120b
  repository: ../../etc
  repository: --x/y
vocabularies.harmony.file | file: o200k_base.tiktoken
  file: ../../etc/passwd
targets.spark.build_packages[0] | build_packages: [gcc,
  build_packages: [-o,
  build_packages: [python3-,
targets.spark.absent[0] | absent: [nvcc,
  absent: [../nvcc,
targets.spark.needs[0] | {library: libcudart.so, package: nvidia-cuda-runtime}
  {program: ../nvcc, package: p1}
targets.cpu.torch_backend | torch_backend: cpu
  torch_backend: --index-url=http://host.invalid
targets.spark.cuda_arch | cuda_arch: "12.1"
  cuda_arch: 'all; rm -rf'
tiny-cpu.mxfp4_layers |     enforce_eager: true
      mxfp4_layers: --host 0.0.0.0
tiny-cpu.expect.moe | expect: {moe: BF16_DEQUANT,
  expect: {moe: '-x',
spark.wheels.vllm.carries | carries: [triton-kernels]
  carries: [vllm]
  carries: [triton-kernels, triton-kernels]
cpu.requirements.linux/amd64 | requirements: {linux/amd64: requirements/cpu-linux-amd64.txt}
  requirements: {linux/amd64: /etc/hostname}
  requirements: {linux/amd64: ../outside.txt}
vllm.files.sdist.file | file: vllm-
  file: --vllm-
"""


def cases() -> list[tuple[str, str, str]]:
    found = []
    for line in VALUES.strip().splitlines():
        text = line.encode().decode("unicode_escape")
        if not line.startswith("  "):
            key, _, old = text.partition(" | ")
        else:
            found.append((old, text[2:], key))
    return found


@pytest.mark.parametrize(("old", "new", "key"), cases())
def test_a_value_that_is_no_plain_value_is_refused(old: str, new: str, key: str) -> None:
    messages = refusal(changed(old, new))
    assert any(key in message.split(": ")[1] for message in messages), messages
    assert all(message.startswith("pins.yaml:") for message in messages)


@pytest.mark.parametrize(
    ("start", "times"), [("a: [", 5000), ("{a: ", 5000), ("- ", 3000), ("a: [" + "[" * 99, 1)]
)
def test_nesting_without_end_is_refused_with_its_line(start: str, times: int) -> None:
    message = refusal(start * times)[0]
    assert re.match(r"pins.yaml:\d+: .*nested more than 32 deep", message)


def test_a_value_cannot_write_lines_of_its_own() -> None:
    for new in ('"x\\nerror: \\e[31mforged": 1', 'counter: "x\\nerror: \\e[31mforged"'):
        message, _ = refusal(changed("release:\n", f"release:\n  {new}\n"))
        assert message.startswith("pins.yaml:")
        assert r"x\nerror: \x1b[31mforged" in message


LINES = REAL.splitlines(keepends=True)
ODD = ["*a", "&a ", "<<: ", "!!python/object:os.system ", "? ", "- ", "{", "}", "]", "|\n", "'"]
ODD += ['"', "\\", "---\n", "%TAG", "..", "\t", "\r", "\x85", "\u202e"]
PIECES = st.one_of(
    st.sampled_from(LINES),
    st.text(max_size=30),
    st.integers(0, 60).map(lambda n: "[" * n),
    st.sampled_from(ODD),
)


@given(st.integers(0, len(LINES)), st.integers(0, 40), st.integers(0, 9), PIECES)
@example(0, 0, len(LINES), "[" * 100_000)
@settings(max_examples=150)
def test_whatever_is_written_into_it_is_read_or_refused(
    at: int, column: int, gone: int, piece: str
) -> None:
    before, behind = "".join(LINES[:at]), "".join(LINES[at + gone :])
    line = LINES[at][:column] if at < len(LINES) else ""
    try:
        pins.parse(ROOT / "pins.yaml", f"{before}{line}{piece}{behind}")
    except PinsError as error:
        assert all(plain.printable(one) for one in str(error).splitlines())
