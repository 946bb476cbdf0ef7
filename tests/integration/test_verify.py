"""`build.py verify`: a second, cold build of a small project."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import struct
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build import graph, image, imagenote, sbom
from sparkforge.build.receipt import SBOM
from sparkforge.build.results import PluginResult, WheelResult
from sparkforge.core import typed
from sparkforge.core.errors import ImageError, UsageError, VerifyError
from sparkforge.core.hashing import key_of
from sparkforge.pins import pins
from sparkforge.runtime.engine import BaseImage
from sparkforge.runtime.servers import SITE_PACKAGES_LABEL
from tests.images import environment, layer, link, make_image
from tests.project import PATCH, PATCHED, PLATFORM, Project
from tests.results import context_of
from tests.support import record_line, sha256

VERIFY = ("verify", "--target", "tiny", "--engine", "none")


def test_a_second_cold_build_gives_the_same_wheel_and_asks_for_no_download(
    project: Project,
) -> None:
    project.build()
    before = sha256(project.wheel.read_bytes())
    project.requests()
    out, err = project.run(*VERIFY, "--json")
    found = json.loads(out)
    assert found["same"]
    assert found["results"] == [
        {"name": project.wheel.name, "first": f"sha256:{before}", "second": f"sha256:{before}"}
    ]
    assert err.count("series demo") > 0  # it was applied again, not taken from the store
    assert project.requests() == []
    assert list((project.store / "tmp").iterdir()) == []


def test_without_a_first_build_it_makes_both(project: Project) -> None:
    out, _ = project.run(*VERIFY)
    assert "the same: demo-1.0+spark.3-py3-none-any.whl" in out


def test_a_wheel_with_another_byte_is_named_with_offset_and_values(project: Project) -> None:
    project.build()
    (wheel,) = (project.store / "artefacts" / "wheels").glob("*/*.whl")
    data = wheel.read_bytes()
    at = data.index(PATCHED) + PATCHED.index(b"line_20 = 2") + len("line_20 = ")
    wheel.chmod(0o644)
    wheel.write_bytes(data[:at] + b"3" + data[at + 1 :])
    # as code that was mended since has made and recorded it
    record = wheel.parent / "artefact.json"
    meta = json.loads(record.read_text())
    meta["outputs"]["sha256"] = sha256(wheel.read_bytes())
    del meta["seal"]
    record.write_text(json.dumps({**meta, "seal": key_of(meta)}))
    _, err = project.run(*VERIFY, code=VerifyError.exit_code)
    assert "two builds of tiny differ" in err
    assert "is old or damaged: build.py build --target tiny" in err
    assert f"demo/mod.py (packed): offset {at:#x}: 33 0a" in err
    assert "→ 32 0a" in err
    out, _ = project.run(*VERIFY, "--json", code=VerifyError.exit_code)
    document = json.loads(out)
    assert not document["same"]
    assert document["differences"][0]["where"].endswith("demo/mod.py (packed)")
    # where diffoscope is installed (a stand-in here), its output follows; it ends with 1 then
    tools = project.root.parent / "tools"
    tools.mkdir()
    (tools / "diffoscope").write_text('#!/bin/sh\necho "diffoscope $1 $2 ${3##*/}"; exit 1\n')
    (tools / "diffoscope").chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    out, _ = project.run(*VERIFY, code=VerifyError.exit_code, PATH=path)
    assert f"diffoscope --text - {wheel.name}" in out


def test_a_build_that_reads_the_clock_is_found_out(project: Project) -> None:
    # a stand-in for any step that is not a function of its inputs
    project.build()
    sitecustomize = project.root.parent / "site"
    sitecustomize.mkdir()
    (sitecustomize / "sitecustomize.py").write_text(
        "import sys, time\n"
        "from importlib.abc import MetaPathFinder\n"
        "class Finder(MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'sparkforge.wheels.overlay':\n"
        "            from sparkforge.wheels import archive\n"
        "            add = archive.Writer.add\n"
        "            def stamped(self, name, data, **more):\n"
        "                if name == 'demo/mod.py':\n"
        "                    data += b'# %d\\n' % time.time_ns()\n"
        "                add(self, name, data, **more)\n"
        "            archive.Writer.add = stamped\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    places = project.env()["PYTHONPATH"]
    _, err = project.run(
        *VERIFY, code=VerifyError.exit_code, PYTHONPATH=f"{sitecustomize}:{places}"
    )
    assert "demo/mod.py: offset" in err


# -- an image by itself -------------------------------------------------------------------

SITE = "opt/sparkforge/venv/lib/python3.11/site-packages"
BASE = BaseImage("base", f"sha256:{'b' * 64}")
# names and ELF's numbers: of this machine's processor, and of the other kind
HERE, FOREIGN = sorted([("amd64", 62), ("arm64", 183)], key=lambda one: one[0] not in PLATFORM)
NOTE = f"{image.SHARE}/{imagenote.NAME}"
Files = dict[str, Any]


def elf(processor: tuple[str, int]) -> bytes:
    """Return the head of a library for a processor: 64 bits, little end first."""
    return b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HH", 3, processor[1])


@dataclass
class Baked:
    """An image of the small project, put together as the Dockerfile would."""

    project: Project
    files: Files
    labels: dict[str, str]

    def verify(self, *words: str, code: int = 0, how: str = "zstd") -> tuple[str, str]:
        path = self.project.root.parent / "image.tar"
        make_image(path, [layer(self.files)], self.labels, how=how, platform=PLATFORM)
        return self.project.run("verify", str(path), *words, code=code)

    def refused(self) -> str:
        return self.verify(code=VerifyError.exit_code)[1]


@pytest.fixture
def baked(project: Project) -> Baked:
    return bake(project)


def bake(project: Project) -> Baked:
    """Build a project's wheels, and put an image of them together."""
    outputs = {item["label"]: item["outputs"] for item in project.build()["items"]}
    made = typed.load(WheelResult, outputs["wheel demo"])
    plugin = typed.load(PluginResult, outputs.get("plugin"))
    assert made is not None
    context = context_of("tiny", project.root)
    for name in image.RECIPE:
        (project.root / name).parent.mkdir(exist_ok=True)
        (project.root / name).write_text("recipe\n")
    bill = sbom.document(context, {"demo": made}, plugin, base=BASE)
    note = graph.note_of(context, BASE)
    labels = {
        **note.image["labels"],
        image.KEY_LABEL: key_of(note.image),
        image.SBOM_LABEL: sha256(bill),
        SITE_PACKAGES_LABEL: f"/{SITE}",
    }
    ours = {
        f"{image.PROGRAMS}/{name.removeprefix('scripts/')}": b"recipe\n"
        for name in image.RECIPE[1:]
    }
    files: Files = {**ours, **environment(), f"{image.SHARE}/{SBOM}": bill, NOTE: note.dumps()}
    for path in project.wheel.parent.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            files |= {f"{SITE}/{name}": wheel.read(name) for name in wheel.namelist()}
    return Baked(project, files, labels)


def test_an_image_says_what_is_in_it_and_that_this_checkout_makes_it(baked: Baked) -> None:
    baked.files["usr/lib/ours.so"] = elf(HERE)
    baked.files["usr/lib/gpu.cubin"] = elf(("cuda", 190))
    out, _ = baked.verify()
    assert "1 programs and libraries" in out
    commit = str(pins.load(baked.project.root / "pins.yaml").upstream("demo").commit)
    assert f"demo v1.0  commit {commit[:12]}" in out
    assert "1 patched files" in out
    assert "1 wheels in the store" in out
    assert "it matches this checkout" in out
    found = json.loads(baked.verify("--json", how="plain")[0])
    assert found["matches"]
    assert found["contents"]["demo"]["commit"] == commit
    assert found["base"] == BASE.digest


def test_a_library_of_another_machine_may_lie_where_its_package_says_so(baked: Baked) -> None:
    triplet = {"amd64": "x86_64", "arm64": "aarch64"}[FOREIGN[0]] + "-unknown-linux-gnu"
    baked.files[f"{SITE}/stubs/{triplet}/lib.so"] = elf(FOREIGN)
    assert f"for {FOREIGN[0]}" not in baked.refused()  # refused as in no distribution's RECORD
    baked.files[f"usr/lib/{triplet}/lib.so"] = elf(FOREIGN)
    assert f"usr/lib/{triplet}/lib.so: for {FOREIGN[0]}, not {HERE[0]}" in baked.refused()


def test_a_file_that_somebody_added_to_our_wheel_s_record_is_told(baked: Baked) -> None:
    baked.files[f"{SITE}/demo/extra.py"] = b"evil"
    record = f"{SITE}/demo-1.0+spark.3.dist-info/RECORD"
    plain = baked.files[record]
    baked.files[record] = plain + b"demo/extra.py,,\n"
    assert "extra.py: differs from demo-1.0+spark.3.dist-info/RECORD" in baked.refused()
    stated = base64.urlsafe_b64encode(hashlib.sha256(b"evil").digest()).rstrip(b"=")
    baked.files[record] = plain + b"demo/extra.py,sha256=%s,4\n" % stated
    assert "demo/extra.py: not in the wheel in the store" in baked.refused()


def test_a_changed_patch_is_told_from_the_image_alone(baked: Baked) -> None:
    baked.project.patch({"demo/mod.py": PATCHED + b"more = 1\n"})
    said = baked.refused()
    assert "wheel demo: series.demo: " in said
    assert f"{SITE}/demo/mod.py: differs from the result of {PATCH}" in said


def test_changed_pins_are_told(baked: Baked) -> None:
    baked.project.edit_pins("counter: 3", "counter: 4")
    said = baked.refused()
    assert "image: release: 1.0-spark.3 → 1.0-spark.4" in said


@pytest.mark.parametrize(
    ("path", "data", "said"),
    [
        (f"{SITE}/demo/mod.py", b"evil\n", f"{SITE}/demo/mod.py: differs from "),
        (f"{SITE}/demo/extra.py", b"evil\n", "extra.py: in no distribution's RECORD"),
        (f"{SITE}/sitecustomize.py", b"evil\n", "sitecustomize.py: in no distribution's RECORD"),
        (f"{image.SHARE}/{SBOM}", b'{"components": []}', f"{SBOM}: differs from the label"),
        (f"{SITE}/other-1.0.dist-info/RECORD", b"", "other: installed, not in"),
        (f"{SITE}/evil", link("/srv", tarfile.SYMTYPE), "site-packages/evil: in no distribution"),
        ("opt/sparkforge", link("/srv", tarfile.SYMTYPE), "opt/sparkforge: must be a folder"),
        (
            "srv/../opt/sparkforge/bin/entrypoint.py",
            b"evil",
            "entrypoint.py: differs from the checkout",
        ),
        (f"{image.PROGRAMS}/json.py", b"evil", "bin/json.py: differs from the checkout"),
        (f"{image.SHARE}/profile.json", b"{}", "profile.json: differs from the profile of tiny"),
        ("usr/lib/a.so", elf(FOREIGN), f"usr/lib/a.so: for {FOREIGN[0]}, not {HERE[0]}"),
    ],
)
def test_a_changed_or_added_file_is_told(baked: Baked, path: str, data: bytes, said: str) -> None:
    baked.files[path] = data
    assert said in baked.refused()


def test_a_file_and_its_record_changed_together_are_told_by_patch_and_store(baked: Baked) -> None:
    record = f"{SITE}/demo-1.0+spark.3.dist-info/RECORD"
    for name, why in (
        ("demo/mod.py", f"differs from the result of {PATCH}"),
        ("demo/__init__.py", "differs from the wheel in the store"),
    ):
        kept = dict(baked.files)
        old = record_line(name, baked.files[f"{SITE}/{name}"])
        new = record_line(name, b"evil\n")
        baked.files[f"{SITE}/{name}"] = b"evil\n"
        text = baked.files[record].decode().replace(",".join(old), ",".join(new))
        assert new[1] in text
        baked.files[record] = text.encode()
        said = baked.refused()
        assert f"{name}: {why}" in said
        assert "RECORD says" not in said  # it agrees with the file
        baked.files = kept


def test_a_missing_file_a_changed_label_and_a_forged_note_are_told(baked: Baked) -> None:
    del baked.files[f"{SITE}/demo/__init__.py"]
    baked.labels["org.sparkforge.demo.commit"] = "0" * 40
    baked.labels[SITE_PACKAGES_LABEL] = "/srv"
    note = baked.files[NOTE]
    assert note.count(b'"epoch"') == 2
    baked.files[NOTE] = note.replace(b'"python": "3.11"', b'"python": "3.12"')
    said = baked.refused()
    assert f"{SITE}/demo/__init__.py: missing, but" in said
    assert "label org.sparkforge.demo.commit: differs from inputs.json" in said
    assert f"label {SITE_PACKAGES_LABEL}: must be /{SITE}" in said
    assert "label org.sparkforge.key: does not match inputs.json" in said
    assert "wheelhouse: its key differs" in said
    made = json.loads(note)
    made["trial"]["seed"] = 1
    baked.files[NOTE] = json.dumps(made).encode()
    assert "preflight checkpoint: its key differs" in baked.refused()


@pytest.mark.parametrize(
    ("path", "data"),
    [
        (NOTE, b"words"),
        (NOTE, b"[]"),
        (NOTE, b'{"image": {}}'),
        (NOTE, b'{"items": {"image": {}}}'),
        (f"{image.SHARE}/{SBOM}", b'{"components": [{}]}'),
        (f"{SITE}/x-1.dist-info/RECORD", b"a\n"),
        (f"{SITE}/x-1.dist-info/RECORD", b"../../../../../../../../x,sha256=aa,1\n"),
        (f"{SITE}/x-1.dist-info/RECORD", b"\xff,sha256=aa,1\n"),
    ],
)
def test_notes_that_no_build_writes_are_one_clear_error(
    baked: Baked, path: str, data: bytes
) -> None:
    baked.files[path] = data
    assert (
        f"{path.removeprefix(f'{image.SHARE}/')}: not in the form that a build writes"
        in baked.refused()
    )


def test_an_image_of_others_is_one_clear_error(project: Project, tmp_path: Path) -> None:
    path = make_image(tmp_path / "i.tar", [layer({"a": b""})])
    _, err = project.run("verify", str(path), code=ImageError.exit_code)
    assert "not built by sparkforge" in err
    _, err = project.run("verify", code=UsageError.exit_code)
    assert "nothing to verify" in err
    receipt = tmp_path / "receipt.json"
    receipt.write_text('{"items": []}')
    _, err = project.run("verify", str(receipt), code=UsageError.exit_code)
    assert "not the receipt of an image build" in err
    item = {"stage": "image", "label": "image", "key": "", "inputs": {}}
    other = project.build() | {"items": [{**item, "outputs": {"image_id": "sha256:1"}}]}
    receipt.write_text(json.dumps(other))
    _, err = project.run("verify", str(receipt), code=UsageError.exit_code)
    assert "another version of sparkforge" in err
