"""`build.py serve`: becomes the server of what was built, with a checkpoint that the user chose."""

from __future__ import annotations

import base64
import os
import shlex
from collections.abc import Callable
from pathlib import Path

from sparkforge import image
from sparkforge.context import Context
from sparkforge.environment import python_path, server_env
from sparkforge.errors import UsageError
from sparkforge.log import log
from sparkforge.publish import made, tiny_model, write_env
from sparkforge.run import call, replace_process
from sparkforge.store import Artefact

_READ_VOCABULARY = (
    "import sys; from sparkforge.serving import vocabulary;"
    " sys.stdout.buffer.write(vocabulary.text())"
)


def checkpoint(model: Path) -> Path:
    """Return the folder of a checkpoint in full.

    Raises:
        UsageError: it is none.
    """
    if not (model / "config.json").is_file():
        msg = f"--model {model}: holds no config.json"
        raise UsageError(msg, "name the folder of a checkpoint")
    return model.resolve()


def chat_model(folder: Path, run: Callable[[str], bytes]) -> Path:
    """Return the tiny checkpoint that speaks Harmony below a folder, making it where it is missing.

    Args:
        run: what Python code writes where the target's packages are, which have the vocabulary.

    Raises:
        SparkforgeError: they do not.
    """
    from sparkforge.tinychat import make_chat_gpt_oss

    def make(model: Path) -> None:
        lines = run(_READ_VOCABULARY).splitlines()
        make_chat_gpt_oss(model, [base64.b64decode(line.partition(b" ")[0]) for line in lines])

    return made(folder / "tiny-chat-model", make)


def in_environment(python: Path) -> Callable[[str], bytes]:
    """Return what runs code in a plain environment, with this checkout's package beside its own."""
    ours = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    return lambda code: call(python, "-P", "-c", code, env=ours).stdout


def become_server(
    context: Context, baked: Artefact, model: Path | None = None, *, chat: bool = False
) -> None:
    """Become the server: Compose for an image, vllm itself for a plain environment.

    Args:
        model: folder of a checkpoint; None: the tiny one.
        chat: the tiny one that speaks Harmony, with the parsers that it takes.
    """
    folder = context.root / "dist" / context.target_name
    if baked.outputs["kind"] == "image":
        _serve_image(context, baked, folder, model, chat=chat)
    else:
        _serve_environment(context, python_path(baked.path), folder, model, chat=chat)


def _serve_image(
    context: Context, baked: Artefact, folder: Path, model: Path | None, *, chat: bool
) -> None:
    from sparkforge.launcher import CHAT_OPTIONS

    write_env(context, baked, folder)
    if context.port:
        os.environ["SPARKFORGE_PORT"] = str(context.port)
    if chat:
        engine, baked_id = context.engine, str(baked.outputs["image_id"])
        assert engine is not None  # an image came of one
        ours = f"/{image.PROGRAMS}"
        model = chat_model(folder, lambda code: engine.run_python(baked_id, code, ours))
    if model is not None:
        os.environ["SPARKFORGE_MODEL_DIR"] = str(checkpoint(model))
    if arguments := (*(CHAT_OPTIONS if chat else ()), *context.arguments):
        os.environ["SPARKFORGE_EXTRA_ARGS"] = shlex.join(arguments)
    log.info("docker compose up; Ctrl-C ends it")
    replace_process("docker", "compose", "--project-directory", context.root, "up")


def _serve_environment(
    context: Context, python: Path, folder: Path, model: Path | None, *, chat: bool
) -> None:
    from sparkforge.launcher import CHAT_OPTIONS, SMOKE_VARIABLES
    from sparkforge.servers import LOOPBACK, MODEL_NAME, free_port

    folder.mkdir(parents=True, exist_ok=True)
    port = free_port(context.port or 8000)
    if chat:
        chosen = chat_model(folder, in_environment(python))
    else:
        chosen = checkpoint(model) if model is not None else tiny_model(folder)
    environment = server_env(context.store.cache_path("serve"))
    os.environ.update({**environment, **(SMOKE_VARIABLES if model is None else {})})
    log.info(f"http://{LOOPBACK}:{port}/v1 serves {chosen}; Ctrl-C ends it")
    replace_process(
        python, "-P", "-m", "vllm.entrypoints.cli.main", "serve", chosen,
        "--host", LOOPBACK, "--port", str(port), "--served-model-name",
        MODEL_NAME if model is None else chosen.name, *context.serve,
        *(CHAT_OPTIONS if chat else ()), *context.arguments,
    )  # fmt: skip
