"""FlashInfer's modules that were compiled with the image, and the server's variables for them.

vLLM uses FlashInfer only where nvcc is on the PATH, or where it is told that nothing has to be
compiled. FlashInfer looks for nvcc in CUDA_HOME first. An image has neither nvcc nor a C++ compiler
unless its build was told to keep them (docs/packs.md).
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge.serving import arguments
from sparkforge.serving.devices import Capability
from sparkforge.serving.document import Document
from sparkforge.serving.errors import StartError

PACKAGE = "flashinfer_jit_cache"
# by the start of a module's name
_KINDS: Mapping[str, str] = {
    "batch_prefill": "prefill",
    "xqa": "decode",
    "fused_moe": "experts",
    "mxfp8_quantization": "quantization",
    "sampling": "sampling",
}
_KV_TYPES: Mapping[str, str] = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
"""FlashInfer's names, by values of ``--kv-cache-dtype``; of all others BF16 is meant."""
_PAGES = (64, 32, 16)
"""Sizes of FlashInfer's pages on SM 12.x; the last is vLLM's block size by default."""
_REMEDY = "build an image that has them (docs/packs.md)"


@dataclass(frozen=True)
class Pack:
    """The modules of an image."""

    architecture: str
    """As FlashInfer names it, e.g. ``sm121f``."""
    modules: tuple[str, ...]

    @classmethod
    def of(cls, document: Document) -> Pack:
        """Read a pack's manifest.

        Raises:
            DocumentError: it is not in the form that a build writes.
        """
        modules = document.get(list, "modules")
        documents = (Document(f"{document.what}: modules", module) for module in modules)
        return cls(
            document.get(str, "architecture"), tuple(entry.get(str, "name") for entry in documents)
        )

    def fits(self, device: Capability) -> bool:
        """Return whether a device loads this machine code: NVIDIA's rules (docs/kernels.md)."""
        found = re.fullmatch(r"sm(\d+)(\d)([af]?)", self.architecture)
        if found is None:
            return False
        major, minor = int(found[1]), int(found[2])
        if found[3] == "a":
            return device == (major, minor)
        return device[0] == major and device[1] >= minor

    def misfits(self, devices: Sequence[Capability]) -> list[str]:
        """Return the capabilities of devices that do not load this machine code."""
        return sorted({f"{device[0]}.{device[1]}" for device in devices if not self.fits(device)})

    def kinds(self) -> str:
        """Return the number of modules of each kind, in words."""
        counts = Counter(map(_kind, self.modules))
        return ", ".join(f"{kind} {count}" for kind, count in counts.items())


def _kind(module: str) -> str:
    return next((kind for start, kind in _KINDS.items() if module.startswith(start)), module)


def installed() -> Pack | None:
    """Return the pack of this Python's FlashInfer; None: there is none of ours.

    Raises:
        DocumentError, OSError: its manifest cannot be read.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (manifest := Path(folder) / "manifest.json").is_file():
            return Pack.of(Document.load(manifest))
    return None


def _on_path(environment: Mapping[str, str]) -> str | None:
    return shutil.which("nvcc", path=environment.get("PATH"))


def has_nvcc(environment: Mapping[str, str]) -> bool:
    """Return whether FlashInfer finds nvcc: where ``CUDA_HOME`` says, else on the PATH."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    usual = _on_path(environment) or "/usr/local/cuda/bin/nvcc"
    named = environment.get("FLASHINFER_NVCC", f"{home}/bin/nvcc" if home else usual)
    return shutil.which(named) is not None


def has_compiler(environment: Mapping[str, str]) -> bool:
    """Return whether a C++ compiler is on the PATH."""
    return any(shutil.which(name, path=environment.get("PATH")) for name in ("c++", "g++"))


def compiles(environment: Mapping[str, str]) -> bool:
    """Return whether FlashInfer can compile a module: with nvcc and a C++ compiler."""
    return has_nvcc(environment) and has_compiler(environment)


def _needs(options: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the modules that options of ``vllm serve`` need: words, start and part of a name."""
    given = arguments.value(options, "--kv-cache-dtype") or ""
    cache = _KV_TYPES.get(given, "bf16")
    block = arguments.positive(options, "--block-size", _PAGES[-1])
    # vLLM cuts its blocks into the largest pages that FlashInfer has
    page = next((size for size in _PAGES if block % size == 0), block)
    words = [] if cache == "bf16" else [f"--kv-cache-dtype {given}"]
    words += [] if page == _PAGES[-1] else [f"--block-size {block}"]
    if attention_by_flashinfer(options):
        part = f"_kv_cache_{cache}_output_bf16_page_size_{page}_"
        yield " with ".join(words) or "attention by FlashInfer", "xqa_", part
        if arguments.has(options, "--speculative-config"):
            yield "--speculative-config", "xqa_", "_use_spec_dec_True_"
    if arguments.value(options, "--moe-backend") == "flashinfer_cutlass":
        yield "--moe-backend flashinfer_cutlass", "fused_moe_", ""


def attention_by_flashinfer(options: Sequence[str]) -> bool:
    """Return whether options of ``vllm serve`` name FlashInfer for attention."""
    return (arguments.value(options, "--attention-backend") or "").upper() == "FLASHINFER"


def check(
    pack: Pack | None,
    devices: Sequence[Capability],
    options: Sequence[str],
    environment: Mapping[str, str],
) -> None:
    """Check that FlashInfer has the modules for options of ``vllm serve``, or can compile them.

    FlashInfer itself fails only when the model is loaded.

    Raises:
        StartError: neither.
    """
    if compiles(environment):
        return
    if pack is None or pack.misfits(devices):
        if attention_by_flashinfer(options):
            what = "no modules of FlashInfer" if pack is None else "none for this device"
            raise StartError(
                f"attention by FlashInfer: this image has {what}, and no nvcc and C++ compiler for"
                f" them; {_REMEDY}, or use --attention-backend TRITON_ATTN"
            )
        return
    for words, start, part in _needs(options):
        if not any(module.startswith(start) and part in module for module in pack.modules):
            raise StartError(
                f"{words}: this image lacks FlashInfer's module for it, and nvcc to compile it;"
                f" {_REMEDY}, or use other options"
            )


def variables(
    pack: Pack | None,
    devices: Sequence[Capability],
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> dict[str, str]:
    """Return the server's variables for a pack, and log its contents; the user's own stay.

    Without compilers FlashInfer's JIT is off: a module outside of the pack that ``check`` does not
    know of then ends the start with MissingJITCacheError, not with that of a missing program.
    """
    if pack is None:
        return {}
    can_compile = compiles(environment)
    if unfit := pack.misfits(devices):
        instead = "they are compiled here, which takes minutes"
        if not can_compile:
            instead = "without compilers there are none, so vLLM cannot use FlashInfer"
        say(
            f"warning: FlashInfer's modules in this image are for {pack.architecture}, not for"
            f" {', '.join(unfit)}: {instead}"
        )
        return {}
    rest = "compiles others at their first use" if can_compile else "compiles no other"
    say(f"FlashInfer has modules for {pack.architecture} ({pack.kinds()}), and {rest}")
    chosen = {}
    if _on_path(environment) is None:
        chosen["VLLM_HAS_FLASHINFER_CUBIN"] = "1"
    if not can_compile:
        chosen["FLASHINFER_DISABLE_JIT"] = "1"
    return {name: value for name, value in chosen.items() if name not in environment}
