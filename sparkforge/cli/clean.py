"""clean."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparkforge.build.options import OutputOptions
from sparkforge.core.command import Entry, switch
from sparkforge.core.log import human_bytes, log
from sparkforge.sources.project import store_of, store_option


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``clean``."""

    store: Path | None = store_option()
    all: bool = switch("delete downloads and git mirrors, too", one_of="results")
    superseded: bool = switch(
        "delete only results that no target's newest build uses", one_of="results"
    )
    output: OutputOptions


def _clean(options: Options) -> int:
    """Empty the store."""
    store = store_of(options.store)
    superseded, everything = options.superseded, options.all
    log.info(f"cleaning {store.root}; a large store takes minutes")
    freed = store.clean_superseded() if superseded else store.clean(everything=everything)
    log.info(f"freed {human_bytes(freed)}")
    log.document({"freed_bytes": freed})
    return 0


COMMANDS = (Entry("clean", Options, _clean),)
