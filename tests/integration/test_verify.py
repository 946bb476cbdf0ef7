"""`build.py verify`: a second, cold build of a small project."""

import io
import json
import os
import tarfile
import zipfile
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from sparkforge.build import graph, image, sbom
from sparkforge.build.receipt import SBOM
from sparkforge.build.results import PluginResult, WheelResult
from sparkforge.check import verify
from sparkforge.core import plain
from sparkforge.core.disk import key_of
from sparkforge.core.errors import CheckError, UsageError
from sparkforge.runtime import engine
from sparkforge.runtime.engine import BaseImage
from sparkforge.runtime.servers import SITE_PACKAGES_LABEL
from sparkforge.sources.project import Project as Opened
from sparkforge.sources.project import ProjectOptions
from tests.project import PATCHED, PLATFORM, Project
from tests.results import context_of, item, reached
from tests.support import record_line, sha256

VERIFY = ("verify", "--target", "tiny", "--engine", "none")


def test_rebuild_has_the_same_wheel_and_needs_no_download(
    project: Project,
) -> None:
    project.build()
    before = sha256(project.wheel.read_bytes())
    project.requests()
    out, err = project.run(*VERIFY, "--json")
    found = json.loads(out)
    assert found["same"]
    assert found["results"] == [{"name": project.wheel.name, "first": before, "second": before}]
    assert err.count("series demo") > 0  # it was applied again, not taken from the store
    assert project.requests() == []
    assert list((project.store / "tmp").iterdir()) == []


def test_without_a_build_there_is_nothing_to_verify(project: Project) -> None:
    project.run(*VERIFY, code=UsageError.exit_code)


def test_damaged_and_missing_files_in_dist_are_named(project: Project) -> None:
    project.build()
    wheel = project.wheel
    wheel.chmod(0o644)
    wheel.write_bytes(wheel.read_bytes()[:-1] + b"x")
    (wheel.parent / "SHA256SUMS").unlink()
    out, err = project.run(*VERIFY, "--json", code=CheckError.exit_code)
    assert wheel.name in err
    assert "SHA256SUMS: missing" in err
    document = json.loads(out)
    assert not document["same"]
    assert any(wheel.name in line for line in document["differences"])
    # where diffoscope is installed (a stand-in here), its output follows; it ends with 1 then
    tools = project.root.parent / "tools"
    tools.mkdir()
    (tools / "diffoscope").write_text('#!/bin/sh\necho "diffoscope ${5##*/}"; exit 1\n')
    (tools / "diffoscope").chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    out, _ = project.run(*VERIFY, code=CheckError.exit_code, PATH=path)
    assert f"diffoscope {wheel.name}" in out


# -- an image by itself -------------------------------------------------------------------

SITE = "opt/sparkforge/venv/lib/python3.11/site-packages"
BASE = BaseImage("base", f"sha256:{'b' * 64}")
NOTE = f"{image.SHARE}/{image.NOTE}"
RECORD = f"{SITE}/demo-1.0+spark.3.dist-info/RECORD"


class Link(str):
    """A symbolic link's target."""


@dataclass
class Baked:
    """An image of the small project in an engine, as the Dockerfile would make it."""

    project: Project
    files: dict[str, bytes | Link]
    labels: dict[str, str]

    def exported(self) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            for name, content in self.files.items():
                info = tarfile.TarInfo(name)
                if isinstance(content, Link):
                    info.type, info.linkname = tarfile.SYMTYPE, content
                    archive.addfile(info)
                else:
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
        return out.getvalue()

    def engine(self) -> Any:
        """Return an engine with this image."""
        system, machine = PLATFORM.split("/")
        config = {"Labels": self.labels}
        attrs = {"Config": config, "Id": "sha256:1", "Os": system, "Architecture": machine}
        data = self.exported()
        pieces = [data[at : at + 10_000] for at in range(0, len(data), 10_000)]
        container = SimpleNamespace(export=lambda: iter(pieces), remove=lambda **_: None)
        images = SimpleNamespace(get=lambda _: SimpleNamespace(attrs=attrs))
        containers = SimpleNamespace(create=lambda _: container)
        return SimpleNamespace(client=SimpleNamespace(images=images, containers=containers))

    def problems(self) -> str:
        """Return the problems, one in a line."""
        holder = self.engine()
        found = verify.read(holder, "tiny:1")
        return "\n".join(verify.check(found, context_of("tiny", self.project.root))[1])


@pytest.fixture
def baked(project: Project) -> Baked:
    return bake(project)


def bake(project: Project) -> Baked:
    """Build a project's wheels, and put an image of them together."""
    outputs = {one["label"]: one["outputs"] for one in project.build()["items"]}
    made = plain.load(WheelResult, outputs["wheel demo"])
    plugin = plain.load(PluginResult, outputs.get("plugin"))
    assert made is not None
    context = context_of("tiny", project.root)
    for name in image.RECIPE:
        (project.root / name).parent.mkdir(exist_ok=True)
        (project.root / name).write_text("recipe\n")
    parts: Any = SimpleNamespace(
        wheels={"demo": reached(item(made), made)},
        plugin=None if plugin is None else reached(item(plugin), plugin),
        pack=None,
        house=SimpleNamespace(found=None),
    )
    document = sbom.document(context, parts, BASE)
    note = graph.inputs_of_image(context, BASE)
    labels = {
        **note["image"]["labels"],
        image.KEY_LABEL: key_of(note["image"]),
        image.SBOM_LABEL: sha256(document),
        SITE_PACKAGES_LABEL: f"/{SITE}",
    }
    files: dict[str, bytes | Link] = {
        f"{image.PROGRAMS}/{name.removeprefix('scripts/')}": b"recipe\n"
        for name in image.RECIPE[1:]
    }
    venv = image.VENV
    files |= {f"{venv}/bin/python3": Link("python"), f"{venv}/bin/python3.11": Link("python")}
    files |= {f"{venv}/bin/python": Link("/usr/bin/python3.11"), f"{venv}/lib64": Link("lib")}
    files[f"{venv}/pyvenv.cfg"] = b"home = /usr/bin\ninclude-system-site-packages = false\n"
    files |= {f"{image.SHARE}/{SBOM}": document, NOTE: json.dumps(note, indent=1).encode()}
    for path in project.wheel.parent.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            files |= {f"{SITE}/{name}": wheel.read(name) for name in wheel.namelist()}
    return Baked(project, files, labels)


def test_an_image_of_this_checkout_matches(baked: Baked, monkeypatch: pytest.MonkeyPatch) -> None:
    assert baked.problems() == ""
    monkeypatch.setattr(engine, "connect", baked.engine)
    paths = ProjectOptions(pins=baked.project.root / "pins.yaml", store=baked.project.store)
    opened = Opened.open(paths)
    assert verify._image("tiny:1", opened, published=False) == 0
    baked.files[f"{SITE}/demo/mod.py"] = b"evil"
    assert verify._image("tiny:1", opened, published=False) == CheckError.exit_code


def test_changed_patches_and_pins_are_named(baked: Baked) -> None:
    baked.project.patch({"demo/mod.py": PATCHED + b"more = 1\n"})
    baked.project.edit_pins("counter: 3", "counter: 4")
    said = baked.problems()
    assert "wheel demo.series.demo: " in said
    assert "image.release: 1.0-spark.3 → 1.0-spark.4" in said


@pytest.mark.parametrize(
    ("path", "data", "said"),
    [
        (f"{SITE}/demo/mod.py", b"evil\n", f"{SITE}/demo/mod.py: "),
        (f"{SITE}/demo/extra.py", b"evil\n", f"{SITE}/demo/extra.py: "),
        (f"{image.SHARE}/{SBOM}", b'{"components": []}', image.SBOM_LABEL),
        ("opt/sparkforge", Link("/srv"), "opt/sparkforge: must be a folder"),
        (f"srv/../{image.PROGRAMS}/entrypoint.py", b"evil", "bin/entrypoint.py: "),
        (f"{image.SHARE}/profile.json", b"{}", "profile.json: "),
    ],
)
def test_a_changed_or_added_file_is_named(
    baked: Baked, path: str, data: bytes | Link, said: str
) -> None:
    baked.files[path] = data
    assert said in baked.problems()


def test_a_file_changed_with_its_record_differs_from_the_wheel(baked: Baked) -> None:
    data, record = baked.files[f"{SITE}/demo/mod.py"], baked.files[RECORD]
    assert isinstance(data, bytes) and isinstance(record, bytes)
    old, new = record_line("demo/mod.py", data), record_line("demo/mod.py", b"evil\n")
    baked.files[f"{SITE}/demo/mod.py"] = b"evil\n"
    baked.files[RECORD] = record.decode().replace(",".join(old), ",".join(new)).encode()
    said = baked.problems()
    assert f"{SITE}/demo/mod.py: differs from {baked.project.wheel}" in said


def test_a_missing_file_and_changed_labels_are_named(baked: Baked) -> None:
    del baked.files[f"{SITE}/demo/__init__.py"]
    baked.labels["org.sparkforge.demo.commit"] = "0" * 40
    baked.labels[SITE_PACKAGES_LABEL] = "/srv"
    note = baked.files[NOTE]
    assert isinstance(note, bytes)
    baked.files[NOTE] = note.replace(b'"python": "3.11"', b'"python": "3.12"')
    said = baked.problems()
    assert f"{SITE}/demo/__init__.py: " in said
    for label in ("org.sparkforge.demo.commit", SITE_PACKAGES_LABEL, image.KEY_LABEL):
        assert f"label {label}: " in said
    assert "image.target.python: 3.12 → 3.11" in said


@pytest.mark.parametrize("path", [NOTE, f"{SITE}/x-1.dist-info/RECORD"])
def test_a_malformed_document_in_an_image_is_one_error(baked: Baked, path: str) -> None:
    baked.files[path] = b"\xff,sha256=aa,1\n"
    with pytest.raises(CheckError):
        baked.problems()


def test_verify_needs_an_image_or_a_target(project: Project) -> None:
    project.run("verify", code=UsageError.exit_code)
