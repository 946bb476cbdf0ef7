"""release."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.build.options import OutputOptions
from sparkforge.build.receipt import RELEASE
from sparkforge.cli import docs
from sparkforge.core import git, pages
from sparkforge.core.command import Entry, grouped, needed, option, switch
from sparkforge.core.errors import RegistryError, ReleaseError, UsageError
from sparkforge.core.log import log
from sparkforge.inspect.verify import cosign
from sparkforge.release import checks, collect, notes
from sparkforge.release.checks import Candidate, Check
from sparkforge.sources.project import Checkout, checkout, pins_option

if TYPE_CHECKING:
    from sparkforge.runtime.registry import Reference


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``release``."""

    target: str = needed("target whose last build to release", metavar="NAME")
    push: str | None = option(
        "push the image there, with signature, bill and provenance", metavar="REGISTRY/NAME"
    )
    keyless: bool = switch("sign by identity instead of a key")
    dry_run: bool = switch("check, and print what would be done; write, sign and push nothing")
    signer: cosign.Signer = grouped(key="no signatures")
    pins: Path | None = pins_option()
    output: OutputOptions


def _release(options: Options) -> int:
    """Check the last build of a target, and make a release of it."""
    signs = _signs(options)
    here = checkout(options.pins)
    here.pins.target(options.target)
    candidate = _candidate(here, options.target)
    image = _reference(options.push, candidate) if options.push is not None else None
    if signs and not options.dry_run:
        cosign.need()
    rows = list(checks.check(candidate))
    log.heading(f"{candidate.version}, target {candidate.target}")
    log.table([("ok" if row.ok else "FAIL", row.name, row.said) for row in rows])
    failed = [row for row in rows if not row.ok]
    made = _Made(collect.folder_of(candidate), [], None if image is None else str(image))
    if not failed and not options.dry_run:
        made = _made(candidate, options.signer if signs else None, image)
    signed = signs or bool(made.signed)
    steps = [] if failed else next_steps(candidate, made.image, signed=signed)
    log.document(
        {
            "release": candidate.version,
            "tag": candidate.tag,
            "target": candidate.target,
            "commit": git.head(candidate.root),
            "checks": [asdict(row) for row in rows],
            "folder": str(made.folder),
            "files": [] if failed else collect.names(candidate),
            "signed": made.signed,
            "image": made.image,
            "dry_run": options.dry_run,
            "next": steps,
        }
    )
    if failed:
        return log.failure(_not_ready(candidate, failed))
    if options.dry_run:
        for name in collect.names(candidate):
            log.info(f"would collect  {made.folder / name}")
        if signs:
            log.info("would sign     receipt, checksums, bill, provenance, release.json")
        if image is not None:
            log.info(f"would push     {image}")
    for step in steps:
        log.info(f"next  {step}")
    return 0


def _signs(options: Options) -> bool:
    """Return whether to sign.

    Raises:
        UsageError: the options conflict.
    """
    if options.keyless and options.signer.key is not None:
        raise UsageError("--keyless and --key conflict", "give only one")
    signs = options.keyless or options.signer.key is not None
    if options.push is not None and not signs:
        msg = "--push: an image without a signature cannot be verified"
        raise UsageError(msg, "add --key FILE (cosign generate-key-pair), or --keyless")
    if signs or options.signer.no_log:
        cosign.check_signer(options.signer)
    return signs


def _candidate(here: Checkout, target: str) -> Candidate:
    from sparkforge.inspect.report import command as report

    def current() -> None:
        pages.settle(docs.pages_of(here), pages.COMMAND, check=True)

    def page() -> str:
        return report.page_of(here, target)

    return Candidate(here.root, here.pins_path, here.pins, target, current, page)


def _reference(name: str, candidate: Candidate) -> Reference:
    """Return the last build's image as it will be in a registry.

    Raises:
        UsageError: the registry's name is malformed.
        ReleaseError: the last build has no image that can be pushed.
    """
    from sparkforge.runtime import registry

    where = registry.repository(name, "--push")
    built = checks.built_image(candidate)
    if built is None:
        msg = f"--push: the last build of {candidate.target} has no image"
        raise ReleaseError(msg, f"build one: {candidate.build} --engine docker")
    if built.digest is None:
        msg = "--push: this engine's image store gives images no digest before the push"
        raise ReleaseError(
            msg, "switch on containerd's store (daemon.json: containerd-snapshotter), build again"
        )
    return registry.Reference(where, built.digest)


@dataclass(frozen=True)
class _Made:
    """A release.

    Attributes:
        signed: files with a signature.
        image: its reference in a registry, as in release.json.
    """

    folder: Path
    signed: list[str]
    image: str | None


def _made(candidate: Candidate, signer: cosign.Signer | None, image: Reference | None) -> _Made:
    """Collect the files, sign them, push the image and sign it."""
    from sparkforge.inspect.verify import signing

    sections = notes.sections((candidate.root / notes.NAME).read_text(encoding="utf-8"))
    text = next(section.text for section in sections if section.version == candidate.version)
    with collect.fresh(candidate, collect.Texts(text, candidate.page())) as files:
        # the files first: a wrong password is known before hours of pushing
        if signer is not None:
            signing.sign_folder(files, signer, f"build.py release --target {candidate.target}")
        if image is not None and signer is not None:
            _pushed(candidate, image)
            cosign.sign_image(str(image), files, signer)
        # last, since it names the image in the registry
        there = collect.record(candidate, files, None if image is None else str(image))
        if signer is not None:
            signing.sign_file(files / RELEASE, signer)
    folder = collect.folder_of(candidate)
    log.info(f"collected  {folder}")
    return _Made(folder, collect.signatures(folder), there)


def _pushed(candidate: Candidate, image: Reference) -> None:
    """Push the image of the last build.

    Raises:
        RegistryError: the registry cannot be reached or refuses, or has another image now.
    """
    from sparkforge.runtime import engine, registry

    built = checks.built_image(candidate)
    assert built is not None  # _reference checked it
    # the local tag ends with the image's id: no other image ever gets it
    tag = built.tag.rpartition(":")[2]
    there = registry.push(engine.connect(), built.image_id, image.repository, tag)
    if there != image:
        msg = f"{image.repository}: the registry has {there.digest}, the receipt {image.digest}"
        raise RegistryError(msg, f"build the image again: {candidate.build}")
    log.info(f"pushed  {image}")


def _not_ready(candidate: Candidate, failed: list[Check]) -> ReleaseError:
    lines = [f"  {row.name}: {row.said}\n    fix: {row.hint}" for row in failed]
    msg = f"{candidate.version} is not ready for a release:\n" + "\n".join(lines)
    return ReleaseError(msg, "fix these, then run this again")


def next_steps(candidate: Candidate, image: str | None, *, signed: bool) -> list[str]:
    """Return the commands that are left to the user, in order."""
    folder = collect.folder_of(candidate).relative_to(candidate.root)
    commit = git.head(candidate.root)
    steps = []
    if not signed:
        steps.append(f"python3 build.py release --target {candidate.target} --key cosign.key")
    if not checks.tagged(candidate):  # as it is once another target is released
        text = folder / collect.NOTES
        steps.append(
            f"git tag --annotate {candidate.tag} {commit} --cleanup=verbatim --file {text}"
        )
    steps += [
        f"git push origin {candidate.tag}",
        f"upload {folder}/* to the forge's release {candidate.tag},"
        f" with {collect.NOTES} as its text",
    ]
    if image is not None:
        steps.append(f"publish {image} and the public key; users: docs/release.md")
    return steps


COMMANDS = (
    Entry(
        "release",
        Options,
        _release,
        description="Check that checkout, changelog and the last build of a target belong"
        " together, collect the release's files in dist/releases/, sign them, and push the image"
        " with signature, bill and provenance. Prints the steps that are left (docs/release.md).",
    ),
)
