"""``build.py report``: a page about the last build of a target; and the table of docs/status.md."""

import tempfile
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import Field, TypeAdapter

from sparkforge.build import composing, receipt
from sparkforge.build.context import release_name
from sparkforge.build.options import StoreOptions, chosen_series, command_options
from sparkforge.check import accept
from sparkforge.check.bench import benchy, command
from sparkforge.check.doctor.command import examined, write
from sparkforge.check.subject import of_compose
from sparkforge.core import pages, plain
from sparkforge.core.disk import intact, read_json, read_yaml, sha256_file, write_file
from sparkforge.core.errors import SparkforgeError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.pins.types import Model
from sparkforge.runtime import client
from sparkforge.serving.profile import VARIABLE
from sparkforge.sources.project import Checkout, ProjectOptions, checkout


@command_options
class Options(StoreOptions):
    target: str | None = None
    """target whose last build to report on (default: the one that Compose serves)"""
    all: bool = False
    """run accept, bench and doctor with Compose's server, and pack all in one file for an issue"""


def run(options: Options = Options()) -> int:
    """Write the page, HTML without scripts or other files; returns the code of what ``all`` lacks.

    UsageError: there is no build.
    """
    here = checkout(options.project.pins)
    variables = composing.seen(here.root / ".env")
    name = options.target or composing.served_target(variables, here.pins)
    target, folder = here.pins.target(name), here.root / "dist" / name
    document, code = everything(here, name, variables, options.project) if options.all else ({}, 0)
    if (built := receipt.load(folder / receipt.NAME)) is None:
        if document:  # the image was not built here
            log.document(document)
            return code
        msg = f"{folder / receipt.NAME}: missing, or of another version"
        raise UsageError(msg, f"build it: build.py --target {name}")
    used = {each for wheel, plan in target.wheels.items() for each in (wheel, *plan.carries)}
    series = chosen_series(None, here.root, here.pins)
    benched = *folder.glob("bench/*/result.json"), *folder.glob("bench/*/patched/result.json")
    changed = {file for file, sha in built.files.items() if not intact(folder / file, sha)}
    newest = max(folder.glob("accept/*.json"), default=None)
    speed = benchy.load(max(benched)) if benched else None
    accepted = plain.load(accept.Report, read_json(newest)) if newest else None
    if newest and accepted is None:
        msg = f"{newest}: damaged, or of another version"
        raise UsageError(msg, "remove it, and run accept again")
    page = pages.render(
        Path(__file__).with_name("report.html.j2"),
        target=name,
        version=release_name(here.pins, target),
        built=built,
        same_pins=built.pins_sha256 == sha256_file(here.pins_path),
        changed=changed,
        series={one.upstream: one.patches for one in series if one.upstream in used},
        accepted=accepted,
        speed=speed,
        benchy=benchy,
    )
    out = folder / "report.html"
    write_file(out, page.encode())
    log.info(f"written: {out} (open it in a browser)")
    log.document({**document, "page": str(out)})
    return code


def everything(
    here: Checkout, name: str, variables: Mapping[str, str], project: ProjectOptions
) -> tuple[dict[str, object], int]:
    """Run accept, bench and doctor, and write their archive, which has what went wrong, too.

    Returns what is where, and the exit code.
    """
    place, found, why = client.place_of(variables), dict[str, object](), None
    asked: dict[str, Any] = {"prompt": "Hello", "ignore_eos": True, "stream": True}
    with tempfile.TemporaryDirectory() as work:
        try:
            model = client.served_model(place)
            asked |= {"model": model.name, "max_tokens": min(4000, model.max_len // 2)}
            accepted, file = accept.judged(accept.Options(target=name, pins=project.pins))
            found["accept"] = {**plain.as_json(accepted), "report": str(file)}
            target = here.pins.target(name)
            table = "seeds" if target.cuda_arch else "quick"
            files = tokenizer(here, name, variables, Path(work))
            found["bench"] = command.measured(
                command.RunOptions(
                    target=name,
                    url=place.root,
                    model=files,
                    table=table,
                    profile=variables.get(VARIABLE) or here.pins.profile_of(target).choice,
                    project=project,
                )
            )
        except SparkforgeError as error:
            found["error"], why = error.as_json(), error
    with closing(client.events(place, client.COMPLETIONS, asked)) as load:
        with suppress(OSError, ValueError):  # no server; clocks are judged while one works
            next(load, None)
        seen, findings = examined(here, name, project.store)
    document = write(seen, findings, **found)
    if why is None:
        return document, 0
    missing = " and ".join(sorted({"accept", "bench"} - found.keys()))
    log.error(f"{document['file']} lacks {missing}: {why.what}", why.remedy)
    return document | {"error": why.as_json()}, why.exit_code


def tokenizer(here: Checkout, name: str, variables: Mapping[str, str], folder: Path) -> Path:
    """Copy the tokenizer.json of the model in Compose's container into a folder; returns it."""
    pinned, inside = here.pins.target(name).model, "/model"
    if pinned is not None:
        model = here.pins.models[pinned]
        inside = f"{composing.HUB}/models--{model.repository.replace('/', '--')}"
        inside += f"/snapshots/{model.revision}"
    words = ("exec", of_compose(variables, name)["Id"], "cat", f"{inside}/tokenizer.json")
    (folder / "tokenizer.json").write_bytes(call("docker", *words).stdout)
    return folder


Machine = Literal["x86", "arm64", "h200", "spark"]
Level = Literal["proved", "partly", "simulated", "compiled", "not run"]
_HEAD = dict(zip(get_args(Machine), ("x86-64", "arm64, emulated", "H200", "Spark"), strict=True))
_Text = Annotated[str, Field(min_length=1)]


class Claim(Model):
    """A feature, and the evidence for it by machine; ``open``: missing tests. Markdown."""

    claim: _Text
    machines: Annotated[Mapping[Machine, Level], Field(min_length=1)]
    tested: _Text
    open: _Text | None = None


class Area(Model):
    """Claims that belong together."""

    area: _Text
    claims: Annotated[tuple[Claim, ...], Field(min_length=1)]


def status(path: Path) -> str:
    """Return docs/status.md, from the claims.yaml beside it; UsageError if that is malformed."""
    source = path.with_name("claims.yaml")
    try:
        areas = TypeAdapter(tuple[Area, ...]).validate_python(read_yaml(source))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{source}: {error}", "its head describes the values") from None
    text = pages.render(
        Path(__file__).with_name("status.md.j2"),
        areas=areas,
        head=["claim", *_HEAD.values()],
        rows=lambda area: map(_row, area.claims),
        Markdown=pages.Markdown,
    )
    return pages.between(path, text)


def _row(claim: Claim) -> tuple[str, ...]:
    """Return a row of the matrix; ``proved`` and ``not run`` are bold."""
    levels = (claim.machines.get(machine, "") for machine in _HEAD)
    bold = (f"**{one}**" if one in ("proved", "not run") else one for one in levels)
    return tuple(pages.Markdown(text) for text in (claim.claim, *bold))
