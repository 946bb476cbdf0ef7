"""A node that `docker compose up` starts from the image, and what it answers."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import requests

from sparkforge.runtime.servers import free_port
from tests.support import ROOT, wait_for

PROMPT = "The forge is hot, the spark is small, and every byte is counted once."
# a start of vLLM on a busy machine takes minutes
READY_S = 1200.0


@dataclass(frozen=True)
class Answer:
    """Tokens of a completion, and the log probability of each of the prompt's but the first."""

    tokens: list[int]
    logprobs: list[float]


def docker(*arguments: str, env: Mapping[str, str] | None = None) -> str:
    """Run docker; returns what it printed."""
    done = subprocess.run(
        ["docker", *arguments], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def project(name: str, *files: Path) -> tuple[str, ...]:
    """Return docker's words for a Compose project of files beside docker-compose.yml, without a
    user's .env."""
    every = (ROOT / "docker-compose.yml", *files)
    return (
        *("compose", "--project-name", name, "--env-file", os.devnull),
        *("--project-directory", str(ROOT)),
        *(word for file in every for word in ("--file", str(file))),
    )


def ask(port: int) -> Answer:
    """Complete PROMPT on a server of the tiny model."""
    body = {
        "model": "tiny-gpt-oss",
        "prompt": PROMPT,
        "max_tokens": 24,
        "temperature": 0,
        "return_token_ids": True,
        "prompt_logprobs": 0,
    }
    url = f"http://127.0.0.1:{port}/v1/completions"
    reply = requests.post(url, json=body, timeout=600)
    assert reply.ok, reply.text
    (choice,) = reply.json()["choices"]
    # the first token of a prompt has no probability; each other row holds its own token's
    rows = choice["prompt_logprobs"][1:]
    return Answer(choice["token_ids"], [next(iter(row.values()))["logprob"] for row in rows])


def wait_until_healthy(checkout: Path) -> str:
    """Wait for the one container of the checkout's Compose project; returns its id."""
    container = ""

    def healthy() -> bool:
        nonlocal container
        container = docker("compose", "--project-directory", str(checkout), "ps", "--quiet")
        if not container:
            return False
        return docker("inspect", "--format", "{{.State.Health.Status}}", container) == "healthy"

    try:
        wait_for(healthy, READY_S, every_s=1)
    except AssertionError as error:
        said = docker("logs", "--tail", "40", container) if container else "no container"
        raise AssertionError(said) from error
    return container


def entrypoint_said(container: str) -> str:
    """Return what the entrypoint printed; vLLM prints elsewhere."""
    done = subprocess.run(
        ["docker", "logs", container],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    return done.stderr


def hosts(container: str) -> set[str]:
    """Return the addresses that a server's port is published on."""
    ports = json.loads(docker("inspect", "--format", "{{json .NetworkSettings.Ports}}", container))
    return {bind["HostIp"] for bind in ports["8000/tcp"]}


def by_compose(checkout: Path) -> Answer:
    """Serve by `docker compose up`, with what build.py wrote into .env, and ask once."""
    port = free_port(0)
    env = {**os.environ, "SPARKFORGE_PORT": str(port)}
    command = ["docker", "compose", "--project-directory", str(checkout)]
    subprocess.run([*command, "up", "--detach"], env=env, check=True)
    try:
        wait_until_healthy(checkout)
        return ask(port)
    finally:
        subprocess.run([*command, "down", "--volumes"], env=env, check=True)
