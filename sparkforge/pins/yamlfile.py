"""A YAML file as plain values with the place of each, so that errors and edits find it.

Plain scalars stay the text that was written (only null is None): 3.10 keeps its zero, a SHA of
digits its length, ``no`` its letters. The model decides which values are numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from sparkforge.core import plain

_DEEPEST = 32  # pins.yaml needs 8
_WIDEST = 60  # characters of a key that are shown
_CONTROL = "contains a control character: write plain text on one line"
Where = tuple[str | int, ...]


class NotYamlError(Exception):
    """The text is no YAML; ``line``: of the error."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


@dataclass
class Document:
    """The values, the place of each by its path, and problems of the form: line and text."""

    data: Any = None
    keys: dict[Where, int] = field(default_factory=lambda: {(): 1})
    """Lines for messages, from 1: of a mapping's value its key's."""
    nodes: dict[Where, Any] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)

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
    """Parse a text; NotYamlError if it is no YAML, more than one document, or nested too deeply."""
    document = Document()
    # the C parser is five times as fast; a build of PyYAML without libyaml lacks it
    loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):  # compose() recurses without a limit
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise NotYamlError(_line(event), f"values are nested more than {_DEEPEST} deep")
            if isinstance(event, yaml.AliasEvent):  # no value contains itself
                raise NotYamlError(_line(event), "an alias (*): write out the value")
        if (top := yaml.compose(text, Loader=loader)) is not None:
            document.keys[()] = _line(top)
            document.data = _value(top, (), document)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise NotYamlError(line, str(error.problem)) from None
    except yaml.reader.ReaderError as error:
        line = text.encode()[: error.position].count(b"\n") + 1
        raise NotYamlError(line, str(error.reason)) from None
    except yaml.YAMLError as error:
        raise NotYamlError(1, str(error).splitlines()[0]) from None
    return document


def _line(part: Any) -> int:
    return int(part.start_mark.line) + 1


def _value(node: yaml.Node, where: Where, document: Document) -> Any:
    """Return one value, and note its place and its problems."""
    document.nodes[where] = node

    def check(where: Where, line: int, *, wrong: bool, what: str = _CONTROL) -> None:
        if wrong:
            document.problems.append((line, f"{dotted(where)}: {what}"))

    if isinstance(node, yaml.ScalarNode):
        check(where, _line(node), wrong=not plain.printable(node.value))
        return None if node.tag.endswith(":null") else node.value
    if isinstance(node, yaml.SequenceNode):
        for at, item in enumerate(node.value):
            document.keys[(*where, at)] = _line(item)
        return [_value(item, (*where, at), document) for at, item in enumerate(node.value)]
    values: dict[str, Any] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise NotYamlError(_line(key), "a key that is no text")
        inside = (*where, key.value)
        document.keys[inside] = line = _line(key)
        check(inside, line, wrong=not plain.printable(key.value))
        check(inside, line, wrong=key.value in values, what="occurs twice: keep one")
        values[key.value] = _value(value, inside, document)
    return values


def replace_scalars(text: str, values: Mapping[Where, str]) -> str:
    """Return the text with some values replaced; KeyError: one is no scalar on one line."""
    nodes = read(text).nodes
    lines = text.splitlines(keepends=True)
    places = []
    for where, value in values.items():
        node = nodes.get(where)
        if not isinstance(node, yaml.ScalarNode) or node.start_mark.line != node.end_mark.line:
            raise KeyError(dotted(where))
        places.append((node.start_mark.line, node.start_mark.column, node.end_mark.column, value))
    for line, start, end, value in sorted(places, reverse=True):  # from the end: columns stay
        lines[line] = lines[line][:start] + value + lines[line][end:]
    return "".join(lines)
