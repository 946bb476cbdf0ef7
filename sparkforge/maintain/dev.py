"""``build.py dev``: patched work trees as packages that can be edited, and a command among them."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from cyclopts import Parameter

from sparkforge.build import cached, graph, publish, setup
from sparkforge.build.context import Context
from sparkforge.build.graph import Build
from sparkforge.build.options import Behind, OutputOptions, ToolOptions, VariantOptions
from sparkforge.build.stages.wheels import release_wheel
from sparkforge.core import git
from sparkforge.core.errors import SeriesError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import replace_process
from sparkforge.maintain import editable
from sparkforge.pins.pathmap import PathRule
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.runtime import buildx, environment
from sparkforge.runtime.engine import Engine
from sparkforge.runtime.servers import SITE_PACKAGES_LABEL
from sparkforge.series import series, worktree
from sparkforge.series.series import Patched, Series
from sparkforge.series.worktree import WorkTree
from sparkforge.sources import sources
from sparkforge.sources.project import Project, ProjectOptions
from sparkforge.wheels import archive

RECIPE = "Dockerfile.dev"
_MOUNTED = "/opt/sparkforge/overlay"
"""Folder that an image made by the recipe searches for packages first."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``dev``."""

    upstream: tuple[str, ...] = field(default=(), kw_only=False)
    """upstreams whose work trees to use (default: the target's)"""
    target: str
    """target whose work trees to use"""
    dir: Path | None = None
    """folder of the work trees (default: dev/TARGET)"""
    arguments: Behind = ()
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()
    variant: VariantOptions = VariantOptions()
    tools: ToolOptions = ToolOptions()


@dataclass(frozen=True)
class Place:
    """The place where a developer's command runs."""

    build: Build
    folder: Path
    """Work trees, links, caches."""
    trees: Mapping[str, WorkTree]
    plugin: Mapping[str, str]
    """Links to our plugin of vLLM, in the checkout."""

    def links(self, name: str, site: PurePosixPath) -> Path:
        """Make the folder of links for one installation of the release wheels."""
        wanted, context = dict(self.plugin), self.build.context
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

    def _tree_of(self, upstream: str) -> editable.TreeOf:
        tree, rules = self.trees[upstream], self.build.context.pins.upstream(upstream).paths
        listed = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
        names = [name for name in tree.git(*listed).split("\0") if name]
        base = tree.git("ls-tree", "-r", "-z", "--name-only", tree.base).split("\0")
        files = [name for name in names if (tree.folder / name).exists()]
        return editable.TreeOf(PurePosixPath(tree.folder), rules, set(base), files)

    def become(self, command: Sequence[str | Path], more: Mapping[str, Any]) -> int:
        """Print where everything is and become a command; with ``more`` print only, as JSON."""
        trees = {name: str(tree.folder) for name, tree in self.trees.items()}
        for name, folder in trees.items():
            log.info(f"{name}: {folder}")
        log.info("to keep an edit, commit it, then build.py patches export DIR")
        if more:  # nothing is run, so that an editor can ask
            log.json({"folder": str(self.folder), "trees": trees, **more})
            return 0
        sys.stdout.flush()
        replace_process(*command)
        raise AssertionError  # exec does not come back


def run(options: Options) -> int:
    """Make or update the work trees of a target, and become a command that imports from them."""
    project = Project.open(options.project)
    variant = setup.last_variant(project, options.target, options.variant)
    build = setup.build_of(project, options.target, variant, "image", tools=options.tools)
    context, engine = build.context, build.tools.engine
    folder = (options.dir or context.root / "dev" / context.target_name).absolute()
    every = [layer for wheel in context.target.wheels for layer in context.layers(wheel)]
    if unknown := sorted(set(options.upstream) - set(every)):
        msg = f"{', '.join(unknown)}: not part of target {context.target_name}"
        raise UsageError(msg, f"it has: {', '.join(every)}")
    trees = {}
    for name in options.upstream or every:
        # as `patches export` does: both must mean the same commit
        upstream = context.upstream(name)
        source = sources.ensure(context.store, name, upstream, RELEASE_PLAN, context.access)
        patches = context.series_of(name)
        trees[name] = _tree(series.apply(context.store, patches, source), patches, folder / name)
    place = Place(build, folder, trees, _plugin(context, folder / ".plugin"))
    if engine is not None:
        return _in_image(place, engine, options.arguments, as_json=options.output.json)
    return _in_environment(place, options.arguments, as_json=options.output.json)


def _tree(patched: Patched, own: Series, folder: Path) -> WorkTree:
    """Return the work tree of a series: made, or moved to it with the developer's commits on top.

    Where these do not apply, or changes are not committed, it stays as it is, with a warning.

    Raises:
        UsageError, SeriesError: something else is in the folder.
    """
    if not folder.exists():
        return worktree.make(patched, own, folder)
    tree = worktree.read(folder)
    if tree.upstream != own.upstream:
        msg = f"{folder}: is a work tree of {tree.upstream}, not of {own.upstream}"
        raise SeriesError(msg, "give another folder with --dir")
    if own.sha256 in tree.series and patched.source.commit == tree.base:
        return tree
    stays = f"{folder}: the series changed; the work tree was not updated: "
    try:
        worktree.settled(tree)
    except SeriesError as error:
        log.warning(stays + error.what)
        return tree
    tree.git("fetch", "--quiet", str(patched.source.repo), patched.commit)
    words = ("--quiet", "--no-gpg-sign", "--onto", patched.commit, worktree.TIP_REF)
    code, output = git.attempt(folder, "rebase", *words)
    if code:
        git.attempt(folder, "rebase", "--abort")
        log.warning(f"{stays}your commits do not apply to the new series:\n{output}")
        return tree
    return worktree.rebased(tree, patched, own)


def _plugin(context: Context, folder: Path) -> dict[str, str]:
    """Return links to the plugin's Python files, and to the rest of its wheel in a folder."""
    pin, item = context.pins.plugin, graph.graph_of(context).plugin
    if pin is None or item is None:
        return {}
    cached.run(context, cached.ordered([item]))
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(item.path / item.result.file) as wheel:
        members = wheel.namelist()
        wheel.extractall(folder)
    at = context.root / pin.folder
    (info,) = folder.glob("*.dist-info")
    package = f"{info.name.partition('-')[0]}/"
    files = [path.relative_to(at).as_posix() for path in (at / package).rglob("*.py")]
    rules = [PathRule(repo=package, wheel=package)]
    tree = editable.TreeOf(PurePosixPath(at), rules, set(files), files)
    return {**editable.links(members, [tree], PurePosixPath(folder)), info.name: str(info)}


def _in_environment(place: Place, words: Sequence[str], *, as_json: bool) -> int:
    """Run in a virtual environment of the release: compiled files are the same in all builds."""
    context = place.build.context
    release = graph.unpatched_environment(context)
    cached.run(context, cached.ordered([release]))
    venv = environment.python_path(release.path).parent.parent
    site = venv / "lib" / f"python{context.target.python}" / "site-packages"
    cache = place.folder / ".cache"
    variables = {
        **environment.server_env(cache),
        "PYTHONPATH": str(place.links("environment", PurePosixPath(site))),
        # a work tree has no compiled files: neither the present folder nor pytest's idea of a root
        # may come before the links
        "PYTHONSAFEPATH": "1",
        "PYTEST_ADDOPTS": "--import-mode=append",
        # byte code next to the sources would litter the work trees
        "PYTHONPYCACHEPREFIX": str(cache / "pycache"),
        "VIRTUAL_ENV": str(venv),
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
    }
    if not as_json:
        os.environ.update(variables)
        os.chdir(place.folder)
    command = words or [os.environ.get("SHELL", "sh")]
    return place.become(command, {"variables": variables} if as_json else {})


def _in_image(place: Place, engine: Engine, words: Sequence[str], *, as_json: bool) -> int:
    """Run in a container of the target's image with compilers, the work trees where they are."""
    context = place.build.context
    place.build.run("image")
    built = publish.image_of(place.build)
    assert built is not None  # an engine makes an image
    tag = _image(place.build, engine, built.tag)
    links = place.links("image", PurePosixPath(engine.image_label(tag, SITE_PACKAGES_LABEL)))
    cache = place.folder / ".cache"
    for name in ("image", "ccache"):
        (cache / name).mkdir(parents=True, exist_ok=True)
    command: list[str | Path] = [
        *("docker", "run", "--rm", "--user", f"{os.getuid()}:{os.getgid()}"),
        *("--volume", f"{place.folder}:{place.folder}"),
        *("--volume", f"{links}:{_MOUNTED}:ro"),
        *("--volume", f"{cache / 'image'}:/var/cache/sparkforge"),
        *("--env", f"CCACHE_DIR={cache / 'ccache'}"),
        *("--workdir", place.folder, "--shm-size", "1g"),
    ]
    if context.pins.plugin is not None:
        at = context.root / context.pins.plugin.folder
        command += ["--volume", f"{at}:{at}:ro"]
    if sys.stdin.isatty() and sys.stdout.isatty():
        command += ["--interactive", "--tty"]
    if context.target.cuda_arch is not None:
        command += ["--gpus", "all"]
    command.append(tag)
    more = {"command": [str(word) for word in command]} if as_json else {}
    return place.become([*command, *(words or ["bash"])], more)


def _image(build: Build, engine: Engine, base: str) -> str:
    """Build the image of the recipe on a target's image; returns its tag."""
    context = build.context
    tag = f"sparkforge/{context.target_name}-dev:{context.release}"
    with log.step("image with compilers"), context.store.temporary("dev") as empty:
        buildx.build(
            buildx.ImageBuild(
                context.root / RECIPE,
                empty,
                engine.context,  # the base is an image that only this engine holds
                engine.kept_as(tag),
                arguments={"IMAGE": base, "PYTHON_VERSION": context.target.python},
                ca_bundle=build.tools.ca_bundle,
            )
        )
    return tag
