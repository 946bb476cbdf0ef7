"""cuobjdump and nvdisasm from the package index, locked in requirements/proofs.txt."""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

from sparkforge.check.proofs.machinecode import Kernel, read
from sparkforge.core.disk import sha256_file
from sparkforge.core.run import call
from sparkforge.runtime import environment
from sparkforge.sources.sources import Access
from sparkforge.store.store import Store, code_of

LOCK = "requirements/proofs.txt"
_TOOLS = ("cuobjdump", "nvdisasm")


@dataclass(frozen=True)
class Readers:
    """cuobjdump and nvdisasm, in one folder.

    Attributes:
        identity: sha256 of their lock.
    """

    folder: Path
    identity: str

    def read(self, cubin: Path) -> list[Kernel]:
        """Read a cubin; CheckError if it can't be read."""
        return read(self.run("-sass", cubin), self.run("--dump-resource-usage", cubin))

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
    """The names of the programs."""

    programs: tuple[str, ...]


def readers(store: Store, root: Path, platform: str, access: Access) -> Readers:
    """Return the readers, fetched if the store lacks them.

    Raises:
        FetchError, IntegrityError: as ``wheelhouse.fill``.
    """
    from sparkforge.sources import wheelhouse

    lock = root / LOCK
    identity = sha256_file(lock)

    def make(folder: Path) -> ReadersResult:
        wanted = wheelhouse.Wanted(
            lock=lock, tools=(), python="3.11", platform=platform, torch_backend=None
        )
        wheels, programs = folder / "wheels", folder / "bin"
        wheels.mkdir()
        programs.mkdir()
        uv, offline = environment.uv_program(), access.offline
        wheelhouse.fill(store, wanted, access.index, uv, offline=offline, into=wheels)
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    name = member.rpartition("/")[2]
                    if member.endswith(f"/bin/{name}") and name in _TOOLS:
                        (programs / name).write_bytes(archive.read(member))
                        (programs / name).chmod(0o755)
        return ReadersResult(tuple(sorted(path.name for path in programs.iterdir())))

    inputs = {"lock": identity, "platform": platform, "code": code_of(__name__)}
    made = store.build("proof-readers", inputs, ReadersResult, make)
    # without this `clean --superseded` would remove it
    store.remember("proofs", f"readers {platform.replace('/', '-')}", made)
    return Readers(made.path / "bin", identity)
