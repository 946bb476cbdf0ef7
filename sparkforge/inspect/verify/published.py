"""Compare an image in a registry with its signature and its attachments.

The signature covers the image's digest, and the digest covers every layer. Bill and provenance are
attached as signed statements about that digest; both must describe the image's contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sparkforge.build import image
from sparkforge.build.receipt import SBOM
from sparkforge.core import plain
from sparkforge.core.log import log
from sparkforge.inspect.verify import cosign, installed
from sparkforge.inspect.verify.reading import DPKG_STATUS, OS_RELEASE, Reading
from sparkforge.runtime import registry
from sparkforge.runtime.engine import Engine
from sparkforge.runtime.registry import Reference

_SYSTEM = "deb-"  # prefix of the bill's references of the distribution's packages


@dataclass(frozen=True)
class Attached:
    """An image's attachments, signed by the trusted signer; at least one of each kind."""

    bills: tuple[Mapping[str, Any], ...]
    histories: tuple[Mapping[str, Any], ...]


def attached(named: Reference, trust: cosign.Trust) -> Attached:
    """Return the attachments of a signed image.

    Raises:
        VerifyError: signature, bill or provenance is missing, or of another signer.
        SignError: cosign is missing.
        RegistryError: the registry cannot be reached, or denies access.
    """
    cosign.check_image(str(named), trust)
    log.info(f"signed: {named}")
    found = Attached(
        tuple(cosign.attested(str(named), cosign.BILL, trust)),
        tuple(cosign.attested(str(named), cosign.HISTORY, trust)),
    )
    log.info("attached: bill and provenance, by the same signer")
    return found


def fetch(engine: Engine, named: Reference) -> None:
    """Pull an image that the engine lacks.

    Raises:
        RegistryError: the registry cannot be reached, denies access, or lacks it.
        VerifyError: the registry gives other bytes.
    """
    if not engine.has_image(str(named)):
        registry.pull(engine, named)
        log.info(f"pulled: {named}")


def compare(
    named: Reference, found: Reading, what: Attached | None, *, same_manifest: bool
) -> list[str]:
    """Compare an image with its name and its attachments; one line for each difference.

    Args:
        same_manifest: the engine keeps the registry's manifest, as containerd's store does. Others
            write their own into an archive, and compare the digest when they pull.
    """
    problems = []
    if same_manifest and found.digest != named.digest:
        problems.append(f"the engine has {found.digest} under this name")
    if what is not None:
        for bill in what.bills:
            with installed.as_we_write("the attached bill"):
                problems += _bill(bill, found)
        for history in what.histories:
            with installed.as_we_write("the attached provenance"):
                problems += _history(history, found)
    return list(dict.fromkeys(problems))


def _bill(bill: Mapping[str, Any], found: Reading) -> Iterator[str]:
    """Compare the attached bill with the image's own, and with the distribution's packages."""
    inside = found.share(SBOM)
    theirs = _components(bill)
    ours = {} if inside is None else _components(plain.json_of(inside))
    system = {ref for ref in theirs if ref.startswith(_SYSTEM)}
    yield from _differences(
        {ref: part for ref, part in theirs.items() if ref not in system}, ours, f"image's {SBOM}"
    )
    stated = {(theirs[ref]["name"], theirs[ref]["version"]) for ref in system}
    there = _packages(found)
    for name, version in sorted(stated - there):
        yield f"attached bill: package {name} {version}: not in the image"
    for name, version in sorted(there - stated):
        yield f"package {name} {version}: not in the attached bill"


def _components(bill: Any) -> dict[str, Any]:
    """Return the components of a bill by their reference."""
    return {str(component["bom-ref"]): component for component in bill["components"]}


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any], where: str) -> Iterator[str]:
    for ref in sorted(theirs.keys() | ours.keys()):
        if ref not in ours:
            yield f"attached bill: {ref}: not in the {where}"
        elif ref not in theirs:
            yield f"{where}: {ref}: not in the attached bill"
        elif theirs[ref] != ours[ref]:
            yield f"attached bill: {ref}: differs from the {where}"


def _packages(found: Reading) -> set[tuple[str, str]]:
    """Return the distribution's packages in an image: names and versions."""
    from sparkforge.build import sbom

    status, release = (found.files.get(path) for path in (DPKG_STATUS, OS_RELEASE))
    if status is None or status.data is None:
        return set()
    text = "" if release is None or release.data is None else release.data.decode(errors="replace")
    packages = sbom.dpkg_packages(status.data.decode(errors="replace"), text)
    return {(package.name, package.version) for package in packages}


def _history(history: Mapping[str, Any], found: Reading) -> Iterator[str]:
    """Compare the attached provenance with the image's labels and its bill."""
    definition = history["buildDefinition"]
    external, internal = definition["externalParameters"], definition["internalParameters"]
    stated = {
        "target": (external["target"], found.labels.get(image.TARGET_LABEL)),
        "platform": (external["platform"], found.platform),
        "key of the image": (internal["image"], found.labels.get(image.KEY_LABEL)),
    }
    for name, (theirs, ours) in stated.items():
        if theirs != ours:
            yield f"attached provenance: {name} is {theirs}, the image has {ours}"
    made_from = {
        str(dependency["digest"].get("sha256")) for dependency in definition["resolvedDependencies"]
    }
    base = found.labels.get("org.opencontainers.image.base.digest", "").removeprefix("sha256:")
    if base not in made_from:
        yield f"attached provenance: does not have the image's base sha256:{base}"
    inside = found.share(SBOM)
    parts = {} if inside is None else _components(plain.json_of(inside))
    for ref, part in sorted(parts.items()):
        if ref.startswith("wheel-") and part["hashes"][0]["content"] not in made_from:
            yield f"attached provenance: does not have {part['name']} of the image"
