"""A YAML file as plain values with the place of each, so that errors and edits find it.

Plain scalars stay the text that was written (only null is None): 3.10 keeps its zero, a SHA of
digits its length, ``no`` its letters. The model decides which values are numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from sparkforge.core import plain

_DEEPEST = 32  # pins.yaml needs 8
_WIDEST = 60  # characters of a key that are shown
_CONTROL = "contains a control character: write plain text on one line"
_NULLS = ("", "~", "null", "Null", "NULL")
Where = tuple[str | int, ...]


class NotYamlError(Exception):
    """The text is no YAML; ``line``: of the error."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


@dataclass(frozen=True)
class Span:
    """A value's place: lines and columns from 0; ``last`` is the line of its last character.

    ``kind``: scalar, flow (a collection in brackets) or block.
    """

    line: int
    column: int
    last: int
    end_column: int
    kind: str


@dataclass
class Document:
    """The values, the place of each by its path, and problems of the form: line and text."""

    data: Any = None
    keys: dict[Where, int] = field(default_factory=lambda: {(): 1})
    """Lines for messages, from 1: of a mapping's value its key's."""
    spans: dict[Where, Span] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)

    def line(self, where: Where) -> int:
        """Return the line of a value, or of the nearest one around it if it is missing."""
        while where not in self.keys:
            where = where[:-1]
        return self.keys[where]

    def check(self, where: Where, line: int, *, wrong: bool, what: str) -> None:
        """Note a problem of the form."""
        if wrong:
            self.problems.append((line, f"{dotted(where)}: {what}"))


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
    documents = 0
    try:
        events = iter(yaml.parse(text, Loader=loader))
        for event in events:
            documents += isinstance(event, yaml.DocumentStartEvent)
            if documents > 1:
                raise NotYamlError(_line(event), "a second document: keep one")
            if isinstance(event, yaml.NodeEvent):
                document.keys[()] = _line(event)
                document.data = _value(event, events, (), document)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise NotYamlError(line, str(error.problem)) from None
    except yaml.reader.ReaderError as error:
        line = text.encode()[: error.position].count(b"\n") + 1
        raise NotYamlError(line, str(error.reason)) from None
    except yaml.YAMLError as error:
        raise NotYamlError(1, str(error).splitlines()[0]) from None
    return document


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _value(event: Any, events: Iterator[Any], where: Where, document: Document) -> Any:
    """Read one value, and note its place and its problems."""
    line, end, kind, inside = _line(event), event, "scalar", where
    if len(where) > _DEEPEST:
        raise NotYamlError(line, f"values are nested more than {_DEEPEST} deep")
    data: Any = None
    if isinstance(event, yaml.AliasEvent):  # each value has one place, and no file contains itself
        document.check(where, line, wrong=True, what="an alias (*): write out the value")
    elif isinstance(event, yaml.ScalarEvent):
        document.check(where, line, wrong=not plain.printable(event.value), what=_CONTROL)
        data = None if event.implicit[0] and event.value in _NULLS else event.value
    else:
        kind = "flow" if event.flow_style else "block"
        mapping = isinstance(event, yaml.MappingStartEvent)
        values: dict[str | int, Any] = {}
        while not isinstance(end := next(events), yaml.CollectionEndEvent):
            if mapping and not isinstance(end, yaml.ScalarEvent):
                raise NotYamlError(_line(end), "a key that is no text")
            key = str(end.value) if mapping else len(values)
            inside = (*where, key)
            document.keys[inside] = line = _line(end)
            document.check(inside, line, wrong=not plain.printable(str(key)), what=_CONTROL)
            document.check(inside, line, wrong=key in values, what="occurs twice: keep one")
            values[key] = _value(next(events) if mapping else end, events, inside, document)
        data = values if mapping else list(values.values())
    start, mark = event.start_mark, end.end_mark
    place = (start.line, start.column, mark.line, mark.column, kind)
    if kind == "block" and inside in document.spans:  # its own end mark is further down
        behind = document.spans[inside]
        place = (start.line, start.column, behind.last, behind.end_column, kind)
    document.spans[where] = Span(*place)
    return data


def replace_scalars(text: str, values: Mapping[Where, str]) -> str:
    """Return the text with some plain values on one line replaced; all else, comments too, stays.

    Raises:
        KeyError: a path leads to no scalar on one line.
    """
    spans = read(text).spans
    lines = text.splitlines(keepends=True)
    places = []
    for where, value in values.items():
        span = spans.get(where)
        if span is None or span.kind != "scalar" or span.line != span.last:
            raise KeyError(dotted(where))
        places.append((span.line, span.column, span.end_column, value))
    for line, start, end, value in sorted(places, reverse=True):  # from the end: columns stay
        lines[line] = lines[line][:start] + value + lines[line][end:]
    return "".join(lines)


def replace_block(text: str, mapping: Where, key: str, block: list[str], behind: str) -> str:
    """Return the text with new lines for one key of a mapping; all others stay.

    Args:
        mapping: its path; it must be written one key a line.
        block: the new lines, indented from the mapping's own column, without line ends.
        behind: if the mapping lacks ``key``, new lines follow this one, else they come first.

    Raises:
        KeyError: there is no such mapping, or it is not written one key a line.
    """
    document = read(text)
    own = document.spans[mapping]
    if own.kind != "block":
        raise KeyError(dotted(mapping))
    present, before = document.spans.get((*mapping, key)), document.spans.get((*mapping, behind))
    if present is not None:
        first, end = document.line((*mapping, key)) - 1, present.last + 1
    else:
        first = end = own.line if before is None else before.last + 1
    lines = text.splitlines(keepends=True)
    newline = "\r\n" if lines[0].endswith("\r\n") else "\n"
    if first > 0 and not lines[first - 1].endswith("\n"):
        lines[first - 1] += newline
    lines[first:end] = [f"{' ' * own.column}{line}{newline}" for line in block]
    return "".join(lines)
