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
_NULLS = ("", "~", "null", "Null", "NULL")
Where = tuple[str | int, ...]


class NotYamlError(Exception):
    """The text is no YAML; ``line``: of the error."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


@dataclass(frozen=True)
class Span:
    """A value's place: lines and columns from 0; ``last`` is the line of its last character."""

    line: int
    column: int
    last: int
    end_column: int
    kind: str
    """scalar, flow (a collection in brackets) or block."""


@dataclass
class Document:
    """The values, the place of each by its path, and problems of the form."""

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

    def problem(self, where: Where, line: int, what: str) -> None:
        """Note a problem of the form."""
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
    line = _line(event)
    if len(where) > _DEEPEST:
        raise NotYamlError(line, f"values are nested more than {_DEEPEST} deep")
    data: Any = None
    end, kind = event, "scalar"
    if isinstance(event, yaml.AliasEvent):  # each value has one place, and no file contains itself
        document.problem(where, line, "an alias (*): write out the value")
    elif isinstance(event, yaml.ScalarEvent):
        if not plain.printable(event.value):
            what = "contains a control character: write plain text on one line"
            document.problem(where, line, what)
        null = event.implicit[0] and event.value in _NULLS
        data = None if null else event.value
    else:
        kind = "flow" if event.flow_style else "block"
        mapping = isinstance(event, yaml.MappingStartEvent)
        values: dict[str | int, Any] = {}
        inside = where
        for end in events:
            if isinstance(end, yaml.CollectionEndEvent):
                break
            inside = (*where, _key(end, events, where, document) if mapping else len(values))
            if inside[-1] in values:
                document.problem(inside, _line(end), "occurs twice: keep one")
            document.keys[inside] = _line(end)
            begin = next(events) if mapping else end
            values[inside[-1]] = _value(begin, events, inside, document)
        data = values if mapping else list(values.values())
        if kind == "block" and inside in document.spans:  # its own end mark is further down
            last = document.spans[inside]
            document.spans[where] = Span(
                line - 1, event.start_mark.column, last.last, last.end_column, kind
            )
            return data
    mark = end.end_mark
    document.spans[where] = Span(line - 1, event.start_mark.column, mark.line, mark.column, kind)
    return data


def _key(event: Any, events: Iterator[Any], where: Where, document: Document) -> str:
    """Return a mapping's key; of a list or mapping as a key "?", which the model refuses."""
    if not isinstance(event, yaml.ScalarEvent):
        _value(event, events, (*where, "?"), document)
        return "?"
    key = str(event.value)
    if not plain.printable(key):
        what = "contains a control character: write plain text on one line"
        document.problem((*where, key), _line(event), what)
    return key


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
