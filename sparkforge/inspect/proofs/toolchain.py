"""nvcc of this machine, and the readers of machine code from the package index."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.core.hashing import sha256_file
from sparkforge.core.run import call
from sparkforge.inspect.proofs.sass import Kernel, read
from sparkforge.runtime import interpreter
from sparkforge.sources.sources import Access
from sparkforge.store.artefact import Artefact, T
from sparkforge.store.codekey import code_of
from sparkforge.store.store import Store

LOCK = "requirements/proofs.txt"
_TOOLS = ("cuobjdump", "nvdisasm")


@dataclass(frozen=True)
class Readers:
    """cuobjdump and nvdisasm, in one folder."""

    folder: Path
    identity: str
    """sha256 of their lock."""

    def read(self, cubin: Path) -> list[Kernel]:
        """Read a cubin; ProofError if it can't be read."""
        return read(self.dump("-sass", cubin), self.dump("--dump-resource-usage", cubin))

    def dump(self, what: str, cubin: Path) -> str:
        """Return cuobjdump's output for one of its options."""
        return self.run(what, cubin)

    def run(self, *words: str | Path, cwd: Path | None = None) -> str:
        """Return cuobjdump's output.

        Raises:
            CommandError: it fails.
        """
        # it needs nvdisasm on the PATH, and without it prints nothing, and no error
        env = {"PATH": f"{self.folder}{os.pathsep}{os.environ.get('PATH', '')}"}
        return call(self.folder / "cuobjdump", *words, cwd=cwd, env=env).stdout.decode()


@dataclass(frozen=True)
class ReadersResult:
    """The names of the readers' programs."""

    programs: tuple[str, ...]


def keep(
    store: Store,
    stage: str,
    label: str,
    inputs: Mapping[str, Any],
    kind: type[T],
    make: Callable[[Path], T],
) -> Artefact[T]:
    """Return a result as ``store.build`` does, recorded as the newest of its label.

    Without the record, ``clean --superseded`` would remove it as unused.
    """
    made = store.build(stage, inputs, kind, make)
    store.remember("proofs", label, made)
    return made


def readers(store: Store, root: Path, platform: str, access: Access) -> Readers:
    """Return the readers, fetched if the store lacks them.

    Raises:
        FetchError, IntegrityError: as ``wheelhouse.fill``.
    """
    from sparkforge.sources import wheelhouse

    lock = root / LOCK
    identity = sha256_file(lock)
    inputs = {
        "lock": identity,
        "platform": platform,
        "code": code_of(__name__),
    }

    def make(folder: Path) -> ReadersResult:
        wanted = wheelhouse.Wanted(
            lock=lock, tools=(), python="3.11", platform=platform, torch_backend=None
        )
        wheels = folder / "wheels"
        wheels.mkdir()
        wheelhouse.fill(
            store,
            wanted,
            access.index,
            interpreter.uv_program(),
            offline=access.offline,
            into=wheels,
        )
        (folder / "bin").mkdir()
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    name = member.rpartition("/")[2]
                    if member.endswith(f"/bin/{name}") and name in _TOOLS:
                        program = folder / "bin" / name
                        program.write_bytes(archive.read(member))
                        program.chmod(0o755)
        return ReadersResult(tuple(sorted(path.name for path in (folder / "bin").iterdir())))

    label = f"readers {platform.replace('/', '-')}"
    made = keep(store, "proof-readers", label, inputs, ReadersResult, make)
    return Readers(made.path / "bin", identity)


def nvcc_identity() -> str:
    """Return nvcc's release and build; MachineError if it is not on the PATH."""
    lines = call("nvcc", "--version").stdout.decode().strip().splitlines()
    return " ".join(line.strip() for line in lines[-2:])
