"""The experts that a decode step reads: noted, or replaced by uniformly random ones.

Nothing is launched for either: the kernels of the router run as they do, and what computes the
experts gets other ids, the same in each step and others in each layer. In a CUDA graph these are
what it was captured with.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

ROWS = 16384  # of a layer's table of ids: the most tokens that vLLM puts into one step by default


class Routing:
    """Stands between vLLM's routers and its experts, once the model is loaded.

    Args:
        experts: of a layer.
        uniform: whether random ids replace the router's.
    """

    def __init__(self, experts: int, *, uniform: bool) -> None:
        self.experts, self.uniform = experts, uniform
        self.active = False  # while a model loads, kernels are compared with each other
        self._tables: dict[int, dict[Any, Any]] = {}  # by the address of weights, and type
        self._last: dict[int, dict[int, Any]] = {}  # by rows and by the address of weights

    def ids(self, weights: Any, ids: Any) -> Any:
        """Return the ids that count, and keep them for ``distinct``.

        Args:
            weights: a layer's, which tell it from others.
            ids: integers [rows, experts of a row].
        """
        if not self.active:
            return ids
        rows = ids.shape[0]
        if self.uniform:
            ids = self._table(weights.data_ptr(), ids)[:rows]
        self._last.setdefault(rows, {})[weights.data_ptr()] = ids
        return ids

    def _table(self, layer: int, ids: Any) -> Any:
        """Return the ids of a layer, for more rows than any step has."""
        import torch

        if layer not in self._tables:
            dice = torch.Generator(ids.device).manual_seed(len(self._tables))
            rows = max(ROWS, ids.shape[0])
            scores = torch.rand(rows, self.experts, generator=dice, device=ids.device)
            chosen = scores.topk(ids.shape[1]).indices
            # both: what asks for the other may do so while a graph is captured
            self._tables[layer] = {kind: chosen.to(kind) for kind in (torch.int32, torch.int64)}
        return self._tables[layer][ids.dtype]

    def distinct(self, rows: int) -> float | None:
        """Return the distinct experts of a layer in the last step of so many rows, on average.

        None: no such step ran, or not with the experts that ``install`` knows.
        """
        layers = self._last.get(rows)
        if not layers:
            return None
        counts = [int(ids[ids >= 0].unique().numel()) for ids in layers.values()]
        return sum(counts) / len(counts)

    def between(
        self,
        function: Callable[..., Any],
        weights: str,
        ids: str,
        tensor: Callable[[Any], Any] = lambda weights: weights,
    ) -> Callable[..., Any]:
        """Return a function that calls another with the ids that count.

        Args:
            function: computes experts.
            weights, ids: names of its parameters.
            tensor: of the weights, one that tells the layer.
        """
        signature = inspect.signature(function)

        @functools.wraps(function)
        def replaced(*given: Any, **named: Any) -> Any:
            bound = signature.bind(*given, **named)
            layer = tensor(bound.arguments[weights])
            bound.arguments[ids] = self.ids(layer, bound.arguments[ids])
            return function(*bound.args, **bound.kwargs)

        return replaced

    def install(self) -> None:
        """Put this into vLLM, before a model is loaded: into Marlin's experts and the plugin's."""
        from vllm.model_executor.layers.fused_moe.experts import marlin_moe
        from vllm.v1.worker.gpu_worker import Worker

        kind = marlin_moe.MarlinExperts
        kind.apply = self.between(kind.apply, "w1", "topk_ids")
        # an environment without the plugin has none of these
        if importlib.util.find_spec("vllm_sparkforge") is not None:
            from vllm_sparkforge.decode import experts

            experts.products = self.between(
                experts.products, "weights", "ids", lambda weights: weights.w13
            )
        measure = Worker.determine_available_memory

        @functools.wraps(measure)
        def loaded(worker: Any) -> Any:
            self.active = True
            return measure(worker)

        Worker.determine_available_memory = loaded
