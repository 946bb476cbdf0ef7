"""Which image Compose uses: .env, `images`, `rollback` and `model fetch`, without an engine.

For `model fetch`, a program named docker records its arguments and does what the test wants.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkforge.build import composing
from sparkforge.cli import main
from sparkforge.core.errors import BuildError, FetchError, UsageError
from sparkforge.pins import pins
from sparkforge.runtime.engine import Engine
from tests.support import ROOT

OLD, MID, NEW = (f"sparkforge/spark:1-{digit * 12}" for digit in "abc")
Run = Callable[..., int]


class Images:
    """Images of an engine, in no order; each has 1 GB of its own, and one layer is common."""

    def __init__(self) -> None:
        self.held = [
            self.one(MID, "2026-02", "spark"),
            self.one(NEW, "2026-03", "spark"),
            self.one(OLD, "2026-01", "spark"),
            self.one("sparkforge/cpu:1-d", "2026-04", "cpu"),
            # made on top of one, and has its labels
            self.one("sparkforge/spark-dev:1", "2026-05", "spark"),
        ]
        self.volumes: list[str] = []

    @staticmethod
    def one(name: str, made: str, target: str) -> Any:
        return SimpleNamespace(
            id=f"sha256:{name}",
            tags=[name],
            labels={"org.sparkforge.target": target},
            attrs={"Metadata": {"LastTagTime": f"{made}-01T10:00:00Z"}, "Size": 20_000_000_000},
        )

    def list(self, filters: Any) -> list[Any]:
        assert filters == {"label": "org.sparkforge.target"}
        return self.held


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Images:
    found = Images()
    client: Any = SimpleNamespace(
        images=found, volumes=SimpleNamespace(create=found.volumes.append)
    )
    monkeypatch.setattr(composing, "connect", lambda: Engine(client, "26", containerd_store=False))
    return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run build.py on a folder that has this checkout's pins."""
    for name in ("SPARKFORGE_IMAGE", "SPARKFORGE_IMAGE_SPARK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "pins.yaml").write_bytes((ROOT / "pins.yaml").read_bytes())
    (tmp_path / "requirements").symlink_to(ROOT / "requirements")
    return lambda *words: main.main([*words, "--pins", str(tmp_path / "pins.yaml")])


def test_rollback_keeps_other_lines(engine: Images, run: Run, tmp_path: Path) -> None:
    env = tmp_path / ".env"
    env.write_text(
        f"# mine\nCOMPOSE_PROFILES=rtx\nexport SPARKFORGE_IMAGE_SPARK = '{NEW}' # x\nMINE='a b'\n"
    )
    env.chmod(0o600)
    for step in (MID, OLD):
        assert run("rollback", "--target", "spark") == 0
        assert env.read_text() == (
            f"# mine\nCOMPOSE_PROFILES=rtx\nMINE='a b'\nSPARKFORGE_IMAGE_SPARK={step}\n"
        )
    assert env.stat().st_mode & 0o777 == 0o600
    assert set(engine.volumes) == {composing.MODELS_VOLUME}
    assert run("rollback", "--target", "spark") == BuildError.exit_code
    assert run("rollback", "--target", "spark", NEW) == 0
    assert composing.read(env)["SPARKFORGE_IMAGE_SPARK"] == NEW


def test_registry_image_is_chosen_by_digest(
    engine: Images, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = f"sha256:{'1' * 64}"
    for name in (f"r.example.org/team/spark@{digest}", f"team/spark@{digest}"):
        pulled = engine.one(name, "2026-06", "spark")
        pulled.tags, pulled.attrs["RepoDigests"] = [], [name]
        engine.held.append(pulled)
    built = next(one for one in engine.held if one.tags == [NEW])
    built.attrs["RepoDigests"] = [f"sparkforge/spark@{digest}"]  # containerd's store: its own name
    wanted = f"r.example.org/team/spark@{digest}"
    assert run("rollback", "--target", "spark", wanted) == 0
    assert composing.read(tmp_path / ".env")["SPARKFORGE_IMAGE_SPARK"] == wanted
    capsys.readouterr()
    assert run("images", "--target", "spark", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["image"] for one in listed["images"]] == [
        f"r.example.org/team/spark@{digest}",
        f"team/spark@{digest}",
        NEW,
        MID,
        OLD,
    ]
    assert [one["image"] for one in listed["images"] if one["used"]] == [wanted]


def test_names_of_a_published_image_count_once(engine: Images, run: Run, tmp_path: Path) -> None:
    published = {}
    for one in (one for one in engine.held if one.tags[0] in (NEW, MID, OLD)):
        published[one.tags[0]] = f"r.example.org/team/spark@sha256:{one.tags[0][-1] * 64}"
        one.attrs["RepoDigests"] = [published[one.tags[0]]]
    env = tmp_path / ".env"
    for used in (NEW, published[NEW]):
        env.write_text(f"SPARKFORGE_IMAGE_SPARK={used}\n")
        assert run("rollback", "--target", "spark") == 0
        assert composing.read(env)["SPARKFORGE_IMAGE_SPARK"] == MID


def test_rollback_to_a_missing_image_fails(engine: Images, run: Run, tmp_path: Path) -> None:
    env = tmp_path / ".env"
    env.write_text("SPARKFORGE_IMAGE_SPARK=sparkforge/spark:1-gone\n")
    for name in ("sparkforge/spark:1-gone", "sparkforge/cpu:1-d", "sparkforge/spark-dev:1"):
        assert run("rollback", "--target", "spark", name) == BuildError.exit_code
    assert run("rollback", "--target", "spark") == BuildError.exit_code
    assert env.read_text() == "SPARKFORGE_IMAGE_SPARK=sparkforge/spark:1-gone\n"


def test_images_lists_newest_first_and_marks_used(
    engine: Images, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".env").write_text(f"SPARKFORGE_IMAGE_SPARK={MID}\n")
    assert run("images", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    found = [(one["image"], one["used"]) for one in said["images"] if one["target"] == "spark"]
    assert found == [(NEW, False), (MID, True), (OLD, False)]
    assert run("images") == 0
    assert f"* {MID}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("value", ["plain", "my $dir #1", "it's"])
def test_dotenv_round_trip(tmp_path: Path, value: str) -> None:
    link, real = tmp_path / "link", tmp_path / "real"
    link.symlink_to(real)
    composing.put(link, {"A": value, "B": ""})
    assert link.is_symlink()
    assert composing.read(real) == {"A": value}


# -- model fetch -------------------------------------------------------------------------------

MODEL = pins.load(ROOT / "pins.yaml").models["gpt-oss-120b"]


@pytest.fixture
def fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> Callable[..., int]:
    """Download with a docker that says words and ends."""
    monkeypatch.delenv("SPARKFORGE_HF_CACHE", raising=False)
    (tmp_path / ".env").write_text(f"SPARKFORGE_IMAGE_SPARK={NEW}\nSPARKFORGE_HF_CACHE=./cache\n")
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    monkeypatch.setenv("PATH", str(docker.parent), prepend=":")

    def start(*words: str, said: str = "", code: int = 0, target: str = "spark") -> int:
        (docker.parent / "said").write_text(said)
        docker.write_text(
            f"#!/bin/sh\n[ $1 != rm ] || exit 0\ncd {docker.parent}\n"
            f'echo "$*" >words\ncat said\nexit {code}\n'
        )
        docker.chmod(0o755)
        return run("model", "fetch", "--target", target, *words)

    return start


def test_compose_downloads_the_model(
    fetch: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetch("--dry-run") == 0
    assert not (tmp_path / "bin/words").exists()
    capsys.readouterr()
    assert fetch("--json", said="entrypoint: downloading 31.0 of 65.0 GB\n") == 0
    assert json.loads(capsys.readouterr().out) == {
        "target": "spark",
        "model": MODEL.repository,
        "revision": MODEL.revision,
        "place": "./cache",
        "image": NEW,
        "complete": True,
    }
    words = (tmp_path / "bin/words").read_text()
    assert words.startswith(f"compose --project-directory {tmp_path} run --rm ")
    cache = "/var/cache/sparkforge/huggingface/hub"
    end = f"spark {composing._PROGRAM} {cache} {MODEL.repository} {MODEL.revision}\n"
    assert words.endswith(f"--entrypoint={composing._PYTHON} {end}")


def test_download_program_is_in_the_image() -> None:
    program = Path(composing._PROGRAM)
    assert (ROOT / "sparkforge/serving" / program.name).is_file()
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"sparkforge/serving/*.py {program.parent}/" in dockerfile
    assert "HF_HOME=/var/cache/sparkforge/huggingface " in dockerfile
    for word in composing._PYTHON.split():
        assert f'"{word}", ' in dockerfile


@pytest.mark.parametrize(("said", "code"), [("entrypoint: error: no network", 68), ("", 125)])
def test_failed_download_is_one_error(
    fetch: Run, capsys: pytest.CaptureFixture[str], said: str, code: int
) -> None:
    assert fetch(said=said + "\n", code=code) == FetchError.exit_code
    assert f"failed with exit code {code}: {said}\n" in capsys.readouterr().err


def test_missing_image_or_model_is_an_error(fetch: Run, tmp_path: Path) -> None:
    (tmp_path / ".env").unlink()
    assert fetch() == BuildError.exit_code
    assert fetch(target="cpu") == UsageError.exit_code
