"""Chats and accept with the image of test_image.py: who comes second waits for it."""

import os
import shlex
from pathlib import Path

import pytest
import requests

from sparkforge.build.image import PROGRAMS
from sparkforge.build.serve import CHAT_NAME, CHAT_OPTIONS, chat_model
from sparkforge.checkpoints.chat import ANSWER, REASONING
from sparkforge.runtime import engine
from sparkforge.runtime.servers import free_port
from tests.support import wait_for

from . import served
from .conftest import Build, cpu_image, one_thread


def test_compose_answers_chats_and_accept_agrees(
    build: Build, checkout: Path, base_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # beside the project of the file's own name, which test_image.py's worker has
    monkeypatch.setenv("COMPOSE_PROJECT_NAME", f"accept-{os.getpid()}")
    receipt = build(*cpu_image(base_image), "--until", "image")
    tag = next(one["outputs"]["tag"] for one in receipt["items"] if one["label"] == "image")
    one_thread(checkout)
    port, runs = free_port(0), engine.connect().run
    python = (tag, "python", "-P", "-c")
    model = chat_model(checkout / "dist/cpu", lambda code: runs(*python, code, path=f"/{PROGRAMS}"))
    for name, value in {
        "COMPOSE_PROFILES": "cpu",  # .env names it and the image, too, but other builds write it
        "SPARKFORGE_IMAGE_CPU": tag,
        "SPARKFORGE_PORT": str(port),
        "SPARKFORGE_MODEL_DIR": str(model),
        "SPARKFORGE_MODEL_NAME": CHAT_NAME,
        "SPARKFORGE_EXTRA_ARGS": shlex.join(CHAT_OPTIONS),
    }.items():
        monkeypatch.setenv(name, value)
    compose = ("compose", "--project-directory", str(checkout))
    try:
        served.docker(*compose, "up", "--detach")
        container = served.wait_until_healthy(checkout)
        assert served.hosts(container) == {"127.0.0.1"}
        body = {"model": CHAT_NAME, "messages": [{"role": "user", "content": "Hello"}]}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        reply = requests.post(url, json=body, timeout=600).json()
        message = reply["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == (REASONING, ANSWER)
        words = ("accept", "--target", "cpu", "--url", f"http://127.0.0.1:{port}")
        found = build(*words, "--long-prompt", "4000")
        unchecked = [one["name"] for one in found["checks"] if one["state"] == "not checked"]
        assert unchecked == ["decode kernels"]  # a GPU's; backends and memory are the container's
        assert found["image"] == tag
        # the profile's, and vLLM's own word; the entrypoint looks on its own, at its own times
        said = "backends: moe BF16_DEQUANT"
        wait_for(lambda: said in served.entrypoint_said(container), every_s=1)
    finally:
        served.docker(*compose, "down", "--volumes")
