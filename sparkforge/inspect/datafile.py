"""Data of a page: a YAML file in docs/, checked as it is read."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from sparkforge.core.errors import UsageError
from sparkforge.pins import yamlfile

_T = TypeVar("_T")


def load(path: Path, kind: TypeAdapter[_T]) -> _T:
    """Read a file.

    Raises:
        UsageError: it is missing or malformed.
    """
    hint = f"the head of docs/{path.name} describes the values"
    try:
        document = yamlfile.read(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "restore it from git") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8", hint) from None
    except yamlfile.NotYamlError as error:
        raise UsageError(f"{path}:{error.line}: {error}", hint) from None
    for line, problem in document.problems:
        raise UsageError(f"{path}:{line}: {problem}", hint)
    try:
        return kind.validate_python(document.data)
    except ValidationError as error:
        first = error.errors()[0]
        line, where = document.line(first["loc"]), yamlfile.dotted(first["loc"])
        raise UsageError(f"{path}:{line}: {where}: {first['msg']}", hint) from None
