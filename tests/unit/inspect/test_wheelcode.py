"""Machine code of a wheel's file, with a program in cuobjdump's place."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkforge.core.errors import ProofError
from sparkforge.inspect.proofs import wheelcode
from sparkforge.inspect.proofs.toolchain import Readers
from sparkforge.inspect.proofs.wheelcode import CodeResult, Device, Reading
from sparkforge.store.store import Store

# lists an image for 12.0 and one for its family, and extracts what stands in the file beside it
CUOBJDUMP = """\
#!/bin/sh
case $2 in
    --dump-resource-usage)
        for number in 1 2; do
            arch=$([ $number = 1 ] && echo 120 || echo 120f)
            printf 'Fatbin elf code:\\n====\\narch = sm_%s\\n Function kernel%s:\\n' $arch $number
        done ;;
    -lelf) for number in 1 2; do echo "ELF file    $number: x.$number.sm_120.cubin"; done ;;
    -xelf) touch $(cat "$0.extracts") ;;
esac
"""


def extracted(folder: Path, *names: str) -> CodeResult:
    (folder / "cuobjdump").write_text(CUOBJDUMP)
    (folder / "cuobjdump").chmod(0o755)
    (folder / "cuobjdump.extracts").write_text(" ".join(names))
    (folder / "x.so").write_bytes(b"\x7fELF....")
    device, store = Device("12.0", ("120f",)), Store(folder / "store")
    how = Reading(device, Readers(folder, "1"), store, 1)
    return wheelcode._read("x.so", [folder / "x.so"], how, folder)


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (("x.1.sm_120.cubin",), "extracts 1; missing: x.2.sm_120.cubin"),
        (("other.1.sm_120.cubin",), "extracts 1; missing: x.1.sm_120.cubin, x.2.sm_120.cubin"),
    ],
)
def test_an_image_that_is_listed_but_not_extracted_is_named(
    tmp_path: Path, names: tuple[str, ...], missing: str
) -> None:
    with pytest.raises(ProofError, match=missing) as error:
        extracted(tmp_path, *names)
    assert error.value.what.startswith("x.so: cuobjdump lists 2 images (*.sm_120.cubin) and")


def test_all_that_is_listed_is_read(tmp_path: Path) -> None:
    code = extracted(tmp_path, "x.1.sm_120.cubin", "x.2.sm_120.cubin")
    assert code.images == {"120": 1, "120f": 1}
