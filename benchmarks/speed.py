"""How long sparkforge itself takes, on this machine, with the downloads in the store.

    python build.py --target cpu                  # fills the store
    python build.py --target spark --until wheels
    python benchmarks/speed.py                    # prints the figures

A benchmark, not a test: it prints what it measured, and beside it the aim.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORE = Path(os.environ.get("SPARKFORGE_STORE", Path.home() / ".cache" / "sparkforge"))


def measure(
    *arguments: str, store: Path = STORE, repeat: int = 5, codes: tuple[int, ...] = (0,)
) -> tuple[float, float]:
    """Run build.py and return (best seconds from prompt to prompt, peak MiB of any process).

    Args:
        codes: exit codes that are as it should be.
    """
    best = float("inf")
    for _ in range(repeat):
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, ROOT / "build.py", *arguments, "--store", store],
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if done.returncode not in codes:
            sys.exit(f"build.py {' '.join(arguments)} ended with {done.returncode}")
        best = min(best, time.monotonic() - start)
    return best, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def overlay() -> tuple[float, float]:
    """Build the arm64 wheel in a store that lacks the wheel, and nothing it is made from."""
    with tempfile.TemporaryDirectory(dir=STORE, prefix="bench-") as name:
        store = Path(name)
        shutil.copyfile(STORE / "CACHEDIR.TAG", store / "CACHEDIR.TAG")  # else it is no store
        for part in ("downloads", "git"):
            (store / part).symlink_to(STORE / part)
        for stage in ("sources", "series", "intake"):
            shutil.copytree(STORE / "artefacts" / stage, store / "artefacts" / stage)
        return measure("--target", "spark", "--until", "wheels", store=store, repeat=1)


def export() -> tuple[float, float]:
    """Export vLLM's series from a work tree that nobody changed."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "vllm"
        measure("patches", "apply", "vllm", str(tree), repeat=1)
        return measure("patches", "export", str(tree))


def rebase() -> tuple[float, float]:
    """Move vLLM's series to 0.32.0, in a checkout that is thrown away.

    Remembered resolutions are used; it ends at the first conflict that has none.
    """
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for part in ("patches", "requirements", "tests", "docs"):
            shutil.copytree(ROOT / part, root / part)
        for part in ("pins.yaml", "CHANGELOG.md"):
            shutil.copyfile(ROOT / part, root / part)
        return measure(
            "rebase",
            "vllm",
            "--onto",
            "release:0.32.0",
            "--pins",
            str(root / "pins.yaml"),
            repeat=1,
            codes=(0, 19),
        )


def main() -> None:
    """Print one line a figure: what, measured, aim."""
    rows = [
        ("overlay wheel, linux/arm64 (315 MB in)", overlay(), 5.0),
        ("build --target cpu, nothing changed", measure("--target", "cpu"), 0.5),
        ("patches check, all series", measure("patches", "check"), 1.5),
        ("patches export, vLLM's series untouched", export(), 0.5),
        (
            "rebase vllm --dry-run, onto 0.33.0",
            measure(
                "rebase", "vllm", "--onto", "release:0.33.0", "--dry-run", repeat=1, codes=(0, 19)
            ),
            20.0,
        ),
        ("rebase vllm, onto 0.32.0, to a conflict", rebase(), 60.0),
    ]
    print(f"{'what':42} {'seconds':>8} {'aim':>5} {'peak so far':>12}")
    for what, (seconds, peak), aim in rows:
        print(f"{what:42} {seconds:8.2f} {aim:5.1f} {peak:8.0f} MiB")


if __name__ == "__main__":
    main()
