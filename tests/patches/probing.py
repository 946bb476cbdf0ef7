"""Run a probe, a script for the target's interpreter, from a test."""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.patches import forks
from tests.patches.checkout import ROOT

TIMEOUT_S = 1800

# Longer than the sliding window (32) and than the context that YaRN starts from (64).
PROMPT = (b"sparkforge builds patched forks, and checks them. " * 4)[:160]

# Distance at one position: RMS of the difference over RMS of the reference, over the vocabulary.
# Its median is what rounding to BF16 does to every position (measured: 0.008); a near tie between
# two experts, turned round by rounding, moves single positions further (measured: 0.058 at one of
# 160). The mildest of the wrong models below, a window of one token more, has a median of 0.035 and
# a third of the positions FAR; the others have 0.2 to 0.7 and two thirds to all.
MEDIAN_TOLERANCE = 0.015
FAR = 0.05
FAR_SHARE = 0.10


def _run(
    python: Path,
    probe: str,
    words: Sequence[str | Path],
    folder: Path,
    timeout: float,
    variables: Mapping[str, str] | None,
) -> str:
    """Run a probe in a folder; return all that it printed, or fail if it fails."""
    name = f"tests.patches.probes.{probe}"
    if variables is None:
        code, said = forks.of(python).run([name, *words], folder, timeout)
    else:
        # no test of these is about what torch compiles: vLLM's sampler, anew in each process
        fixed = {"TORCH_COMPILE_DISABLE": "1", **forks.known(python), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [python, "-m", name, *words],
            env={**os.environ, **fixed, **variables},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        code, said = done.returncode, done.stdout
    assert code == 0, f"exit code {code}\n{said[-6000:]}"
    return said


def runner(
    probe: str,
    request: Mapping[str, Any],
    folder: Path,
    timeout: float,
    variables: Mapping[str, str] | None = None,
) -> Callable[[Path, str], Path]:
    """Return ``run(python, steps)``, which runs a probe's steps and returns the folder they fill.

    Args:
        probe: a module of tests/patches/probes; it is given the steps, the request's path and the
            folder.
        request: what it reads, as JSON.
        folder: for the request, and a folder a run.
        timeout: of a run, in seconds.
        variables: further ones of the environment; with none, Python is forked (``forks.of``).
    """
    request_path = folder / "request.json"
    request_path.write_text(json.dumps(request), encoding="utf-8")

    def run(python: Path, steps: str) -> Path:
        out = Path(tempfile.mkdtemp(prefix=f"{steps.partition(',')[0]}-", dir=folder))
        said = _run(python, probe, [steps, request_path, out], out, timeout, variables)
        (out / "log").write_text(said, encoding="utf-8")
        return out

    return run


def run_module(
    python: Path,
    probe: str,
    *arguments: str | Path,
    folder: Path,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run a module of tests/patches/probes, which may import the tests' own; fail if it fails.

    Args:
        folder: to run in.
        variables: further ones of the environment; with none, Python is forked (``forks.of``).
    """
    _run(python, probe, arguments, folder, TIMEOUT_S, variables)


def ask(
    python: Path,
    probe: str,
    *words: Any,
    folder: Path,
    variables: Mapping[str, str] | None = None,
) -> Any:
    """Run a module as ``run_module`` does; return the JSON that it writes.

    Args:
        words: its arguments before the path of its answer; a dictionary goes by a file of JSON.
    """
    asked, out = folder / "asked.json", folder / "out.json"
    given: list[str | Path] = []
    for word in words:
        if isinstance(word, dict):
            asked.write_text(json.dumps(word), encoding="utf-8")
        given.append(asked if isinstance(word, dict) else word)
    run_module(python, probe, *given, out, folder=folder, variables=variables)
    return json.loads(out.read_text(encoding="utf-8"))


def result_of(out: Path) -> dict[str, Any]:
    """Return what a probe wrote as its result, an entry a step."""
    result: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
    return result


def relative_distance(
    actual: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Return RMS of the difference over RMS of what is expected, along the last axis."""
    assert actual.shape == expected.shape
    difference = np.sqrt(np.mean(np.square(actual - expected), axis=-1))
    out: npt.NDArray[np.float32] = difference / np.sqrt(np.mean(np.square(expected), axis=-1))
    return out


def assert_close(actual: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    """Fail unless logits differ from the reference's by no more than rounding to BF16 does."""
    distance = relative_distance(actual, expected)
    assert np.median(distance) < MEDIAN_TOLERANCE
    assert np.mean(distance > FAR) < FAR_SHARE
