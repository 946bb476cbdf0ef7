"""A YAML file as plain values with the place of each, so that errors and edits find it.

Plain scalars stay the text that was written (only null is None): 3.10 keeps its zero, a SHA of
digits its length, ``no`` its letters. The model decides which values are numbers.

Edits of pins.yaml leave every other line as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sparkforge.core import plain
from sparkforge.core.disk import YAML_LOADER, write_file
from sparkforge.core.errors import PinsError

if TYPE_CHECKING:
    from sparkforge.pins.pins import Provider, Recorded

_DEEPEST = 32  # pins.yaml needs 8
_WIDEST = 60  # characters of a key that are shown
Where = tuple[str | int, ...]


@dataclass
class Document:
    """The values, and the place of each by its path."""

    data: Any = None
    keys: dict[Where, int] = field(default_factory=lambda: {(): 1})
    """Lines for messages, from 1: of a mapping's value its key's."""
    nodes: dict[Where, Any] = field(default_factory=dict)

    def line(self, where: Where) -> int:
        """Return the line of a value, or of the nearest one around it if it is missing."""
        while where not in self.keys:
            where = where[:-1]
        return self.keys[where]


def dotted(where: Where) -> str:
    """Return a path for messages: ``targets.cpu.platforms[0]``."""
    text = ""
    for key in where:
        part = key if isinstance(key, int) or len(key) <= _WIDEST else f"{key[:_WIDEST]}..."
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return plain.escaped(text) or "top level"


def read(text: str) -> Document:
    """Parse a text; yaml.YAMLError: no YAML, more than one document, or nested too deeply."""
    document = Document()
    depth = 0
    for event in yaml.parse(text, Loader=YAML_LOADER):  # compose() recurses without a limit
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise _refused(event, f"values are nested more than {_DEEPEST} deep")
        if isinstance(event, yaml.AliasEvent):  # no value contains itself
            raise _refused(event, "an alias (*): write out the value")
    if (top := yaml.compose(text, Loader=YAML_LOADER)) is not None:
        document.keys[()] = _line(top)
        document.data = _value(top, (), document)
    return document


def _refused(part: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=part.start_mark)


def _line(part: Any) -> int:
    return int(part.start_mark.line) + 1


def _value(node: yaml.Node, where: Where, document: Document) -> Any:
    """Return one value, and note its place."""
    document.nodes[where] = node
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag.endswith(":null") else _printable(node)
    if isinstance(node, yaml.SequenceNode):
        for at, item in enumerate(node.value):
            document.keys[(*where, at)] = _line(item)
        return [_value(item, (*where, at), document) for at, item in enumerate(node.value)]
    values: dict[str, Any] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or _printable(key) in values:
            raise _refused(key, "a key that is no text, or occurs twice")
        inside = (*where, key.value)
        document.keys[inside] = _line(key)
        values[key.value] = _value(value, inside, document)
    return values


def _printable(node: yaml.ScalarNode) -> str:
    text = str(node.value)
    if not plain.printable(text):
        short = plain.escaped(text[:_WIDEST])
        raise _refused(node, f"{short}: more than a line, or control characters")
    return text


def replace_scalars(text: str, values: Mapping[Where, str]) -> str:
    """Return the text with some values replaced; PinsError: one is not written on one line."""
    nodes = read(text).nodes
    lines = text.splitlines(keepends=True)
    places = []
    for where, value in values.items():
        node = nodes.get(where)
        if not isinstance(node, yaml.ScalarNode) or node.start_mark.line != node.end_mark.line:
            msg = f"pins.yaml: {dotted(where)}: is not written on one line"
            raise PinsError(msg, "write it KEY: VALUE on one line")
        places.append((node.start_mark.line, node.start_mark.column, node.end_mark.column, value))
    for line, start, end, value in sorted(places, reverse=True):  # from the end: columns stay
        lines[line] = lines[line][:start] + value + lines[line][end:]
    return "".join(lines)


def with_commit(path: Path, text: str, upstream: str, commit: str | None) -> str:
    """Return the text of pins.yaml with an upstream's commit; None leaves the key out."""
    here: Where = ("upstreams", upstream)
    if commit is not None and (*here, "commit") in read(text).nodes:
        return replace_scalars(text, {(*here, "commit"): commit})  # keeps its comment
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


def record(path: Path, upstream: str, recorded: Mapping[Provider, Recorded]) -> None:
    """Write other records of a series into pins.yaml."""
    # read_text() would change the line ends
    text = with_record(path, path.read_bytes().decode(), upstream, recorded)
    write_file(path, text.encode())


def _block(path: Path, text: str, mapping: Where, key: str, block: list[str], behind: str) -> str:
    """Return the text with new lines for one key of a mapping, which must be one key a line.

    If it lacks ``key``, they follow ``behind``, else they come first.
    """
    own = read(text).nodes[mapping]
    if own.flow_style:
        msg = f"{path.name}: {dotted(mapping)}: is written on one line"
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
