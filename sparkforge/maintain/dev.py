"""``build.py dev``: patched work trees as packages that can be edited, and a command among them.

A wheel holds more than its repository: compiled modules, generated ones, files from elsewhere. So
each file of the packages is a link: into the work tree, else into the installed release wheel.
"""

import os
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from sparkforge.build import cached, image
from sparkforge.build.context import Context
from sparkforge.build.graph import Build, build_of, last_variant
from sparkforge.build.options import (
    Behind,
    StoreOptions,
    ToolOptions,
    VariantOptions,
    command_options,
)
from sparkforge.build.stages.wheels import release_wheel
from sparkforge.core.log import log
from sparkforge.core.run import replace_process
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.pins.types import member_of
from sparkforge.runtime import environment
from sparkforge.runtime.engine import Engine, build_image
from sparkforge.runtime.servers import SITE_PACKAGES_LABEL
from sparkforge.series import series, worktree
from sparkforge.series.worktree import WorkTree
from sparkforge.sources import sources
from sparkforge.sources.project import Project
from sparkforge.wheels import archive

RECIPE = "Dockerfile.dev"
_MOUNTED = "/opt/sparkforge/overlay"
"""Folder that an image made by the recipe searches for packages first."""


@command_options
class Options(StoreOptions):
    target: str
    """target whose work trees to use"""
    dir: Path | None = None
    """folder of the work trees (default: dev/TARGET)"""
    arguments: Behind = ()
    variant: VariantOptions = VariantOptions()
    tools: ToolOptions = ToolOptions()


def run(options: Options) -> int:
    """Make or update the work trees of a target, and become a command that imports from them."""
    project = Project.open(options.project)
    variant = last_variant(project, options.target, options.variant)
    build = build_of(project, options.target, variant, "image", tools=options.tools)
    context, engine = build.context, build.tools.engine
    folder = (options.dir or context.root / "dev" / context.target_name).absolute()
    trees = {}
    for name in [layer for wheel in context.target.wheels for layer in context.layers(wheel)]:
        # as `patches export` does: both must mean the same commit
        upstream = context.upstream(name)
        source = sources.ensure(context.store, name, upstream, RELEASE_PLAN, context.access)
        own, at = context.series_of(name), folder / name
        patched = series.apply(context.store, own, source)
        tree = worktree.read(at) if at.exists() else worktree.make(patched, own, at)
        if own.sha256 not in tree.series or source.commit != tree.base:
            hint = "move the folder away; the next dev makes it anew: cherry-pick your commits"
            log.warning(
                f"{at}: the series changed; the work tree was not updated\n    hint: {hint}"
            )
        trees[name] = tree
        log.info(f"{name}: {tree.folder}")
    log.info("to keep an edit, commit it, then build.py patches export DIR")
    plugin = _plugin(context, folder / ".plugin")
    more: dict[str, object] = {"folder": str(folder)}
    more["trees"] = {name: str(tree.folder) for name, tree in trees.items()}
    command: list[str | Path] = list(options.arguments)
    if engine is None:
        links = folder / ".links" / "environment"
        site, variables = _environment(context, folder, links)
        more["variables"] = variables
        command = command or [os.environ.get("SHELL", "sh")]
    else:
        build.run("image")
        built = build.image
        assert built is not None  # an engine makes an image
        tag = _image(build, engine, built.tag)
        links = folder / ".links" / "image"
        site = Path(engine.client.images.get(tag).labels[SITE_PACKAGES_LABEL])
        command = [*_container(context, folder, links), tag, *(command or ["bash"])]
        more["command"] = [str(word) for word in command]
    write(links, plugin | _of_wheels(context, trees, site))
    if options.output.json:  # nothing is run, so that an editor can ask
        log.document(more)
        return 0
    if engine is None:
        os.environ.update(variables)
        os.chdir(folder)
    sys.stdout.flush()
    replace_process(*command)
    raise AssertionError  # exec does not come back


def _of_wheels(context: Context, trees: Mapping[str, WorkTree], site: Path) -> dict[str, str]:
    """Return links for the release wheels, which are installed in ``site``, by path."""
    wanted: dict[str, str] = {}
    for wheel in context.target.wheels:
        pinned = set()
        for layer in context.layers(wheel):
            tree, rules = trees[layer], context.pins.upstream(layer).paths
            base = tree.git("ls-tree", "-r", "-z", "--name-only", tree.base).split("\0")
            # never taken from the wheel, so that a deleted one stays away
            pinned |= {member_of(rules, name) for name in base}
            listed = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
            for name in filter(None, tree.git(*listed).split("\0")):
                member, path = member_of(rules, name), tree.folder / name
                if member is not None and path.exists():
                    wanted[member] = str(path)
        with archive.opened(release_wheel(context, wheel)) as source:
            for member in source.members:
                about = member.partition("/")[0].endswith((".dist-info", ".data"))
                if not about and member not in pinned:
                    wanted.setdefault(member, str(site / member))
    return wanted


def _plugin(context: Context, folder: Path) -> dict[str, str]:
    """Return links to the plugin's Python files, and to the rest of its wheel in a folder."""
    pin, item = context.pins.plugin, Build(context).graph.plugin
    if pin is None or item is None:
        return {}
    cached.run(context, cached.ordered([item]))
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(item.path / item.result.file) as wheel:
        wheel.extractall(folder)
    at = context.root / pin.folder
    (info,) = folder.glob("*.dist-info")
    links = {info.name: str(info)}
    for top, pattern in ((folder, "*"), (at, "*.py")):
        for path in (top / info.name.partition("-")[0]).rglob(pattern):
            if path.is_file():
                links[path.relative_to(top).as_posix()] = str(path)
    return links


def _environment(context: Context, folder: Path, links: Path) -> tuple[Path, dict[str, str]]:
    """Return site-packages of the release's virtual environment, and its variables with links.

    Compiled files are the same in all builds.
    """
    venv = environment.python_path(image.unpatched(context).path).parent.parent
    return venv / "lib" / f"python{context.target.python}" / "site-packages", {
        **environment.server_env(folder / ".cache"),
        "PYTHONPATH": str(links),
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


def write(folder: Path, wanted: Mapping[str, str]) -> None:
    """Make a folder hold exactly these links."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, target in wanted.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
