"""Real clients from the package index, each with a whole conversation through the front door.

The server says what a script has (scripted.py), so each client makes the same three calls, two of
them at once, gives the results back, and reads an answer; another answer is cut. What they get is
what gpt-oss would send: tokens that vLLM's own parser and endpoints turn into replies.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from sparkforge.core import run as programs
from sparkforge.core.index import uv_variables
from sparkforge.runtime.environment import uv_program
from sparkforge.runtime.servers import free_port
from tests.patches.scripting import Scripts, answer, call, preamble, reply, thought
from tests.patches.served import NO_NETWORK
from tests.support import PATIENCE_S, ROOT, wait_for

FIRST, SECOND = ["weather", {"city": "Paris"}], ["add", {"a": 1, "b": 2}]
THIRD = ["add", {"a": 3, "b": 4}]
ANSWER = "Paris is warm, and it is 7."
LONG = "one two three four five six seven eight nine ten eleven twelve thirteen"
SHORT = "one two three four five six seven"  # in 20 tokens, with the thought and the frames
CUT_CHAT, CUT_RESPONSES = ["length"] * 2, [["incomplete", "max_output_tokens"]] * 2


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the programs of requirements/clients.txt; 2 s where uv has the wheels."""
    folder, uv = tmp_path_factory.mktemp("clients") / "venv", uv_program()
    found = uv_variables()
    programs.call(uv, "venv", "--quiet", "--python", sys.executable, folder, env=found)
    words = ["--no-deps", "--require-hashes", "-r", str(ROOT / "requirements" / "clients.txt")]
    python = folder / "bin" / "python"
    programs.call(uv, "pip", "install", "--quiet", "--python", python, *words, env=found)
    return python.parent


@pytest.fixture(scope="module")
def prompts(scripted: Scripts) -> tuple[str, str]:
    """What makes the model do the job, and what makes it give a long answer."""

    def called(one: list[Any]) -> str:
        return call(one[0], json.dumps(one[1]))

    job = scripted.write(
        "job",
        reply(thought("Both at once."), called(FIRST), called(SECOND)),
        reply(thought("One is missing."), preamble("Nearly there."), called(THIRD)),
        reply(thought("That is all."), answer(ANSWER)),
    )
    long = scripted.write("long", reply(thought("A long one."), answer(LONG)))
    return f"Weather, and sums, please ({job}).", f"Count ({long})."


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, **NO_NETWORK, "PYTHONPATH": str(ROOT), **variables}


def run(clients: Path, name: str, *words: str) -> list[Any]:
    """Return what a client says of each of its ways through the conversation."""
    command: list[str | Path] = [
        clients / "python",
        "-m",
        f"tests.patches.clients.use_{name}",
        *words,
    ]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def cuts(said: list[Any]) -> list[Any]:
    """Check that all calls were made, and the answer came; return how the other one is cut."""
    for one in said:
        # some clients run calls of one turn in threads
        assert sorted(one["called"], key=str) == [SECOND, THIRD, FIRST]
        assert one["answer"] == ANSWER
    return [one["cut"] for one in said]


def test_openai(scripted: Scripts, clients: Path, prompts: tuple[str, str]) -> None:
    said = run(clients, "openai", f"{scripted.url}/v1", "the-key", "tiny", *prompts)
    assert cuts(said) == [*CUT_CHAT, *CUT_RESPONSES]


def test_agents_sdk(scripted: Scripts, clients: Path, prompts: tuple[str, str]) -> None:
    said = run(clients, "agents", f"{scripted.url}/v1", "the-key", "tiny", *prompts)
    *responses, whole, streamed = cuts(said)
    assert len(responses) == 2
    assert all("reason='max_output_tokens'" in one for one in responses)
    assert whole == streamed == SHORT  # of chats it does not tell the reason of an end


def test_anthropic(scripted: Scripts, clients: Path, prompts: tuple[str, str]) -> None:
    said = run(clients, "anthropic", scripted.url, "the-key", "tiny", *prompts)
    assert cuts(said) == ["max_tokens"] * 3


def test_langchain(scripted: Scripts, clients: Path, prompts: tuple[str, str]) -> None:
    said = run(clients, "langchain", f"{scripted.url}/v1", "the-key", "tiny", *prompts)
    assert cuts(said) == [*CUT_CHAT, *[{"reason": "max_output_tokens"}] * 2]


@pytest.fixture
def litellm(scripted: Scripts, clients: Path, tmp_path: Path) -> Iterator[str]:
    """Address of LiteLLM's proxy, which has the server as the model "ours"."""
    behind = {"model": "hosted_vllm/tiny", "api_base": f"{scripted.url}/v1", "api_key": "the-key"}
    config = {
        "model_list": [{"model_name": "ours", "litellm_params": behind}],
        "general_settings": {"master_key": "sk-proxy"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    port, log = free_port(0), tmp_path / "log"
    words = ["--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [clients / "litellm", *words],
            env=environment(LITELLM_LOCAL_MODEL_COST_MAP="True"),
            cwd=tmp_path,
            stdout=sink,
            stderr=sink,
        )
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            return requests.get(f"{url}/health/liveliness", timeout=PATIENCE_S).ok
        except requests.ConnectionError:
            return False

    try:
        wait_for(ready, every_s=0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def test_litellm(litellm: str, clients: Path, prompts: tuple[str, str]) -> None:
    """It translates Messages to Responses or chats, and the answers back."""
    said = run(clients, "openai", f"{litellm}/v1", "sk-proxy", "ours", *prompts)
    assert cuts(said) == [*CUT_CHAT, *CUT_RESPONSES]
    # it forgets threads without a word, where the server refuses them
    said = run(clients, "anthropic", litellm, "sk-proxy", "ours", *prompts, "no thread")
    assert cuts(said) == ["max_tokens"] * 3
