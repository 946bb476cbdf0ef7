"""pins check, docs, clean, --version, --exit-codes."""

import platform
from collections.abc import Mapping
from pathlib import Path

from sparkforge import __version__
from sparkforge.build.context import release_name
from sparkforge.build.options import CheckoutOptions, OutputOptions, chosen_series, command_options
from sparkforge.core import errors, pages
from sparkforge.core.disk import outdated, sha256_file, write_files
from sparkforge.core.errors import PinsError
from sparkforge.core.log import human_bytes, log
from sparkforge.sources.project import Checkout, checkout, store_of


@command_options
class CleanOptions:
    store: Path | None = None
    """cache folder (default: $SPARKFORGE_STORE, else ~/.cache/sparkforge)"""
    superseded: bool = False
    """delete only results that no target's newest build uses"""
    output: OutputOptions = OutputOptions()


@command_options
class DocsOptions(CheckoutOptions):
    check: bool = False
    """fail if one is stale; write nothing"""


def check_pins(options: CheckoutOptions = CheckoutOptions()) -> int:
    """Check pins.yaml and all that it names."""
    from sparkforge.sources import wheelhouse

    here = checkout(options.pins)
    upstreams, targets = here.pins.upstreams, here.pins.targets
    for target in targets.values():
        for lock in target.requirements.values():
            wheelhouse.read_lock(here.root / lock)
    files = sum(len(upstream.files) for upstream in upstreams.values())
    counts = {"upstreams": len(upstreams), "targets": len(targets), "files": files}
    numbers = ", ".join(f"{number} {what}" for what, number in counts.items())
    log.info(f"{here.pins_path.name}: {numbers}; no problems")
    unknown = [name for name, upstream in upstreams.items() if upstream.commit is None]
    for name in unknown:
        place = f"{upstreams[name].git} {upstreams[name].tag}^{{}}"
        log.info(f"{name}: commit: unknown; look it up: git ls-remote {place}")
    log.document({"pins": str(here.pins_path), "ok": True, **counts, "commit_unknown": unknown})
    return 0


def clean(options: CleanOptions = CleanOptions()) -> int:
    """Delete build results from the store; downloads and git mirrors stay."""
    store = store_of(options.store)
    log.info(f"cleaning {store.root}; a large store takes minutes")
    freed = store.clean(superseded=options.superseded)
    log.info(f"freed {human_bytes(freed)}")
    log.document({"freed_bytes": freed})
    return 0


def docs(options: DocsOptions = DocsOptions()) -> int:
    """Write the generated pages, or compare them with the files."""
    wanted = {path: text.encode() for path, text in pages_of(checkout(options.pins)).items()}
    stale = outdated(wanted)
    if options.check and stale:
        msg = f"out of date: {', '.join(map(str, stale))}"
        raise PinsError(msg, f"update it: build.py {pages.COMMAND}")
    write_files(stale)
    for path in stale:
        log.info(f"{path}: written")
    log.info(f"{len(wanted) - len(stale)} of {len(wanted)} pages were up to date")
    log.document({"written": [str(path) for path in stale]})
    return 0


def pages_of(here: Checkout) -> Mapping[Path, str]:
    """Return the text of every generated page."""
    from sparkforge.check import accept, report, roofline
    from sparkforge.series import exporting

    root, folder, all_pins = here.root, here.root / "docs", here.pins
    patches = chosen_series(None, root, all_pins)
    kernels = roofline.markdown(all_pins)
    return {
        folder / "patches.md": exporting.markdown(patches, all_pins.upstreams),
        folder / "kernels.md": pages.between(folder / "kernels.md", kernels),
        folder / "status.md": report.status(folder / "status.md"),
        folder / "variables.md": variables((root / "docker-compose.yml").read_text("utf-8")),
        folder / "measure.md": pages.between(folder / "measure.md", accept.markdown()),
        folder / "cli.md": commands(),
    }


def commands() -> str:
    """Return docs/cli.md: the help of all commands."""
    from cyclopts.docs.markdown import generate_markdown_docs

    from sparkforge.cli.main import COMMANDS, app

    questions = [*COMMANDS["questions"]]
    text = generate_markdown_docs(app(), generate_toc=False, exclude_commands=questions)
    # no blanks at ends of lines, and anchors as forges make them
    lines = [line.rstrip() for line in text.replace("(#build.py", "(#buildpy").splitlines()]
    return "\n".join((*lines, ""))


def variables(compose: str) -> str:
    """Return docs/variables.md: of the image's settings, and of the lines in docker-compose.yml."""
    from sparkforge.build import composing

    found = composing.variables(compose)
    lines = [f"| `{names.replace(', ', '`, `')}` | {text} |" for names, text in found]
    head = "What `.env` or the environment of `docker compose` sets: [serving.md](serving.md)."
    return "\n".join((f"# Variables\n\n{head}\n\n| variable | for |\n|---|---|", *lines, ""))


def version(options: CheckoutOptions = CheckoutOptions()) -> int:
    """Print the versions of sparkforge and of its targets."""
    here = checkout(options.pins)
    python, sha256 = platform.python_version(), sha256_file(here.pins_path)
    found = {"sparkforge": __version__, "python": python, "pins_sha256": sha256}
    targets = sorted(here.pins.targets.items())
    releases = {name: release_name(here.pins, target) for name, target in targets}
    log.heading(f"sparkforge {__version__} (Python {python})")
    rows = [(f"target {name}", release) for name, release in releases.items()]
    log.table([*rows, (here.pins_path.name, f"sha256 {sha256[:12]}")])
    log.document({**found, "releases": releases})
    return 0


def exit_codes(options: CheckoutOptions = CheckoutOptions()) -> int:
    """Explain the exit codes."""
    rows = errors.exit_codes()
    log.table([(f"{code:3}", meaning) for code, meaning in rows])
    log.document({"exit_codes": {str(code): meaning for code, meaning in rows}})
    return 0
