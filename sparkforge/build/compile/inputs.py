"""What a compile needs besides its tree: the builder image, and sources that CMake would fetch."""

from pathlib import Path

from sparkforge.build.cached import Cached
from sparkforge.build.context import WHEELS, Context, Tools
from sparkforge.build.results import BuilderResult, FilesResult, all_intact
from sparkforge.build.stages.thirdparty import wheelhouse_item
from sparkforge.core.disk import code_digest, key_of, sha256_file
from sparkforge.core.errors import BuildError, CommandError, FetchError, MachineError
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.runtime.engine import build_image
from sparkforge.sources.download import Fetches

ARCHIVE = "source.tar"
# CMake and ninja are locked wheels. patch: vLLM's CMake patches one header of torch with it.
# libnuma-dev: its CPU kernels
_PACKAGES = ("ccache", "g++", "gcc", "git", "libc6-dev", "libnuma-dev", "patch")


def builder_item(context: Context, tools: Tools) -> Cached[BuilderResult]:
    """Return the image with compilers and build requirements, on the target's base or --base.

    Raises:
        BuildError: the target names no requirements for a builder.
        MachineError: the target has no base image, and none is named.
    """
    base, target = tools.base, context.target
    if base is None:
        msg = f"target {context.target_name} has no base image in pins.yaml to compile in"
        raise MachineError(msg, "give one: --base IMAGE (with Python and apt)")
    if context.platform not in target.builder:
        msg = f"targets.{context.target_name}: has no builder for {context.platform}"
        raise BuildError(msg, "add a lock of its upstreams' build requirements (builder:)")
    lock = context.root / target.builder[context.platform]
    house = wheelhouse_item(context, lock, "builder's wheelhouse", "builder")
    dockerfile = context.root / "Dockerfile"
    arguments = {
        "PYTHON_VERSION": target.python,
        "SOURCE_DATE_EPOCH": str(context.epoch),
        "SYSTEM_PACKAGES": " ".join((*_PACKAGES, f"python{target.python}-dev")),
    }
    inputs = {
        "base": base.digest,
        "wheelhouse": house.key,
        "platform": context.platform,
        "arguments": arguments,
        "recipe": code_digest(dockerfile),
    }

    def make(folder: Path) -> BuilderResult:
        engine = tools.engine
        assert engine is not None  # build_of refuses a compile without one
        name = f"sparkforge/builder-{context.target_name}:{key_of(inputs)[:12]}"
        ours = folder / "wheels"
        ours.mkdir()
        (ours / "requirements.txt").write_bytes(lock.read_bytes())
        build_image(
            *(dockerfile, context.root, engine.context, engine.kept_as(name)),
            stage="builder",
            platform=context.platform,
            arguments={"BASE": base.reference, **arguments},
            contexts={"wheels": ours, "wheelhouse": house.path / WHEELS},
            ca_bundle=tools.ca_bundle,
        )
        image_id = engine.image_id(name)
        log.info(f"builder {name} ({image_id})")
        return BuilderResult(image_id, name)

    return Cached(
        *("builder", "builder", inputs, BuilderResult, make),
        needs=(house,),
        valid=lambda made: tools.engine is None or tools.engine.has_image(made.result.image_id),
    )


def external_item(context: Context, upstream: str, external: str) -> Cached[FilesResult]:
    """Return a repository that an upstream's CMake would fetch, with submodules, as an archive.

    It is fetched by its full SHA. A commit's tree has the SHAs of its submodules, so it pins them.
    """
    pin = context.pins.upstream(upstream).externals[external]
    name = f"{upstream}/{external}"

    def make(folder: Path) -> FilesResult:
        url = context.access.mirrors.get(name, pin.git)
        local = "://" not in url
        remedy = f"check the network, or give --mirror {name}=URL or PATH of a clone"
        if context.access.offline and not local:
            msg = f"{name}: commit {pin.commit[:12]} is not in the store, and --offline is set"
            raise FetchError(msg, remedy)
        url = str(Path(url).resolve()) if local else url
        log.info(f"{name}: fetching {pin.commit[:12]} from {url}")
        with context.store.temporary("external") as work:
            # whether submodules may be folders of this machine
            files = f"protocol.file.allow={'always' if local else 'never'}"
            git = ("git", "-C", work, "-c", files, "-c", "core.hooksPath=/dev/null")
            submodules = ("submodule", "--quiet", "update", "--init")
            try:
                for words in (
                    ("init", "--quiet", "--template="),
                    ("remote", "add", "origin", url),  # addresses of submodules may be relative
                    ("fetch", "--quiet", "--depth=1", "--no-tags", "origin", pin.commit),
                    ("checkout", "--quiet", "FETCH_HEAD"),
                    (*submodules, "--recursive", "--depth=1", "--checkout"),
                ):
                    call(*git, *words, env={"GIT_TERMINAL_PROMPT": "0"}, stream=True)
            except CommandError as error:
                raise FetchError(f"{name}: {error}", remedy) from error
            out = folder / ARCHIVE
            call("tar", "--create", "--exclude=.git", "--file", out, "--directory", work, ".")
        return FilesResult({ARCHIVE: sha256_file(out)})

    inputs = {"commit": pin.commit}
    return Cached(
        *("sources", f"external {name}", inputs, FilesResult, make),
        valid=all_intact,
        fetches=lambda: Fetches(unknown=(f"{name} by git",)),
    )
