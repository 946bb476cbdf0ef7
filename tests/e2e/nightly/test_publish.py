"""A release whose image is published: pushed to a real registry on loopback, verified, run.

The image is the rtx target's with few and small wheels: all of the way, and none of the weight.
"""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.support import PATIENCE_S, wait_for

from ..conftest import PASSWORD, ROOT, clone, on_base, registry_with
from ..served import docker
from ..targets import small_target

# of the password "pw", by bcrypt
_HTPASSWD = "me:$2b$04$gKnrD3X4Uk67KAnGdRRdGOjlZnEOM201Ja2LziaVhN9GwzSAW5kn."


@dataclass(frozen=True)
class Clone:
    """A clean checkout with a build of the small image.

    Attributes:
        words: of the build.
    """

    root: Path
    words: tuple[str, ...]

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, self.root / "build.py", *words],
            cwd=self.root,
            env={**os.environ, "COSIGN_PASSWORD": PASSWORD},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, code: int = 0) -> tuple[str, str]:
        """Run a command; returns (stdout, stderr)."""
        with self.start(*words) as child:
            out, err = child.communicate()
        assert child.returncode == code, f"exit {child.returncode}\n{out}\n{err}"
        assert "Traceback" not in err
        assert PASSWORD not in out + err
        return out, err

    def json(self, *words: str) -> Any:
        return json.loads(self.run(*words, "--json")[0])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, base_image: str) -> Clone:
    root = tmp_path_factory.mktemp("publish") / "sparkforge"
    clone(ROOT, root)
    small_target(root, "rtx", "linux/amd64").rename(root / "pins.yaml")
    words = ("--target", "rtx", "--engine", "docker", *on_base(base_image))
    made = Clone(root, words)
    release = made.json("--version")["releases"]["rtx"]
    log = root / "CHANGELOG.md"
    log.write_text(
        log.read_text().replace("\n## ", f"\n## {release} (2026-11-23)\n\n* x\n\n## ", 1)
    )
    (root / "SECURITY.md").write_text("Write to us@example.org.\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "add", "."], cwd=root, check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "small"], cwd=root, check=True)
    made.run(*words, "--until", "image")
    return made


def image_of(small: Clone) -> Any:
    receipt = json.loads((small.root / "dist/rtx/receipt.json").read_text())
    return next(one["outputs"] for one in receipt["items"] if one["label"] == "image")


def test_a_second_cold_build_gives_the_same_manifest(small: Clone) -> None:
    # the cpu image of 3.4 GB would take ten times as long, and take no other way
    baked = image_of(small)
    found = small.json("verify", *small.words)
    assert found["same"]
    again = next(one for one in found["results"] if one["name"] == baked["tag"])
    assert again["first"] == again["second"] == baked["digest"]


@dataclass(frozen=True)
class Published:
    """The image in the registry.

    Attributes:
        name: REGISTRY/NAME@sha256:….
        data: the registry's folder.
    """

    name: str
    data: Path
    small: Clone
    keys: Path

    def verify(self, *words: str, key: str = "cosign.pub", code: int = 0) -> str:
        named = words or (self.name,)
        return "".join(self.small.run("verify", *named, "--key", str(self.keys / key), code=code))

    def cosign(self, *words: str) -> None:
        subprocess.run(
            ["cosign", *words],
            check=True,
            capture_output=True,
            env={**os.environ, "COSIGN_PASSWORD": PASSWORD},
        )

    def attest(self, kind: str, predicate: Path, key: str = "cosign.key") -> None:
        """Attach a statement in place of the present one."""
        key = str(self.keys / key)
        how = ("--yes", "--tlog-upload=false", "--replace", "--key", key)
        self.cosign("attest", *how, "--type", kind, "--predicate", str(predicate), self.name)


@pytest.fixture(scope="module")
def published(
    small: Clone, keys: Path, registry: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Published]:
    """Push the image, interrupted once; then remove it from the engine."""
    baked = image_of(small)
    words = ("release", "--target", "rtx", "--key", str(keys / "cosign.key"), "--push")
    folder = tmp_path_factory.mktemp("registry-that-stops")
    with registry_with(folder) as (address, process):
        name = f"{address}/team/sparkforge"
        tag = f"{name}:{baked['tag'].rpartition(':')[2]}"
        process.send_signal(signal.SIGSTOP)
        try:
            first = small.start(*words, name)
            wait_for(lambda: tag in docker("images", "--format", "{{.Repository}}:{{.Tag}}"))
            first.send_signal(signal.SIGINT)
            _, err = first.communicate()
            assert first.returncode == 130, err
        finally:
            process.send_signal(signal.SIGCONT)
        found = small.json(*words, name)
        assert found["image"] == f"{name}@{baked['digest']}"
        assert tag not in docker("images", "--format", "{{.Repository}}:{{.Tag}}")
        docker("rmi", baked["tag"])
        yield Published(found["image"], folder / "data", small, keys)


def test_a_release_is_pushed_verified_and_run_by_its_digest(published: Published) -> None:
    small, name = published.small, published.name
    found = json.loads(
        small.run("verify", name, "--json", "--key", str(published.keys / "cosign.pub"))[0]
    )
    assert found["matches"], found["problems"]
    assert found["digest"] == name.partition("@")[2]
    assert docker("run", "--rm", "--entrypoint", "python", name, "-c", "print(6 * 7)") == "42"
    small.run("rollback", "--target", "rtx", name)
    used = docker("compose", "--project-directory", str(small.root), "config", "--images")
    assert used == name
    (listed,) = [one for one in small.json("images", "--target", "rtx")["images"] if one["used"]]
    assert listed["image"] == name
    folder = next((small.root / "dist" / "releases").glob("*/rtx"))
    assert "signed: " in published.verify(str(folder))
    (folder / "more.tar.gz").write_bytes(b"")
    assert "more.tar.gz: not signed" in published.verify(str(folder), code=9)


def test_a_wrong_or_missing_signature_is_refused(published: Published, tmp_path: Path) -> None:
    repository = published.name.partition("@")[0]
    published.verify(key="other/cosign.pub", code=9)
    published.verify(f"{repository}:latest", code=2)
    forged = tmp_path / "sbom.json"
    forged.write_text('{"components": []}')
    published.attest("cyclonedx", forged, "other/cosign.key")
    published.verify(code=9)
    published.cosign("clean", "--force", "--type", "attestation", published.name)
    published.verify(code=9)
    published.verify(uploaded(repository, tag="1"), code=9)


def uploaded(repository: str, tag: str) -> str:
    """Put an image of one file into a registry, past the engine; returns its name by digest."""
    address, _, name = repository.partition("/")
    base = f"http://{address}/v2/{name}"

    def put(data: bytes) -> dict[str, Any]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        where = requests.post(f"{base}/blobs/uploads/", timeout=PATIENCE_S).headers["Location"]
        requests.put(
            where, data=data, params={"digest": digest}, timeout=PATIENCE_S
        ).raise_for_status()
        return {"digest": digest, "size": len(data)}

    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("file"))
    kind = "application/vnd.oci.image"
    config = {
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {
            "type": "layers",
            "diff_ids": [f"sha256:{hashlib.sha256(layer.getvalue()).hexdigest()}"],
        },
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.manifest.v1+json",
        "config": {"mediaType": f"{kind}.config.v1+json", **put(json.dumps(config).encode())},
        "layers": [{"mediaType": f"{kind}.layer.v1.tar", **put(layer.getvalue())}],
    }
    answer = requests.put(
        f"{base}/manifests/{tag}",
        data=json.dumps(manifest).encode(),
        headers={"Content-Type": f"{kind}.manifest.v1+json"},
        timeout=PATIENCE_S,
    )
    answer.raise_for_status()
    return f"{repository}@{answer.headers['Docker-Content-Digest']}"


def test_a_changed_layer_is_refused(published: Published) -> None:
    name = uploaded(f"{published.name.partition('/')[0]}/changed", tag="1")
    for path in published.data.glob("docker/registry/v2/blobs/sha256/*/*/data"):
        if path.stat().st_size == 10240:  # an empty file's archive
            path.write_bytes(b"\1" + path.read_bytes()[1:])
    published.small.run("verify", name, code=8)


def test_a_registry_that_denies_or_is_not_there(published: Published, tmp_path: Path) -> None:
    (tmp_path / "htpasswd").write_text(f"{_HTPASSWD}\n")
    access = {"htpasswd": {"realm": "test", "path": str(tmp_path / "htpasswd")}}
    digest = published.name.partition("@")[2]
    with registry_with(tmp_path, auth=access) as (address, _):
        published.small.run("verify", f"{address}/team/x@{digest}", code=8)
        published.verify(f"{address}/team/x@{digest}", code=9)
    published.small.run("verify", f"{address}/team/x@{digest}", code=8)
