"""``build.py doctor``: readings → findings → text or JSON, and an archive for a bug report."""

import getpass
import json
import re
import socket
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sparkforge import __version__
from sparkforge.build import composing
from sparkforge.build.options import CheckoutOptions, command_options, usual_target
from sparkforge.check.doctor.checks import Finding, Machine, judge, want_of
from sparkforge.core.disk import disk_errors, read_yaml
from sparkforge.core.errors import CheckError
from sparkforge.core.log import log
from sparkforge.core.run import glimpse
from sparkforge.runtime import client
from sparkforge.serving.options import IN_URL, SECRET_NAME
from sparkforge.sources.project import Checkout, checkout, store_of

_MARKS = {"ok": ("32", "✓"), "not checked": ("2", "·"), "warning": ("33", "!")}
_MARKS["error"] = "31;1", "✗"


@command_options
class Options(CheckoutOptions):
    target: str | None = None
    """target to check for (default: spark on arm64, else cpu)"""
    report: bool = False
    """pack readings, findings and logs into sparkforge-report-TIME.zip for a bug report"""
    store: Path | None = None
    """cache folder (default: $SPARKFORGE_STORE, else ~/.cache/sparkforge)"""


def run(options: Options = Options()) -> int:
    """Judge this machine; CheckError's code if the target cannot work, but 0 with a report."""
    here, target = checkout(options.pins), options.target or usual_target()
    seen, found = examined(here, target, options.store)
    log.document(asdict(found) | ({"report": write(seen, found)} if options.report else {}))
    if options.report or found.ok:
        return 0
    stops = ", ".join(one.name for one in found.findings if one.state == "error")
    msg = f"this machine cannot build or serve target {target}: {stops}"
    return log.failure(CheckError(msg, "fix the problems above, then run doctor again"))


@dataclass(frozen=True)
class Examined:
    """What was found on a machine; ``ok``: nothing that stops the target."""

    target: str
    ok: bool
    findings: Sequence[Finding]


def examined(here: Checkout, target: str, store: Path | None) -> tuple[Machine, Examined]:
    """Judge this machine, and print the findings; returns its readings, and them."""
    want = want_of(here.pins, target)
    seen = Machine(here.root, store_of(store).root)
    findings = judge(seen, want)
    for finding in sorted(findings, key=lambda finding: list(_MARKS).index(finding.state)):
        colour, mark = _MARKS[finding.state]
        log.info(f"{mark} {finding.state:11}  {finding.name}: {finding.seen}", colour)
        if finding.hint:
            log.info(f"{'':15}hint: {finding.hint}")
    return seen, Examined(target, all(one.state != "error" for one in findings), findings)


def write(seen: Machine, found: Examined, **more: object) -> dict[str, object]:
    """Collect, mask, and write the archive; ``more``: documents by name. Returns what is where."""
    path = Path(time.strftime("sparkforge-report-%Y%m%d-%H%M%S.zip"))
    documents = {"readings": seen.taken, "findings": asdict(found), **more}
    scripts = read_yaml(Path(__file__).with_name("archive.yaml"))
    mask = mask_of(composing.seen(seen.root / ".env"))
    with disk_errors(path), zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in documents.items():
            archive.writestr(f"{name}.json", masked_json(value, mask))
        for name, script in scripts.items():
            words = ("sh", "-c", script, "sh", str(seen.root), found.target, __version__)
            output = glimpse(*words, timeout_s=60.0)
            text = f"{output.out}{output.err}" or output.problem  # why a part is missing
            archive.writestr(name, mask(text).encode(errors="replace"))
        files = archive.namelist()
    log.heading(f"{path}: {', '.join(files)}")
    log.info("secrets, serial numbers and names are masked; check it before you send it")
    return {"file": str(path), "parts": files}


_MASKS = Path(__file__).with_name("masks.yaml")


def mask_of(variables: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that masks in a text the values of secrets, and user and machine."""
    secrets = [v.strip() for n, v in variables.items() if re.search(SECRET_NAME, n, re.IGNORECASE)]
    # not the path of a secret's file, nor words that would spoil every text
    kept = re.compile(r"[/~.].*|.{0,2}|true|false|none|null|yes|off", re.IGNORECASE)
    found = {one for one in (*secrets, client.api_key(variables)) if not kept.fullmatch(one)}
    own = dict.fromkeys(sorted(found, key=len, reverse=True), "***")  # one may be part of another
    host = socket.gethostname()
    names = {str(Path.home()): "~", getpass.getuser(): "USER"}
    names |= dict.fromkeys((host, host.partition(".")[0]), "HOST")
    own |= {name: word for name, word in names.items() if len(name) > 1 and name != "root"}

    known = {"NAME": rf"{SECRET_NAME}[\w.-]{{0,60}}", "URL": IN_URL.pattern}
    listed = read_yaml(_MASKS)
    patterns = [(re.sub("NAME|URL", lambda at: known[at[0]], one), to) for one, to in listed]

    def mask(text: str) -> str:
        for one, instead in own.items():  # a short one only as a word
            pattern = re.escape(one)
            whole = rf"(?<![\w.-]){pattern}(?![\w-])"
            text = re.sub(pattern if instead == "***" and len(one) > 5 else whole, instead, text)
        for pattern, instead in patterns:
            text = re.sub(pattern, instead, text)
        return text

    return mask


def masked_json(value: object, mask: Callable[[str], str]) -> str:
    """Return a document with all texts in it masked."""
    text = json.dumps(value, indent=1, sort_keys=True)
    return re.sub(r'"(?:[^"\\]|\\.)*"', lambda found: json.dumps(mask(json.loads(found[0]))), text)
