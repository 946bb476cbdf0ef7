"""Runs inside the interpreter under test: one of two ranks whose all-reduce has a name, over gloo.

usage: python -m tests.patches.probes.probe_all_reduce RANK NAME MEETING

Prints the sums of a short and a long row, and how often the communicator that stands in was asked.
"""

import importlib.metadata
import json
import sys
from types import SimpleNamespace
from typing import Any

ASKED: list[int] = []


class Fake:
    """Leaves long rows to vLLM; its sums are told from others by a half."""

    def __init__(self, cpu_group: Any, device: Any) -> None:
        self.group = cpu_group
        assert device.type == "cpu"

    def all_reduce(self, input_: Any) -> Any:
        import torch

        ASKED.append(input_.numel())
        if input_.numel() > 64:
            return None
        summed = input_.clone()
        torch.distributed.all_reduce(summed, group=self.group)
        return summed + 0.5


def main(rank: int, name: str, meeting: str) -> None:
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm import distributed
    from vllm_sparkforge import options

    entry = SimpleNamespace(name="fake", load=lambda: Fake)
    found = importlib.metadata.EntryPoints([entry])  # type: ignore[list-item]
    options.entry_points = lambda group: found
    sys.modules["vllm_sparkforge.all_reduce"].entry_points = (  # type: ignore[attr-defined]
        lambda group, name: [one for one in found if one.name == name]
    )
    config = VllmConfig(additional_config={"sparkforge": {"all_reduce": name}})
    with set_current_vllm_config(config):
        distributed.init_distributed_environment(2, rank, meeting, rank, "gloo")
        distributed.initialize_model_parallel(2, backend="gloo")
    rows = (torch.full((1, size), rank + 1.0) for size in (8, 2880))
    sums = [distributed.tensor_model_parallel_all_reduce(row)[0, 0].item() for row in rows]
    print(json.dumps([sums, ASKED]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
