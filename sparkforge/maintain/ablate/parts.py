"""Parts of the plugin, switched off in turn: the test of each must fail then, as a patch's does."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparkforge.core.errors import SeriesError
from sparkforge.core.log import log
from sparkforge.maintain.ablate.outcome import Outcome, Result, run_tests
from sparkforge.pins.compiling import Plugin
from sparkforge.store.store import Store

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


def results_of(store: Store, python: Path, root: Path, tests: Mapping[str, str]) -> list[Result]:
    """Run the tests of parts with all parts, and each with its part switched off.

    Raises:
        SeriesError: they cannot be run at all.
    """
    results: list[Result] = []
    with store.temporary("report") as work:

        def run(
            names: Sequence[str], env: Mapping[str, str], *, found: bool = False
        ) -> dict[str, Outcome]:
            env = {"SPARKFORGE_STORE": str(store.root), **env}
            return run_tests(python, root, [tests[name] for name in names], env, work, found=found)

        with log.step("all parts of the plugin"):
            whole = run(list(tests), {})
        for part, test in tests.items():
            start = time.monotonic()
            with log.step(f"without {part}"):
                without = run([part], {_OPTIONS: json.dumps({"off": [part]})}, found=True)
            seconds = time.monotonic() - start
            one = Result("plugin", part, test, (part,), (), whole[test], without[test], seconds)
            log.info(one.verdict)
            results.append(one)
    return results
