"""Image archives: what their files are, damage found out, and where two of them differ."""

from __future__ import annotations

import random
import tarfile
from pathlib import Path
from typing import Any

import pytest

from sparkforge.core.errors import ImageError, VerifyError
from sparkforge.inspect.verify import ociarchive
from tests.images import layer, link, make_image
from tests.support import sha256


def contents(path: Path) -> dict[str, bytes | None]:
    with ociarchive.opened(path) as image:
        found = ociarchive.files(image, lambda name: True)
    plain = {name: entry for name, entry in found.items() if "link" not in entry.sha256}
    assert all(sha256(entry.data or b"") == entry.sha256 for entry in plain.values())
    return {name: entry.data for name, entry in found.items()}


@pytest.mark.parametrize("how", ["zstd", "gzip", "plain"])
def test_later_layers_replace_remove_and_link_files(tmp_path: Path, how: str) -> None:
    one = layer(
        {
            "etc/a": b"old",
            "etc/b": b"gone",
            "var/log/x": b"1",
            "var/log/deep/y": b"2",
            "bin/tool": b"tool",
            "opt/c": b"c",
            "lib/is-a-file": b"f",
            "usr/folder/x": b"hidden",
        }
    )
    two = layer(
        {
            "./etc/a": b"new",
            "etc/.wh.b": b"",
            "var/.wh.log": b"",
            "var/log/z": b"3",
            "bin/same": link("bin/tool"),
            "opt/.wh..wh..opq": b"",
            "opt/d": b"d",
            "lib/is-a-file": link("elsewhere", tarfile.SYMTYPE),
            "srv/../etc/./e": b"e",
            "usr/folder": link("/elsewhere", tarfile.SYMTYPE),
        }
    )
    assert contents(make_image(tmp_path / "i.tar", [one, two], how=how)) == {
        "etc/a": b"new",
        "var/log/z": b"3",
        "bin/tool": b"tool",
        "bin/same": b"tool",
        "opt/d": b"d",
        "etc/e": b"e",
        "lib/is-a-file": None,
        "usr/folder": None,
    }


Members = list[tuple[str, bytes | tarfile.TarInfo]]


def places(tmp_path: Path, *layers: Members) -> set[str]:
    return set(contents(make_image(tmp_path / "i.tar", [layer(one) for one in layers])))


FOLDER, LINK = link("", tarfile.DIRTYPE), link("/evil", tarfile.SYMTYPE)


@pytest.mark.parametrize(
    ("members", "left"),
    [
        # a link or file replaces the folder that its own layer has, and a folder these
        ([("a/b/c", b""), ("a/b", LINK)], {"a/b"}),
        ([("a/b/c", b""), ("a", b"")], {"a"}),
        ([("a/b/c", b""), ("a", FOLDER)], {"a/b/c"}),
        ([("a", LINK), ("a", FOLDER), ("a/b", b"")], {"a/b"}),
        ([("a", b""), ("a", FOLDER), ("a/b", b"")], {"a/b"}),
        # what follows a link lies behind it, and so do its whiteouts
        ([("x", link("a", tarfile.SYMTYPE)), ("x/b", b"")], {"x", "a/b"}),
        ([("d/x", link("../a/./b", tarfile.SYMTYPE)), ("d/x/c", b"")], {"d/x", "a/b/c"}),
        (
            [("x", link("/a", tarfile.SYMTYPE)), ("y", link("x", tarfile.SYMTYPE)), ("y/b", b"")],
            {"x", "y", "a/b"},
        ),
        ([("x", link("../../a", tarfile.SYMTYPE)), ("x/../x/b", b"")], {"x", "a/b"}),
        ([("x", link("a", tarfile.SYMTYPE)), ("a/f", b""), ("b", link("x/f"))], {"x", "a/f", "b"}),
        # a whiteout hides earlier layers only, and no name leads above its folder
        ([("a/b", b""), ("a/.wh.b", b""), ("a/.wh..wh..opq", b"")], {"a/b"}),
        ([(".wh...", b""), ("a/.wh...", b""), ("b", b"")], {"b"}),
    ],
)
def test_members_of_one_layer_lie_where_engines_put_them(
    tmp_path: Path, members: Members, left: set[str]
) -> None:
    assert places(tmp_path, members) == left
    # the same over an earlier layer's folders
    assert places(tmp_path, [("a/old", b"")], [("a/.wh.old", b""), *members]) == left


@pytest.mark.parametrize("lower", [link("a", tarfile.SYMTYPE), b"file"])
def test_a_later_layer_replaces_hides_or_is_refused(tmp_path: Path, lower: Any) -> None:
    base = [("a/b", b""), ("x", lower)]
    assert places(tmp_path, base, [("x", FOLDER), ("x/b", b"")]) == {"a/b", "x/b"}
    assert places(tmp_path, base, [(".wh.x", b""), ("x/b", b"")]) == {"a/b", "x/b"}
    assert places(tmp_path, base, [(".wh..wh..opq", b""), ("x/b", b"")]) == {"x/b"}
    assert places(tmp_path, base, [("a", LINK)]) == {"a", "x"}
    for name in ("x/b", "x/.wh.b", "x/.wh..wh..opq", "x/y/z", "./q/../x/b"):
        with pytest.raises(VerifyError, match="is below x, which is no folder"):
            places(tmp_path, base, [(name, b"")])
    with pytest.raises(VerifyError, match="is below x, which is no folder"):
        places(tmp_path, base, [("c", link("x/b"))])


def test_links_in_a_circle_are_one_clear_error(tmp_path: Path) -> None:
    circle: Members = [
        ("x", link("y", tarfile.SYMTYPE)),
        ("y", link("x", tarfile.SYMTYPE)),
        ("x/a", b""),
    ]
    with pytest.raises(VerifyError, match="is no folder"):
        places(tmp_path, circle)


def test_gits_name_of_a_file_is_gits(tmp_path: Path) -> None:
    with ociarchive.opened(make_image(tmp_path / "i.tar", [layer({"a": b"x = 1\n"})])) as image:
        entry = ociarchive.files(image, lambda name: False)["a"]
    assert entry.git_blob == "7d4290a117a4ddcc11daae7ea675841033830c8f"  # git hash-object
    assert entry.data is None


@pytest.mark.parametrize("how", ["zstd", "plain"])
def test_a_changed_byte_of_a_layer_is_found_out(tmp_path: Path, how: str) -> None:
    noise = random.Random(1).randbytes(3000)  # which zstd stores as it is
    path = make_image(tmp_path / "i.tar", [layer({"a": noise})], how=how)
    data = bytearray(path.read_bytes())
    data[data.index(noise) + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(ImageError, match=r"does not match its digest|cannot be read"):
        contents(path)


def test_a_changed_configuration_is_found_out(tmp_path: Path) -> None:
    path = make_image(tmp_path / "i.tar", [], {"who": "me"})
    path.write_bytes(path.read_bytes().replace(b'"who": "me"', b'"who": "ye"'))
    with pytest.raises(ImageError, match="unexpected content"):
        contents(path)


def test_what_is_no_image_archive_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("words")
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    for name in ("text", "empty.tar", "absent"):
        with pytest.raises(ImageError, match=r"not an image archive|has no index.json"):
            contents(tmp_path / name)


@pytest.mark.parametrize(
    "index",
    [
        b"words",
        b"\xff\xfe\0",
        b"[]",
        b"{}",
        b'{"manifests": "x"}',
        b'{"manifests": [1]}',
        b'{"manifests": [{}]}',
        b'{"manifests": [{"digest": 3}]}',
        b"[" * 100_000,
        b'{"manifests": [{"digest": "sha256:0", "platform": null}]}',
    ],
)
def test_an_index_of_another_shape_is_one_clear_error(tmp_path: Path, index: bytes) -> None:
    (tmp_path / "i.tar").write_bytes(layer({"index.json": index}))
    with pytest.raises(ImageError, match="invalid image documents"):
        contents(tmp_path / "i.tar")


@pytest.mark.parametrize(
    "config",
    [{"config": {"Labels": ["x"]}}, {"config": {"Labels": {"x": 3}}}, {"config": 1}],
)
def test_a_configuration_of_another_shape_is_one_clear_error(tmp_path: Path, config: Any) -> None:
    with pytest.raises(ImageError, match="invalid image documents"):
        contents(make_image(tmp_path / "i.tar", [], **config))


def test_an_archive_that_was_cut_short_is_one_clear_error(tmp_path: Path) -> None:
    path = make_image(tmp_path / "i.tar", [layer({"a": b"1"})])
    for length in (1000, 1600, 2100):
        (tmp_path / "cut.tar").write_bytes(path.read_bytes()[:length])
        with pytest.raises(ImageError, match=r"cannot be read|has no|invalid image documents"):
            contents(tmp_path / "cut.tar")


def test_an_attestation_beside_the_image_is_left_aside(tmp_path: Path) -> None:
    beside = [{"digest": f"sha256:{'0' * 64}", "platform": {"os": "unknown"}}]
    path = make_image(tmp_path / "i.tar", [layer({"a": b"1"})], more=beside)
    assert contents(path) == {"a": b"1"}


def told(tmp_path: Path, one: Path, two: Path) -> list[str]:
    return [str(difference) for difference in ociarchive.compare(one, two)]


def test_the_same_image_differs_in_nothing(tmp_path: Path) -> None:
    one, two = (make_image(tmp_path / name, [layer({"a": b"1"})]) for name in ("1.tar", "2.tar"))
    assert told(tmp_path, one, two) == []


def test_a_difference_is_named_by_layer_and_file(tmp_path: Path) -> None:
    same = layer({"same": b"same"})
    one = make_image(tmp_path / "1.tar", [same, layer({"a": b"-- 1 --", "b": b"b", "c": b""})])
    two = make_image(tmp_path / "2.tar", [same, layer({"a": b"-- 2 --", "b": b"b", "d": b""})])
    assert told(tmp_path, one, two) == [
        f"layer 2: a: sha256 {sha256(b'-- 1 --')} → {sha256(b'-- 2 --')}",
        "layer 2: c: only in the first",
        "layer 2: d: only in the second",
    ]


def test_dates_owners_order_packing_and_settings_are_named(tmp_path: Path) -> None:
    dated = tarfile.TarInfo()
    dated.mtime, dated.uid = 5, 7
    one = make_image(tmp_path / "1.tar", [layer({"a": tarfile.TarInfo()})])
    two = make_image(tmp_path / "2.tar", [layer({"a": dated})])
    (said,) = told(tmp_path, one, two)
    assert said.startswith("layer 1: a: type 0 mode ")
    assert "owner 0:0 mtime 0" in said
    assert "owner 7:0 mtime 5" in said
    one = make_image(tmp_path / "1.tar", [layer({"a": b"", "b": b""})])
    two = make_image(tmp_path / "2.tar", [layer({"b": b"", "a": b""})])
    assert told(tmp_path, one, two) == ["layer 1: a: member 0 → 1"]
    two = make_image(tmp_path / "2.tar", [layer({"a": b"", "b": b""})], how="gzip")
    (said,) = told(tmp_path, one, two)
    assert said.startswith("layer 1: the same files in another archive: sha256:")
    two = make_image(tmp_path / "2.tar", [layer({"a": b"", "b": b""})], {"x": "1"}, created="2026")
    assert told(tmp_path, one, two) == [
        "configuration: config.Labels.x: nothing → 1",
        "configuration: created: nothing → 2026",
    ]
    two = make_image(tmp_path / "2.tar", [])
    assert "number of layers: 1 → 0" in told(tmp_path, one, two)
