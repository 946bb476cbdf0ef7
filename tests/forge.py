"""A stand-in for gh, the forge's program, with a bare repository in the forge's place."""

from pathlib import Path

# what release.sh calls; like gh, it refuses commands of no repository and a second release of a tag
_GH = """\
#!/bin/sh
printf '%s\\n' "$*" >>"$FORGE/calls"
case "$1 $2" in
  "repo clone") exec git clone --quiet "$FORGE/bare" "$4" ;;
esac
[ -n "${GH_REPO:-}" ] || [ -n "$(git remote)" ] || { echo "no git remotes found" >&2; exit 1; }
case "$1 $2" in
  "release view") [ -e "$FORGE/assets" ] && echo false ;;
  "release create")
    mkdir "$FORGE/assets" || exit 1
    for one; do case $one in */assets/*) cp "$one" "$FORGE/assets" ;; esac; done ;;
  "pr create") [ ! -e "$FORGE/refuses" ] ;;
esac
"""


def stand_in(folder: Path) -> None:
    """Put gh into a folder; $FORGE has ``bare``, and gets ``calls`` and ``assets``."""
    folder.mkdir(exist_ok=True)
    (folder / "gh").write_text(_GH)
    (folder / "gh").chmod(0o755)
