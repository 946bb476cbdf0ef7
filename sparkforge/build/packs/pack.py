"""FlashInfer's modules → objects in the store → a wheel of libraries."""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from threading import Event

from sparkforge.build.cached import Cached
from sparkforge.build.context import WHEELS, Context, width
from sparkforge.build.packs import recipe
from sparkforge.build.packs.modules import LOCK, UPSTREAM, Module
from sparkforge.build.packs.recipe import Described, Host, Unit
from sparkforge.build.results import FilesResult, PackResult, all_intact
from sparkforge.build.stages.thirdparty import compiler, fill, to_fetch, version
from sparkforge.build.stages.wheels import Tree, holds_wheel
from sparkforge.core import git
from sparkforge.core.disk import key_of, sha256_file
from sparkforge.core.errors import UsageError
from sparkforge.core.log import log
from sparkforge.core.run import in_parallel
from sparkforge.store.store import Store
from sparkforge.wheels import archive

DISTRIBUTION, PACKAGE = "flashinfer-jit-cache", "flashinfer_jit_cache"
OBJECT = "unit.o"
_SHIM = Path(__file__).with_name("shim.py")
_TAGS = {"linux/amd64": "py3-none-linux_x86_64", "linux/arm64": "py3-none-linux_aarch64"}
_METADATA = (
    "Summary: FlashInfer's modules for gpt-oss on SM 12.x, compiled by sparkforge",
    "License-Expression: Apache-2.0",
)
# that one compiler takes at most, and with files of gemm_grouped/ (docs/build.md)
_GIB, _LARGEST_GIB = 2.0, 8.0


def libraries(
    store: Store,
    tree: Path,
    host: Host,
    modules: Sequence[Described],
    shared: Mapping[str, object],
    jobs: int | None,
) -> dict[str, Path]:
    """Return the libraries of modules by name, compiling the objects that the store lacks.

    ``tree`` is as ``recipe.fill`` writes it, with generated files; it gets the libraries.
    ``shared``: inputs of all units, for their keys. CommandError: a compiler or the linker fails.
    BuildError: a library needs newer ones than the image's.
    """
    inputs = {
        unit: {
            "source": unit.source,
            "contents": recipe.contents(tree, unit),
            "flags": list(unit.flags),
            "host": host.identity,
            "code": recipe.digest(),
            **shared,
        }
        for module in modules
        for unit in module.units
    }

    def compiled(unit: Unit, _: Event) -> Path:
        def make(folder: Path) -> FilesResult:
            recipe.compile_unit(tree, host, unit, key_of(inputs[unit])[:16], folder / OBJECT)
            return FilesResult({OBJECT: sha256_file(folder / OBJECT)})

        kept = store.find("packs", inputs[unit], FilesResult)
        again = kept is not None and not all_intact(kept)
        return store.build("packs", inputs[unit], FilesResult, make, again=again).path / OBJECT

    objects: dict[Unit, Path] = {}
    gib = _LARGEST_GIB if any("gemm_grouped/" in unit.source for unit in inputs) else _GIB
    made = in_parallel(compiled, list(inputs), jobs or width(gib))
    for unit, path in zip(inputs, made, strict=True):
        objects[unit] = path
        log.progress(f"{Path(unit.source).name}: {len(objects)} of {len(inputs)} units")
    libraries = {module.name: tree / f"{module.name}.so" for module in modules}
    for one in modules:
        recipe.link(tree, host, one, [objects[unit] for unit in one.units], libraries[one.name])
    return libraries


def write(
    modules: Sequence[Module],
    described: Sequence[Described],
    libraries: Mapping[str, Path],
    about: Mapping[str, str],
    epoch: int,
    folder: Path,
) -> PackResult:
    """Write the wheel with the package that FlashInfer looks for; the same inputs, the same bytes.

    ``about`` is for the manifest: version (FlashInfer's, and ours after a plus, as FlashInfer wants
    it), architecture (as it names it, e.g. ``sm121f``), platform, commit, and compilers.
    """
    entries, members, hashes = [], {}, {}
    for module, units in zip(modules, described, strict=True):
        name, data = module.name, libraries[module.name].read_bytes()
        hashes[name] = sha256(data).hexdigest()
        entry = {"name": name, "sha256": hashes[name], "size": len(data)}
        entries.append({**entry, "units": len(units.units), "needs": module.needs})
        members[f"{PACKAGE}/modules/{name}/{name}.so"] = data
    manifest = {"schema": 1, "distribution": DISTRIBUTION, **about, "modules": entries}
    members[f"{PACKAGE}/__init__.py"] = _SHIM.read_bytes()
    members[f"{PACKAGE}/manifest.json"] = f"{json.dumps(manifest, indent=1)}\n".encode()
    version, tag = about["version"], _TAGS[about["platform"]]
    wheel = archive.Fresh(DISTRIBUTION, version, tag, _METADATA, members, {})
    path = archive.write_fresh(wheel, epoch, folder)
    return PackResult(path.name, sha256_file(path), version, hashes)


def packs_item(
    context: Context, tree: Tree | None, modules: Sequence[Module], jobs: int | None = None
) -> Cached[PackResult]:
    """Return the wheel of these modules; UsageError if the target has no GPU.

    A machine without the C++ compiler for its host code can plan it, not make it.
    """
    arch = context.target.cuda_arch
    if arch is None or tree is None or UPSTREAM not in context.target.wheels:
        msg = f"target {context.target_name} has no GPU, so FlashInfer compiles nothing for it"
        raise UsageError(msg, "choose spark or rtx")
    host, upstream = recipe.found(context.platform), context.pins.upstream(UPSTREAM)
    lock, local = context.root / LOCK, context.target.wheels[UPSTREAM].local
    full = f"{upstream.version}+{local}.{context.pins.release.counter}"
    inputs = {
        "upstream_commit": upstream.commit_or_unknown,
        "series": context.series_of(UPSTREAM).sha256,
        "modules": [module.name for module in modules],
        "architecture": f"{arch}f",
        "platform": context.platform,
        "compiler": sha256_file(lock),
        "host": "none on this machine" if host is None else host.identity,
        "version": full,
        "epoch": context.epoch,
    }

    def make(folder: Path) -> PackResult:
        host = recipe.host(context.platform)
        patched = tree.layer(context).patched
        repo, commit = patched.source.repo, patched.commit
        with context.store.temporary("packs") as work:
            where = work / "tree"
            fill(context, compiler(lock), work / WHEELS)
            recipe.fill(repo, commit, work / WHEELS, host, where)
            ids = git.git(repo, "rev-parse", *(f"{commit}:{name}" for name in recipe.READ)).split()
            read = dict(zip(recipe.READ, ids, strict=True))
            shared = {"tree": read, "compiler": inputs["compiler"]}
            described = recipe.describe(where, f"{arch}f", modules)
            found = libraries(context.store, where, host, described, shared, jobs)
            about = {
                "version": full,
                "architecture": f"sm{arch.replace('.', '')}f",
                "platform": context.platform,
                "commit": commit,
                "compiler": f"nvcc {version(lock, 'nvidia-cuda-nvcc')}",
                "host": host.identity,
            }
            return write(modules, described, found, about, context.epoch, folder)

    return Cached(
        *("packs", "pack flashinfer", inputs, PackResult, make),
        needs=tree.items,
        valid=holds_wheel,
        fetches=lambda: to_fetch(context, compiler(lock)),
    )
