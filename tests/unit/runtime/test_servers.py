"""Servers of a virtual environment: ports, and what is shown of one that does not start."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkforge.core.errors import MachineError
from sparkforge.runtime import servers
from sparkforge.runtime.engine import Engine
from sparkforge.runtime.servers import LOOPBACK, ending, explain, free_port, usual_port
from tests.support import wait_for


def test_a_taken_port_has_an_exit_code_of_its_own() -> None:
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(MachineError, match=str(port)):
            free_port(port)
    assert free_port(0) < 32768  # none that an outgoing connection gets


def test_where_another_server_has_the_usual_port_a_free_one_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server((LOOPBACK, 0)) as other:
        taken = other.getsockname()[1]
        # for 8000, which servers of other tests take and leave meanwhile
        monkeypatch.setattr(servers, "free_port", lambda port: free_port({8000: taken, 0: 0}[port]))
        found = usual_port()
    assert found == free_port(found) != taken


def test_an_image_is_served_without_rights_and_ends_with_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = tmp_path / "docker"
    docker.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/words\n[ $1 = rm ] && exit\n'
        "trap 'echo bye; exit 3' TERM\necho hello\nwhile :; do sleep 0.1; done\n"
    )
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    held = SimpleNamespace(labels={servers.SITE_PACKAGES_LABEL: "/site"})
    client: Any = SimpleNamespace(images=SimpleNamespace(get=lambda _: held))
    launch = servers.Launch(tmp_path, ["--ours"], ["--more"], {"A": "b c"})
    engine = Engine(client, "26", containerd_store=True)
    with servers.from_image(engine, "sha256:1", launch, tmp_path, {"x.py": docker}) as server:
        wait_for(lambda: "hello" in server.output())
        code, _, stragglers = server.stop()
    assert (code, stragglers) == (3, False)
    assert "bye" in server.output()
    start, end = (tmp_path / "words").read_text().splitlines()
    for words in (
        "--read-only --cap-drop=ALL --security-opt=no-new-privileges",
        f"--publish={LOOPBACK}:{server.url.rpartition(':')[2]}:8000",
        "--env=A=b c",
        "--env=SPARKFORGE_SERVE_ARGS=--ours",  # the image's own need the patches
        f"--mount=type=bind,src={docker},dst=/site/x.py,readonly",
    ):
        assert f"{words} " in start
    assert start.endswith("sha256:1 /model --more")
    assert end.startswith("rm --force ")


# -- why a server did not start ----------------------------------------------------------------

# of vLLM 0.31.0, shortened
FAILED = """\
(APIServer pid=10) INFO 11-22 07:34:55 [api_server.py:1] vLLM API server version 0.31.0
(VllmWorker-0 pid=12) WARNING 11-22 07:36:11 [indexer_topk.py:35] Failed to import an extension
(Worker pid=12) ERROR 11-22 07:36:12 [multiproc_executor.py:948] WorkerProc failed to start.
(Worker pid=12) ERROR 11-22 07:36:12 [multiproc_executor.py:948] Traceback (most recent call last):
(Worker pid=12) ERROR 11-22 07:36:12 [multiproc_executor.py:948]   File "/some/where/site-packages/vllm/oracle/mxfp4.py", line 731, in select
(EngineCore pid=11) INFO 11-22 07:36:12 [core.py:129] another process prints in between
(Worker pid=12) ERROR 11-22 07:36:12 [multiproc_executor.py:948]     raise NotImplementedError(
(Worker pid=12) ERROR 11-22 07:36:12 [multiproc_executor.py:948]           ^^^^^^^^^^^^^^^^^^^
(Worker pid=12) ERROR 11-22 07:36:12 [multiproc_executor.py:948] NotImplementedError: No MXFP4 MoE backend supports it
(Worker pid=12) ERROR 11-22 07:36:12 [multiproc_executor.py:948] 
(Worker pid=12) ERROR 11-22 07:36:12 [multiproc_executor.py:948] The above exception was the direct cause of the following exception:
(EngineCore pid=11) ERROR 11-22 07:36:15 [core.py:1433] Traceback (most recent call last):
(EngineCore pid=11) ERROR 11-22 07:36:15 [core.py:1433] Exception: WorkerProc initialization failed
(APIServer pid=10) Traceback (most recent call last):
(APIServer pid=10)   File "/some/where/site-packages/vllm/v1/engine/utils.py", line 1, in wait
(APIServer pid=10) RuntimeError: Engine core initialization failed. See root cause above.
"""  # noqa: E501, W291
DIED = """\
(EngineCore pid=11) ERROR 11-22 07:36:15 [multiproc_executor.py:1] Worker proc VllmWorker-0 died unexpectedly, shutting down executor.
(EngineCore pid=11) ERROR 11-22 07:36:15 [core.py:1433] Traceback (most recent call last):
(EngineCore pid=11) ERROR 11-22 07:36:15 [core.py:1433] RuntimeError: cancelled
nanobind: leaked 7 instances!
 - leaked instance 0x1 of type "x"
"""  # noqa: E501
INVALID = """\
(APIServer pid=10) Traceback (most recent call last):
(APIServer pid=10)   File "/x/site-packages/vllm/config.py", line 7, in check
(APIServer pid=10) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
(APIServer pid=10)   Value error, the model has no tokenizer [type=value_error]
(APIServer pid=10)     For further information visit the documentation
"""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (FAILED, "Worker: NotImplementedError: No MXFP4 MoE backend supports it"),
        (
            "".join(f"cpu-1  | {line}\n" for line in FAILED.splitlines()),
            "Worker: NotImplementedError: No MXFP4 MoE backend supports it",
        ),
        (
            DIED,
            "EngineCore: Worker proc VllmWorker-0 died unexpectedly, shutting down executor.",
        ),
        (
            INVALID,
            "APIServer: pydantic_core._pydantic_core.ValidationError: 1 validation error for"
            " ModelConfig",
        ),
        ('Traceback (most recent call last):\n  File "x"\nKeyError: 7\n', "KeyError: 7"),
    ],
)
def test_the_first_exception_of_engine_or_worker_comes_first(text: str, shown: str) -> None:
    assert explain(text).splitlines()[0] == f"    {shown}"


def test_a_failure_is_shown_with_its_place() -> None:
    shown = explain(FAILED)
    assert 'vllm/oracle/mxfp4.py", line 731, in select' in shown
    assert "another process" not in shown
    assert "the model has no tokenizer" in explain(INVALID)
    deep = FAILED.replace("    raise Not", "    raise \n" * 40 + "    raise Not")
    assert len(explain(deep).splitlines()) <= 10
    assert explain("y\n" * 50 + "last").splitlines()[-1] == "    last"


@pytest.mark.parametrize(
    ("code", "words"),
    [(-4, "was killed by SIGILL"), (132, "was killed by SIGILL"), (1, "exited with code 1")],
)
def test_how_a_server_ended_in_words(code: int, words: str) -> None:
    assert ending(code) == words
