"""Servers of a virtual environment: ports, and what is shown of one that does not start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkforge.core.errors import MachineError, ServerError
from sparkforge.runtime import serverlog, servers
from sparkforge.runtime.servers import LOOPBACK, free_port


def test_a_taken_port_has_an_exit_code_of_its_own() -> None:
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(MachineError, match=f"port {port} on {LOOPBACK} is in use") as refusal:
            free_port(port)
    assert refusal.value.exit_code != ServerError.exit_code
    assert "--port" in refusal.value.remedy


def test_a_free_port_is_none_that_an_outgoing_connection_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the kernel leaves one port
    port = free_port(0)
    limits = tmp_path / "range"
    limits.write_text(f"{port + 1}\t60999\n")
    monkeypatch.setattr(servers, "_EPHEMERAL", limits)
    monkeypatch.setattr(servers, "_LOWEST", port)
    assert free_port(0) == port
    with socket.socket() as other:
        other.bind((LOOPBACK, port))
        other.listen()
        assert free_port(0) != port
    limits.write_text("1024\t65535\n")  # it leaves none
    assert free_port(0) >= 1024


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
    ("text", "process", "words"),
    [
        (FAILED, "Worker", "NotImplementedError: No MXFP4 MoE backend supports it"),
        (
            "".join(f"cpu-1  | {line}\n" for line in FAILED.splitlines()),
            "Worker",
            "NotImplementedError: No MXFP4 MoE backend supports it",
        ),
        (
            DIED,
            "EngineCore",
            "Worker proc VllmWorker-0 died unexpectedly, shutting down executor.",
        ),
        (
            INVALID,
            "APIServer",
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig"
            " Value error, the model has no tokenizer [type=value_error]"
            " For further information visit the documentation",
        ),
        ('Traceback (most recent call last):\n  File "x"\nKeyError: 7\n', "", "KeyError: 7"),
    ],
)
def test_the_first_exception_of_engine_or_worker(text: str, process: str, words: str) -> None:
    failure = serverlog.first_failure(text)
    assert failure is not None
    assert (failure.process, failure.words) == (process, words)


@pytest.mark.parametrize("text", ["", "Error: a word\nin no traceback\n", "Traceback (most"])
def test_a_log_without_an_exception_has_none(text: str) -> None:
    assert serverlog.first_failure(text) is None


def test_a_failure_is_shown_in_ten_lines_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    shown = serverlog.explain(FAILED).splitlines()
    assert shown[0] == "    Worker: NotImplementedError: No MXFP4 MoE backend supports it"
    assert shown[1] == '      File "vllm/oracle/mxfp4.py", line 731, in select'
    assert "another process" not in "".join(shown)
    deep = FAILED.replace("    raise Not", "    raise \n" * 40 + "    raise Not")
    assert len(serverlog.explain(deep).splitlines()) <= serverlog.LINES
    lines = serverlog.explain("x" * 500 + "\n" + "y\n" * 50 + DIED[DIED.index("nanobind") :])
    assert len(lines.splitlines()) == serverlog.LINES
    assert "leaked" not in lines
    assert max(map(len, serverlog.explain("x" * 500).splitlines())) <= 70


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-4, "was killed by SIGILL"),
        (132, "was killed by SIGILL"),
        (1, "exited with code 1"),
        (0, "exited with code 0"),
        (128, "exited with code 128"),
    ],
)
def test_how_a_server_ended_in_words(code: int, words: str) -> None:
    assert serverlog.ending(code) == words


@given(st.text())
def test_any_text_is_explained(text: str) -> None:
    assert len(serverlog.explain(text).split("\n")) <= serverlog.LINES
