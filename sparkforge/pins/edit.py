"""Edit pins.yaml, and leave every other line as it is.

An upstream that is not written one key a line is a PinsError, and an unknown one a UsageError.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sparkforge.core.disk import write_file
from sparkforge.core.errors import PinsError
from sparkforge.pins import pins, yamlfile
from sparkforge.pins.pins import Provider, Recorded


def with_commit(path: Path, text: str, upstream: str, commit: str | None) -> str:
    """Return the text of pins.yaml with an upstream's commit; None leaves the key out."""
    here = ("upstreams", upstream)
    if commit is not None and pins.parse(path, text).upstream(upstream).commit is not None:
        return yamlfile.replace_scalars(text, {(*here, "commit"): commit})  # keeps its comment
    block = [] if commit is None else [f"commit: {commit}"]
    found = yamlfile.replace_block(text, here, "commit", block, behind="tag")
    if found is None:
        msg = f"{path.name}: upstreams.{upstream}: is written on one line"
        raise PinsError(msg, "write one key per line, so that the commit has its own line")
    return found


def without_natives(path: Path, text: str, upstream: str, file: str) -> str:
    """Return the text of pins.yaml with a release file that has native files of its own release."""
    found = yamlfile.replace_block(
        text, ("upstreams", upstream, "files", file), "natives", [], behind="size"
    )
    if found is None:
        msg = f"{path.name}: upstreams.{upstream}.files.{file}: is written on one line"
        raise PinsError(msg, "write one key per line")
    return found


def record(path: Path, upstream: str, provider: Provider, recorded: Recorded) -> None:
    """Record the result of a series in pins.yaml.

    The file is read anew: it may have changed since.
    """
    present = dict(pins.load(path).upstream(upstream).patched) | {provider: recorded}
    _rewrite(path, upstream, present)


def forget(path: Path, upstream: str) -> None:
    """Remove all records of a series from pins.yaml."""
    if pins.load(path).upstream(upstream).patched:
        _rewrite(path, upstream, {})


def _rewrite(path: Path, upstream: str, recorded: Mapping[Provider, Recorded]) -> None:
    # read_text() would change the line ends
    text_now = with_record(path, path.read_bytes().decode(), upstream, recorded)
    pins.parse(path, text_now)
    write_file(path, text_now.encode())


def with_record(path: Path, text: str, upstream: str, recorded: Mapping[Provider, Recorded]) -> str:
    """Return the text of pins.yaml with other records of a series."""
    # right after the source file, from which the tree was made
    text_now = yamlfile.replace_block(
        text, ("upstreams", upstream), "patched", _block(recorded), behind="source_file"
    )
    if text_now is None:
        msg = f"{path.name}: upstreams.{upstream}: is written on one line"
        raise PinsError(msg, "write one key per line, so that the record has its own lines")
    return text_now


def _block(recorded: Mapping[Provider, Recorded]) -> list[str]:
    """Return the lines of ``patched``; none where nothing is recorded."""
    if not recorded:
        return []
    return ["patched:"] + [
        f"  {kind}: {{commit: {value.commit}, tree: {value.tree}}}"
        for kind, value in sorted(recorded.items())
    ]
