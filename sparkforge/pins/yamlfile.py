"""A YAML file as plain values with the line of each, and the edit of one block in its text.

Plain scalars stay the text that was written (only null is None): 3.10 keeps its zero, a SHA of
digits its length, ``no`` its letters. The model decides which values are numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from sparkforge.core import plain

_DEEPEST = 32  # pins.yaml needs 8; libyaml's composer recurses, until the stack is full
_WIDEST = 60  # characters of a key that are shown
_ONE_LINE = "contains a control character: write plain text on one line"
Where = tuple[str | int, ...]


class NotYamlError(Exception):
    """The text is no YAML; ``line``: of the error."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


@dataclass
class Document:
    """The values, the line of each by its path, and problems of the form."""

    data: Any = None
    lines: dict[Where, int] = field(default_factory=lambda: {(): 1})
    problems: list[tuple[int, str]] = field(default_factory=list)

    def line(self, where: Where) -> int:
        """Return the line of a value, or of the nearest one around it if it is missing."""
        while where not in self.lines:
            where = where[:-1]
        return self.lines[where]


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
    root = _compose(text)
    if root is not None:
        document.data = _value(root, (), document, set())
    return document


def _compose(text: str) -> yaml.Node | None:
    # the C parser is five times as fast; a build of PyYAML without libyaml lacks it
    loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        depth = 0
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                assert event.start_mark is not None
                line = event.start_mark.line + 1
                raise NotYamlError(line, f"values are nested more than {_DEEPEST} deep")
        node: yaml.Node | None = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise NotYamlError(line, str(error.problem)) from None
    except yaml.reader.ReaderError as error:
        line = text.encode()[: error.position].count(b"\n") + 1
        raise NotYamlError(line, str(error.reason)) from None
    except yaml.YAMLError as error:
        raise NotYamlError(1, str(error).splitlines()[0]) from None
    return node


def _value(node: yaml.Node, where: Where, document: Document, seen: set[int]) -> Any:
    line = node.start_mark.line + 1
    document.lines[where] = line
    if id(node) in seen:
        # each value has one place, and no file contains itself
        document.problems.append((line, f"{dotted(where)}: an alias (*): write out the value"))
        return None
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            # a list or mapping as a key: "?", which the model refuses
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
            at = (*where, key)
            line = key_node.start_mark.line + 1
            if not plain.printable(key):
                document.problems.append((line, f"{dotted(at)}: {_ONE_LINE}"))
            if key in result:
                document.problems.append((line, f"{dotted(at)}: occurs twice: keep one"))
            result[key] = _value(value_node, at, document, seen)
            document.lines[at] = line  # messages name the key's line
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*where, i), document, seen) for i, item in enumerate(node.value)]
    if not plain.printable(node.value):
        document.problems.append((line, f"{dotted(where)}: {_ONE_LINE}"))
    return None if node.tag == "tag:yaml.org,2002:null" else node.value


# -- editing ------------------------------------------------------------------------


def replace_block(
    text: str, mapping: Sequence[str], key: str, block: Sequence[str], behind: str
) -> str | None:
    """Return the text with new lines for one key of a mapping; all others stay.

    Args:
        mapping: path of the mapping, which must be written one key a line.
        block: the new lines, indented from the mapping's own column, without line ends.
        behind: if the mapping lacks ``key``, new lines follow this one.

    Returns:
        None where the mapping is not written one key a line.
    """
    node = _compose(text)
    for name in mapping:
        node = dict(_pairs(node))[name][1]
    if not isinstance(node, yaml.MappingNode) or node.flow_style:
        return None
    pairs = dict(_pairs(node))
    lines = text.splitlines(keepends=True)
    if key in pairs:
        first, last = pairs[key][0].start_mark.line, _last_line(pairs[key][1])
    elif behind in pairs:
        first = _last_line(pairs[behind][1]) + 1
        last = first - 1
    else:
        first = node.start_mark.line
        last = first - 1
    end = "\r\n" if lines[0].endswith("\r\n") else "\n"
    if first > 0 and not lines[first - 1].endswith("\n"):
        lines[first - 1] += end
    indent = " " * node.start_mark.column
    lines[first : last + 1] = [f"{indent}{line}{end}" for line in block]
    return "".join(lines)


def replace_scalars(text: str, values: Mapping[Where, str]) -> str:
    """Return the text with some plain values replaced; all else, comments too, stays.

    Args:
        values: by path; each must be there, and be a scalar on one line.

    Raises:
        KeyError: a path leads to no scalar.
    """
    root = _compose(text)
    places = []
    for where, value in values.items():
        node = root
        for part in where:
            if isinstance(part, int) and isinstance(node, yaml.SequenceNode):
                node = node.value[part]
            elif isinstance(node, yaml.MappingNode):
                node = dict(_pairs(node))[str(part)][1]
            else:
                raise KeyError(dotted(where))
        if not isinstance(node, yaml.ScalarNode) or node.start_mark.line != node.end_mark.line:
            raise KeyError(dotted(where))
        places.append((node.start_mark.line, node.start_mark.column, node.end_mark.column, value))
    lines = text.splitlines(keepends=True)
    for line, start, end, value in sorted(places, reverse=True):  # from the end: columns stay
        lines[line] = lines[line][:start] + value + lines[line][end:]
    return "".join(lines)


def _pairs(node: yaml.Node | None) -> Iterator[tuple[str, tuple[yaml.Node, yaml.Node]]]:
    assert isinstance(node, yaml.MappingNode)
    for key_node, value_node in node.value:
        yield str(key_node.value), (key_node, value_node)


def _last_line(node: yaml.Node) -> int:
    """Return a value's last line; a block's own end mark is further down."""
    if not isinstance(node, yaml.CollectionNode) or node.flow_style:
        return int(node.end_mark.line)
    children = [
        child for item in node.value for child in (item if isinstance(item, tuple) else (item,))
    ]
    return max(_last_line(child) for child in children)
