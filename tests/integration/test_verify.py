"""`build.py verify`: a second, cold build of a small project."""

from __future__ import annotations

import json

from sparkforge.errors import VerifyError
from tests.project import PATCHED, Project
from tests.support import sha256

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
        {"name": project.wheel.name, "first": before, "second": before}
    ]  # fmt: skip
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
    _, err = project.run(*VERIFY, code=VerifyError.exit_code)
    assert "two builds of tiny differ" in err
    assert f"demo/mod.py (packed): offset {at:#x}: 33 0a" in err
    assert "→ 32 0a" in err
    out, _ = project.run(*VERIFY, "--json", code=VerifyError.exit_code)
    document = json.loads(out)
    assert not document["same"]
    assert document["differences"][0]["where"].endswith("demo/mod.py (packed)")


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
    _, err = project.run(*VERIFY, code=VerifyError.exit_code,
                         PYTHONPATH=f"{sitecustomize}:{places}")  # fmt: skip
    assert "demo/mod.py: offset" in err
