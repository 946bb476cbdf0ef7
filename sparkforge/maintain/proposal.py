"""One pull request for each upstream with a newer release, as far as the move goes by itself.

``watch --try`` runs code of the new release, so it must not hold a right to write. ``watch
--propose`` makes the same commit again from release files, without that code; from the trial it
takes words alone. ``gh``, GitHub's client, knows the forge, its repository and the token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkforge.core import git, pages
from sparkforge.core.errors import CommandError, SeriesError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import call, failure
from sparkforge.maintain import landing, mover
from sparkforge.maintain.mover import Mover
from sparkforge.maintain.rebase import Job
from sparkforge.maintain.releases import Move, Note
from sparkforge.pins import pins
from sparkforge.sources.project import Project

if TYPE_CHECKING:
    from sparkforge.maintain.watch import Found

_LIMIT = 65_536
"""Characters that GitHub takes as the text of a pull request."""
_HAND = " (needs a hand)"


@contextmanager
def clone(project: Project) -> Iterator[Project]:
    """Make a throw-away clone of a checkout's HEAD."""
    with project.store.temporary("watch") as work:
        root, path = work / "checkout", work / "checkout" / project.pins_path.name
        config = f"--config=include.path={mover.CONFIG}"
        git.git(project.root, "clone", "--quiet", "--template=", config, ".", str(root))
        yield replace(project, pins_path=path, pins=pins.load(path))


def move(here: Project, found: Found, *, trial: bool) -> tuple[Found, str, list[Note], str]:
    """Move a series in a clone as far as it goes; ``trial`` runs code of the new release.

    Returns what is known now, a commit on HEAD, the same of the same input and without a change
    where the move stopped, what no longer agrees, and ``git range-diff`` of the series.
    """
    root, job, base = here.root, Job(here, found.upstream), git.head(here.root)
    text, tree = f"Move {found.upstream} to {found.newest}", "HEAD^{tree}"
    diff, notes = "", list[Note]()
    try:
        plan = job.begin(found.newest, companions=True)
        results = job.move(plan, None)
        diff = "\n".join(_range_diff(job, move) for move in plan.moves)
        _, notes, tried = landing.land(job, plan, results, trial=trial)
        text, tree = git.git(root, "log", "-1", "--format=%B"), git.git(root, "rev-parse", tree)
        found = replace(found, moves=(*chain(*results.values()),), tree=tree, trial=tried)
    except (SeriesError, UsageError) as error:
        trouble = error.what.replace(f"{root}/", "")[-4000:]
        found = replace(found, state="a person is needed", trouble=trouble)
        log.error(f"{text}: {trouble}")
    finally:
        job.remove()
    date = git.git(root, "log", "-1", "--format=%cI", base)
    dates = dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), date)
    commit = git.git(root, "commit-tree", tree, "-p", base, "-m", text, env=dates)
    git.git(root, "reset", "--quiet", "--hard", base)
    return found, commit, notes, diff


def _range_diff(job: Job, move: Move) -> str:
    moved = Mover(job.project, move, job.tree(move.upstream))
    ranges = (f"{move.old.commit}..{moved.tip}", f"{move.new.commit}..HEAD")
    told = moved.git("range-diff", "--no-color", "--creation-factor=999", *ranges)
    # names of commits that nobody else has, new in every run
    return re.sub(r"^( *\S+:) +\S+( [<=>!] +\S+:) +\S+", r"\1\2", told, flags=re.MULTILINE)


@dataclass(frozen=True)
class Forge:
    """The repository that a checkout came from."""

    root: Path
    base: str
    """The branch that is checked out, up to date."""
    heads: Mapping[str, str]
    """The commits of that branch and of the bot's."""

    @classmethod
    def of(cls, root: Path) -> Forge:
        """Read a checkout's remote ``origin``; UsageError: it has other commits."""
        base = git.attempt(root, "symbolic-ref", "--quiet", "--short", "HEAD")[1].strip()
        listed = _git(root, "ls-remote", "origin", f"refs/heads/{base}", "refs/heads/bot/*")
        heads = {ref[11:]: commit for commit, ref in map(str.split, listed.splitlines())}
        if heads.get(base) != git.head(root):
            msg = f"{root}: HEAD is not the newest commit of a branch of origin"
            raise UsageError(msg, "git switch main && git pull")
        return cls(root, base, heads)

    def tell(self, here: Project, found: Found, known: Found | None) -> None:
        """Bring an upstream's pull request up to date, with what its trial gave (``known``)."""
        branch, title = f"bot/{found.upstream}", f"Move {found.upstream} to {found.newest}"
        tip = self.heads.get(branch)
        every = self._api("GET", f"pulls?state=all&per_page=100&head={{owner}}:{branch}")
        opened = next((one for one in every if one["state"] == "open"), None)
        if found.newest == found.pinned:
            if opened is not None:
                text = f"{self.base} has {found.upstream} {found.pinned}, and nothing is newer."
                self._api("POST", f"issues/{opened['number']}/comments", {"body": text})
                self._api("PATCH", f"pulls/{opened['number']}", {"state": "closed"})
            if tip is not None:
                self._push(branch, "")
        elif found.moves is None:
            log.info(f"{title}: {found.state}")
        elif opened is None and title in [one["title"].removesuffix(_HAND) for one in every]:
            log.info(f"{title}: not proposed again, as its pull request was closed")
        elif opened is not None and tip is not None and not self._ours(branch):
            log.info(f"{title}: {branch} has a commit of a person, so it stays as it is")
        else:
            found, commit, notes, diff = move(here, found, trial=False)
            if commit != tip:
                git.git(self.root, "fetch", "--quiet", str(here.root), commit)
                self._push(branch, commit)
            if known is None or known.newest != found.newest:
                known = replace(found, tree="", trouble="")
            trouble = found.trouble or known.trouble
            if not trouble and known.tree != found.tree:
                trouble = "Nobody has built this commit, or run its tests."
            more: Any = {"found": found, "notes": notes, "diff": diff, "trouble": trouble}
            more |= {"base": self.base, "branch": branch, "Markdown": pages.Markdown}
            more["trial"] = {} if trouble else known.trial
            text = pages.render(Path(__file__).with_name("proposal.md.j2"), **more).strip()
            if len(text) > _LIMIT:
                text = f"{text[: _LIMIT - 40]}\n\n    (too long: cut here)"
            self._write(branch, title, text, bool(trouble), opened)

    def _write(
        self, branch: str, title: str, text: str, draft: bool, opened: Mapping[str, Any] | None
    ) -> None:
        """Open a pull request, or change what differs in the one that is open."""
        wanted = {"title": title + (_HAND if draft else ""), "body": text}
        if opened is None:
            more = {"head": branch, "base": self.base, "draft": draft}
            self._api("POST", "pulls", wanted | more)
            return
        if wanted != {"title": opened["title"], "body": opened["body"]}:
            self._api("PATCH", f"pulls/{opened['number']}", wanted)
        if opened["draft"] != draft:  # REST cannot change that
            words = ("pr", "ready", str(opened["number"]), *(["--undo"] if draft else []))
            call("gh", *words, cwd=self.root)

    def _ours(self, branch: str) -> bool:
        _git(self.root, "fetch", "--quiet", "origin", f"refs/heads/{branch}")
        email = git.git(self.root, "log", "-1", "--format=%ce", self.heads[branch])
        return email == git.COMMITTER_EMAIL

    def _push(self, branch: str, commit: str) -> None:
        ref = f"refs/heads/{branch}"  # what came since then stays
        lease = f"--force-with-lease={ref}:{self.heads.get(branch, '')}"
        _git(self.root, "push", "--quiet", "--no-verify", lease, "origin", f"{commit}:{ref}")

    def _api(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        words = ["--method", method, f"repos/{{owner}}/{{repo}}/{path}"]
        more = [] if body is None else ["--input", "-"]
        data = json.dumps(body).encode()
        done = call("gh", "api", *words, *more, cwd=self.root, stdin=data, check=False)
        try:
            if done.returncode == 0:
                return json.loads(done.stdout)
            what = failure(done).what
        except ValueError:
            what = f"gh api {path}: no JSON: {done.stdout[:200]!r}"
        raise CommandError(what, "run it again: gh auth status, docs/rebase.md")


def _git(root: Path, *words: str) -> str:
    """Run git with the user's settings, which reach the forge."""
    return call("git", "-C", root, *words, env={"GIT_TERMINAL_PROMPT": "0"}).stdout.decode()
