"""``build.py dev``: patched work trees as packages that can be edited, and a command among them.

A wheel holds more than its repository: compiled modules, generated ones, files from elsewhere. So
each file of the packages is a link: into the work tree, else into the installed release wheel.
"""

import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sparkforge.build import cached, graph, publish, setup
from sparkforge.build.context import Context
from sparkforge.build.graph import Build
from sparkforge.build.options import (
    Behind,
    OutputOptions,
    ToolOptions,
    VariantOptions,
    command_options,
)
from sparkforge.build.stages.wheels import release_wheel
from sparkforge.core.log import log
from sparkforge.core.run import replace_process
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.pins.types import PathRule, member_of
from sparkforge.runtime import environment
from sparkforge.runtime.engine import Engine, build_image
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


@command_options
class Options:
    """Options of ``dev``."""

    target: str
    """target whose work trees to use"""
    dir: Path | None = None
    """folder of the work trees (default: dev/TARGET)"""
    arguments: Behind = ()
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()
    variant: VariantOptions = VariantOptions()
    tools: ToolOptions = ToolOptions()


def run(options: Options) -> int:
    """Make or update the work trees of a target, and become a command that imports from them."""
    project = Project.open(options.project)
    variant = setup.last_variant(project, options.target, options.variant)
    build = setup.build_of(project, options.target, variant, "image", tools=options.tools)
    context, engine = build.context, build.tools.engine
    folder = (options.dir or context.root / "dev" / context.target_name).absolute()
    every = [layer for wheel in context.target.wheels for layer in context.layers(wheel)]
    trees = {}
    for name in every:
        # as `patches export` does: both must mean the same commit
        upstream = context.upstream(name)
        source = sources.ensure(context.store, name, upstream, RELEASE_PLAN, context.access)
        patches = context.series_of(name)
        trees[name] = _tree(series.apply(context.store, patches, source), patches, folder / name)
    plugin = _plugin(context, folder / ".plugin")

    def links(name: str, site: str) -> Path:
        """Make the folder of links for one installation of the release wheels."""
        write(folder / ".links" / name, plugin | _of_wheels(context, trees, PurePosixPath(site)))
        return folder / ".links" / name

    for name, tree in trees.items():
        log.info(f"{name}: {tree.folder}")
    log.info("to keep an edit, commit it, then build.py patches export DIR")
    more: dict[str, object] = {"folder": str(folder)}
    more["trees"] = {name: str(tree.folder) for name, tree in trees.items()}
    command: list[str | Path] = list(options.arguments)
    if engine is not None:
        build.run("image")
        built = publish.image_of(build)
        assert built is not None  # an engine makes an image
        tag = _image(build, engine, built.tag)
        site = engine.client.images.get(tag).labels[SITE_PACKAGES_LABEL]
        command = [*_container(context, folder, links("image", site)), tag, *(command or ["bash"])]
        more["command"] = [str(word) for word in command]
    else:
        more["variables"] = variables = _variables(context, folder, links)
        command = command or [os.environ.get("SHELL", "sh")]
    if options.output.json:  # nothing is run, so that an editor can ask
        log.json(more)
        return 0
    if engine is None:
        os.environ.update(variables)
        os.chdir(folder)
    sys.stdout.flush()
    replace_process(*command)
    raise AssertionError  # exec does not come back


def _of_wheels(
    context: Context, trees: Mapping[str, WorkTree], site: PurePosixPath
) -> dict[str, str]:
    wanted: dict[str, str] = {}
    for wheel, plan in context.target.wheels.items():
        file = context.pins.upstream(wheel).files[plan.files[context.platform]]
        with archive.opened(release_wheel(context, wheel, file)) as source:
            members = list(source.members)
        parts = []
        for layer in context.layers(wheel):
            tree, rules = trees[layer], context.pins.upstream(layer).paths
            listed = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
            names = [name for name in tree.git(*listed).split("\0") if name]
            base = tree.git("ls-tree", "-r", "-z", "--name-only", tree.base).split("\0")
            there = [name for name in names if (tree.folder / name).exists()]
            parts.append(TreeOf(PurePosixPath(tree.folder), rules, set(base), there))
        wanted |= links_of(members, parts, site)
    return wanted


def _tree(patched: Patched, own: Series, folder: Path) -> WorkTree:
    """Return the work tree of a series, made where it is missing."""
    if not folder.exists():
        return worktree.make(patched, own, folder)
    tree = worktree.read(folder)
    if own.sha256 not in tree.series or patched.source.commit != tree.base:
        log.warning(
            f"{folder}: the series changed; the work tree was not updated\n"
            "    hint: move the folder away; the next dev makes it anew: cherry-pick your commits"
        )
    return tree


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
    tree = TreeOf(PurePosixPath(at), rules, set(files), files)
    return {**links_of(members, [tree], PurePosixPath(folder)), info.name: str(info)}


def _variables(context: Context, folder: Path, links: Callable[[str, str], Path]) -> dict[str, str]:
    """Return the variables of a virtual environment of the release, and of the links before it.

    Compiled files are the same in all builds.
    """
    release = graph.unpatched_environment(context)
    cached.run(context, cached.ordered([release]))
    venv = environment.python_path(release.path).parent.parent
    site = venv / "lib" / f"python{context.target.python}" / "site-packages"
    return {
        **environment.server_env(folder / ".cache"),
        "PYTHONPATH": str(links("environment", str(site))),
        # a work tree has no compiled files: neither the present folder nor pytest's idea of a root
        # may come before the links
        "PYTHONSAFEPATH": "1",
        "PYTEST_ADDOPTS": "--import-mode=append",
        # byte code next to the sources would litter the work trees
        "PYTHONPYCACHEPREFIX": str(folder / ".cache" / "pycache"),
        "VIRTUAL_ENV": str(venv),
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
    }


def _container(context: Context, folder: Path, links: Path) -> list[str | Path]:
    """Return ``docker run`` with the work trees where they are, up to the image's name."""
    cache = folder / ".cache" / "image"
    cache.mkdir(parents=True, exist_ok=True)
    command: list[str | Path] = [
        *("docker", "run", "--rm", "--user", f"{os.getuid()}:{os.getgid()}"),
        *("--volume", f"{folder}:{folder}", "--volume", f"{links}:{_MOUNTED}:ro"),
        *("--volume", f"{cache}:/var/cache/sparkforge", "--env", f"CCACHE_DIR={cache / 'ccache'}"),
        *("--workdir", folder, "--shm-size", "1g"),
    ]
    if context.pins.plugin is not None:
        at = context.root / context.pins.plugin.folder
        command += ["--volume", f"{at}:{at}:ro"]
    if sys.stdin.isatty() and sys.stdout.isatty():
        command += ["--interactive", "--tty"]
    return command + (["--gpus", "all"] if context.target.cuda_arch is not None else [])


def _image(build: Build, engine: Engine, base: str) -> str:
    """Build the image of the recipe, with compilers, on the target's image; returns its tag."""
    context = build.context
    tag = f"sparkforge/{context.target_name}-dev:{context.release}"
    with log.step("image with compilers"), context.store.temporary("dev") as empty:
        build_image(
            context.root / RECIPE,
            empty,
            engine.context,  # the base is an image that only this engine holds
            ("--load", "--tag", tag),
            arguments={"IMAGE": base, "PYTHON_VERSION": context.target.python},
            ca_bundle=build.tools.ca_bundle,
        )
    return tag


# -- links -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TreeOf:
    """One upstream's work tree: its folder, the places of its files in the wheel, the paths of the
    pinned commit (never taken from the wheel, so that a deleted one stays away), and those now."""

    at: PurePosixPath
    rules: Sequence[PathRule]
    base: Collection[str]
    files: Iterable[str]


def links_of(
    members: Iterable[str], trees: Sequence[TreeOf], site: PurePosixPath
) -> dict[str, str]:
    """Return the links of the folder, by path in it, each with its target.

    Args:
        members: the files of the release wheel.
        site: the site-packages folder that the wheel is installed in.
    """
    found: dict[str, str] = {}
    pinned = set()
    for tree in trees:
        pinned |= {member_of(tree.rules, file) for file in tree.base}
        for file in tree.files:
            if (member := member_of(tree.rules, file)) is not None:
                found[member] = str(tree.at / file)
    for member in members:
        about = member.partition("/")[0].endswith((".dist-info", ".data"))
        if not about and not member.endswith("/") and member not in pinned:
            found.setdefault(member, str(site / member))
    return found


def write(folder: Path, wanted: Mapping[str, str]) -> None:
    """Make a folder hold exactly these links."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, target in wanted.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
