"""The folder of a lock's wheels, each with its locked sha256."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sparkforge.build.context import WHEELS, Context
from sparkforge.build.item import Item, Results
from sparkforge.build.results import WheelhouseResult
from sparkforge.core.disk import sha256_file
from sparkforge.core.log import log
from sparkforge.runtime import interpreter
from sparkforge.sources import sizes
from sparkforge.store.artefact import Artefact
from sparkforge.store.codekey import code_of


def wheelhouse_item(
    context: Context, lock: Path | None = None, label: str = "wheelhouse", stage: str = "wheelhouse"
) -> Item[WheelhouseResult]:
    """Return the folder of a lock's wheels; without a lock: the target's own."""
    from sparkforge.sources import wheelhouse

    lock = context.lock if lock is None else lock

    # the image's build installs with the uv that the driver is locked to
    driver = wheelhouse.read_lock(context.root / "requirements" / "driver.txt")
    tools = tuple(item for item in driver if item.name == "uv")
    inputs = {
        "lock": sha256_file(lock),
        "tools": [item.requirement for item in tools],
        "python": context.target.python,
        "platform": context.platform,
        "code": code_of(__name__),
    }

    wanted = wheelhouse.Wanted(
        lock=lock,
        tools=tools,
        python=context.target.python,
        platform=context.platform,
        torch_backend=context.target.torch_backend,
    )

    def known() -> Mapping[str, sizes.Known]:
        return sizes.read(context.root / sizes.FILE)

    def make(folder: Path, results: Results) -> WheelhouseResult:
        (folder / WHEELS).mkdir()
        count = wheelhouse.fill(
            context.store,
            wanted,
            context.access.index,
            interpreter.uv_program(),
            offline=context.access.offline,
            into=folder / WHEELS,
            known=known(),
        )
        log.info(f"{count} third-party wheels (with uv), each with its locked sha256")
        return WheelhouseResult(count)

    def complete(artefact: Artefact[WheelhouseResult]) -> bool:
        return len(list((artefact.path / WHEELS).glob("*.whl"))) == artefact.result.files

    return Item(
        stage,
        label,
        inputs,
        WheelhouseResult,
        make,
        valid=complete,
        sound=lambda artefact: not wheelhouse.damaged(artefact.path / WHEELS, wanted),
        fetches=lambda: wheelhouse.to_fetch(context.store, wanted, known()),
    )
