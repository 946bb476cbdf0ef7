"""Tables of tests, as data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Test:
    """One test of llama-benchy.

    Attributes:
        depth: tokens of the context before the prompt.
        prompt: tokens of the prompt.
        generated: limit for tokens of the answer.
        concurrency: requests at once.
    """

    depth: int
    prompt: int
    generated: int
    concurrency: int

    @property
    def name(self) -> str:
        """The name in llama-benchy's tables: ``pp2048 tg128 @ d4096 (c2)``."""
        at = f" @ d{self.depth}" if self.depth else ""
        return f"pp{self.prompt} tg{self.generated}{at} (c{self.concurrency})"

    @property
    def slug(self) -> str:
        """The name for files."""
        return f"pp{self.prompt}-tg{self.generated}-d{self.depth}-c{self.concurrency}"

    @property
    def tokens(self) -> int:
        """Tokens of the longest sequence."""
        return self.depth + self.prompt + self.generated


@dataclass(frozen=True)
class Table:
    """Tests: each combination of these numbers.

    Attributes:
        runs: of each test, after one warm-up.
        prefix_caching: a separate request loads the context, and is measured, too.
    """

    prompts: tuple[int, ...]
    generated: tuple[int, ...]
    depths: tuple[int, ...] = (0,)
    concurrency: tuple[int, ...] = (1,)
    runs: int = 3
    prefix_caching: bool = False

    def tests(self) -> Iterator[Test]:
        """Yield the tests, short contexts first."""
        for numbers in itertools.product(
            self.depths, self.prompts, self.generated, self.concurrency
        ):
            yield Test(*numbers)


TABLES: Mapping[str, Table] = {
    "quick": Table((512,), (32,), concurrency=(1, 2)),
    "seeds": Table((512, 2048, 8192), (32, 128)),
    "community": Table(
        (2048,),
        (128,),
        (0, 4096, 8192, 16384, 32768, 65536, 100_000),
        (1, 2, 5, 10),
        prefix_caching=True,
    ),
}
"""By the name for ``--profile-table``.

``seeds``: the shape of the first published figures of gpt-oss-120b on one Spark. ``community``: the
shape of spark-arena's profiles v1 and v2 (read on 2026-11-20: prompts of 2,048, answers of 128,
depths from 0 to 100,000, concurrency 1, 2, 5 and 10, prefix caching, three runs); the depths
between its ends are ours.
"""
