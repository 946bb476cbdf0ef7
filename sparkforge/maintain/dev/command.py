"""``build.py dev``: patched work trees as packages that can be edited, and a command among them."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from sparkforge.build import executor, graph, publish, setup
from sparkforge.build.context import Context
from sparkforge.build.options import OutputOptions, ToolOptions, VariantOptions, as_last
from sparkforge.build.stages.wheels import release_wheel
from sparkforge.core.command import Entry, argument, behind, needed, option
from sparkforge.core.errors import UsageError
from sparkforge.core.log import log
from sparkforge.core.run import replace_process
from sparkforge.maintain.dev import editable, trees
from sparkforge.pins.pathmap import PathRule
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.runtime import buildx, environment
from sparkforge.runtime.engine import Engine
from sparkforge.runtime.servers import SITE_PACKAGES_LABEL
from sparkforge.series import series
from sparkforge.series.worktree import WorkTree
from sparkforge.sources import sources
from sparkforge.sources.project import Project, ProjectOptions
from sparkforge.wheels import archive

RECIPE = "Dockerfile.dev"
_MOUNTED = "/opt/sparkforge/overlay"
"""Folder that an image made by the recipe searches for packages first."""


@dataclass(frozen=True)
class Place:
    """The place where a developer's command runs."""

    context: Context
    folder: Path
    """Work trees, links, caches."""
    trees: Mapping[str, WorkTree]
    plugin: Mapping[str, str]
    """Links to our plugin of vLLM, in the checkout."""

    def links(self, name: str, site: PurePosixPath) -> Path:
        """Make the folder of links for one installation of the release wheels."""
        wanted, context = dict(self.plugin), self.context
        for wheel, plan in context.target.wheels.items():
            file = context.pins.upstream(wheel).files[plan.files[context.platform]]
            with archive.opened(release_wheel(context, wheel, file)) as source:
                members = list(source.members)
            trees = [self._tree_of(layer) for layer in context.layers(wheel) if layer in self.trees]
            if trees:
                wanted |= editable.links(members, trees, site)
        folder = self.folder / ".links" / name
        editable.write(folder, wanted)
        return folder

    def as_json(self) -> dict[str, Any]:
        """Return all paths; with --json nothing is run, so that an editor can ask."""
        trees = {name: str(tree.folder) for name, tree in self.trees.items()}
        return {"folder": str(self.folder), "trees": trees}

    def _tree_of(self, upstream: str) -> editable.TreeOf:
        tree = self.trees[upstream]
        listed = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
        files = [
            name for name in tree.git(*listed).split("\0") if name and (tree.folder / name).exists()
        ]
        base = tree.git("ls-tree", "-r", "-z", "--name-only", tree.base).split("\0")
        return editable.TreeOf(
            PurePosixPath(tree.folder), self.context.pins.upstream(upstream).paths, set(base), files
        )


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``dev``."""

    upstream: tuple[str, ...] = argument(
        "upstreams whose work trees to use (default: the target's)", default=(), nargs="*"
    )
    target: str = needed("target whose work trees to use", metavar="NAME")
    dir: Path | None = option(
        "folder of the work trees (default: dev/TARGET)", type=Path, metavar="DIR"
    )
    arguments: tuple[str, ...] = behind()
    """The command after ``--``."""
    project: ProjectOptions
    output: OutputOptions
    variant: VariantOptions = as_last()
    tools: ToolOptions


def run(options: Options) -> int:
    """Make or update the work trees of a target, and become a command that imports from them."""
    project = Project.open(options.project)
    variant = setup.last_variant(project, options.target, options.variant)
    context = setup.context_of(project, options.target, variant, "image", tools=options.tools)
    folder = (options.dir or context.root / "dev" / context.target_name).absolute()
    plugin = _plugin(context, folder / ".plugin")
    place = Place(context, folder, _trees(context, folder, options.upstream), plugin)
    as_json = options.output.json
    if context.engine is not None:
        return _in_image(place, context.engine, options.arguments, as_json=as_json)
    return _in_environment(place, options.arguments, as_json=as_json)


def _trees(context: Context, folder: Path, names: Sequence[str]) -> dict[str, WorkTree]:
    every = [layer for wheel in context.target.wheels for layer in context.layers(wheel)]
    if unknown := sorted(set(names) - set(every)):
        msg = f"{', '.join(unknown)}: not part of target {context.target_name}"
        raise UsageError(msg, f"it has: {', '.join(every)}")
    found = {}
    for name in names or every:
        upstream = context.upstream(name)
        # as `patches export` does: both must mean the same commit
        source = sources.ensure(context.store, name, upstream, RELEASE_PLAN, context.access)
        patches = context.series_of(name)
        patched = series.apply(context.store, patches, source)
        found[name] = trees.ensure(patched, patches, folder / name)
    return found


def _plugin(context: Context, folder: Path) -> dict[str, str]:
    """Return links to the plugin's Python files, and to the rest of its wheel in a folder."""
    pin, item = context.pins.plugin, graph.graph_of(context).plugin
    if pin is None or item is None:
        return {}
    built = executor.run(context, graph.ordered([item])).artefact(item)
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(built.path / built.result.file) as wheel:
        members = wheel.namelist()
        wheel.extractall(folder)
    at = context.root / pin.folder
    (info,) = folder.glob("*.dist-info")
    package = f"{info.name.partition('-')[0]}/"
    files = [path.relative_to(at).as_posix() for path in (at / package).rglob("*.py")]
    tree = editable.TreeOf(
        PurePosixPath(at), [PathRule(repo=package, wheel=package)], set(files), files
    )
    return {**editable.links(members, [tree], PurePosixPath(folder)), info.name: str(info)}


def _in_environment(place: Place, words: Sequence[str], *, as_json: bool) -> int:
    """Run in a virtual environment of the release: compiled files are the same in all builds."""
    context = place.context
    release = graph.unpatched_environment(context)
    results = executor.run(context, graph.ordered([release]))
    venv = environment.python_path(results.artefact(release).path).parent.parent
    site = venv / "lib" / f"python{context.target.python}" / "site-packages"
    links = place.links("environment", PurePosixPath(site))
    cache = place.folder / ".cache"
    variables = {
        **environment.server_env(cache),
        "PYTHONPATH": str(links),
        # a work tree has no compiled files: neither the present folder nor pytest's idea of a root
        # may come before the links
        "PYTHONSAFEPATH": "1",
        "PYTEST_ADDOPTS": "--import-mode=append",
        # byte code next to the sources would litter the work trees
        "PYTHONPYCACHEPREFIX": str(cache / "pycache"),
        "VIRTUAL_ENV": str(venv),
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
    }
    _tell(place)
    if as_json:
        log.json({**place.as_json(), "variables": variables})
        return 0
    os.environ.update(variables)
    os.chdir(place.folder)
    replace_process(*(words or [os.environ.get("SHELL", "sh")]))
    raise AssertionError  # exec does not come back


def _in_image(place: Place, engine: Engine, words: Sequence[str], *, as_json: bool) -> int:
    """Run in a container of the target's image with compilers, the work trees where they are."""
    context = place.context
    built = publish.image_of(executor.build(context, "image"))
    assert built is not None  # an engine makes an image
    tag = _image(context, engine, built.tag)
    site = engine.image_label(tag, SITE_PACKAGES_LABEL)
    links = place.links("image", PurePosixPath(site))
    cache = place.folder / ".cache"
    for name in ("image", "ccache"):
        (cache / name).mkdir(parents=True, exist_ok=True)
    plugin = context.pins.plugin
    at = None if plugin is None else context.root / plugin.folder
    own = () if at is None else ("--volume", f"{at}:{at}:ro")
    command: list[str | Path] = [
        *("docker", "run", "--rm", "--user", f"{os.getuid()}:{os.getgid()}"),
        *("--volume", f"{place.folder}:{place.folder}"),
        *("--volume", f"{links}:{_MOUNTED}:ro"),
        *own,
        *("--volume", f"{cache / 'image'}:/var/cache/sparkforge"),
        *("--env", f"CCACHE_DIR={cache / 'ccache'}"),
        *("--workdir", place.folder, "--shm-size", "1g"),
    ]
    if sys.stdin.isatty() and sys.stdout.isatty():
        command += ["--interactive", "--tty"]
    if context.target.cuda_arch is not None:
        command += ["--gpus", "all"]
    _tell(place)
    if as_json:
        log.json({**place.as_json(), "command": [str(word) for word in (*command, tag)]})
        return 0
    sys.stdout.flush()
    replace_process(*command, tag, *(words or ["bash"]))
    raise AssertionError  # exec does not come back


def _image(context: Context, engine: Engine, base: str) -> str:
    """Build the image of the recipe on a target's image; returns its tag."""
    tag = f"sparkforge/{context.target_name}-dev:{context.release}"
    with log.step("image with compilers"), context.store.temporary("dev") as empty:
        buildx.build(
            buildx.ImageBuild(
                context.root / RECIPE,
                empty,
                engine.context,  # the base is an image that only this engine holds
                engine.kept_as(tag),
                arguments={"IMAGE": base, "PYTHON_VERSION": context.target.python},
                ca_bundle=context.ca_bundle,
            )
        )
    return tag


def _tell(place: Place) -> None:
    for name, tree in place.trees.items():
        log.info(f"{name}: {tree.folder}")
    log.info(
        "edits of Python files take effect at the next start; to keep them, commit, then"
        " build.py patches"
        " export DIR"
    )


COMMANDS = (Entry("dev", Options, run),)
