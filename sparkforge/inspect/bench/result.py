"""The result of a run: samples, server and machine; as JSON and as a page."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree as ET

from sparkforge.core import pages, plain, typed
from sparkforge.core.disk import write_file
from sparkforge.core.errors import BenchError
from sparkforge.inspect.bench.samples import METRICS, Metric, Samples
from sparkforge.inspect.bench.tables import Test
from sparkforge.inspect.doctor.gpu import text_of

FILE = "result.json"
PAGE = "report.md"
SCHEMA = 1
_MIN, _MAX = 1e-9, 1e9  # tokens a second, or milliseconds


@dataclass(frozen=True)
class Identity:
    """The measured server.

    Attributes:
        origin: the ``build`` of this checkout, the unpatched ``release``, or a ``url``: a server of
            which only its own answers are known.
        release: of the build, e.g. ``0.31.0-spark.1``; "" of a url.
        pins: sha256 of pins.yaml; "" of a url.
        wheels: sha256 by file name; of the build.
        image: its digest, or else its id; "" for a virtual environment.
        profile: the choice of dense layers, for example ``exact``; "" without one.
        options: of ``vllm serve``.
        model: its id in requests.
        checkpoint: name of its folder; "" of a url.
        context: limit for tokens of a sequence; 0: unknown.
        server: its version by itself, or "".
    """

    origin: Literal["build", "release", "url"]
    target: str
    release: str = ""
    pins: str = ""
    wheels: Mapping[str, str] | None = None
    image: str = ""
    profile: str = ""
    options: tuple[str, ...] = ()
    model: str = ""
    checkpoint: str = ""
    context: int = 0
    server: str = ""


@dataclass(frozen=True)
class Machine:
    """The machine of a measurement, as far as it is known.

    Attributes:
        gpus: names.
    """

    architecture: str
    cpu: str
    cores: int
    gpus: tuple[str, ...]
    driver: str


@dataclass(frozen=True)
class Ceiling:
    """Memory's limit for tokens a second, over all sequences (docs/kernels.md)."""

    context: int
    batch: int
    tok_s: float


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        session: equal in two results whose rounds took turns.
        started: UTC, ISO 8601.
        rounds: started ones.
        complete: all tests of the table ran.
        disturbed: disturbances, as sentences; none: it is clean.
        tool: llama-benchy's version; ``lock``: sha256 of its requirements.
        text: sha256 of the prompts' text.
    """

    session: str
    started: str
    table: str
    rounds: int
    complete: bool
    disturbed: tuple[str, ...]
    tool: str
    lock: str
    text: str
    identity: Identity
    machine: Machine
    ceilings: tuple[Ceiling, ...]
    samples: tuple[Samples, ...]
    schema_version: int = SCHEMA

    @property
    def clean(self) -> bool:
        """Whether it is complete and undisturbed."""
        return self.complete and not self.disturbed


def load(path: Path) -> Result:
    """Read a result: a file, or its folder.

    Raises:
        BenchError: it is missing, or has another shape.
    """
    file = path / FILE if path.is_dir() else path
    remedy = "give the folder or result.json of a `build.py bench` run"
    try:
        values = plain.json_of(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{file}: {error.strerror}", remedy) from None
    except ValueError:
        raise BenchError(f"{file}: not JSON", remedy) from None
    if isinstance(values, dict) and values.get("schema_version", SCHEMA) != SCHEMA:
        msg = f"{file}: another version of sparkforge wrote it"
        raise BenchError(msg, "measure again, or use that version")
    result = typed.load(Result, values)
    if result is None:
        raise BenchError(f"{file}: not a result of `build.py bench`", remedy)
    for samples in result.samples:
        if not samples.values or not all(_MIN < x < _MAX for x in samples.values):
            raise BenchError(f"{file}: {samples.name} has a sample out of range", remedy)
    return result


def save(result: Result, folder: Path) -> None:
    """Write the result and its page; each is replaced atomically."""
    document = json.dumps(typed.as_json(result), indent=1, sort_keys=True)
    write_file(folder / FILE, f"{document}\n".encode())
    write_file(folder / PAGE, page(result, folder).encode())


def page(result: Result, folder: Path) -> str:
    """Return the result as Markdown, with the pictures in its folder."""
    metrics: tuple[Metric, ...] = tuple(METRICS)
    rows: dict[tuple[Test, bool], dict[Metric, Samples]] = {}
    for samples in result.samples:
        rows.setdefault((samples.test, samples.context), {})[samples.metric] = samples
    table = []
    for found in rows.values():
        cells = [_cell(found.get(metric)) for metric in metrics]
        table.append([next(iter(found.values())).name, *cells])
    wheels = result.identity.wheels or {}
    return pages.render(
        Path(__file__).with_name("report.md.j2"),
        result=result,
        options=" ".join(result.identity.options),
        head=["test", *METRICS.values()],
        rows=table,
        wheels=[f"`{name}` {sha256}" for name, sha256 in sorted(wheels.items())],
        pictures=[name for name in PICTURES if (folder / name).exists()],
    )


PICTURES: Mapping[str, str] = {
    "decode.svg": "decode over context",
    "prefill.svg": "prefill",
    "concurrency.svg": "decode over concurrency",
}
"""File and caption."""


def _cell(samples: Samples | None) -> str:
    if samples is None:
        return ""
    digits = 2 if samples.mean < 100 else 0
    return f"{samples.mean:.{digits}f} ± {samples.deviation:.{digits}f}"


def summary(result: Result) -> list[tuple[str, ...]]:
    """Return the means as rows of text, the head first."""
    rows: list[tuple[str, ...]] = [("test", "metric", "mean", "±", "samples")]
    for samples in result.samples:
        values = (f"{samples.mean:.2f}", f"{samples.deviation:.2f}", str(len(samples.values)))
        rows.append((samples.name, METRICS[samples.metric], *values))
    return rows


def machine(tree: ET.Element | None, cpuinfo: Path = Path("/proc/cpuinfo")) -> Machine:
    """Return this machine.

    Args:
        tree: of nvidia-smi; None: it has no GPU.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    # arm64 has no model name
    cpu = next((line.partition(":")[2].strip() for line in lines if line[:10] == "model name"), "")
    gpus = () if tree is None else tuple(text_of(gpu, "product_name") for gpu in tree.iter("gpu"))
    cores = len(os.sched_getaffinity(0))
    return Machine(platform.machine(), cpu, cores, gpus, text_of(tree, "driver_version"))
