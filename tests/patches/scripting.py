"""A server whose replies a test writes: scripted.py in the engine, and the scripts beside it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparkforge.build.serve import chat_model, in_environment
from tests.patches.checkout import PINS
from tests.patches.served import READY_S, Served, serving

# of the Spark's profile
_TAKEN = (
    "reasoning_parser tool_call_parser exclude_tools_when_none prefix_caching vocabulary"
    " prefix_cache_retention_interval"
)
MOST_TOKENS = 500
"""Of any reply: for clients that send no limit."""


class Scripts:
    """The server, and the folder of its scripts."""

    def __init__(self, server: Served, folder: Path) -> None:
        self.server = server
        self.url = f"http://127.0.0.1:{server.port}"
        self._folder = folder

    def write(self, name: str, *replies: str) -> str:
        """Write a script, also while the server runs; return the word that calls it in a prompt."""
        (self._folder / f"{name}.json").write_text(json.dumps(replies))
        return f"script:{name}"


@contextmanager
def served(python: Path, folder: Path) -> Iterator[Scripts]:
    """Start the entrypoint with its front door, and wait until it is ready."""
    spark = PINS.profile_of(PINS.target("spark")).document()
    changes = {name: spark[name] for name in _TAKEN.split()}
    scripts = folder / "scripts"
    scripts.mkdir()
    variables = {
        "SCRIPTS": str(scripts),
        "SPARKFORGE_EXTRA_ARGS": "--logits-processors tests.patches.scripted:Scripted"
        f" --override-generation-config.max_new_tokens {MOST_TOKENS}",
    }
    model = chat_model(folder, in_environment(python))
    with serving(python, folder, variables, model=model, **changes) as one:
        one.wait_for("ready after", READY_S)
        yield Scripts(one, scripts)


# -- raw Harmony, each what follows ``<|start|>assistant`` ---------------------------------------


def thought(text: str) -> str:
    return f"<|channel|>analysis<|message|>{text}<|end|>"


def preamble(text: str) -> str:
    return f"<|channel|>commentary<|message|>{text}<|end|>"


def call(name: str, arguments: str) -> str:
    return (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
    )


def answer(text: str) -> str:
    return f"<|channel|>final<|message|>{text}<|return|>"


def reply(*messages: str) -> str:
    """Join messages to a reply; only the last one ends it."""
    body = "<|start|>assistant".join((*messages[:-1], ""))
    return body.replace("<|call|>", "<|end|>") + messages[-1]
