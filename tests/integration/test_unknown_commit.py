"""A pin without a commit: shown as unknown, built from release files."""

import json
from pathlib import Path

from sparkforge.pins.pins import load
from tests.integration.moving import NEW, Upstream, with_line
from tests.project import FILES, Project


def unpin(project: Project) -> str:
    """Leave the commit of the project's upstream out; returns it."""
    commit = str(load(project.root / "pins.yaml").upstreams["demo"].commit)
    project.edit_pins(f"    commit: {commit}\n", "")
    return commit


def test_a_build_says_that_the_commit_is_unknown(project: Project) -> None:
    unpin(project)
    assert "demo: commit: unknown" in "".join(project.run("pins", "check"))
    git_alone = ("build", "--target", "tiny", "--until", "sources", "--source", "git")
    assert "git ls-remote https://" in project.run(*git_alone, code=3)[1]
    project.edit_pins("source: release", "source: auto")
    receipt = project.build()
    (source,) = (item for item in receipt["items"] if item["label"] == "source demo")
    assert source["inputs"]["commit"] == "unknown"
    assert source["outputs"]["provider"] == "release"
    sbom = json.loads((project.root / "dist" / "tiny" / "sbom.cdx.json").read_text())
    (wheel,) = (part for part in sbom["components"] if part["name"] == "demo")
    assert "commits" not in wheel["pedigree"]
    said = [item for part in wheel["pedigree"]["ancestors"] for item in part.get("properties", [])]
    assert {"name": "sparkforge:commit", "value": "unknown"} in said


def test_a_release_whose_commit_nobody_knows_lands(upstream: Upstream, tmp_path: Path) -> None:
    text = FILES["demo/mod.py"]
    upstream.series({"First one": {"demo/mod.py": with_line(text, 3, b"ours = 1")}})
    upstream.release({"demo/mod.py": b"new = 0\n" + text}, commit="c0ffeec0f")
    dry = upstream.rebase("demo", "--onto", NEW, "--dry-run")
    landed = upstream.rebase("demo", "--onto", NEW)
    for found in (dry, landed):
        (one,) = (one for one in found["companions"] if "commit of v2.0 is unknown" in one["what"])
        assert "c0ffeec0f" in one["what"]
        assert "git ls-remote https://" in one["mend"]
    demo = load(upstream.root / "pins.yaml").upstreams["demo"]
    assert (demo.tag, demo.version, demo.commit) == ("v2.0", NEW, None)
