"""Edit pins.yaml, and leave every other line as it is.

An upstream that is not written one key a line is a PinsError, and an unknown one a UsageError.
"""

from collections.abc import Mapping
from pathlib import Path

import yaml

from sparkforge.core.disk import write_file
from sparkforge.core.errors import PinsError
from sparkforge.pins import pins, yamlfile
from sparkforge.pins.pins import Provider, Recorded
from sparkforge.pins.yamlfile import Where


def with_commit(path: Path, text: str, upstream: str, commit: str | None) -> str:
    """Return the text of pins.yaml with an upstream's commit; None leaves the key out."""
    here: Where = ("upstreams", upstream)
    if commit is not None and pins.parse(path, text).upstream(upstream).commit is not None:
        return yamlfile.replace_scalars(text, {(*here, "commit"): commit})  # keeps its comment
    return _block(path, text, here, "commit", [f"commit: {commit}"] if commit else [], "tag")


def without_natives(path: Path, text: str, upstream: str, file: str) -> str:
    """Return the text of pins.yaml with a release file that has native files of its own release."""
    return _block(path, text, ("upstreams", upstream, "files", file), "natives", [], "size")


def with_record(path: Path, text: str, upstream: str, recorded: Mapping[Provider, Recorded]) -> str:
    """Return the text of pins.yaml with other records of a series; {} leaves the key out."""
    lines = [
        f"  {kind}: {{commit: {value.commit}, tree: {value.tree}}}"
        for kind, value in sorted(recorded.items())
    ]
    block = ["patched:", *lines] if lines else []
    # right after the source file, from which the tree was made
    return _block(path, text, ("upstreams", upstream), "patched", block, "source_file")


def _block(path: Path, text: str, mapping: Where, key: str, block: list[str], behind: str) -> str:
    """Return the text with new lines for one key of a mapping, which must be one key a line.

    They are indented from the mapping's own column; if it lacks ``key``, they follow ``behind``,
    else they come first.
    """
    nodes = yamlfile.read(text).nodes
    own = nodes[mapping]
    if own.flow_style:
        msg = f"{path.name}: {yamlfile.dotted(mapping)}: is written on one line"
        raise PinsError(msg, "write one key per line")
    first = end = own.start_mark.line
    for name, value in own.value:
        if name.value in (key, behind):
            last = value
            while isinstance(last, yaml.CollectionNode) and not last.flow_style:
                last = last.value[-1]  # a block's own end mark is further down
                last = last[1] if isinstance(last, tuple) else last
            end = last.end_mark.line + 1
            first = end if name.value == behind else name.start_mark.line
            if name.value == key:
                break
    lines = text.splitlines(keepends=True)
    lines[first:end] = [f"{' ' * own.start_mark.column}{line}\n" for line in block]
    return "".join(lines)


def record(path: Path, upstream: str, provider: Provider, recorded: Recorded) -> None:
    """Record the result of a series in pins.yaml, which is read anew."""
    present = dict(pins.load(path).upstream(upstream).patched)
    _rewrite(path, upstream, present | {provider: recorded})


def forget(path: Path, upstream: str) -> None:
    """Remove all records of a series from pins.yaml."""
    _rewrite(path, upstream, {})


def _rewrite(path: Path, upstream: str, recorded: Mapping[Provider, Recorded]) -> None:
    # read_text() would change the line ends
    text = with_record(path, path.read_bytes().decode(), upstream, recorded)
    pins.parse(path, text)
    write_file(path, text.encode())
