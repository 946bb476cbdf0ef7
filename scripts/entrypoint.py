"""What the image runs: `vllm serve MODEL`, with the target's options and then the caller's.

The model is the first argument if that is no option, else SPARKFORGE_MODEL: a directory in the
container (by default /model, where a checkpoint is mounted) or the name of a model on the hub.

    SPARKFORGE_MODEL            /model
    SPARKFORGE_MODEL_REVISION   commit on the hub; without it the hub's newest is served
    SPARKFORGE_MODEL_NAME       the name that clients ask for; without it the model's own
    SPARKFORGE_SERVE_ARGS       options of the target, set when the image was built
    SPARKFORGE_EXTRA_ARGS       options on top of those, e.g. --mxfp4-layers qkv,o,lm_head
    SPARKFORGE_LISTEN_PORT      port in the container
"""

import os
import shlex
import shutil
import sys
from pathlib import Path

EX_NOINPUT = 66  # sysexits.h: no such input, which is no fault of the program

ENCODINGS = (
    Path("/opt/sparkforge/share/encodings"),
    Path("/var/cache/sparkforge/encodings"),
)


def main(arguments: list[str]) -> None:
    model = os.environ.get("SPARKFORGE_MODEL", "/model")
    if arguments and not arguments[0].startswith("-"):
        model, *arguments = arguments
    if model.startswith(("/", ".")):
        check_checkpoint(Path(model))

    command = ["vllm", "serve", model, "--port", os.environ.get("SPARKFORGE_LISTEN_PORT", "8000")]
    for option, variable in (
        ("--revision", "SPARKFORGE_MODEL_REVISION"),
        ("--served-model-name", "SPARKFORGE_MODEL_NAME"),
    ):
        if value := os.environ.get(variable):
            command += [option, value]
    for variable in ("SPARKFORGE_SERVE_ARGS", "SPARKFORGE_EXTRA_ARGS"):
        command += shlex.split(os.environ.get(variable, ""))
    command += arguments  # last: of two values of one option vLLM takes the later

    if "TIKTOKEN_ENCODINGS_BASE" not in os.environ:
        # The Harmony vocabulary. Without it the first chat request downloads it, or fails.
        for folder in ENCODINGS:
            if folder.is_dir():
                os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)
                break

    if not shutil.which("c++") and not shutil.which("g++"):
        # torch.compile would call the compiler at the first token (vLLM's CPU sampler uses it even
        # with --enforce-eager), and the engine would die of it.
        print("entrypoint: no C++ compiler here: serving without torch.compile", flush=True)
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        if "--enforce-eager" not in command:
            command.append("--enforce-eager")

    print("entrypoint:", shlex.join(command), flush=True)
    # In place of this process, so that a signal reaches the server itself.
    os.execvp(command[0], command)


def check_checkpoint(path: Path) -> None:
    """End with a message that says what to do, which vLLM's own for a wrong path does not."""
    if not path.is_dir():
        problem = "is not there"
    elif not os.access(path, os.R_OK | os.X_OK):
        problem = f"cannot be read by user {os.getuid()}: chmod -R a+rX it on the host"
    elif not (path / "config.json").is_file():
        problem = "has no config.json" if any(path.iterdir()) else "is empty"
    elif not os.access(path / "config.json", os.R_OK):
        problem = f"has files that user {os.getuid()} cannot read: chmod -R a+rX it on the host"
    else:
        return
    print(
        f"entrypoint: error: the model directory {path} {problem}.\n"
        "Mount a checkpoint there (with Compose: SPARKFORGE_MODEL_DIR=/path/on/the/host), or name "
        "another one in SPARKFORGE_MODEL.",
        file=sys.stderr,
    )
    sys.exit(EX_NOINPUT)


if __name__ == "__main__":
    main(sys.argv[1:])
