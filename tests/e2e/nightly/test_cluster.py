"""The pair of docker-compose.yml with vLLM itself: two containers, one model, tensor parallel 2.

tests/data/cluster-cpu.yml takes GPU, RDMA and the host's network out of it. Services, entrypoints,
their link, vLLM's executor over two nodes and the health checks are those of two Sparks.
"""

import signal
from collections.abc import Iterator
from operator import eq
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from .. import served
from ..pair import Pair

# BF16 sums in another order. Measured between one process and two (in network namespaces), over
# the prompt's 68 log probabilities of -2 to -24: median 0.027, largest 0.145
MEDIAN, LARGEST = 0.1, 0.5


@pytest.fixture
def pair(image: Any, checkout: Path) -> Iterator[Pair]:
    one = Pair(image["image"]["tag"], checkout / "dist" / "cpu" / "tiny-model", "10.87.41")
    try:
        yield one
    finally:
        one.close()


def test_two_nodes_answer_as_one_does_and_outlive_a_worker_that_dies_or_stops(
    checkout: Path, pair: Pair
) -> None:
    alone = served.by_compose(checkout)
    ready_s = pair.up()
    together = served.ask(pair.port)
    apart = [abs(a - b) for a, b in zip(alone.logprobs, together.logprobs, strict=True)]
    same = sum(map(eq, alone.tokens, together.tokens))
    print(f"two nodes healthy after {ready_s:.0f} s; {same} of 24 tokens the same")
    print(f"log probabilities apart: median {median(apart):.3f}, at most {max(apart):.3f}")
    assert len(together.tokens) == len(alone.tokens) == 24
    assert len(apart) == len(served.PROMPT.encode()) - 1
    assert median(apart) < MEDIAN
    assert 0 < max(apart) < LARGEST  # the same to the bit would be no other order of adding
    assert "world_size=2, local_world_size=1" in pair.compose("logs", "spark-head")

    for number in (signal.SIGKILL, signal.SIGSTOP):
        noticed_s, again_s = pair.lose("spark-worker", number)
        print(f"{number.name}: not healthy after {noticed_s:.0f} s, both again {again_s:.0f} s")
        assert served.ask(pair.port).tokens == together.tokens
    log = pair.compose("logs", "spark-head")
    assert "the worker has gone" in log
    assert "the server hangs: " in log
