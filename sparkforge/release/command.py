"""`build.py release`: check the last build of a target, collect its files, sign them, push.

Then, with the images of all targets: one name of them, and the files that serve it. cosign does all
the cryptography. Neither keys nor passwords are read here.
"""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from jinja2 import UndefinedError

from sparkforge.build import image, publish, receipt
from sparkforge.build.context import release_name
from sparkforge.build.options import CheckoutOptions, command_options
from sparkforge.build.receipt import SBOM, SUFFIX, SUMS, Receipt
from sparkforge.core import git
from sparkforge.core.disk import disk_errors
from sparkforge.core.errors import CheckError, CommandError, MachineError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.pins.pins import Pins
from sparkforge.release import files
from sparkforge.runtime import engine
from sparkforge.sources.project import Checkout, checkout

SIGNED = (receipt.NAME, SUMS, SBOM)
"""The signed files; the receipt has the hashes of all others."""
_PROVENANCE = "slsaprovenance1"
"""cosign's name of a SLSA v1 statement."""
_ISSUER = "https://token.actions.githubusercontent.com"
"""Of a forge's tokens, for which cosign gets a certificate that names the job's workflow."""
# a key needs no root of trust; without this cosign would download one
_NO_ROOT = '{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}\n'


def inputs(of: Pins) -> tuple[str, ...]:
    """Return the files and folders of a checkout that a build reads."""
    plugin = () if of.plugin is None else (of.plugin.folder.rstrip("/"),)
    files = ("pins.yaml", "Dockerfile", ".dockerignore")
    return (*files, "patches", "requirements", "scripts", "sparkforge", *plugin)


@command_options
class Options(CheckoutOptions):
    target: str | None = None
    """target whose last build to release"""
    push: str | None = None
    """push the image there, with signature and SBOM"""
    join: tuple[str, ...] = ()
    """NAME@sha256:… of a pushed image, once for each target: make one name of the platforms, and
    the files that serve it"""
    key: str | None = None
    """private key, or a key service's name as cosign writes it; password in COSIGN_PASSWORD.
    A forge's job with a token for that needs none"""


def run(options: Options = Options()) -> int:
    """Check the last build of a target and make a release of it, or join the images of all."""
    key, target = options.key or _identity(), options.target
    if (target is None) == (not options.join):
        raise UsageError("give --target NAME, or --join for each image", "build.py release --help")
    if key is None and (options.push is not None or options.join):
        raise UsageError("--push and --join are for signed releases", "add --key FILE")
    check_key(key)
    here = checkout(options.pins)
    if target is None:
        return _join(here, options.join, str(key))
    to = None if options.push is None else engine.repository(options.push)
    version = release_name(here.pins, here.pins.target(target))
    dist = here.root / "dist" / target
    folder = here.root / "dist" / "releases" / version / target
    commit, built = git.head(here.root), receipt.load(dist / receipt.NAME)
    problems = list(_problems(here, target, version, commit, built, pushes=to is not None))
    if problems or built is None:
        msg = "\n  ".join([f"{version} is not ready for a release:", *problems])
        hint = f"commit what differs, then build: python3 build.py --target {target}"
        raise CheckError(msg, hint)
    with disk_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in (*built.files, SUMS, receipt.NAME):
            publish.link(dist / name, folder / name)
    if key is not None:  # the files first: a wrong password is known before hours of pushing
        sign_folder(folder, key)
    steps = [
        f"git tag --annotate v{version} {commit}; git push origin v{version}",
        f"upload {folder}/* to the release v{version} of your forge",
    ]
    reference = None
    if key is not None and to is not None and built.image is not None:
        reference = f"{to}@{built.image.digest}"
        # the local tag ends with the image's id: no other image ever gets it
        engine.push(built.image.image_id, reference, built.image.tag.rpartition(":")[2])
        sign_image(reference, folder, key)
        steps.append(f"publish {reference} and the public key")
    log.info(f"wrote  {folder}")
    for step in steps:
        log.info(f"next  {step}")
    found = {"release": version, "target": target, "commit": commit, "folder": str(folder)}
    log.document({**found, "image": reference, "signed": key is not None})
    return 0


def _join(here: Checkout, pushed: Sequence[str], key: str) -> int:
    """Make one name of images for several platforms, and write the files that serve it."""
    images: dict[str, str] = {}
    for name in pushed:
        if not engine.is_published(name):
            raise UsageError(f"--join {name}: not NAME@sha256:…", "--push prints the name")
        labels = engine.labels(name)
        target, version = labels.get(image.TARGET_LABEL), labels.get(image.VERSION_LABEL)
        pinned = here.pins.targets.get(str(target))
        if pinned is None or version != release_name(here.pins, pinned):
            msg = f"{name}: of {target} {version}, which is no release of this checkout"
            raise CheckError(msg, "join the images of the checked-out tag")
        images[str(target)] = name
    models = sorted(name for name, one in here.pins.targets.items() if one.model is not None)
    if not len(pushed) == len(images) == len(here.pins.targets):
        raise UsageError(f"--join: not one image each of {', '.join(here.pins.targets)}")
    release = release_name(here.pins, here.pins.target(files.MAIN))
    joined = engine.join([images[name] for name in models], release)
    every = {**images, **dict.fromkeys([*models, "router"], joined)}
    compose = (here.root / "docker-compose.yml").read_text("utf-8")
    folder = here.root / "dist" / "releases" / release
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.files(here.pins, compose, release, every).items():
            (folder / name).write_text(text, encoding="utf-8")
    sign_folder(folder, key, files.FILES)
    _cosign("sign", key, joined)
    log.info(f"wrote  {folder}")
    log.info(f"next  publish {joined}, and {', '.join(files.FILES)}")
    log.document({"release": release, "folder": str(folder), "image": joined, "signed": True})
    return 0


def _problems(
    here: Checkout, target: str, version: str, commit: str, built: Receipt | None, *, pushes: bool
) -> Iterator[str]:
    """Yield one line for each reason against a release; ``commit`` is "" without a repository."""
    if not commit:
        yield f"{here.root}: no git repository"
        return
    dist = here.root / "dist" / target
    if git.git(here.root, "status", "--porcelain", "--untracked-files=normal").strip():
        yield "the checkout has files that are not committed: git status"
    ref = f"refs/tags/v{version}^{{commit}}"
    code, tagged = git.attempt(here.root, "rev-parse", "--verify", "--quiet", ref)
    if code == 0 and tagged.strip() != commit:
        yield f"tag v{version} is another commit: raise release.counter in pins.yaml"
    text = git.attempt(here.root, "show", "HEAD:CHANGELOG.md")[1]
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", text, re.MULTILINE):
        yield f"CHANGELOG.md has no section ## {version} (YYYY-MM-DD)"
    text = git.attempt(here.root, "show", "HEAD:SECURITY.md")[1]
    if not (found := re.search(r"\S+@\S+\w", text)) or found[0].endswith(".invalid"):
        yield "SECURITY.md has no address for private reports in place of security@example.invalid"
    if built is None or not built.files:
        yield f"no build of {target}"
        return
    yield from receipt.problems(dist)
    tested = any(item.get("stage") == "smoke" for item in built.items)
    if here.pins.target(target).smoke is not None and not tested:
        yield "the build ended before its smoke test"
    if pushes and (built.image is None or built.image.digest is None):
        yield "--push: the last build has no image with a digest (containerd's store)"
    # the build is of this commit, or of one with the same inputs
    again = f"remove {dist / receipt.NAME} and build again"
    if not (made := built.run.commit):
        yield f"the build is of files that were not committed: {again}"
    elif git.attempt(here.root, "diff", "--quiet", made, commit, "--", *inputs(here.pins))[0]:
        yield f"the build is of commit {made[:12]}, whose inputs differ: {again}"


def check_key(key: str | None) -> None:
    """Refuse a missing file, or a key itself; ``env://…`` and ``pkcs11:…`` are names of keys."""
    if key is None or (":" in key and "-----BEGIN" not in key) or Path(key).is_file():
        return
    msg = "--key: no such file (the key itself does not belong on a command line)"
    raise UsageError(msg, "give a file (cosign generate-key-pair), or env://VARIABLE")


def _identity() -> str | None:
    """Return the address of the forge's workflow that runs this and may sign, or None."""
    at = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_WORKFLOW_REF")
    return "/".join(map(str, at)) if "ACTIONS_ID_TOKEN_REQUEST_URL" in os.environ else None


def sign_folder(folder: Path, key: str, names: Sequence[str] = SIGNED) -> None:
    """Sign files of a folder, each into a bundle beside it."""
    for name in names:
        bundle = folder / (name + SUFFIX)
        _cosign("sign-blob", key, "--bundle", bundle, folder / name)
        log.info(f"signed  {bundle.name}")


def sign_image(name: str, folder: Path, key: str) -> None:
    """Sign an image in its registry, and attach a folder's SBOM and the forge's provenance."""
    _cosign("sign", key, name)
    with TemporaryDirectory(prefix="sparkforge-") as work:
        statements = {"cyclonedx": folder / SBOM}
        if os.environ.get("GITHUB_ACTIONS") == "true":
            statements[_PROVENANCE] = Path(work) / "provenance.json"
            try:
                text = files.provenance(folder / receipt.NAME, os.environ)
            except UndefinedError as unset:
                raise MachineError(f"GITHUB_ACTIONS is set: {unset}", "unset it here") from None
            statements[_PROVENANCE].write_text(text)
        for kind, path in statements.items():
            # --replace: a repeated push leaves one statement
            _cosign("attest", key, "--replace", "--type", kind, "--predicate", path, name)
    log.info(f"signed  {name}, with {', '.join(statements)}")


def check_folder(folder: Path, key: str) -> list[str]:
    """Check the signatures in a folder, and its files against the receipt; return their names."""
    built = receipt.load(folder / receipt.NAME)
    if built is None:
        msg = f"{folder}: has no valid {receipt.NAME}"
        raise UsageError(msg, "give the folder of a release, or REGISTRY/NAME@sha256:…")
    files = {*SIGNED, *built.files}
    there = {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }
    there -= {*files, *(name + SUFFIX for name in SIGNED)}
    problems = receipt.problems(folder, built)  # whose hashes are signed themselves
    problems += [f"{name}: not signed" for name in sorted(there)]
    for name in SIGNED:
        try:
            _cosign("verify-blob", key, "--bundle", folder / (name + SUFFIX), folder / name)
        except CheckError as error:
            problems.append(f"{name}: {error.what}")
    if problems:
        msg = f"{folder}: not verified:\n" + "\n".join(problems)
        raise CheckError(msg, "get it from a trusted source, or build it: build.py")
    return sorted(files)


def check_image(name: str, key: str) -> None:
    """Check the signature of an image in its registry, and of the statements on its parts."""
    _cosign("verify", key, name)
    kinds = ("cyclonedx", *([_PROVENANCE] if key.startswith("https://") else ()))
    for part in engine.parts(name):
        for kind in kinds:
            _cosign("verify-attestation", key, "--type", kind, part)
    log.info(f"signed: {name}, with {', '.join(kinds)}")


def _cosign(command: str, key: str, *words: str | os.PathLike[str]) -> None:
    """Run cosign; without its public log, which a key does not need and a forge's token does."""
    # cosign 3 has an option more for that; 2 has one to write bundles as 3 does
    modern = b"--use-signing-config" in call("cosign", "sign-blob", "--help", check=False).stdout
    with TemporaryDirectory(prefix="sparkforge-") as work:
        root = Path(work) / "trusted_root.json"
        root.write_text(_NO_ROOT)
        signer, verifies = ["--key", key], command.startswith("verify")
        if key.startswith("https://"):
            of = ["--certificate-identity", key, "--certificate-oidc-issuer", _ISSUER]
            signer, how = of if verifies else [], [] if verifies else ["--yes"]
        elif verifies:
            how = ["--insecure-ignore-tlog", "--trusted-root", str(root)]
        else:
            how = ["--yes", "--tlog-upload=false", *["--use-signing-config=false"] * modern]
        if command.endswith("-blob") and not modern:
            how.append("--new-bundle-format")
        try:
            call("cosign", command, *signer, *how, *words)
        except CommandError as error:
            remedy = "see cosign's output; a private key needs its password in COSIGN_PASSWORD"
            raise CheckError(f"cosign: {error.what}", remedy) from None
