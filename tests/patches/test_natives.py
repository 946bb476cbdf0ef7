"""What pins.yaml says of vLLM's native files, held against the includes of their sources."""

import re
from pathlib import Path

import pytest

from sparkforge.pins import pins
from sparkforge.pins.types import Native
from tests.patches import trees
from tests.patches.checkout import ROOT

NATIVES = {
    one.target: one
    for one in pins.load(ROOT / "pins.yaml").upstream("vllm").compile.natives
    if not one.blocked
}
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@pytest.fixture(scope="module")
def csrc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "tree"
    return trees.tree("vllm", folder, patched=True, only=("csrc",)) / "csrc"


def sources(native: Native, csrc: Path) -> list[Path]:
    """Return the files that pins.yaml names, of folders all that a CUDA or C++ compiler reads."""
    named = [csrc.parent / name for name in native.sources if not name.endswith("/")]
    folders = [csrc.parent / name for name in native.sources if name.endswith("/")]
    named += [
        path
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".cu", ".cpp")
    ]
    return [path for path in named if native.made_from(name_of(path, csrc))]


def name_of(path: Path, csrc: Path) -> str:
    return path.relative_to(csrc.parent).as_posix()


def included(path: Path, csrc: Path, seen: set[Path]) -> None:
    """Add what a file includes of the repository, and what that includes."""
    for name in _INCLUDE.findall(path.read_text(encoding="utf-8")):
        for candidate in (path.parent / name, csrc / name):
            found = candidate.resolve()
            if found.is_file() and found not in seen:
                seen.add(found)
                included(found, csrc, seen)


@pytest.mark.parametrize("target", sorted(NATIVES))
def test_a_native_is_made_of_every_file_that_its_sources_include(target: str, csrc: Path) -> None:
    native, seen = NATIVES[target], set[Path]()
    ours = sources(native, csrc)
    assert ours, f"{target}: pins.yaml names no source that vLLM has"
    for path in ours:
        included(path, csrc, seen)
    names = sorted(name_of(path, csrc) for path in seen)
    assert [name for name in names if not native.made_from(name)] == []
