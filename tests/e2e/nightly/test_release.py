"""A release from its tag to servers in empty folders, by the words of release.yml, and once more.

The repository, the registry and the forge are stand-ins on this machine. All but the last test have
images of few and small wheels, with a stand-in for vLLM; spark's is for arm64, and emulated.
"""

import base64
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from sparkforge.build import composing
from sparkforge.checkpoints.tiny import make_tiny_gpt_oss
from sparkforge.release import files
from sparkforge.runtime.servers import free_port
from sparkforge.sources.project import store_of
from tests.forge import stand_in
from tests.hub import Hub

from ..conftest import PASSWORD, ROOT, clone, on_base, one_thread
from ..served import by_compose, docker
from ..small import use_small
from ..test_spark import MODEL

_GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org")


def run(*words: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        words, cwd=cwd, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, f"{words}: exit {done.returncode}"
    return done.stdout


@dataclass(frozen=True)
class Forge:
    """A bare repository with a tag, a registry, and a stand-in of the forge's program.

    Attributes:
        tag: what was pushed.
        wheels: folder with the stand-in for vLLM in the spark image.
    """

    folder: Path
    name: str
    tag: str
    wheels: Path
    keys: Path

    def env(self) -> dict[str, str]:
        """Return the variables of a job that the tag has started."""
        workflow = f"me/fork/.github/workflows/release.yml@refs/tags/{self.tag}"
        found = " ".join(filter(None, (os.environ.get("PIP_FIND_LINKS"), str(self.wheels))))
        return {
            "COSIGN_PASSWORD": PASSWORD,
            "FORGE": str(self.folder),
            "GITHUB_ACTIONS": "true",
            "GITHUB_EVENT_NAME": "push",
            "GITHUB_REF": f"refs/tags/{self.tag}",
            "GITHUB_REF_NAME": self.tag,
            "GITHUB_REPOSITORY": "me/fork",
            "GITHUB_REPOSITORY_ID": "1",
            "GITHUB_REPOSITORY_OWNER_ID": "2",
            "GITHUB_RUN_ATTEMPT": "1",
            "GITHUB_RUN_ID": "3",
            "GITHUB_SERVER_URL": "https://forge.example.org",
            "GITHUB_SHA": run("git", "rev-parse", f"{self.tag}^{{}}", cwd=self.bare).strip(),
            "GITHUB_WORKFLOW_REF": workflow,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PIP_FIND_LINKS": found,
            "RUNNER_ENVIRONMENT": "self-hosted",
        }

    @property
    def bare(self) -> Path:
        return self.folder / "bare"

    def release(self, folder: Path, bases: Mapping[str, str], **env: str) -> dict[str, str]:
        """Run the jobs in a clone of the tag; returns the outputs of all, joined with spark."""
        folder.mkdir()
        checkout, outputs = folder / "sparkforge", folder / "outputs"
        clone(self.bare, checkout)
        run("git", "checkout", "--quiet", "--detach", self.tag, cwd=checkout)

        def job(*words: str) -> dict[str, str]:
            key = ("--key", str(self.keys / "cosign.key"))
            own = {**self.env(), "GITHUB_OUTPUT": str(outputs), **env}
            run("scripts/release.sh", *key, *words, cwd=checkout, **own)
            return dict(line.split("=", 1) for line in outputs.read_text().splitlines())

        found: dict[str, str] = {}
        for target, base in bases.items():
            found = job("image", target, self.name, "--engine", "docker", *on_base(base))
        return job("join", *(found[target] for target in bases)) if "spark" in bases else found


@pytest.fixture(scope="module")
def bases(base_image: str) -> dict[str, str]:
    arm64 = os.environ.get("SPARKFORGE_TEST_ARM64_BASE")
    if arm64 is None or platform.machine() != "x86_64":
        pytest.skip("no emulated arm64: scripts/test.py --with-engine (root, amd64)")
    return {"cpu": base_image, "rtx": base_image, "spark": arm64}


def small_cpu(pins: Path) -> None:
    """Give the cpu target what the small rtx target is made of, and our kernels one device."""
    text = pins.read_text()
    (rtx,) = re.findall(r"(?m)^  rtx:\n(?:    .*\n)+", text)
    of_a_gpu = "cuda_arch|machine_code|pack|absent|model|profile|builder|torch_backend|needs"
    cpu = re.sub(rf"(?m)^    (?:{of_a_gpu}):.*\n(?:      .*\n)*", "", rtx)
    cpu = cpu.replace("  rtx:", "  cpu:") + "    torch_backend: cpu\n\n"
    text, count = re.subn(r"(?m)^  cpu:\n(?:    .*\n)+\n", lambda _: cpu, text)
    assert count == 1
    text, count = re.subn(r"(?m)^  architectures: .*$", "  architectures: [121a]", text)
    assert count == 1
    pins.write_text(text)


def make_forge(folder: Path, registry: str, keys: Path, *, small: bool) -> Forge:
    source, wheels = folder / "source", folder / "wheels"
    clone(ROOT, source)
    wheels.mkdir()
    if small:
        use_small(source, wheels, "rtx", "linux/amd64")
        use_small(source, wheels, "spark", "linux/arm64")
        small_cpu(source / "pins.yaml")
    told = json.loads(run("python3", "build.py", "--version", "--json", cwd=source))["releases"]
    log = source / "CHANGELOG.md"
    (release,) = {*told.values()}
    section = f"\n## {release} (2026-11-29)\n\n* all of it\n\n## "
    log.write_text(log.read_text().replace("\n## ", section, 1))
    (source / "SECURITY.md").write_text("Write to us@example.org.\n")
    run(*_GIT, "add", ".", cwd=source)
    run(*_GIT, "commit", "--quiet", "--message", "released", cwd=source)
    run(*_GIT, "tag", "--annotate", f"v{release}", "--message", release, cwd=source)
    run("git", "clone", "--quiet", "--bare", source, folder / "bare", cwd=folder)
    stand_in(folder / "bin")
    name = f"{registry}/me/{'fork' if small else 'whole'}"
    return Forge(folder, name, f"v{release}", wheels, keys)


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory, keys: Path, registry: str) -> Forge:
    return make_forge(tmp_path_factory.mktemp("forge"), registry, keys, small=True)


@pytest.fixture(scope="module")
def released(
    forge: Forge, bases: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("jobs") / "first"
    found = forge.release(folder, bases)
    carried = [f"{name}={found[f'{name}-files']}" for name in ("serve", *bases)]
    words = ("scripts/release.sh", "publish", found["image"], *carried)
    run(*words, cwd=folder / "sparkforge", **forge.env())
    return found


def test_the_name_is_for_both_platforms(forge: Forge, released: dict[str, str]) -> None:
    version = forge.tag.removeprefix("v")
    found = json.loads(docker("buildx", "imagetools", "inspect", "--raw", released["image"]))
    kinds = {one["digest"]: one["platform"]["architecture"] for one in found["manifests"]}
    assert kinds == {
        released["rtx"].partition("@")[2]: "amd64",
        released["spark"].partition("@")[2]: "arm64",
    }
    tagged = docker("buildx", "imagetools", "inspect", "--raw", f"{forge.name}:{version}")
    assert json.loads(tagged) == found
    for kind, code in (("linux/amd64", "x86_64"), ("linux/arm64", "aarch64")):
        docker("pull", "--quiet", "--platform", kind, released["image"])
        how = ("run", "--rm", "--platform", kind, "--entrypoint", "python", released["image"])
        assert docker(*how, "-c", "import os; print(os.uname().machine)") == code


def test_the_provenance_names_commit_and_workflow(forge: Forge, released: dict[str, str]) -> None:
    key = ("--key", str(forge.keys / "cosign.pub"), "--insecure-ignore-tlog")
    words = ("cosign", "verify-attestation", *key, "--type", "slsaprovenance1", released["spark"])
    envelope = json.loads(run(*words, cwd=forge.folder))
    statement = json.loads(base64.b64decode(envelope["payload"]))
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    digest = released["spark"].partition("sha256:")[2]
    assert statement["subject"][0]["digest"] == {"sha256": digest}
    build, env = statement["predicate"], forge.env()
    (source,) = build["buildDefinition"]["resolvedDependencies"]
    assert source["digest"] == {"gitCommit": env["GITHUB_SHA"]}
    workflow = build["buildDefinition"]["externalParameters"]["workflow"]
    assert workflow["path"] == ".github/workflows/release.yml"
    assert build["runDetails"]["builder"]["id"].endswith(env["GITHUB_WORKFLOW_REF"])


def test_the_forge_has_the_files_and_a_pull_request(
    forge: Forge, released: dict[str, str], tmp_path: Path
) -> None:
    assets = {one.name: one for one in (forge.folder / "assets").iterdir()}
    assert {files.COMPOSE, "env.example", files.RECIPE, "spark.tar"} <= assets.keys()
    (tmp_path / "spark").mkdir()
    run("tar", "-xf", assets["spark.tar"], cwd=tmp_path / "spark")
    build = json.loads((tmp_path / "spark" / "receipt.json").read_text())
    for name in build["files"]:
        if name.endswith(".whl"):
            shutil.copy(assets[name], tmp_path / "spark")
    key = ("--key", str(forge.keys / "cosign.pub"))
    run("python3", "build.py", "verify", tmp_path / "spark", *key, cwd=forge.folder / "source")
    for call in ("release create", "pr create"):
        assert f"{call}" in (forge.folder / "calls").read_text()
    change = run("git", "diff", "HEAD", f"release-{forge.tag}", cwd=forge.bare)
    assert re.findall(r"(?m)^[+-]\S.*(?<!README\.md)$", change) == [
        "-No image is published yet, so it is built: <!-- release -->",
        f"+**[{forge.tag}](https://forge.example.org/me/fork/releases/tag/{forge.tag})**:"
        f" `{released['image']}` <!-- release -->",
    ]


@pytest.fixture
def empty(forge: Forge, released: dict[str, str], tmp_path: Path) -> Iterator[Path]:
    """A folder with the two files of the release, and an engine without its images."""
    docker("image", "rm", "--force", released["image"], released["cpu"])
    folder = tmp_path / "empty"
    folder.mkdir()
    shutil.copy(forge.folder / "assets" / files.COMPOSE, folder)
    shutil.copy(forge.folder / "assets" / "env.example", folder / files.VARIABLES)
    yield folder
    compose(folder, "--profile", "*", "down", "--volumes", "--timeout", "5")


def compose(folder: Path, *words: str, **env: str) -> str:
    # other tests have a project of the file's own name at the same time
    own = {"COMPOSE_PROJECT_NAME": f"release-{os.getpid()}"}
    return run("docker", "compose", *words, cwd=folder, **own, **env)


def answer(port: int, model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    reply = requests.post(url, json=body, timeout=900)
    assert reply.ok, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def test_two_files_serve_a_cpu(empty: Path) -> None:
    port = free_port(0)
    make_tiny_gpt_oss(empty / "model")
    (empty / ".env").write_text(f"SPARKFORGE_PORT={port}\n")
    compose(empty, "up", "--detach", "--wait", "cpu")
    assert "42" in answer(port, "tiny-gpt-oss")


def test_two_files_are_all_that_a_spark_needs(empty: Path, tmp_path: Path) -> None:
    if "SPARKFORGE_TEST_DRIVER" not in os.environ:
        pytest.skip("no made-up driver: scripts/test.py --with-engine (root, amd64)")
    model = tmp_path / "hub"
    make_tiny_gpt_oss(model)
    hub = Hub({one.name: one.read_bytes() for one in model.iterdir()}, MODEL)
    (settings,) = json.loads(docker("network", "inspect", "bridge"))[0]["IPAM"]["Config"]
    port, hub_port = free_port(0), free_port(0)
    hub.start(hub_port, settings["Gateway"])
    env = (
        f"SPARKFORGE_PORT={port}\nHF_ENDPOINT=http://{settings['Gateway']}:{hub_port}\n"
        "SPARKFORGE_CHECKS=hang=600\n"  # emulated, on a busy machine
    )
    (empty / ".env").write_text(env)
    # a machine of CI may not raise its own limits
    (empty / "compose.override.yaml").write_text("services: {spark: {ulimits: !reset null}}\n")
    try:
        compose(empty, "up", "--detach", "--wait", DOCKER_DEFAULT_PLATFORM="linux/arm64")
        assert "42" in answer(port, MODEL)
    finally:
        hub.close()


def test_a_second_time_the_digests_are_the_same(
    forge: Forge, released: dict[str, str], bases: dict[str, str], tmp_path: Path
) -> None:
    docker("builder", "prune", "--all", "--force")
    store = store_of(None).borrowed(tmp_path / "store", ("downloads", "partial"))
    again = forge.release(tmp_path / "again", bases, SPARKFORGE_STORE=str(store.root))
    for name in ("image", *bases):
        assert again[name] == released[name]


def test_the_whole_cpu_image_goes_the_same_way_twice(
    tmp_path: Path, keys: Path, registry: str, base_image: str
) -> None:
    """The real image: pulled by its digest it serves, with vLLM itself; a cold store repeats it."""
    forge = make_forge(tmp_path, registry, keys, small=False)
    found = forge.release(tmp_path / "first", {"cpu": base_image})
    docker("image", "rm", "--force", found["cpu"])
    docker("pull", "--quiet", found["cpu"])
    checkout = tmp_path / "first" / "sparkforge"
    composing.put(checkout / ".env", {"SPARKFORGE_IMAGE_CPU": found["cpu"]})
    one_thread(checkout)
    assert len(by_compose(checkout).tokens) == 24
    docker("builder", "prune", "--all", "--force")
    store = store_of(None).borrowed(tmp_path / "store", ("downloads", "partial"))
    env = {"SPARKFORGE_STORE": str(store.root)}
    assert forge.release(tmp_path / "again", {"cpu": base_image}, **env)["cpu"] == found["cpu"]
