"""The result of a run: what was measured, of what, where; as JSON and as a page."""

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
    """What was served.

    Attributes:
        origin: the ``build`` of this checkout, the unpatched ``release``, or the server of a
            ``url``, of which only its own answers are known.
        release: of the build, e.g. ``0.31.0-spark.1``; "" of a url.
        pins: sha256 of pins.yaml; "" of a url.
        wheels: sha256 by file name; of the build.
        image: its digest, or else its id; "" for a virtual environment.
        profile: the choice of dense layers, ``exact`` for example; "" where there is none.
        options: of ``vllm serve``.
        model: what requests call it.
        checkpoint: name of its folder; "" of a url.
        context: tokens of a sequence, at the most; 0: the server does not say.
        server: what it says of its version, or "".
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
    """Where it was measured, as far as the machine says.

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
    """Tokens a second, over all sequences, that memory allows at the most (docs/roofline.md)."""

    context: int
    batch: int
    tok_s: float


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        session: equal in two results whose rounds took turns.
        started: UTC, ISO 8601.
        rounds: that were begun.
        complete: all tests of the table ran.
        disturbed: what disturbed it, as sentences; none: it is clean.
        tool: llama-benchy's version; ``lock``: sha256 of its requirements.
        text: sha256 of the text that prompts were cut from.
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
        """Nothing disturbed it, and it ran to its end."""
        return self.complete and not self.disturbed


def load(path: Path) -> Result:
    """Read a result: a file, or the folder that has it.

    Raises:
        BenchError: it is not there, or has another shape.
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
    for one in result.samples:
        if not one.values or not all(_MIN < x < _MAX for x in one.values):
            raise BenchError(f"{file}: {one.name} has a sample out of range", remedy)
    return result


def save(result: Result, folder: Path) -> None:
    """Write the result and its page; each is replaced atomically."""
    document = json.dumps(typed.as_json(result), indent=1, sort_keys=True)
    write_file(folder / FILE, f"{document}\n".encode())
    write_file(folder / PAGE, page(result, folder).encode())


def page(result: Result, folder: Path) -> str:
    """Return the result as Markdown, with the pictures that are in its folder."""
    metrics: tuple[Metric, ...] = tuple(METRICS)
    rows: dict[tuple[Test, bool], dict[Metric, Samples]] = {}
    for one in result.samples:
        rows.setdefault((one.test, one.context), {})[one.metric] = one
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
    for one in result.samples:
        values = (f"{one.mean:.2f}", f"{one.deviation:.2f}", str(len(one.values)))
        rows.append((one.name, METRICS[one.metric], *values))
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
    cpu = next((one.partition(":")[2].strip() for one in lines if one[:10] == "model name"), "")
    gpus = () if tree is None else tuple(text_of(one, "product_name") for one in tree.iter("gpu"))
    cores = len(os.sched_getaffinity(0))
    return Machine(platform.machine(), cpu, cores, gpus, text_of(tree, "driver_version"))
