"""``build.py doctor``: readings → findings → text or JSON, and an archive for a bug report."""

import getpass
import json
import platform
import re
import shlex
import socket
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from sparkforge import __version__
from sparkforge.build import composing, receipt
from sparkforge.build.options import OutputOptions, command_options
from sparkforge.check.doctor.checks import judge
from sparkforge.check.doctor.machine import Machine, want_of
from sparkforge.core.disk import disk_errors
from sparkforge.core.errors import CheckError
from sparkforge.core.log import log
from sparkforge.core.run import glimpse
from sparkforge.pins.types import MACHINES
from sparkforge.runtime import client
from sparkforge.serving.options import IN_URL, SECRET_NAME
from sparkforge.sources.project import PinsFile, checkout, store_of

_MARKS = {
    "ok": ("32", "✓"),
    "not checked": ("2", "·"),
    "warning": ("33", "!"),
    "error": ("31;1", "✗"),
}


@command_options
class Options:
    """Options of ``doctor``."""

    target: str | None = None
    """target to check for (default: spark on arm64, else cpu)"""
    report: bool = False
    """pack readings, findings and logs into sparkforge-report-TIME.zip for a bug report"""
    pins: PinsFile = None
    store: Path | None = None
    """cache folder (default: $SPARKFORGE_STORE, else ~/.cache/sparkforge)"""
    output: OutputOptions = OutputOptions()


def run(options: Options = Options()) -> int:
    """Judge this machine; CheckError's code if the target cannot work, but 0 with a report."""
    here = checkout(options.pins)
    likely = "spark" if MACHINES.get(platform.machine()) == "linux/arm64" else "cpu"
    want = want_of(here.pins, options.target or likely)
    seen = Machine(here.root, store_of(options.store).root)
    findings = judge(seen, want)
    stops = [finding.name for finding in findings if finding.state == "error"]
    document: dict[str, object] = {
        "target": want.name,
        "ok": not stops,
        "counts": Counter(finding.state for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }
    for finding in sorted(findings, key=lambda finding: list(_MARKS).index(finding.state)):
        colour, mark = _MARKS[finding.state]
        log.info(f"{mark} {finding.state:11}  {finding.name}: {finding.seen}", colour)
        if finding.hint:
            log.info(f"{'':15}hint: {finding.hint}")
    if options.report:
        path = Path(time.strftime("sparkforge-report-%Y%m%d-%H%M%S.zip"))
        files = write(path, seen, want.name, document)
        document["report"] = {"file": str(path), "parts": files}
        log.heading(f"{path}: {', '.join(files)}")
        log.info("secrets, serial numbers and names are masked; check it before you send it")
    log.document(document)
    if options.report or not stops:
        return 0
    msg = f"this machine cannot build or serve target {want.name}: {', '.join(stops)}"
    return log.failure(CheckError(msg, "fix the problems above, then run doctor again"))


# -- the archive -------------------------------------------------------------------------

# without its variables, which may be secrets
_CONTAINER = (
    '{"image": "{{.Image}}", "restarts": {{.RestartCount}}, "state": {{json .State}},'
    ' "host": {{json .HostConfig}}}'
)
_MEMORY = "cd /sys/fs/cgroup && head -v -n 50 memory.current memory.peak memory.max memory.stat"


def write(path: Path, seen: Machine, target: str, findings: object) -> list[str]:
    """Collect, mask, and write the archive; return the names of its files."""
    mask = mask_of(composing.seen(seen.root / ".env"))
    with disk_errors(path), zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in (("readings.json", seen.taken), ("findings.json", findings)):
            archive.writestr(name, masked_json(value, mask))
        for name, text in _parts(seen.root, target):
            archive.writestr(name, mask(text).encode(errors="replace"))
        return archive.namelist()


def _parts(root: Path, target: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of each file; what is missing has the reason as its text."""
    here = shlex.quote(str(root))
    box = f'"$(docker ps -aq --filter label=com.docker.compose.service={target} | head -n 1)"'
    scripts = {
        "checkout.txt": f"cd {here}; echo sparkforge {__version__}; git log -1; git status -s",
        "system.txt": "uname -a; head -v /etc/*-release /sys/class/dmi/id/*_name",
        receipt.NAME: f"cat {here}/dist/{target}/{receipt.NAME}",
        "build.log": f"tail -c 30000000 {here}/build.log",
        "kernel.log": "journalctl -kb -o short-iso"
        " | grep -iE 'nvrm|xid|nvidia|out of memory|oom[-_ ]|hung task|mce:'",
        "container.json": f"docker inspect --format '{_CONTAINER}' {box}",
        "memory.txt": f"docker exec {box} sh -c '{_MEMORY}'",
        # two streams; sorted by the time at the start of each line
        "container.log": f"docker logs --timestamps {box} 2>&1 | sort",
    }
    for name, script in scripts.items():
        seen = glimpse("sh", "-c", script, timeout_s=60.0)
        yield name, f"{seen.out}{seen.err}" or seen.problem


# -- secrets -----------------------------------------------------------------------------

_NAME = rf"[\w.-]*{SECRET_NAME}[\w.-]*"
_PATTERNS = (
    (re.compile(r"-----BEGIN ([A-Z ]+)-----(?:[^\"']*?-----END \1-----|[^\"']*)"), "***"),
    (IN_URL, "***@"),
    (
        re.compile(
            r"\b(hf_|sk-|gh[pousr]_|github_pat_|nvapi-|glpat-|xox[abprs]-)[A-Za-z0-9_-]{16,}"
        ),
        r"\1***",
    ),
    (re.compile(r"(?i)\b(bearer|basic) [A-Za-z0-9+/=._~-]{6,}"), r"\1 ***"),
    # a name and its value in quotes, which may be escaped: "name": "…", 'name': '…', name="…"
    (
        re.compile(rf"(?i)({_NAME}\\*[\"']?\s*[:=,]\s*)(\\*[\"'])(?:(?!\2)(?:\\.|[^\n]))*"),
        r"\1\2***",
    ),
    # name=…, name: …, and --name … with several values
    (re.compile(rf"(?i)({_NAME}\\*[\"']?\s*[:=]\s*)[^\s\"',}}\]\\]+"), r"\1***"),
    (re.compile(rf"(?i)(--{_NAME})(?:[ \t]+(?!-)[^\s\"'\\]+)+"), r"\1 ***"),
    # serial numbers of this device
    (re.compile(r"\bGPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "GPU-***"),
    (re.compile(r"(<(serial|board_id|uuid|pdi)>)[^<]*"), r"\1***"),
    (re.compile(r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", re.I), "xx:xx:xx:xx:xx:xx"),
)


def mask_of(variables: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that masks in a text the values of secrets, and user and machine."""
    secrets = [v.strip() for n, v in variables.items() if re.search(SECRET_NAME, n, re.IGNORECASE)]
    # not the path of a secret's file, nor words that would spoil every text
    kept = re.compile(r"[/~.].*|.{0,2}|true|false|none|null|yes|off", re.IGNORECASE)
    found = {one for one in (*secrets, client.api_key(variables)) if not kept.fullmatch(one)}
    own = dict.fromkeys(sorted(found, key=len, reverse=True), "***")  # one may be part of another
    host = socket.gethostname()
    names = {str(Path.home()): "~", getpass.getuser(): "USER", host: "HOST"}
    names |= {host.partition(".")[0]: "HOST"}
    own |= {name: word for name, word in names.items() if len(name) > 1 and name != "root"}

    def mask(text: str) -> str:
        for one, instead in own.items():  # a short one only as a word
            pattern = re.escape(one)
            whole = rf"(?<![\w.-]){pattern}(?![\w-])"
            text = re.sub(pattern if instead == "***" and len(one) > 5 else whole, instead, text)
        for known, instead in _PATTERNS:
            text = known.sub(instead, text)
        return text

    return mask


def masked_json(value: object, mask: Callable[[str], str]) -> str:
    """Return a document with all texts in it masked."""
    text = json.dumps(value, indent=1, sort_keys=True)
    return re.sub(r'"(?:[^"\\]|\\.)*"', lambda found: json.dumps(mask(json.loads(found[0]))), text)
