"""A CUDA machine that is not there, for vLLM's CPU build: only the platform's answers are made up.

Runs in the interpreter under test, before anything of vLLM is imported. Every selector, expert
class and kernel class that is asked afterwards is the installed vLLM's own. What stands in, and
why that is sound:

* `vllm.platforms`: capability, name, memory, device count. The selectors ask nothing else.
* the CUDA extension modules, which the CPU build lacks: imported by many modules, called by none
  of the selectors, except for the questions that `_answer_for_csrc` and `_add_extensions` answer as
  the CUDA 13 wheel does.
* packages that a Spark has and the cpu environment has not: see `add_packages`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from typing import Any, NamedTuple

STAND_IN = "(a stand-in of tests/patches/probes/fake_cuda.py)"

SHARED_MEMORY = {9: 232_448, 10: 232_448, 12: 101_376}
"""Bytes that one block may have, by major capability."""

PACKAGES: dict[str, tuple[str, ...]] = {
    # Names that vLLM looks for; test_selection.py holds them against the pinned release.
    "flashinfer": (
        "BatchAttentionWithAttentionSinkWrapper",
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "MultiLevelCascadeAttentionWrapper",
        "fp4_quantize",
        "get_seq_lens",
        "nvfp4_block_scale_interleave",
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    ),
    "flashinfer.fused_moe": (
        "cutlass_fused_moe",
        "trtllm_bf16_moe",
        "trtllm_fp4_block_scale_moe",
        "trtllm_fp8_block_scale_moe",
        "trtllm_fp8_per_tensor_scale_moe",
        "trtllm_mxint4_block_scale_moe",
    ),
    "flashinfer.cute_dsl": (),
    "flashinfer.decode": ("fast_decode_plan", "trtllm_batch_decode_with_kv_cache"),
    "flashinfer.prefill": ("trtllm_batch_context_with_kv_cache",),
    "flashinfer.utils": (
        "FP4Tensor",
        "get_device_sm_count",
        "get_trtllm_gen_multi_ctas_kv_counter_bytes",
    ),
    # Absence of SparseMatrix is what tells 3.5.1 from 3.6.
    "triton_kernels": (),
    "triton_kernels.matmul_ogs": (
        "FlexCtx",
        "FnSpecs",
        "FusedActivation",
        "GatherIndx",
        "PrecisionConfig",
        "RoutingData",
        "ScatterIndx",
        "matmul_ogs",
    ),
    "triton_kernels.swiglu": ("swiglu_fn",),
    "triton_kernels.tensor": ("BIT", "Bitmatrix"),
}

PARTS_OF_THE_WHEEL = ("deep_gemm", "humming")
"""Packages that the CUDA wheel contains or requires: asked for by import alone."""


class Capability(NamedTuple):
    """A compute capability, from a text such as 12.1."""

    major: int
    minor: int

    @classmethod
    def parse(cls, text: str) -> Capability:
        major, _, minor = text.partition(".")
        return cls(int(major), int(minor))


class _Member(str):
    """A member of an enumeration, as far as comparing goes."""

    @property
    def value(self) -> str:
        return str(self)


class _Named(type):
    """Gives a class every attribute: its own name, so that two of them differ."""

    def __getattr__(cls, name: str) -> _Member:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Member(name)


class _Anything(metaclass=_Named):
    """Stands for a class, enumeration or function that is named, and never asked to compute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Stub(types.ModuleType):
    """A package that has every module and every name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__file__ = STAND_IN

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of some packages, all of them stubs."""

    def __init__(self, *packages: str) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _add_extensions(capability: Capability) -> None:
    for name in (
        "vllm._C",
        "vllm._C_stable_libtorch",
        "vllm._moe_C_stable_libtorch",
        "vllm.vllm_flash_attn",
        "vllm.vllm_flash_attn.flash_attn_interface",
    ):
        sys.modules.setdefault(name, _Stub(name))

    # What the module of the CUDA wheel answers where all three versions are built.
    majors = {2: range(8, 99), 3: (9,), 4: (9, 10, 11)}
    interface: Any = sys.modules["vllm.vllm_flash_attn.flash_attn_interface"]
    interface.is_fa_version_supported = lambda version: capability.major in majors[version]


def add_packages() -> None:
    """Put empty packages in place of those that vLLM asks for by name, with the names it wants."""
    for name, attributes in PACKAGES.items():
        module = types.ModuleType(name)
        module.__path__ = []
        module.__path__ = []
        module.__file__ = STAND_IN
        # importlib.util.find_spec of a loaded module looks here.
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        for attribute in attributes:
            setattr(module, attribute, _Anything)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    sys.meta_path.append(_StubFinder(*PARTS_OF_THE_WHEEL))


def _pretend_release() -> None:
    # The CPU build says so in its version, and would be taken for the platform.
    version = importlib.metadata.version

    def plain(distribution_name: str) -> str:
        text = version(distribution_name)
        return text.partition("+")[0] if distribution_name == "vllm" else text

    importlib.metadata.version = plain


def _answer_for_csrc(capability: Capability) -> None:
    import vllm._custom_ops as ops

    number = capability.major * 10 + capability.minor
    ops.cutlass_scaled_mm_supports_fp8 = lambda _: True
    ops.cutlass_scaled_mm_supports_block_fp8 = lambda _: True
    ops.cutlass_scaled_mm_supports_fp4 = lambda _: number >= 100
    ops.cutlass_group_gemm_supported = lambda _: 90 <= number < 110


def install(capability: Capability) -> None:
    """Make vLLM believe in one CUDA device of a capability."""
    _pretend_release()
    _add_extensions(capability)

    # vLLM imports Triton for good only where one driver claims to be active.
    from triton.backends import backends

    for name, backend in backends.items():
        active = name == "nvidia"
        backend.driver.is_active = staticmethod(lambda active=active: active)

    import vllm.platforms
    import vllm.platforms.cuda
    from vllm.platforms.interface import DeviceCapability

    class Fake(vllm.platforms.cuda.CudaPlatformBase):  # type: ignore[misc]
        device_name = "made up"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return cls.device_name

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 119 << 30

        @classmethod
        def device_count(cls) -> int:
            return 1

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 48

    vllm.platforms._current_platform = Fake()
    _answer_for_csrc(capability)
