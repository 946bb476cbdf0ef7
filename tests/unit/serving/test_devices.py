"""Devices as a driver tells them; the driver is a library of a few lines."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sparkforge.serving import devices
from sparkforge.serving.errors import EX_UNAVAILABLE


def driver(folder: Path, count: int, integrated: int = -1) -> str:
    """A driver with that many devices, of which one may be integrated: by its number."""
    source = folder / "cuda.c"
    source.write_text(
        "int cuInit(unsigned f) { return 0; }\n"
        f"int cuDeviceGetCount(int *n) {{ *n = {count}; return 0; }}\n"
        "int cuDriverGetVersion(int *v) { *v = 13020; return 0; }\n"
        "int cuDeviceGet(int *d, int i) { *d = i; return 0; }\n"
        "int cuDeviceGetAttribute(int *v, int a, int d)\n"
        f"{{ *v = a == 75 ? 12 : a == 18 ? d == {integrated} : d; return 0; }}\n"
        "int cuDeviceTotalMem_v2(unsigned long *n, int d) { *n = 1000 + d; return 0; }\n"
    )
    library = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


def test_each_device_is_asked_for_its_capability(tmp_path: Path) -> None:
    there = devices.capabilities(driver(tmp_path, 2))
    assert there == [(12, 0), (12, 1)]
    assert devices.check("12.1", there) is None
    assert devices.check("9.0", there) == (
        "this image is for devices of compute capability 9.0, not 12.0, 12.1"
    )


def test_an_integrated_device_says_how_much_memory_it_counts(tmp_path: Path) -> None:
    assert devices.unified_bytes(driver(tmp_path, 2, integrated=1)) == 1001
    other = tmp_path / "other"
    other.mkdir()
    assert devices.unified_bytes(driver(other, 2)) is None
    assert devices.unified_bytes("libnosuch.so.1") is None


def test_without_a_device_the_way_to_one_is_told(tmp_path: Path) -> None:
    for there in (
        devices.capabilities("libnosuch.so.1"),
        devices.capabilities(driver(tmp_path, 0)),
    ):
        with pytest.raises(devices.DeviceError, match="docker run needs --gpus all"):
            devices.check("12.1", there)


def test_the_drivers_version_is_read(tmp_path: Path) -> None:
    text = tmp_path / "version"
    text.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release")
    assert devices.driver(driver(tmp_path, 1), text) == "580.95.05, CUDA 13.2"
    text.write_text("of another form")
    assert devices.driver(driver(tmp_path, 1), text) == "CUDA 13.2"


def test_a_driver_without_a_version_is_one_error(tmp_path: Path) -> None:
    for library, text in (("libnosuch.so.1", tmp_path), (driver(tmp_path, 1), tmp_path / "none")):
        with pytest.raises(devices.DeviceError, match="version cannot be read") as caught:
            devices.driver(library, text)
        assert caught.value.code == EX_UNAVAILABLE
