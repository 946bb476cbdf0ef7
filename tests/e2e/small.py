"""The spark image for arm64 without what makes it large, and a stand-in for vLLM in it.

The path is the whole one: build.py --target spark, the real Dockerfile, an arm64 base, our overlay
wheel of FlashInfer, wheels of others from the real lock. Left out for time: torch and vLLM (6 GB
and some 20,000 files to compile under emulation); with them it was done by hand:
docs/build.md. Debian has no Python 3.12, so the base brings 3.11.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.build.packs.recipe import found
from sparkforge.core.disk import sha256_file
from tests.modules import SMALLEST
from tests.support import ROOT, make_wheel

from .conftest import Build, clone, on_base, runner
from .targets import SMALL, small_target

# what downloads the model
_DOWNLOAD = (
    "huggingface-hub",
    "click",
    "filelock",
    "fsspec",
    "hf-xet",
    "httpx",
    "httpcore",
    "h11",
    "anyio",
    "certifi",
    "idna",
    "packaging",
    "pyyaml",
    "tqdm",
    # what makes the front door's configuration
    "jinja2",
    "markupsafe",
)
_STAND_IN = """

def cli():
    if "--headless" in sys.argv:  # the second of two machines: it listens to the first, no more
        print("half", os.getpid(), flush=True)
        signal.pause()
    os.environ.setdefault("FAKE_ANSWER", "17 + 25 = 42")
    if "--die-of" in sys.argv:
        os.environ["FAKE_ENGINE_DIES"] = sys.argv[sys.argv.index("--die-of") + 1]
    if (reference := Path(sys.argv[2], "reference.json")).exists():  # this is a preflight
        os.environ["FAKE_REFERENCE"] = str(reference)
    if "--attention-backend" in sys.argv:
        name = sys.argv[sys.argv.index("--attention-backend") + 1]
        print(f"INFO 11-21 07:21:00 [cuda.py:8] Using AttentionBackendEnum.{name} backend.")
    for word in sys.argv:  # what our plugin says of its own options; here no kernel runs
        name, _, given = word.partition("=")
        failed = name == "--additional-config" and json.loads(given)["sparkforge"].get("failed")
        if failed:
            print(f"WARNING 11-21 07:21:00 [model.py:9] Kernels that failed their trial: {failed}.")
    sys.argv = ["vllm", sys.argv[sys.argv.index("--uds") + 1]]
    main()
"""


def stand_in_wheel(folder: Path) -> Path:
    """Write a wheel named vllm, whose program is tests/fake_server.py.

    A GPU's server wants FlashInfer's modules. Where none can be compiled here, the wheel has the
    manifest of a pack; the fake server loads no module.
    """
    source = (ROOT / "tests/fake_server.py").read_text()
    files = {
        "vllm_stand_in.py": f"{source.partition('if __name__ ==')[0]}{_STAND_IN}".encode(),
    }
    if not has_pack():
        manifest = {"architecture": "sm121f", "modules": [{"name": SMALLEST.name}]}
        files["flashinfer_jit_cache/manifest.json"] = json.dumps(manifest).encode()
    program = {"entry_points.txt": b"[console_scripts]\nvllm = vllm_stand_in:cli\n"}
    return make_wheel(folder, "vllm", "0", files, info=program)


def has_pack() -> bool:
    """Return whether this machine compiles host code for the image, of the module in its pack."""
    return found("linux/arm64") is not None


@dataclass(frozen=True)
class Small:
    """A clone with pins of the small image in place of its own."""

    checkout: Path
    build: Build
    base: str
    wheels: Path

    @classmethod
    def of(cls, folder: Path, base: str) -> Small:
        checkout, wheels = folder / "sparkforge", folder / "wheels"
        clone(ROOT, checkout)
        wheel = stand_in_wheel(wheels)
        pack = [SMALLEST.name] if has_pack() else []
        small = small_target(checkout, "spark", "linux/arm64", (*SMALL, *_DOWNLOAD), pack)
        small.rename(checkout / "pins.yaml")
        with (checkout / "requirements" / "small-linux-arm64.txt").open("a") as lock:
            lock.write(f"vllm==0 --hash=sha256:{sha256_file(wheel)}\n")
        return cls(checkout, runner(checkout), base, wheels)

    def bake(self) -> Any:
        """Build the image; returns what the receipt has of it."""
        found = " ".join(filter(None, (os.environ.get("PIP_FIND_LINKS"), str(self.wheels))))
        words = ["--target", "spark", "--until", "image", *on_base(self.base)]
        receipt = self.build(*words, PIP_FIND_LINKS=found)
        return next(one["outputs"] for one in receipt["items"] if one["label"] == "image")
