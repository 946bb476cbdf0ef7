"""`build.py serve` with a stand-in for vLLM in a virtual environment: what its user sees."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from sparkforge.build import serve
from sparkforge.build.context import Tools
from sparkforge.build.results import EnvironmentResult, ImageResult
from sparkforge.core.errors import ServerError
from sparkforge.runtime import servers
from sparkforge.runtime.servers import free_port
from sparkforge.store.store import Store
from tests.results import context_of, item, reached
from tests.support import ROOT

IMAGE: Any = ImageResult("x/cpu:1", "sha256:1", None, "base", ())
_WAIT_S = 120.0
# stands for `python -P -m vllm.entrypoints.cli.main serve MODEL --host H --port N …`
_AS_VLLM = """\
#!/bin/sh
{before}
while [ "$1" != --port ]; do shift; done
exec {python} {fake} "$2" {seconds}
"""
_BROKEN = """\
echo '(EngineCore pid=1) ERROR 11-22 07:36:15 [core.py:1] Traceback (most recent call last):'
echo '(EngineCore pid=1) ERROR 11-22 07:36:15 [core.py:1] ValueError: no room for the KV cache'
exit 1
"""


def bake(root: Path, *, before: str = "", seconds: float = 0) -> None:
    """Make an environment whose interpreter starts the stand-in."""
    python = root / "environment" / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    fake = ROOT / "tests" / "fake_server.py"
    python.write_text(
        _AS_VLLM.format(
            before=before, python=sys.executable, fake=shlex.quote(str(fake)), seconds=seconds
        )
    )
    python.chmod(0o755)


def built(root: Path, result: Any, folder: Path, port: int) -> Any:
    """Return a build that has made its product."""
    context = context_of("cpu", root=root, store=Store(root / "store"))
    product = reached(item(result), result, folder)
    graph = SimpleNamespace(product=product)
    return SimpleNamespace(context=context, tools=Tools(port=port), graph=graph)


def run_it(root: Path, port: int, profile: str | None = None) -> int:
    """Serve what ``bake`` made; in a process of its own, that Ctrl-C ends."""
    build = built(root, EnvironmentResult(), root / "environment", port)
    return serve.serve(build, serve.Options(target="cpu", profile=profile))


def test_serve_prints_url_and_stops_at_ctrl_c(tmp_path: Path) -> None:
    bake(tmp_path, before='echo "$*" >&2', seconds=1)
    port = free_port(0)
    code = (
        "import sys; from pathlib import Path; from tests.integration.test_serve import run_it;"
        f" sys.exit(run_it(Path({str(tmp_path)!r}), {port}, 'balanced'))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        try:
            assert child.stdout is not None
            said = []
            for line in child.stdout:
                said.append(line)
                if line.startswith("  try"):
                    break
            words = "".join(said)
            assert "loading tiny-gpt-oss" in said[0]
            assert words.index("loading") < words.index("ready after") < words.index("URL    ")
            assert f"URL    http://127.0.0.1:{port}/v1\n" in words
            assert "model  tiny-gpt-oss\n" in words
            curl = shlex.split(said[-1].partition("try")[2])
            assert curl[:2] == ["curl", f"http://127.0.0.1:{port}/v1/completions"]
            # what the line asks for, asked
            body = json.loads(curl[curl.index("-d") + 1])
            assert requests.post(curl[1], json=body, timeout=_WAIT_S).ok
            kept = (tmp_path / "dist" / "cpu" / "server.log").read_text()
            config = (
                '{"sparkforge":{"experts":"bf16_dequant",'
                '"mxfp4_layers":"qkv=int8,o=int8,lm_head=int8"}}'
            )
            assert f" --additional-config={config}\n" in kept
            assert "--mxfp4-layers" not in kept
            assert "--moe-backend" not in kept
            child.send_signal(signal.SIGINT)
            rest = child.stdout.read()
            assert child.wait(_WAIT_S) == 0, rest
            assert free_port(port) == port
        finally:
            child.kill()


def test_failed_start_shows_first_exception(tmp_path: Path) -> None:
    bake(tmp_path, before=_BROKEN)
    with pytest.raises(ServerError, match="EngineCore: ValueError: no room for the KV") as refusal:
        run_it(tmp_path, free_port(0))
    assert str(tmp_path / "dist" / "cpu" / "server.log") in refusal.value.remedy


def test_an_image_is_served_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    fake = ROOT / "tests" / "fake_server.py"
    docker.write_text(
        '#!/bin/sh\n[ "$1" = run ] || exit 0\n'
        f'echo "$*" >{tmp_path}/words\n'
        'port=$(echo "$*" | sed "s/.*--publish=127.0.0.1:\\([0-9]*\\):8000 .*/\\1/")\n'
        f'{sys.executable} {fake} "$port" 1 &\n'
        f"until [ -e {tmp_path}/enough ]; do sleep 0.1; done\n"
        "kill $!\necho was ended\nexit 7\n"
    )
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:{os.environ['PATH']}")
    curl = serve.curl

    def last_line(*found: Any, **more: Any) -> str:
        (tmp_path / "enough").touch()
        return curl(*found, **more)

    monkeypatch.setattr(serve, "curl", last_line)
    port = free_port(0)
    build = built(tmp_path, IMAGE, tmp_path, port)
    labels = {servers.SITE_PACKAGES_LABEL: "/site-packages"}
    images = SimpleNamespace(get=lambda _: SimpleNamespace(labels=labels))
    engine: Any = SimpleNamespace(client=SimpleNamespace(images=images))
    build.tools = Tools(engine, port=port)
    with pytest.raises(ServerError, match="the server exited with code 7"):
        serve.serve(build, serve.Options(target="cpu", profile="fast"))
    words = (tmp_path / "words").read_text()
    assert "--env=SPARKFORGE_PROFILE=fast " in words
    assert words.endswith(f" {IMAGE.image_id} /model\n")
    said = capsys.readouterr().out
    # a container says how far it is: serve passes that on while it loads
    assert said.index("Using 'MARLIN'") < said.index("ready after") < said.index("was ended")
    assert f"URL    http://127.0.0.1:{port}/v1" in said


def test_curl_fits_the_model() -> None:
    words = shlex.split(serve.curl("http://h/v1", "m", chat=True))
    assert words[1] == "http://h/v1/chat/completions"
    assert json.loads(words[-1])["messages"][0]["role"] == "user"
