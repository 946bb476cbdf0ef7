"""The folder of links that makes work trees importable."""

from pathlib import Path

from sparkforge.maintain import dev


def test_links_are_made_anew(tmp_path: Path) -> None:
    folder, precious = tmp_path / "links", tmp_path / "tree" / "precious.py"
    precious.parent.mkdir()
    precious.write_text("x\n")
    dev.write(folder, {"a": "/x/a", "d/b": "/x/b", "pkg": str(precious.parent)})
    wanted = {"a": "/x/a", "d": "/x/d", "pkg/precious.py": "/x"}
    dev.write(folder, wanted)
    links = (path for path in folder.rglob("*") if path.is_symlink())
    assert {str(path.relative_to(folder)): str(path.readlink()) for path in links} == wanted
    assert precious.read_text() == "x\n"
