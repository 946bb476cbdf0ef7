"""vLLM's accounting of memory on a made-up machine that GPU and host share; see
test_unified_memory.py. Runs in the target's interpreter: STATES-FILE OUT-FILE.

Real are MemorySnapshot, request_memory, Worker.determine_available_memory with memory_profiling,
and the measuring of CUDA graphs in both model runners. Made up are
the readings (unified_memory.py), and the model and its graphs: amounts that are allocated when
vLLM would load, run or capture them.
"""

import contextlib
import gc
import importlib.util
import json
import sys
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.patches.probes import fake_cuda
from tests.patches.unified_memory import GIB, Machine

fake_cuda.install(fake_cuda.Capability(12, 1))

import psutil  # noqa: E402
import torch  # noqa: E402
import vllm.platforms  # noqa: E402
import vllm.v1.worker.gpu.cudagraph_utils as v2  # noqa: E402
from vllm.config import CUDAGraphMode, VllmConfig  # noqa: E402
from vllm.utils.mem_utils import MemorySnapshot  # noqa: E402
from vllm.v1.worker import gpu_model_runner as v1  # noqa: E402
from vllm.v1.worker.gpu import model_runner as v2_runner  # noqa: E402
from vllm.v1.worker.gpu_worker import Worker  # noqa: E402
from vllm.v1.worker.utils import request_memory  # noqa: E402

Memory = namedtuple("Memory", "total available")
DEVICE = torch.device("cuda:0")


class Torch:
    """What torch's allocator would say, on a machine whose GPU memory it takes."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.allocated = self.peak = 0

    def allocate(self, size: int) -> None:
        self.machine.allocate_gpu(size)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def release(self, size: int) -> None:
        self.machine.free_gpu(size)
        self.allocated -= size

    def install(self, integrated: bool) -> None:
        def stats(_: Any = None) -> dict[str, int]:
            current = self.allocated
            return {"allocated_bytes.all.peak": self.peak, "allocated_bytes.all.current": current}

        def reset(_: Any = None) -> None:
            self.peak = self.allocated

        accelerator: Any = torch.accelerator
        accelerator.memory_stats = stats
        accelerator.memory_reserved = lambda _=None: self.allocated
        accelerator.reset_peak_memory_stats = reset
        accelerator.get_memory_info = lambda _=None: (self.machine.free, self.machine.total)
        accelerator.empty_cache = lambda: None
        accelerator.synchronize = lambda _=None: None
        psutil.virtual_memory = lambda: Memory(self.machine.total, self.machine.available)
        platform: Any = type(vllm.platforms.current_platform)
        platform.is_integrated_gpu = classmethod(lambda cls, device_id=0: integrated)
        platform.graph_pool_handle = classmethod(lambda cls: object())


class Graphs:
    """Graphs that cost memory when they are captured: the first one most."""

    def __init__(self, torch_: Torch, first: int, each: int, during: int) -> None:
        self.torch, self.first, self.each, self.during = torch_, first, each, during
        self.held = 0

    def capture(self) -> None:
        """Capture one more; a compiler may read files meanwhile."""
        size = self.each if self.held else self.first
        if not self.held:
            self.torch.machine.read_file(self.during)
        self.torch.allocate(size)
        self.held += size

    def clear(self) -> None:
        self.torch.release(self.held)
        self.held = 0


def profile_v2(graphs: Graphs, count: int) -> int:
    """Run the second runner's measuring over ``count`` full graphs."""

    class Manager(v2.CudaGraphManager):  # type: ignore[misc]
        def __init__(self) -> None:
            self.device, self.pool, self.ubatch_runner = DEVICE, None, None
            self.vllm_config = VllmConfig()
            self.use_breakable_cg = False
            self.graphs: dict[Any, Any] = {}
            self._capture_descs = {CUDAGraphMode.FULL: [_Desc(64 - i) for i in range(count)]}
            self._max_full_descs_to_capture = None
            self._capture_mem_samples = None

        def capture(self, *_: Any, **__: Any) -> None:
            super().capture(lambda desc, warmup: lambda mode: None)

    @contextlib.contextmanager
    def graph(*_: Any, **__: Any) -> Any:
        yield
        graphs.capture()

    runner = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL),
        cudagraph_manager=Manager(),
        vllm_config=VllmConfig(),
        device=DEVICE,
        model_state=SimpleNamespace(
            supports_mm_inputs=False, capture_inner_cudagraphs=lambda *_: None
        ),
        needs_cudagraph_capture=lambda: True,
        model=None,
        input_buffers=None,
        pcp_manager=None,
        intermediate_tensors=None,
        block_tables=None,
        attn_groups=None,
        kv_cache_config=None,
        lora_config=None,
        use_aux_hidden_state_outputs=False,
        speculator=None,
        adaptive_verification=None,
        kv_connector=SimpleNamespace(reset_capture_state=lambda: None),
        maybe_setup_dummy_loras=lambda _: contextlib.nullcontext(),
        eplb=SimpleNamespace(suppress=contextlib.nullcontext),
    )
    runner.capture_model = lambda profile_only: v2_runner.GPUModelRunner.capture_model(
        runner, profile_only=profile_only
    )
    module: Any = v2
    module.capture_outside_cumem_pool = contextlib.nullcontext
    module._init_minimal_kv_cache_for_profiling = lambda _: None
    module._teardown_profiling_state = lambda _: graphs.clear()
    module.graph_capture = lambda device: contextlib.nullcontext()
    module.is_global_first_rank = lambda: False
    module.current_stream = lambda: None
    cuda: Any = torch.cuda
    cuda.CUDAGraph, cuda.graph = object, graph
    v2_runner.create_lora_capture_hook = lambda *_: None
    return int(v2_runner.GPUModelRunner.profile_cudagraph_memory(runner))


@dataclass(frozen=True)
class _Desc:
    """What the second runner asks of a graph's description."""

    num_tokens: int
    cg_mode: CUDAGraphMode = CUDAGraphMode.FULL
    num_ubatches: int = 1


def profile_v1(graphs: Graphs, count: int) -> int:
    """Run the first runner's measuring over ``count`` full graphs."""
    descs = [SimpleNamespace(num_tokens=64 - number) for number in range(count)]
    dispatcher = SimpleNamespace(
        get_capture_descs=lambda: [(CUDAGraphMode.FULL, descs)],
        cudagraph_keys={},
        keys_initialized=False,
    )
    runner = SimpleNamespace(
        vllm_config=VllmConfig(),
        device=DEVICE,
        cudagraph_dispatcher=dispatcher,
        lora_config=None,
        max_model_len=131072,
        max_num_tokens=8192,
        _init_minimal_kv_cache_for_profiling=lambda: None,
        _create_encoder_cudagraph_manager=lambda: None,
        _cleanup_profiling_kv_cache=graphs.clear,
        _freeze_gc=contextlib.nullcontext,
        _warmup_and_capture=lambda *_, **__: graphs.capture(),
        maybe_remove_all_loras=lambda _: None,
    )
    module: Any = v1
    module.graph_capture = lambda device: contextlib.nullcontext()
    return int(v1.GPUModelRunner.profile_cudagraph_memory(runner))


PROFILERS = {"v1": profile_v1, "v2": profile_v2}


def _machine(state: dict[str, Any]) -> tuple[Machine, Torch, Graphs]:
    """Return a state's machine, its allocator, installed, and graphs to be captured."""
    machine = Machine(**{name: int(value * GIB) for name, value in state["machine"].items()})
    torch_ = Torch(machine)
    torch_.install(state.get("integrated", True))
    many = state["graphs"]
    sizes = (int(many[name] * GIB) for name in ("first", "each", "during"))
    return machine, torch_, Graphs(torch_, *sizes)


def start(state: dict[str, Any]) -> dict[str, Any]:
    """Start vLLM on a machine; returns what it took, in GiB, and what is left.

    Args:
        state: ``machine`` (fields, GiB), ``share``, amounts in GiB (``own``: before the first
            reading; ``weights``, ``file``, ``other``, ``peak``), ``graphs`` (count, first, each,
            and files read ``before`` and ``during`` their capture) and ``runner``.
    """
    machine, torch_, graphs = _machine(state)
    machine.allocate_host(int(state["own"] * GIB))
    snapshot = MemorySnapshot(device=DEVICE)
    cache = SimpleNamespace(
        gpu_memory_utilization=state["share"],
        kv_cache_memory_bytes=None,
    )
    result: dict[str, Any] = {"seen": snapshot.free_memory / GIB}
    requested = request_memory(snapshot, cache)
    weights = int(state["weights"] * GIB)
    for _ in range(32):  # shard by shard: read by mmap, copied
        machine.read_file(int(state["file"] * GIB / 32))
        torch_.allocate(weights // 32)
    many = state["graphs"]

    def profile_run(**_: Any) -> None:
        machine.allocate_gpu(int(state["other"] * GIB))  # not torch's, and it stays
        torch_.allocate(int(state["peak"] * GIB))
        torch_.release(int(state["peak"] * GIB))
        machine.read_file(int(many["before"] * GIB))

    worker = SimpleNamespace(
        init_snapshot=snapshot,
        requested_memory=requested,
        cache_config=cache,
        model_runner=SimpleNamespace(
            model_memory_usage=weights,
            profile_run=profile_run,
            profile_cudagraph_memory=lambda: PROFILERS[state["runner"]](graphs, many["count"]),
        ),
        vllm_config=VllmConfig(),
        randomize_dummy_inputs=False,
        model_config=SimpleNamespace(multimodal_config=None),
        parallel_config=SimpleNamespace(),
        _scoped_allocator_max_split=lambda **_: contextlib.nullcontext(),
    )
    worker.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    kv_cache = Worker.determine_available_memory(worker)
    result |= {
        "requested": requested / GIB,
        "graphs": worker.cudagraph_memory_estimate / GIB,
        "kv_cache": kv_cache / GIB,
    }
    torch_.allocate(kv_cache)
    for _ in range(many["count"]):
        graphs.capture()
    torch_.allocate(int(state["peak"] * GIB))  # a step as large as the profiled one
    torch_.release(int(state["peak"] * GIB))
    return result | {"available": machine.available / GIB}


if __name__ == "__main__":
    gc.freeze()  # what is imported stays: each of vLLM's collections would look at all of it
    wanted = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if importlib.util.find_spec("vllm_sparkforge"):
        from vllm_sparkforge import graph_memory

        graph_memory.measure(VllmConfig())
    found = {name: start(state) for name, state in wanted.items()}
    Path(sys.argv[2]).write_text(json.dumps(found, indent=1), encoding="utf-8")
