"""Machine code of a wheel's file, with a program in cuobjdump's place."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkforge.check.proofs.cuobjdump import Readers
from sparkforge.check.proofs.wheelcode import CodeResult, Device, _Reader
from sparkforge.core.errors import CheckError

# lists an image for 12.0 and one for its family, and extracts what stands in the file beside it
CUOBJDUMP = """\
#!/bin/sh
case $2 in
    --dump-resource-usage)
        for number in 1 2; do
            arch=$([ $number = 1 ] && echo 120 || echo 120f)
            printf 'Fatbin elf code:\\n====\\narch = sm_%s\\n Function kernel%s:\\n' $arch $number
        done ;;
    -xelf) touch $(cat "$0.extracts") ;;
esac
"""


def extracted(folder: Path, *names: str) -> CodeResult:
    (folder / "cuobjdump").write_text(CUOBJDUMP)
    (folder / "cuobjdump").chmod(0o755)
    (folder / "cuobjdump.extracts").write_text(" ".join(names))
    (folder / "x.so").write_bytes(b"\x7fELF....")
    device = Device("12.0", ("120f",))
    return _Reader("x.so", device, Readers(folder, "1"), folder, 1).read([folder / "x.so"])


def test_image_that_is_not_extracted_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckError) as error:
        extracted(tmp_path, "x.1.sm_120.cubin")
    assert error.value.what.startswith("x.so: cuobjdump lists 2 images")


def test_all_images_are_read(tmp_path: Path) -> None:
    code = extracted(tmp_path, "x.1.sm_120.cubin", "x.2.sm_120.cubin")
    assert code.images == {"120": 1, "120f": 1}
