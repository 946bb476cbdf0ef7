"""Pull requests for newer releases: a bare repository as origin, and a stand-in for ``gh``."""

import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkforge.cli import main
from sparkforge.maintain import ablate, companions, proposal
from sparkforge.pins.pins import load
from tests.integration.moving import COMMIT, Upstream, with_line
from tests.integration.test_move import pin, publish
from tests.project import FILES
from tests.support import ROOT, Repo, sha256

MOD = FILES["demo/mod.py"]
NOTHING = '{"watch": []}'
FIRST = "change-a-line-of-the-module"
# what GitHub's REST interface answers, and refuses; its state is beside it
GH = """\
import json, subprocess, sys
from pathlib import Path

here = Path(__file__).parent
state, words = json.loads((here / "state.json").read_text()), sys.argv[1:]


def refuse(text):
    sys.exit(f"gh: {text}")


def commit(branch):
    words = ["git", "-C", str(here / "origin"), "rev-parse", "--verify", f"refs/heads/{branch}"]
    return subprocess.run(words, capture_output=True, check=False).stdout


if state["down"] == "odd":
    print("<html>")
    sys.exit()
if state["down"] and state["down"] in " ".join(words):
    refuse("Server Error (HTTP 500)")
pulls = state["pulls"]
match words:
    case ["api", "--method", method, path, *rest]:
        assert path.startswith("repos/{owner}/{repo}/"), path
        assert rest in ([], ["--input", "-"]), rest
        body = json.load(sys.stdin) if rest else None
        place, _, query = path.removeprefix("repos/{owner}/{repo}/").partition("?")
        match method, place.split("/"):
            case "GET", ["pulls"]:
                asked = dict(pair.split("=") for pair in query.split("&"))
                assert asked["state"] == "all", asked
                branch = asked["head"].removeprefix("{owner}:")
                answer = [one for one in reversed(pulls) if one["head"] == branch]
            case "POST", ["pulls"]:
                head, base = commit(body["head"]), commit(body["base"])
                twice = [one for one in pulls if one["head"] == body["head"]
                         and one["state"] == "open"]
                if not head or not base or head == base or twice or len(body["body"]) > 65536:
                    refuse("Validation Failed (HTTP 422)")
                answer = {"number": len(pulls) + 1, "state": "open", "comments": [], **body}
                pulls.append(answer)
            case "PATCH", ["pulls", number]:
                assert not body.keys() - {"title", "body", "state"}, body
                answer = pulls[int(number) - 1]
                answer |= body
            case "POST", ["issues", number, "comments"]:
                answer = body
                pulls[int(number) - 1]["comments"].append(body["body"])
            case _:
                refuse("Not Found (HTTP 404)")
        if rest:
            state["writes"] += 1
        print(json.dumps(answer))
    case ["pr", "ready", number, *undo]:
        assert undo in ([], ["--undo"]), undo
        pulls[int(number) - 1]["draft"] = bool(undo)
        state["writes"] += 1
    case _:
        refuse(f"unknown command: {words}")
(here / "state.json").write_text(json.dumps(state))
"""


class Forge:
    """A maintainer's checkout under git, and where it came from."""

    def __init__(self, up: Upstream, folder: Path) -> None:
        self.up, self.folder, self.tried = up, folder, folder / "tried.json"
        folder.mkdir()
        program = folder / "gh"
        program.write_text(f"#!{sys.executable}\n{GH}")
        program.chmod(0o755)
        self.state(pulls=[], writes=0, down="")
        (up.root / ".gitignore").write_text("dist/\n.sparkforge/\n")
        self.git = Repo.__new__(Repo)
        self.git.path = up.root
        self.git("init", "--quiet", "--initial-branch=main", "--template=")
        self.git("add", "--all")
        self.git("commit", "--quiet", "-m", "all")
        self.git("commit", "--quiet", "--allow-empty", "-m", "newest")
        self.git("clone", "--quiet", "--bare", str(up.root), str(folder / "origin"))
        self.git("remote", "add", "origin", str(folder / "origin"))
        self.git("fetch", "--quiet", "--depth=1", "origin", "main")  # as the workflow's

    def state(self, **new: Any) -> Any:
        path = self.folder / "state.json"
        found = (json.loads(path.read_text()) if path.exists() else {}) | new
        path.write_text(json.dumps(found))
        return found

    def pulls(self, branch: str = "bot/demo") -> list[Any]:
        return [one for one in self.state()["pulls"] if one["head"] == branch]

    def heads(self) -> dict[str, str]:
        listed = self.git("ls-remote", "--heads", "origin").splitlines()
        return {ref.split("/", 2)[2]: commit for commit, ref in map(str.split, listed)}

    def watch(self, *words: str, code: int = 0) -> Any:
        places = ["--pins", str(self.up.root / "pins.yaml"), "--store", str(self.up.project.store)]
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            found = main.main(["watch", *words, "--json", *places])
        assert found == code, out.getvalue()
        return json.loads(out.getvalue())

    def night(self, code: int = 9) -> None:
        """Run both jobs."""
        self.tried.write_text(json.dumps(self.watch("--try", code=code)))
        self.propose()

    def propose(self, code: int = 0) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("_build", "_tested"):  # the job that may write runs nothing of a release
                patch.setattr(companions, name, None)
            return self.watch("--propose", str(self.tried), code=code)

    def change(self, **new: Any) -> None:
        """Have a person change the newest pull request."""
        pulls = self.state()["pulls"]
        pulls[-1] |= new
        self.state(pulls=pulls)


@pytest.fixture
def forge(upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Forge:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(ablate, "dev_python", lambda root: Path(sys.executable))
    monkeypatch.setenv("PATH", f"{tmp_path / 'forge'}{os.pathsep}{os.environ['PATH']}")
    return Forge(upstream, tmp_path / "forge")


def test_a_pull_request_from_its_release_to_its_landing(forge: Forge) -> None:
    forge.up.release({"demo/mod.py": MOD.replace(b"line_18 = 1", b"line_18 = 7")})
    before, tracked = forge.heads(), forge.git("status", "--porcelain")
    said = forge.watch("--try", code=9)
    assert forge.heads() == before  # with code of the release at work, nothing is pushed
    assert forge.state()["writes"] == 0
    assert said["watch"][0]["trial"]["tests"] == {"tests/test_it.py::test_it": "passes"}
    said["watch"][0]["trial"] |= {"wheels": {"a` @ada|#1": "b\n@ada"}, "@ada": {}}
    forge.tried.write_text(json.dumps(said))
    forge.propose()
    (pull,) = forge.pulls()
    assert (pull["title"], pull["draft"], pull["base"]) == ("Move demo to 2.0", False, "main")
    assert "| `a' @ada\\|#1` | `b @ada` |\n" in pull["body"]
    assert "@" not in re.sub("`.*?`|^    .*", "", pull["body"], flags=re.MULTILINE)
    assert f"| {FIRST} | context-only |  |" in pull["body"]
    assert "| `tests/test_it.py::test_it` | `passes` |" in pull["body"]
    assert "    1: ! 1: Change a line of the module\n" in pull["body"]
    assert "         -line_20 = 1" in pull["body"]
    tip = forge.heads()["bot/demo"]
    assert forge.git("status", "--porcelain") == tracked
    assert not (forge.up.root / "dist/rebase").exists()

    forge.propose()
    assert (forge.state()["writes"], forge.heads()["bot/demo"]) == (1, tip)

    forge.up.release({"demo/more.py": b"y = 1\n"}, "3.0")
    forge.night()
    (pull,) = forge.pulls()
    assert (pull["number"], pull["title"]) == (1, "Move demo to 3.0")
    assert f"| {FIRST} | clean |" in pull["body"]
    assert forge.heads()["bot/demo"] != tip

    forge.git("fetch", "--quiet", "origin", "bot/demo")
    forge.git("cherry-pick", "FETCH_HEAD")
    forge.git("push", "--quiet", "origin", "main")
    assert forge.git("log", "--format=%s").splitlines() == ["Move demo to v3.0", "newest"]
    assert load(forge.up.root / "pins.yaml").upstreams["demo"].commit == COMMIT
    forge.up.project.run("patches", "check")
    forge.up.project.build()
    digest = sha256(forge.up.project.wheel.read_bytes())
    assert f"| `tiny/{forge.up.project.wheel.name}` | `{digest}` |" in pull["body"]
    forge.propose()
    (pull,) = forge.pulls()
    assert (pull["state"], pull["comments"]) == (
        "closed",
        ["main has demo 3.0, and nothing is newer."],
    )
    assert list(forge.heads()) == ["main"]
    writes = forge.state()["writes"]
    forge.propose()
    assert forge.state()["writes"] == writes


def test_a_conflict_is_a_draft_that_a_person_goes_on_with(forge: Forge) -> None:
    forge.up.release({"demo/mod.py": with_line(MOD, 20, b"theirs = 1")})
    forge.night(code=6)
    (pull,) = forge.pulls()
    assert (pull["title"], pull["draft"]) == ("Move demo to 2.0 (needs a hand)", True)
    assert f"demo: {FIRST}.patch: conflict" in pull["body"]
    assert f"| {FIRST} | ! conflict | `demo/mod.py: 1 overlap` |" in pull["body"]
    assert str(forge.folder.parent) not in pull["body"]
    forge.git("fetch", "--quiet", "origin", "bot/demo")
    assert forge.git("diff", "main", "FETCH_HEAD") == ""

    # a person does what the text says
    commands = re.findall(r"^    (?:git|python3 build\.py) (.*)$", pull["body"], re.MULTILINE)
    fetch, rebase, push = commands
    for words in fetch.split(" && git "):
        forge.git(*words.split())
    assert rebase == "rebase demo --onto 2.0 --with-companions"
    forge.up.rebase(*rebase.split()[1:], code=6)
    resolved = forge.up.root / "dist/rebase/demo/tree/demo/mod.py"
    resolved.write_bytes(with_line(MOD, 20, b"line_20 = 2"))
    forge.git("config", "user.name", "Ada")
    forge.git("config", "user.email", "ada@example.invalid")
    forge.up.rebase("demo", "--continue")
    forge.git(*push.split())
    forge.git("switch", "--quiet", "main")

    writes, heads = forge.state()["writes"], forge.heads()
    forge.up.release({"demo/mod.py": with_line(MOD, 20, b"theirs = 1"), "demo/n.py": b""}, "3.0")
    forge.propose()
    assert (forge.state()["writes"], forge.heads()) == (writes, heads)
    forge.git("merge", "--quiet", "--ff-only", "bot/demo")
    forge.git("push", "--quiet", "origin", "main")
    forge.change(state="closed")
    assert load(forge.up.root / "pins.yaml").upstreams["demo"].version == "2.0"
    forge.propose()  # the branch that was left is the bot's again
    titles = [(pull["state"], pull["title"]) for pull in forge.pulls()]
    assert titles[1:] == [("open", "Move demo to 3.0 (needs a hand)")]


def test_what_a_trial_says(forge: Forge) -> None:
    forge.tried.write_text(NOTHING)
    forge.up.release({})
    forge.propose()  # by hand, or of a release that came between both jobs
    (pull,) = forge.pulls()
    assert (pull["title"], pull["draft"]) == ("Move demo to 2.0 (needs a hand)", True)
    assert "Nobody has built this commit" in pull["body"]
    test = forge.up.root / "tests/test_it.py"
    for text, code in (("1 / 0", 6), ("...", 9)):
        test.write_text(f"def test_it() -> None: {text}\n")
        forge.git("commit", "--quiet", "--all", "-m", text)
        forge.git("push", "--quiet", "origin", "main")
        forge.night(code)
        (pull,) = forge.pulls()
        assert pull["draft"] == ("(needs a hand)" in pull["title"]) == (code == 6)
        assert ("tests/test_it.py::test_it fails on the new release" in pull["body"]) == (code == 6)
        forge.git("fetch", "--quiet", "origin", "bot/demo")
        assert forge.git("rev-parse", "FETCH_HEAD^") == forge.git("rev-parse", "main")
        assert "version: 2.0" in forge.git("show", "FETCH_HEAD:pins.yaml")

    forge.change(state="closed")  # a person does not want it
    writes = forge.state()["writes"]
    forge.propose()
    assert forge.state()["writes"] == writes


def test_one_for_each_upstream_and_a_forge_that_fails(
    forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("1.0", "2.0"):
        publish(forge.up.project, "helper", version)
    forge.up.project.edit_pins("images: {}\n", pin(forge.up.project, "helper") + "images: {}\n")
    with (forge.up.root / "tests/test_it.py").open("a") as tests:
        tests.write("def test_helper() -> None: ...\n")
    forge.git("add", "--all")
    forge.git("commit", "--quiet", "-m", "another upstream")
    forge.up.release({})
    forge.tried.write_text(NOTHING)
    said = forge.propose(code=2)
    assert "not the newest commit" in said["error"]["what"]
    forge.git("push", "--quiet", "origin", "main")
    forge.state(down="bot/helper")
    said = forge.propose(code=12)
    assert "HTTP 500" in said["error"]["what"]
    assert said["error"]["remedy"]
    forge.state(down="odd")
    assert "pulls?state=all" in (error := forge.propose(code=12)["error"])["what"]
    assert "no JSON: b'<html>" in error["what"] and error["remedy"]
    assert (len(forge.pulls()), len(forge.pulls("bot/helper"))) == (1, 0)
    assert len(forge.pulls()[0]["body"]) > 500
    forge.state(down="")
    monkeypatch.setattr(proposal, "_LIMIT", 500)
    forge.propose()
    assert all(len(one["body"]) <= 500 and "cut" in one["body"] for one in forge.state()["pulls"])
    assert [len(forge.pulls(name)) for name in ("bot/demo", "bot/helper")] == [1, 1]
    titles = {one["head"]: one["title"] for one in forge.state()["pulls"]}
    assert titles["bot/helper"] == "Move helper to 2.0 (needs a hand)"
    assert titles["bot/demo"] == "Move demo to 2.0 (needs a hand)"


def test_refused(forge: Forge) -> None:
    for text in (None, "[]", '{"watch": [{}]}'):
        if text is not None:
            forge.tried.write_text(text)
        said = forge.propose(code=2)
        assert "not written by watch --try" in said["error"]["what"]
    forge.tried.write_text(NOTHING)
    forge.git("remote", "remove", "origin")
    assert "origin" in forge.propose(code=12)["error"]["what"]
