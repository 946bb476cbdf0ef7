"""Codex CLI and Claude Code, headless, edit a file with their own tools.

Through the front door, with the replies of scripted.py. Both come from npm, as locked in
requirements/agents.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patches.scripting import MOST_TOKENS, Scripts, answer, call, preamble, reply, thought
from tests.patches.served import NO_NETWORK
from tests.support import PATIENCE_S, ROOT

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not on this machine")

LOOK, DONE, REST = "I will look at the file.", "The note greets the world.", "That was all."
BEFORE, AFTER = "hello\n", "hello, world\n"
CODEX = """
model = "tiny"
model_provider = "ours"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false

[model_providers.ours]
name = "ours"
base_url = "{url}/v1"
env_key = "OUR_KEY"
wire_api = "responses"

[analytics]
enabled = false
"""
PATCH = """apply_patch <<'EOF'
*** Begin Patch
*** Update File: note.txt
@@
-hello
+hello, world
*** End Patch
EOF"""


@pytest.fixture(scope="module")
def agents() -> Iterator[Path]:
    """Folder of the packages that npm installs; none of their scripts has run."""
    with tempfile.TemporaryDirectory(prefix="agents-") as name:
        for one in ("package.json", "package-lock.json"):
            shutil.copy(ROOT / "requirements" / "agents" / one, name)
        words = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(words, cwd=name, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        yield Path(name, "node_modules")


@pytest.fixture
def note(tmp_path: Path) -> Path:
    path = tmp_path / "work" / "note.txt"
    path.parent.mkdir()
    path.write_text(BEFORE)
    return path


def use(name: str, **arguments: str) -> str:
    return call(name, json.dumps(arguments))


def run(
    command: list[str | Path], note: Path, **variables: str
) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    """Run an agent beside the note; return its events too."""
    home = note.parents[1] / "home"
    home.mkdir(exist_ok=True)
    env = {"PATH": os.environ["PATH"], "HOME": str(home), **NO_NETWORK, **variables}
    done = subprocess.run(
        command,
        env=env,
        cwd=note.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    lines = done.stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")], done


def codex(
    agents: Path, scripted: Scripts, note: Path, asked: str
) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    home = note.parents[1] / "codex"
    home.mkdir()
    (home / "config.toml").write_text(CODEX.format(url=scripted.url))
    words = ["exec", "--skip-git-repo-check", "--json", asked]
    return run([agents / ".bin" / "codex", *words], note, CODEX_HOME=str(home), OUR_KEY="the-key")


def test_codex_edits_a_file(agents: Path, scripted: Scripts, note: Path) -> None:
    script = scripted.write(
        "codex",
        reply(
            thought("Look first."),
            preamble(LOOK),
            use("exec_command", cmd="cat note.txt"),
            use("exec_command", cmd="ls"),
        ),
        reply(thought("Change it."), use("exec_command", cmd=PATCH)),
        # a tool in a namespace: Codex finds it by both names
        reply(thought("Nobody helps."), use("multi_agent_v1__close_agent", target="nobody")),
        reply(thought("Check."), use("exec_command", cmd="cat note.txt")),
        reply(thought("Good."), answer(DONE)),
    )
    events, done = codex(agents, scripted, note, f"Change the note ({script}).")
    assert done.returncode == 0, done.stdout + done.stderr
    assert note.read_text() == AFTER
    items = [one["item"] for one in events if one["type"] == "item.completed"]
    ran = [one for one in items if one["type"] == "command_execution"]
    assert sorted(one["aggregated_output"] for one in ran) == [BEFORE, AFTER, "note.txt\n"]
    assert [one["status"] for one in items if one["type"] == "file_change"] == ["completed"]
    assert "invalid agent id nobody" in done.stderr
    assert [one["text"] for one in items if one["type"] == "agent_message"] == [LOOK, DONE]
    # the later turns find the earlier ones in the cache
    usage = events[-1]["usage"]
    assert usage["cached_input_tokens"] > 0.7 * usage["input_tokens"]


def test_codex_tells_that_an_answer_is_cut(agents: Path, scripted: Scripts, note: Path) -> None:
    script = scripted.write("endless", answer("again " * MOST_TOKENS))
    events, done = codex(agents, scripted, note, f"Say it all ({script}).")
    assert done.returncode == 1
    said = "Incomplete response returned, reason: max_output_tokens"
    assert events[-1] == {"type": "turn.failed", "error": {"message": said}}


def claude(
    agents: Path, scripted: Scripts, note: Path, asked: str, **variables: str
) -> list[dict[str, Any]]:
    (program,) = agents.glob("@anthropic-ai/claude-code-linux-*/claude")
    words = ["--output-format", "stream-json", "--verbose", "--permission-mode", "acceptEdits"]
    variables |= {
        "ANTHROPIC_BASE_URL": scripted.url,
        "ANTHROPIC_AUTH_TOKEN": "the-key",
        "ANTHROPIC_MODEL": "tiny",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "tiny",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    words = [*words, "--allowedTools", "Bash", "--", asked]
    events, done = run([program, "-p", *words], note, **variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return events


def blocks(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the blocks of a kind in the model's messages."""
    said = [block for one in events if one["type"] == "assistant" for block in content(one)]
    return [block for block in said if block["type"] == kind]


def content(event: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = event["message"]["content"]
    return found


def test_claude_code_edits_a_file(agents: Path, scripted: Scripts, note: Path) -> None:
    path = str(note)
    script = scripted.write(
        "claude",
        reply(
            thought("Look first."),
            preamble(LOOK),
            use("Read", file_path=path),
            use("Bash", command="ls", description="List the files"),
        ),
        reply(
            thought("Change it."),
            use("Edit", file_path=path, old_string="hello", new_string="hello, world"),
        ),
        reply(thought("Check."), use("Bash", command="cat note.txt", description="Show it")),
        reply(thought("Good."), answer(DONE)),
    )
    events = claude(agents, scripted, note, f"Change the note ({script}).")
    assert note.read_text() == AFTER
    assert [one["name"] for one in blocks(events, "tool_use")] == ["Read", "Bash", "Edit", "Bash"]
    results = [block for one in events if one["type"] == "user" for block in content(one)]
    assert len(results) == 4
    assert not any(one.get("is_error") for one in results)
    thoughts = ["Look first.", "Change it.", "Check.", "Good."]
    assert [one["thinking"] for one in blocks(events, "thinking")] == thoughts
    assert [one["text"] for one in blocks(events, "text")] == [LOOK, DONE]
    assert (events[-1]["result"], events[-1]["is_error"]) == (DONE, False)


def test_claude_code_goes_on_with_an_answer_that_is_cut(
    agents: Path, scripted: Scripts, note: Path
) -> None:
    script = scripted.write("two-parts", answer("again " * 30), answer(REST))
    limit = {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "20"}
    events = claude(agents, scripted, note, f"Say it all ({script}).", **limit)
    cut, rest = blocks(events, "text")
    assert (cut["text"].strip().replace("again", "").strip(), rest["text"]) == ("", REST)
    assert events[-1]["result"] == REST
