"""FlashInfer's modules that were compiled with the image, and what the server is told of them.

vLLM uses FlashInfer only where nvcc is on the PATH, or where it is told that nothing has to be
compiled. FlashInfer looks for nvcc in CUDA_HOME first.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge.serving.devices import Capability
from sparkforge.serving.document import Document

PACKAGE = "flashinfer_jit_cache"
# by the start of a module's name
_KINDS: Mapping[str, str] = {
    "batch_prefill": "prefill",
    "xqa": "decode",
    "fused_moe": "experts",
    "mxfp8_quantization": "quantization",
    "sampling": "sampling",
}


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
        each = (Document(f"{document.what}: modules", one) for one in modules)
        return cls(document.get(str, "architecture"), tuple(one.get(str, "name") for one in each))

    def fits(self, device: Capability) -> bool:
        """Return whether a device loads this machine code: NVIDIA's rules (docs/sm12x.md)."""
        found = re.fullmatch(r"sm(\d+)(\d)([af]?)", self.architecture)
        if found is None:
            return False
        major, minor = int(found[1]), int(found[2])
        if found[3] == "a":
            return device == (major, minor)
        return device[0] == major and device[1] >= minor

    def kinds(self) -> str:
        """Return how many modules there are of each kind, in words."""
        counts = Counter(map(_kind, self.modules))
        return ", ".join(f"{kind} {count}" for kind, count in counts.items())


def _kind(module: str) -> str:
    return next((kind for start, kind in _KINDS.items() if module.startswith(start)), module)


def installed() -> Pack | None:
    """Return the pack beside this Python's FlashInfer; None: there is none of ours.

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


def variables(
    pack: Pack | None,
    devices: Sequence[Capability],
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> dict[str, str]:
    """Return the server's variables for a pack, and log what it has; the user's own stay.

    Without nvcc FlashInfer's JIT is off: a module outside of the pack then ends the start with
    FlashInfer's error for it, and not with that of a missing program.
    """
    if pack is None:
        return {}
    compiles = has_nvcc(environment)
    unfit = sorted({f"{one[0]}.{one[1]}" for one in devices if not pack.fits(one)})
    if unfit:
        instead = "they are compiled here, which takes minutes"
        if not compiles:
            instead = "without nvcc none can be compiled, so vLLM cannot use FlashInfer"
        say(
            f"warning: FlashInfer's modules in this image are for {pack.architecture}, not for"
            f" {', '.join(unfit)}: {instead}"
        )
        return {}
    rest = (
        "compiles others at their first use"
        if compiles
        else "fails with MissingJITCacheError for any other: there is no nvcc"
    )
    say(f"FlashInfer has modules for {pack.architecture} ({pack.kinds()}), and {rest}")
    chosen = {}
    if _on_path(environment) is None:
        chosen["VLLM_HAS_FLASHINFER_CUBIN"] = "1"
    if not compiles:
        chosen["FLASHINFER_DISABLE_JIT"] = "1"
    return {name: value for name, value in chosen.items() if name not in environment}
