"""pins.yaml as somebody malicious or careless would write it: values that are no plain values."""

from __future__ import annotations

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


EXTERNAL = "git: https://github.com/nvidia/cutlass.git"
UPSTREAM = "git: https://github.com/vllm-project/vllm.git"
RULE = "- {repo: vllm/, wheel: vllm/}"


# what stands in pins.yaml; the key that the refusal names; what stands there in its place
VALUES: list[tuple[str, str, list[str]]] = [
    (
        EXTERNAL,
        "externals.cutlass.git",
        ["git: 'ext::sh -c true'", "git: file:///root/.ssh", "git: /etc"],
    ),
    (
        UPSTREAM,
        "upstreams.vllm.git",
        [
            "git: 'https://host.invalid/?a=#x.git'",
            "git: https://me@host.invalid/x.git",
            "git: 'https://host.invalid/a b.git'",
        ],
    ),
    ("redirect: VLLM_CUTLASS_SRC_DIR", "cutlass.redirect", ["redirect: 'PATH=/evil; x'"]),
    ("target: spinloop,", "natives[0].target", ["target: 'spinloop; touch x',"]),
    ("{file: vllm/spinloop", "natives[0].file", ["{file: ../../x", "{file: /x"]),
    ("[csrc/spinloop.cpp]", "natives[0].sources[0]", ["[/etc/x]", "[../x/]", "[-x]"]),
    (
        'configure: ["-DVLLM_TARGET_DEVICE={device}"]',
        "configure[0]",
        [
            f"configure: ['{word}']"
            for word in ("-DX={nope}", "-DX={0}", "-DX={device.__class__}", "-P evil.cmake")
        ],
    ),
    (
        RULE,
        "paths[0].wheel",
        [
            f"- {{repo: vllm/, wheel: {value}}}"
            for value in ("../../etc/", "/etc/", "vllm//", "./vllm/", "-x/", '"vllm\\0/"')
        ],
    ),
    (
        RULE,
        "paths[0].repo",
        [
            f"- {{repo: {value}, wheel: vllm/}}"
            for value in ("../", "/", "'x\\y/'", "':(exclude)x/'")
        ],
    ),
    (RULE, "paths[1].repo", [f"{RULE}\n      {RULE}"]),
    (RULE, "paths[1].wheel", [f"{RULE}\n      - {{repo: other/, wheel: vllm/}}"]),
    (
        "version_file: vllm/_version.py",
        "vllm.version_file",
        [f"version_file: {value}" for value in ("/etc/passwd", "vllm/../x", "vllm/")],
    ),
    (
        "subdirectory: python/triton_kernels",
        "kernels.subdirectory",
        ["subdirectory: ../x", "subdirectory: /x"],
    ),
    (
        "repository: nvidia/cuda",
        "cuda-devel.repository",
        [
            f"repository: {value}"
            for value in (
                "'--privileged -v /:/x'",
                "'$(touch x)'",
                "nvidia/cuda:latest",
                "Nvidia/CUDA",
                "a//b",
            )
        ],
    ),
    ("tag: 13.0.2-devel-ubuntu24.04", "images.cuda-devel.tag", ["tag: '--x'"]),
    (
        "repository: openai/gpt-oss-120b",
        "gpt-oss-120b.repository",
        [
            f"repository: {value}"
            for value in ("../../etc", "/etc", "openai/../x", "--x/y", "a/b/c")
        ],
    ),
    (
        "file: o200k_base.tiktoken",
        "vocabularies.harmony.file",
        [f"file: {value}" for value in ("../../etc/passwd", "/etc/passwd", "-x", "''")],
    ),
    (
        "build_packages: [gcc,",
        "targets.spark.build_packages[0]",
        [
            f"build_packages: [{value},"
            for value in (
                "-o",
                "'APT::Update::Pre-Invoke::=touch x'",
                "'x; touch y'",
                "Python3",
                "python3-",
                "'x y'",
            )
        ],
    ),
    (
        "absent: [nvcc,",
        "targets.spark.absent[0]",
        ["absent: [../nvcc,", "absent: [-x,", "absent: ['',"],
    ),
    (
        "{library: libcudart.so, package: nvidia-cuda-runtime}",
        "targets.spark.needs[0]",
        [
            "{program: ../nvcc, package: p1}",
            "{program: -x, package: p1}",
            "{file: usr/include/x.h, package: p1}",
        ],
    ),
    (
        "torch_backend: cpu",
        "targets.cpu.torch_backend",
        [
            "torch_backend: --index-url=http://host.invalid",
            "torch_backend: auto",
            "torch_backend: cu",
        ],
    ),
    ('cuda_arch: "12.1"', "targets.spark.cuda_arch", ["cuda_arch: 'all; rm -rf'"]),
    ("    enforce_eager: true", "tiny-cpu.mxfp4_layers", ["    mxfp4_layers: --host 0.0.0.0"]),
    ("expect: {moe: BF16_DEQUANT,", "tiny-cpu.expect.moe", ["expect: {moe: '-x',"]),
    (
        "carries: [triton-kernels]",
        "spark.wheels.vllm.carries",
        ["carries: [vllm]", "carries: [triton-kernels, triton-kernels]"],
    ),
    (
        "requirements: {linux/amd64: requirements/cpu-linux-amd64.txt}",
        "cpu.requirements.linux/amd64",
        [
            f"requirements: {{linux/amd64: {value}}}"
            for value in ("/etc/hostname", "../outside.txt", "requirements/", "x" * 5000, "''")
        ],
    ),
    ("file: vllm-", "vllm.files.sdist.file", ["file: --vllm-"]),
    ("  flashinfer:\n    git", "upstreams.faaa", [f"  f{'a' * 500}:\n    git"]),
    (
        "summary: this",
        "targets.cpu.summary",
        ['summary: "\\e[31mred" # this', 'summary: "two\\nlines" # this'],
    ),
]


@pytest.mark.parametrize(
    ("old", "new", "key"), [(old, new, key) for old, key, values in VALUES for new in values]
)
def test_a_value_that_is_no_plain_value_is_refused(old: str, new: str, key: str) -> None:
    messages = refusal(changed(old, new))
    assert any(key in message.split(": ")[1] for message in messages), messages
    assert all(message.startswith("pins.yaml:") for message in messages)


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 100_000,
        "{a: " * 5000,
        "\n".join(" " * i + "a:" for i in range(2000)),
        "- " * 3000,
        "a: " + "[" * 40 + "]" * 40,
    ],
    ids=["flow", "mappings", "block", "sequences", "closed"],
)
def test_nesting_without_end_is_refused_with_its_line(text: str) -> None:
    message = refusal(text)[0]
    assert re.match(r"pins.yaml:\d+: .*nested more than 32 deep", message)


def test_a_key_cannot_write_lines_of_its_own() -> None:
    messages = refusal(changed("release:\n", 'release:\n  "x\\nerror: \\e[31mforged": 1\n'))
    assert all(message.startswith("pins.yaml:") for message in messages)
    assert "\x1b" not in "".join(messages)
    assert any(r"release.x\nerror: \x1b[31mforged" in message for message in messages)


LINES = REAL.splitlines(keepends=True)
PIECES = st.one_of(
    st.sampled_from(LINES),
    st.text(max_size=30),
    st.integers(0, 60).map(lambda n: "[" * n),
    st.sampled_from(
        [
            "*a",
            "&a ",
            "<<: ",
            "!!python/object:os.system ",
            "? ",
            "- ",
            "{",
            "}",
            "]",
            "|\n",
            "'",
            '"',
            "\\",
            "---\n",
            "%TAG",
            "..",
            "\t",
            "\r",
            "\x85",
            "\u202e",
        ]
    ),
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
