"""An export gives the same bytes whatever git is told to do, by whom and where."""

from pathlib import Path

import pytest

from tests.integration.worktrees import Tree, snapshot
from tests.project import PATCHED
from tests.support import BODY

FUNCTIONS = b"".join(b"def f%d():\n%s\n\n" % (i, b"    x = 1\n" * 9) for i in range(9))

# those that changed the bytes of `git format-patch` with our flags, or broke it (git 2.39)
ALONE = """
diff.noprefix=true diff.context=9 diff.suppressBlankEmpty=true format.attach=true
format.signOff=true format.useAutoBase=true format.headers=X-Evil:%20yes format.from=true
format.thread=true format.coverLetter=true format.filenameMaxLength=9 diff.renames=copies
"""
# settings of what an export calls, from git's manual; those of a line at once
TOGETHER = """
diff.mnemonicPrefix=true diff.interHunkContext=40 diff.algorithm=patience
diff.algorithm=minimal diff.indentHeuristic=false
diff.orderFile=ORDER diff.external=false diff.wordRegex=.
diff.ignoreSubmodules=all diff.submodule=log diff.colorMoved=zebra diff.wsErrorHighlight=all
diff.relative=true diff.dirstat=lines diff.statGraphWidth=9 diff.autoRefreshIndex=false
diff.evil.textconv=false diff.evil.command=false diff.evil.binary=true diff.evil.xfuncname=^.*$
format.numbered=true format.subjectPrefix=EVIL format.signature=evil format.signatureFile=ORDER
format.suffix=.evil format.outputDirectory=evil format.notes=true
format.encodeEmailHeaders=false format.pretty=oneline format.to=x@example.invalid
format.cc=x@example.invalid format.coverFromDescription=subject format.noprefix=true
format.forceInBodyFrom=true format.mboxrd=true format.inReplyTo=x core.abbrev=5
core.quotePath=false core.autocrlf=true core.eol=crlf core.safecrlf=true core.fileMode=false
core.whitespace=trailing-space,tab-in-indent core.attributesFile=ATTRIBUTES core.hooksPath=HOOKS
core.pager=false core.editor=false core.symlinks=false core.ignoreCase=true
core.precomposeUnicode=true core.commentChar=; core.preferSymlinkRefs=true
core.logAllRefUpdates=0 core.notesRef=refs/notes/evil core.excludesFile=EXCLUDES
core.untrackedCache=keep core.fsmonitor=false core.checkStat=minimal core.trustctime=false
core.bigFileThreshold=1 i18n.commitEncoding=latin-1 i18n.logOutputEncoding=latin-1
log.showSignature=true log.date=relative log.decorate=full log.follow=true log.mailmap=true
log.abbrevCommit=true log.showRoot=false log.diffMerges=combined log.excludeDecoration=*
mailmap.file=MAILMAP notes.displayRef=* blame.date=relative commit.gpgSign=true
gpg.program=false tag.gpgSign=true commit.cleanup=strip commit.verbose=2 color.ui=always
color.diff=always color.status=always column.ui=always status.short=true status.branch=true
status.showUntrackedFiles=all status.relativePaths=false status.renames=copies
apply.whitespace=fix apply.ignoreWhitespace=change am.threeWay=true am.keepcr=false
mailinfo.scissors=true merge.renames=false rerere.enabled=true gc.auto=1 pull.rebase=true
rebase.autoSquash=true user.name=Mallory transfer.hideRefs=refs advice.detachedHead=false
submodule.recurse=true feature.experimental=true index.version=4 index.sparse=true
pack.writeBitmaps=false
"""

_ASSIGNED = """
GIT_DIFF_OPTS=-u9 GIT_EXTERNAL_DIFF=false GIT_CONFIG_PARAMETERS='diff.noprefix'='true'
GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=diff.context GIT_CONFIG_VALUE_0=9 GIT_DIR=/nowhere
GIT_WORK_TREE=/nowhere GIT_INDEX_FILE=/nowhere GIT_OBJECT_DIRECTORY=/nowhere GIT_NAMESPACE=evil
GIT_ALTERNATE_OBJECT_DIRECTORIES=/nowhere GIT_LITERAL_PATHSPECS=1 GIT_ICASE_PATHSPECS=1
GIT_PAGER=false GIT_EDITOR=false GIT_NOTES_REF=refs/notes/evil GIT_AUTHOR_NAME=Mallory
GIT_DEFAULT_HASH=sha256 GIT_COMMITTER_DATE=2005-04-07T22:13:13 GIT_OPTIONAL_LOCKS=0
GIT_REPLACE_REF_BASE=refs/x/
TZ=Asia/Kolkata LC_ALL=C LANG=de_DE.UTF-8 COLUMNS=20 PAGER=false TERM=dumb NO_COLOR=1
"""
VARIABLES = {name: value for name, _, value in (w.partition("=") for w in _ASSIGNED.split())}

HOOKS = """applypatch-msg pre-applypatch post-applypatch commit-msg pre-commit fsmonitor-watchman
prepare-commit-msg reference-transaction post-checkout post-index-change"""


def write_hooks(folder: Path, mark: Path) -> None:
    """Write hooks that make a file, and fail, into a new folder."""
    folder.mkdir(parents=True)
    for name in HOOKS.split():
        (folder / name).write_text(f"#!/bin/sh\ntouch '{mark}'\nexit 1\n")
        (folder / name).chmod(0o755)


@pytest.fixture
def rich(tree: Tree) -> Tree:
    """A series with something for every setting to spoil, exported and recorded."""
    changed = FUNCTIONS.replace(b"def f4():\n    x = 1\n", b"def f4():\n    x = 2\n")
    tree.commit({"demo/long.py": FUNCTIONS, "demo/end.py": b"a\n\nb \n\t\nc"}, "Add a module")
    tree.commit(
        {
            "demo/long.py": changed.replace(b"def f8", b"def f9"),
            "demo/copy.py": PATCHED + b"x\n",
            "demo/crlf.py": b"a\r\nb\r\n",
            "demo/more.py": b"x\n",
            "demo/data.bin": b"no code\n" * 9,
            "run.sh": b"#!/bin/sh\n",
            "demo/end.py": b"a\n\nb \n\t\nd",
        },
        "Change some lines of the \u00fcber package, and with them more than one else",
    )
    tree.git("mv", "demo/__init__.py", "demo/first.py")
    tree.git("commit", "--quiet", "-m", f"Move the first file\n\n{BODY}")
    tree.export()
    return tree


def test_no_setting_changes_a_byte(rich: Tree, tmp_path: Path) -> None:
    """Settings in the work tree and in the home folder at once."""
    user = str(Path.home() / ".gitconfig")
    mark = tmp_path / "hook-ran"
    write_hooks(tmp_path / "HOOKS", mark)
    (tmp_path / "ORDER").write_text("*.sh\n*.py\n")
    (tmp_path / "EXCLUDES").write_text("*.sh\n*.py\n")
    (tmp_path / "ATTRIBUTES").write_text("*.py -diff\n*.bin diff text\n")
    (tmp_path / "MAILMAP").write_text("Mallory <m@example.invalid> <ada@example.invalid>\n")
    config = rich.path / ".git" / "config"
    plain = config.read_bytes()
    (rich.path / ".git" / "info").mkdir()
    (rich.path / ".git" / "info" / "attributes").write_text("*.py diff=evil\n*.bin diff text\n")
    before = snapshot(rich.project.root)
    for group in [*([one] for one in ALONE.split()), *map(str.split, TOGETHER.splitlines())]:
        Path(user).unlink(missing_ok=True)
        for setting in group:
            key, _, value = setting.partition("=")
            place = tmp_path / value
            value = str(place) if value.isupper() and place.exists() else value.replace("%20", " ")
            rich.git("config", key, value)
            rich.git("config", "--file", user, key, value)
        assert rich.export()["written"] == [], group
        config.write_bytes(plain)
    assert snapshot(rich.project.root) == before
    assert not mark.exists()


def test_no_variable_changes_a_byte(rich: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(rich.project.root)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    rich.run("patches", "export", str(rich.path), "--check")
    assert snapshot(rich.project.root) == before
