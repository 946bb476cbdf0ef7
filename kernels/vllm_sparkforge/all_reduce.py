# SPDX-License-Identifier: Apache-2.0
"""The all-reduce of the tensor-parallel group by another library, by its name.

An installed package names its function in the entry-point group ``sparkforge.all_reduce``:

    make(cpu_group: ProcessGroup, device: torch.device) -> communicator
    communicator.all_reduce(input: Tensor) -> Tensor | None

It is called once in each rank. The communicator returns the sum as a new tensor, or None to leave
it to vLLM. All ranks have to decide alike, so by shape and type alone. The call becomes a part of
CUDA graphs: nothing in it waits on the host.
"""

from __future__ import annotations

from functools import wraps
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from vllm_sparkforge import options

if TYPE_CHECKING:
    import torch


def register() -> None:
    """Have each tensor-parallel group ask the communicator that the configuration names."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.logger import init_logger

    make, logger = GroupCoordinator.__init__, init_logger(f"vllm.{__name__}")

    @wraps(make)
    def init(self: GroupCoordinator, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        name = options.of(get_current_vllm_config_or_none()).all_reduce
        theirs = self.device_communicator
        if name == options.NCCL or theirs is None or self.unique_name.partition(":")[0] != "tp":
            return
        (entry,) = entry_points(group=options.ALL_REDUCES, name=name)
        ours = entry.load()(self.cpu_group, self.device)
        upstream = theirs.all_reduce

        def all_reduce(input_: torch.Tensor) -> torch.Tensor:
            summed: torch.Tensor | None = ours.all_reduce(input_)
            return upstream(input_) if summed is None else summed

        theirs.all_reduce = all_reduce
        logger.info("All-reduce of group %s: %s, else vLLM's.", self.unique_name, name)

    GroupCoordinator.__init__ = init
