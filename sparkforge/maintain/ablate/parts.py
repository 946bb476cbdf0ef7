"""Parts of the plugin, switched off in turn: the test of each must fail then, as a patch's does."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

from sparkforge.core.errors import SeriesError
from sparkforge.core.log import log
from sparkforge.maintain.ablate.outcome import OwnTests, Result, run_tests
from sparkforge.maintain.ablate.reduced import Place
from sparkforge.pins.compiling import Plugin

_OPTIONS = "VLLM_SPARKFORGE"
"""The variable that the plugin reads its options from."""


def tests_of(root: Path, plugin: Plugin | None) -> dict[str, str]:
    """Return the test's node id of each part, as the plugin's pyproject.toml names it.

    Raises:
        SeriesError: it names none.
    """
    if plugin is None:
        return {}
    path = root / plugin.folder / "pyproject.toml"
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        return {str(name): str(test) for name, test in document["tool"]["sparkforge"].items()}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        msg = f"{path}: cannot be read: {error}"
        raise SeriesError(msg, "name each part's test in the table tool.sparkforge") from error


def results_of(place: Place, python: Path, tests: Mapping[str, str]) -> list[Result]:
    """Run the tests of parts with all parts, and each with its part switched off.

    Args:
        place: the checkout as it is.

    Raises:
        UsageError, SeriesError: they cannot be run at all.
    """
    own = OwnTests(python, place.root, {("plugin", part): test for part, test in tests.items()})
    with log.step("all parts of the plugin"):
        whole = own.whole(place)
    results: list[Result] = []
    for part, test in tests.items():
        start = time.monotonic()
        env = {**place.env, _OPTIONS: json.dumps({"off": [part]})}
        with log.step(f"without {part}"), place.store.temporary("report") as work:
            without = run_tests(python, place.root, [test], env, work, found=True)[test]
        seconds = time.monotonic() - start
        one = Result("plugin", part, test, (part,), (), whole[test], without, seconds)
        log.info(one.verdict)
        results.append(one)
    return results
