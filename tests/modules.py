"""The module of FlashInfer that tests compile."""

from sparkforge.build.packs.modules import MODULES

SMALLEST = next(one for one in MODULES if one.name.startswith("xqa_"))
"""Of the list the one that compiles in the least time: 20 s of CPU."""
