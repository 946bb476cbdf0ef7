"""`serve --chat` and bench with the image of test_image.py: who comes second waits for it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import requests

from sparkforge.checkpoints.chat import ANSWER, REASONING
from sparkforge.runtime.servers import free_port

from . import served
from .conftest import Build, cpu_image, on_base, one_thread


def test_serve_chat_answers_chats_from_the_image_and_accept_agrees(
    build: Build, checkout: Path, base_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # beside the project of the file's own name, which test_image.py's worker has
    monkeypatch.setenv("COMPOSE_PROJECT_NAME", f"accept-{os.getpid()}")
    receipt = build(*cpu_image(base_image), "--until", "image")
    tag = next(one["outputs"]["tag"] for one in receipt["items"] if one["label"] == "image")
    one_thread(checkout)
    port = free_port(0)
    command = ["python3", "build.py", "serve", "--target", "cpu", "--chat", "--base", base_image]
    server = subprocess.Popen([*command, "--port", str(port)], cwd=checkout)
    try:
        served.wait_until_healthy(checkout, server)
        body = {"model": "tiny-chat-gpt-oss", "messages": [{"role": "user", "content": "Hello"}]}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        reply = requests.post(url, json=body, timeout=600).json()
        message = reply["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == (REASONING, ANSWER)
        # --target: .env names it, too, but builds of other tests write it
        words = ("accept", "--target", "cpu", "--url", f"http://127.0.0.1:{port}")
        found = build(*words, "--long-prompt", "4000")
        unchecked = [one["name"] for one in found["checks"] if one["state"] == "not checked"]
        assert unchecked == ["decode kernels"]  # a GPU's; backends and memory are the container's
        assert found["image"] == tag
    finally:
        server.terminate()  # Compose stops the container, as at Ctrl-C
        server.wait(600)
        served.docker("compose", "--project-directory", str(checkout), "down", "--volumes")


def test_the_image_is_measured_against_the_release(
    build: Build, base_image: str, tmp_path: Path
) -> None:
    """The release is the image with the original files in place of ours."""
    receipt = build(*cpu_image(base_image), "--until", "image")
    (baked,) = (one["outputs"] for one in receipt["items"] if one["label"] == "image")
    words = ("--target", "cpu", *on_base(base_image), "--quick", "--vs", "unpatched", "--runs", "2")
    document = build("bench", *words, "--out", str(tmp_path / "vs"))
    release, ours = document["results"]
    assert ours["identity"]["image"] in (baked["digest"], baked["image_id"])
    assert release["identity"]["options"] == ours["identity"]["options"]
    for one in (release, ours):
        assert all(1 <= len(each["decode"]) <= 2 for each in one["tests"].values())
    assert all(one["ratio"] > 0 for one in document["comparison"]["changes"])
