"""``build.py report``: one page about the last build of a target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cyclopts import Parameter
from pydantic import ValidationError

from sparkforge.build import receipt
from sparkforge.build.context import release_name
from sparkforge.build.options import OutputOptions, chosen_series
from sparkforge.build.receipt import Receipt
from sparkforge.core import pages, plain
from sparkforge.core.disk import sha256_file, write_file
from sparkforge.core.errors import UsageError
from sparkforge.core.log import log
from sparkforge.series.docs import why
from sparkforge.sources.project import Checkout, PinsFile, checkout

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Component:
    name: str
    version: str = ""


@dataclass(frozen=True)
class _Sbom:
    components: tuple[_Component, ...]


@dataclass(frozen=True)
class _Check:
    state: str


@dataclass(frozen=True)
class _Accepted:
    checks: tuple[_Check, ...] = ()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``report``."""

    target: str
    """target whose last build to report on"""
    out: Path | None = None
    """write the page here (default: dist/TARGET/report.html)"""
    pins: PinsFile = None
    output: OutputOptions = OutputOptions()


def run(options: Options) -> int:
    """Write the page."""
    here = checkout(options.pins)
    page = page_of(here, options.target)
    out = options.out or here.root / "dist" / options.target / "report.html"
    write_file(out, page.encode())
    log.info(f"written: {out} (open it in a browser)")
    log.document({"page": str(out)})
    return 0


def page_of(here: Checkout, name: str) -> str:
    """Return the page about the last build of a target: HTML without scripts or other files.

    Raises:
        UsageError: the target was not built, or another version wrote a file.
    """
    target, folder = here.pins.target(name), here.root / "dist" / name
    build = f"build.py --target {name}"
    built = _read(folder / receipt.NAME, Receipt, build)
    used = {each for wheel, plan in target.wheels.items() for each in (wheel, *plan.carries)}
    series = [one for one in chosen_series(None, here.root, here.pins) if one.upstream in used]
    return pages.render(
        Path(__file__).with_name("page.html.j2"),
        target=name,
        version=release_name(here.pins, target),
        built=built,
        same_pins=built.pins_sha256 == sha256_file(here.pins_path),
        files={
            file: (digest, _state(folder / file, digest)) for file, digest in built.files.items()
        },
        series={one.upstream: one.patches for one in series},
        why=why,
        components=_read(folder / receipt.SBOM, _Sbom, build).components,
        checks=_checks(folder),
        results=dict(_results(folder)),
    )


def _state(path: Path, digest: str) -> str:
    """Return whether a published file is the one of the receipt."""
    if not path.is_file():
        return "missing"
    if sha256_file(path) != digest:
        return "changed"
    return "signed" if path.with_name(path.name + receipt.SUFFIX).is_file() else "unchanged"


def _checks(folder: Path) -> Counter[str]:
    """Return how many checks of the newest acceptance have each state."""
    newest = max(folder.glob("accept/accept-*.json"), default=None)
    found = _read(newest, _Accepted, "build.py accept") if newest else _Accepted()
    return Counter(check.state for check in found.checks)


def _results(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield name and text of the newest pages of `accept` and `bench`, Markdown."""
    newest = max(folder.glob("accept/accept-*.md"), default=None)
    paths = [newest] if newest else []
    found = sorted(folder.glob("bench/**/*.md"), key=lambda path: path.stat().st_mtime_ns)
    if found:
        run = folder / "bench" / found[-1].relative_to(folder / "bench").parts[0]
        paths += [path for path in found if path.is_relative_to(run)]
    for path in paths:
        yield str(path.relative_to(folder)), path.read_text(encoding="utf-8", errors="replace")


def _read(path: Path, kind: type[_T], command: str) -> _T:
    """Read a document of an earlier command; UsageError if it is missing, or of another shape."""
    try:
        return plain.adapter(kind).validate_python(plain.json_of(path.read_bytes()))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", f"run {command} first") from None
    except ValidationError as error:
        first = error.errors()[0]
        msg = f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise UsageError(msg, f"remove it, and run {command} again") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}", f"remove it, and run {command} again") from None
