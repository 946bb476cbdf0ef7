"""pins.yaml: what is refused, where the message points, and that a record changes nothing else."""

from itertools import pairwise
from pathlib import Path

import pytest

from sparkforge.core.errors import PinsError, UsageError
from sparkforge.pins import pins, yamlfile
from sparkforge.pins.pins import Recorded
from sparkforge.pins.types import compiles, loads
from tests.support import ROOT

COMMIT = "a" * 40
TREE = "b" * 40
HASH = "c" * 64

OTHER = "e" * 64
GOOD = f"""\
# a comment that must survive
schema: 1
release:
  counter: 1
  source_date_epoch: 1700000000
upstreams:
  demo:   # our upstream
    git: https://example.invalid/demo.git
    tag: v1.2.3
    commit: {COMMIT}
    version: 1.2.3
    files:
      sdist: {{project: demo, file: demo-1.2.3.tar.gz, sha256: {OTHER}, size: 10}}
      wheel:
        project: demo
        file: demo-1.2.3-py3-none-any.whl
        sha256: {HASH}
        size: 10
    source_file: sdist
    paths:
      - {{repo: demo/, wheel: demo/}}
      - {{repo: tests/, wheel: null}}
  other:
    git: https://example.invalid/other.git
    tag: 0.7.0.post1
    commit: {TREE}
    version: 0.7.0.post1
    files: {{}}
plugin:
  folder: own/
  architectures: [90a, 121a]
  requirements: lock.txt
images:
  base:
    repository: base
    tag: "1"
    index: sha256:{HASH}
models:
  tiny: {{repository: a/b, revision: {COMMIT}}}
vocabularies:
  words: {{file: w.txt, sha256: {HASH}}}
choices:
  slow: {{}}
  quick: {{mxfp4_layers: "qkv,o"}}
profiles:
  plain: {{}}
  full:
    model: tiny
    choice: slow
    vocabulary: words
    max_num_seqs: 4
    cudagraph_capture_sizes: [1, 2, 4]
    prefix_caching: true
    memory: {{keep_free_gib: 2, most_percent: 80, least_gib: 3}}
    expect: {{moe: MARLIN}}
targets:
  here:
    profile: full
    summary: a target
    platforms: [linux/amd64]
    python: 3.11
    source: release
    wheels:
      demo:
        files: {{linux/amd64: wheel}}
        local: spark
    requirements: {{linux/amd64: lock.txt}}
    serve: [--port, "1"]
"""


def write(folder: Path, text: str) -> Path:
    (folder / "lock.txt").write_text("")
    path = folder / "pins.yaml"
    path.write_bytes(text.encode())
    return path


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) >= 1, old
    return GOOD.replace(old, new, 1)


def line_of(text: str, fragment: str) -> int:
    return text[: text.index(fragment)].count("\n") + 1


def refusal(folder: Path, text: str) -> list[str]:
    with pytest.raises(PinsError) as caught:
        pins.load(write(folder, text))
    assert caught.value.exit_code == 3
    return str(caught.value).splitlines()


# the key that the refusal names, what GOOD has, and what stands there instead
WRONG = rf"""
upstreams.demo.tagg | tag: v1 | tagg: v1
upstreams.demo.commit | commit: {COMMIT} | commit: abc1234
upstreams.demo.commit | commit: {COMMIT} | commit: {"5df63a720".ljust(40, "0")}
upstreams.demo.tag | tag: v1.2.3 | tag: main
upstreams.demo.files.wheel.sha256 |         sha256: {HASH}\n |
profiles.full.model | model: tiny | model: huge
profiles.full.prefix_caching | caching: true | caching: yes
choices.quick.mxfp4_layers | "qkv,o" | "qkv,zzz"
choices.quick.mxfp4_layers | "qkv,o" | "qkv,qkv=mxfp8"
upstreams.demo.source_file | source_file: sdist | source_file: sdisd
targets.here.wheels.demo.files.linux/amd64 | linux/amd64: wheel | linux/amd64: whele
targets.here.wheels.demo.files.linux/amd64 | none-any.whl | none-linux_aarch64.whl
targets.here.wheels.demp | demo:\n        files: {{linux | demp:\n        files: {{linux
targets.here.requirements.linux/amd64 | {{linux/amd64: lock.txt}} | {{linux/amd64: locc.txt}}
targets.here.requirements | {{linux/amd64: lock.txt}} | {{}}
targets.here.base |     serve: |     base: nowhere\n    serve:
targets.here.source | source: release | source: svn
targets.here.platforms | platforms: [linux/amd64] | platforms: []
targets.here.serve[0] | [--port, "1"] | [--api-key, k]
targets.here.serve[0] | [--port, "1"] | [--hf_tok=k]
release.counter | counter: 1 | counter: 0
schema | schema: 1 | schema: 2
upstreams.Demo |   demo:   # our |   Demo:   # our
upstreams.demo.paths[0].repo | {{repo: demo/, wheel: demo/}} | {{repo: demo, wheel: demo/}}
upstreams.demo.paths[0].wheel | {{repo: demo/, wheel: demo/}} | {{repo: demo/, wheel: demo}}
upstreams.demo.paths[0].build | wheel: demo/}} | wheel: demo/, build: true}}
plugin.folder | folder: own/ | folder: own
plugin.architectures[0] | [90a, 121a] | ["12.1"]
upstreams.demo.files.wheel.file | demo-1.2.3-py3 | demo-1.2.4-py3
"""


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_wrong_value_is_named_by_key(tmp_path: Path, line: str) -> None:
    key, old, new = f"{line} ".replace(r"\n", "\n").split(" | ")
    messages = refusal(tmp_path, changed(old, new.rstrip(" ")))
    assert sum(f": {key}: " in message for message in messages) == 1, messages


def test_all_problems_are_reported_at_once_in_the_order_of_lines(tmp_path: Path) -> None:
    text = changed("    tag: v1.2.3\n", "    tag: main\n")
    messages = refusal(tmp_path, text.replace("counter: 1", "countr: 1"))
    first = line_of(text, "    tag: main")
    assert [message.split(": ")[:2] for message in messages] == [
        ["pins.yaml:3", "release.counter"],
        ["pins.yaml:4", "release.countr"],
        [f"pins.yaml:{first}", "upstreams.demo.tag"],
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\n\tb: 2\n", 2),
        ("a: [\nb: 1\n", 3),
        ("a: 'x\n", 2),
        ("\u00e4: 1\nb: 2\nc: \x02\n", 1),
        ("a: 1\nb: 2\na: 1\n", 3),
        ("a: *nothing\n", 1),
        ("a: 1\n---\na: 1\n", 2),
        *((text, 1) for text in ("", "# nothing\n", "- a\n- b\n", "just words\n", "null\n")),
    ],
)
def test_what_is_no_mapping_in_yaml_is_refused_with_its_line(
    tmp_path: Path, text: str, line: int
) -> None:
    message = refusal(tmp_path, text)[0]
    assert message.startswith(f"pins.yaml:{line}: ")
    assert len(message) < 200


@pytest.mark.parametrize("sha", ["0" * 39 + "7", "1" * 40, "11e" + "3" * 37, "07" * 20])
@pytest.mark.parametrize("word", ["yes", "1.0", "0o17", "2026-01-01"])
def test_a_text_value_is_the_text_as_written(tmp_path: Path, sha: str, word: str) -> None:
    text = changed("summary: a target", f"summary: {word}").replace("3.11", "3.10", 1)
    path = write(tmp_path, text.replace(f"commit: {COMMIT}", f"commit: {sha}", 1))
    loaded = pins.load(path)
    assert loaded.target("here").summary == word
    assert loaded.target("here").python == "3.10"
    assert loaded.upstream("demo").commit == sha


def test_unknown_names_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    loaded = pins.load(write(tmp_path, GOOD))
    with pytest.raises(UsageError, match="no such target") as caught:
        loaded.target("herr")
    assert caught.value.exit_code == 2
    with pytest.raises(UsageError, match="no such upstream"):
        loaded.upstream("zzz")
    with pytest.raises(PinsError, match="--pins"):
        pins.load(tmp_path / "none" / "pins.yaml")


# -- record --------------------------------------------------------------------


RECORDED = Recorded(commit="1" * 40, tree="2" * 40)
AGAIN = Recorded(commit="3" * 40, tree="4" * 40)


def test_a_record_adds_its_lines_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    path.chmod(0o640)
    yamlfile.record(path, "demo", {"release": RECORDED})
    assert path.read_text() == changed(
        "    source_file: sdist\n",
        "    source_file: sdist\n    patched:\n"
        f"      release: {{commit: {RECORDED.commit}, tree: {RECORDED.tree}}}\n",
    )
    assert pins.load(path).upstream("demo").patched == {"release": RECORDED}
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lock.txt", "pins.yaml"]


def test_a_file_of_another_upstream_stands_in(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        changed("    files: {}\n", "    files: {}\n    source_in: demo\n    source_file: wheel\n"),
    )
    loaded = pins.load(path)
    assert loaded.upstream("other").files == {"wheel": loaded.upstream("demo").files["wheel"]}
    yamlfile.record(path, "other", {"release": RECORDED})
    assert pins.load(path).upstream("other").patched == {"release": RECORDED}


def test_records_change_and_go_and_leave_the_rest(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    yamlfile.record(path, "demo", {})  # nothing is recorded
    yamlfile.record(path, "demo", {"release": RECORDED})
    yamlfile.record(path, "demo", {"git": RECORDED, "release": AGAIN})
    yamlfile.record(path, "other", {"git": AGAIN})
    loaded = pins.load(path)
    assert loaded.upstream("demo").patched == {"git": RECORDED, "release": AGAIN}
    assert loaded.upstream("other").patched == {"git": AGAIN}
    yamlfile.record(path, "demo", {})
    assert pins.load(path).upstream("demo").patched == {}
    assert pins.load(path).upstream("other").patched == {"git": AGAIN}
    yamlfile.record(path, "other", {})
    assert path.read_text() == GOOD


@pytest.mark.parametrize(
    "text",
    [
        changed("  demo:   # our", '  "demo":   # our'),
        changed("upstreams:\n", "upstreams:   # all of them\n"),
        changed("    source_file: sdist\n", "    source_file: sdist   # stands in\n"),
        GOOD.replace("    source_file: sdist\n", "    patched: {}\n    source_file: sdist\n"),
        GOOD.replace(
            "    source_file: sdist\n",
            "    source_file: sdist\n    patched:\n      release:\n"
            f"        commit: {COMMIT}\n        tree: {TREE}\n    # of paths\n",
        ),
    ],
    ids=["quoted", "comment", "comment-behind", "empty", "block"],
)
def test_a_record_copes_with_other_ways_of_writing(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    yamlfile.record(path, "demo", {"release": RECORDED})
    assert pins.load(path).upstream("demo").patched == {"release": RECORDED}
    left = path.read_bytes().decode().splitlines(keepends=True)
    wanted = text.splitlines(keepends=True)
    mine = {"patched", "release:", "commit: " + COMMIT, "tree: "}
    assert [ln for ln in wanted if not any(m in ln for m in mine)] == [
        ln for ln in left if not any(m in ln for m in (*mine, "commit: 1"))
    ]


def test_a_record_is_refused_where_the_upstream_stands_on_one_line(tmp_path: Path) -> None:
    start = GOOD.index("  other:")
    end = GOOD.index("images:")
    line = (
        f"  other: {{git: https://example.invalid/o.git, tag: v1.0, commit: {TREE},"
        " version: 1.0, files: {}}\n"
    )
    path = write(tmp_path, GOOD[:start] + line + GOOD[end:])
    before = path.read_bytes()
    with pytest.raises(PinsError, match="one key per line"):
        yamlfile.record(path, "other", {"git": RECORDED})
    assert path.read_bytes() == before


def test_every_profile_of_a_gpu_has_a_graph_for_each_small_batch() -> None:
    loaded = pins.load(ROOT / "pins.yaml")
    targets = [target for target in loaded.targets.values() if target.cuda_arch is not None]
    assert targets
    for target in targets:
        profile = loaded.profiles[str(target.profile)]
        sizes = profile.cudagraph_capture_sizes
        assert sizes[:10] == tuple(range(1, 11)), target.profile
        assert sizes[-1] >= (profile.max_num_seqs or 512), target.profile
        # none is padded by more than half
        assert all(after <= before * 1.6 for before, after in pairwise(sizes[9:])), target.profile


def test_a_profile_is_handed_on_with_what_it_says_and_its_vocabularys_hash(tmp_path: Path) -> None:
    loaded = pins.load(write(tmp_path, GOOD))
    assert loaded.profile_of(loaded.target("here")).document() == {
        "model": "tiny",
        "vocabulary": "words",
        "vocabulary_sha256": HASH,
        "max_num_seqs": 4,
        "cudagraph_capture_sizes": [1, 2, 4],
        "choices": {"slow": {}, "quick": {"mxfp4_layers": "qkv,o"}},
        "choice": "slow",
        "prefix_caching": True,
        "expect": {"moe": "MARLIN"},
        "memory": {"keep_free_gib": 2, "most_percent": 80, "least_gib": 3},
    }
    bare = pins.load(write(tmp_path, changed("    profile: full\n", "")))
    assert bare.profile_of(bare.target("here")).document() == {}


# -- NVIDIA's rules: which devices load machine code and compile PTX ---------------------------


@pytest.mark.parametrize(
    ("code", "on_12_0", "on_12_1"),
    [
        ("120", True, True),
        ("120f", True, True),
        ("120a", True, False),
        ("121", False, True),
        ("121f", False, True),
        ("121a", False, True),
        ("90a", False, False),
        ("80", False, False),
    ],
)
def test_machine_code(code: str, on_12_0: bool, on_12_1: bool) -> None:
    assert loads(code, "12.0") is on_12_0
    assert loads(code, "12.1") is on_12_1


@pytest.mark.parametrize(
    ("ptx", "expected"),
    [("80", True), ("121", True), ("120f", True), ("90a", False), ("120a", False), ("130", False)],
)
def test_ptx_on_12_1(ptx: str, expected: bool) -> None:
    assert compiles(ptx, "12.1") is expected
