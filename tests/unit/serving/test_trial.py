"""The trial of kernels: the process that gives each a deadline, and what a start makes of it.

The kernels themselves are tried in tests/patches/test_trial.py.
"""

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkforge.serving import devices, options, supervise, trial
from sparkforge.serving.options import EX_CONFIG, StartError
from sparkforge.serving.profile import Watch
from tests.support import PATIENCE_S, ROOT, wait_for
from tests.unit.serving.test_launch import Signals, machine, main, profile

__all__ = ["machine"]  # a fixture

Patch = pytest.MonkeyPatch
CHILD = """
import json, os, signal, sys, time
found = json.loads(sys.argv[1])["found"]
kinds = {"rotary": ("rotary", ""), "INT8": ("layers", HOW), "experts": ("experts", "")}
def tell(**what): print(json.dumps(what), flush=True)
if HOW == "never": time.sleep(60)
if HOW == "loading": os.kill(os.getpid(), signal.SIGILL)
for kind, (part, how) in kinds.items():
    if kind in found: continue
    if how == "between": sys.exit(1)
    tell(begin=kind, part=part)
    if how == "signal": os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hang": time.sleep(60)
    problem = how if how in ("wrong", "memory", "fault") else ""
    tell(kind=kind, problem=problem, text="so it is", part=part)
    if problem == "fault": sys.exit(1)
tell(end=True)
"""
"""Stands in for the process with the kernels; HOW is what becomes of INT8."""


@pytest.fixture
def parent(monkeypatch: Patch) -> Any:
    """The plugin's own process, which needs neither torch nor vLLM."""
    monkeypatch.syspath_prepend(ROOT / "kernels")
    return importlib.import_module("vllm_sparkforge.trial.__main__")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("right", "INT8: so it is"),
        ("wrong", "INT8: wrong: so it is"),
        ("memory", "INT8: memory: so it is"),
        ("fault", "INT8: fault: so it is"),
        ("signal", f"INT8: fault: the process ended with {-signal.SIGSEGV}"),
        ("hang", "INT8: hang: no result within 1 s"),
        ("never", "all: hang: no result within 2 s"),
        ("loading", f"all: fault: the process ended with {-signal.SIGILL}"),
        ("between", "all: fault: the process ended with 1"),
    ],
)
def test_each_kind_has_its_verdict(parent: Any, how: str, said: str) -> None:
    lines: list[str] = []
    child = [sys.executable, "-c", f"HOW = {how!r}{CHILD}"]
    # short only where it has to pass: a busy machine takes seconds to start Python
    short = {"hang": {"kind_s": 1.0}, "never": {"load_s": 2.0}}.get(how, {})
    verdict = parent.run({}, child, lines.append, **short)
    assert said in lines
    everything = said.startswith("all: ")
    failed = [] if how == "right" else ["all"] if everything else ["INT8"]
    expect = {"failed": failed[0].upper(), "linear": None} if failed else {}
    expect |= {"experts": None} if everything else {}
    assert verdict == {
        "failed": failed,
        "moe_backend": None,
        "expect": expect,
        "keep": how != "memory",
    }
    # the others are tried all the same, once
    others = [line for line in lines if line.startswith(("rotary", "experts"))]
    assert len(others) == {"never": 0, "loading": 0, "between": 1}.get(how, 2)


STAND_IN = """
import json, os, sys
print("a line of vLLM's")
print("trial: INT8: hang: no result within 60 s")
with open(os.environ["ASKED"], "a") as file: print(sys.argv[1], file=file)
print("verdict: " + os.environ["VERDICT"])
"""
FAILED = {"failed": ["INT8"], "moe_backend": None, "expect": {"failed": "INT8", "linear": None}}
CHOSEN = {
    "failed": ["CUTLASS tactic 3"],
    "moe_backend": "flashinfer_cutlass",
    "expect": {
        "failed": "CUTLASS TACTIC 3",
        "moe": "FLASHINFER_CUTLASS_MXFP4_MXFP8",
        "experts": None,
    },
}
NOTHING: dict[str, Any] = {"failed": [], "moe_backend": None, "expect": {}}


@pytest.fixture
def start(monkeypatch: Patch, tmp_path: Path) -> Callable[..., Any]:
    """Start an image for a Spark whose plugin has a verdict; returns the servers' plans."""
    plugin = tmp_path / "plugin" / trial.MODULE
    (tmp_path / "share" / "preflight").mkdir(parents=True)
    (tmp_path / "share" / "preflight" / "reference.json").write_text("{}")
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").touch()
    (plugin / "trial.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(plugin.parent)
    monkeypatch.setenv("PYTHONPATH", str(plugin.parent))
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setenv("SPARKFORGE_SHARE", str(tmp_path / "share"))
    monkeypatch.setenv("SPARKFORGE_JIT_DIR", str(tmp_path / "jit"))
    monkeypatch.setattr(devices, "capabilities", lambda: [(12, 1)])
    path = profile(
        tmp_path,
        cuda_arch="12.1",
        moe_backend="marlin",
        expect={"moe": "MARLIN", "linear": "DECODE", "experts": "DECODE"},
        choices={"exact": {}, "fast": {"mxfp4_layers": "qkv,o"}},
        choice="fast",
    )
    monkeypatch.setenv("SPARKFORGE_PROFILE", path)

    def begin(verdict: dict[str, Any], *words: str) -> list[supervise.Server]:
        monkeypatch.setenv("VERDICT", json.dumps({"keep": True, **verdict}))
        plans: list[supervise.Server] = []

        def run(plan: supervise.Server) -> int:
            plans.append(plan)
            return 0 if plan.trial else 7

        monkeypatch.setattr(supervise.Server, "run", run)
        code = main(list(words))
        assert code == (7 if plans else EX_CONFIG)
        return plans

    return begin


def asked(tmp_path: Path) -> list[Any]:
    path = tmp_path / "asked"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("verdict", [FAILED, CHOSEN, NOTHING], ids=["failed", "chosen", "nothing"])
def test_its_verdict_reaches_both_servers(
    start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], verdict: dict[str, Any]
) -> None:
    small, real = start(verdict)
    assert asked(tmp_path)[0] == {
        "options": {"mxfp4_layers": "qkv,o"},
        "moe_backend": "marlin",
        "kv_cache_dtype": "auto",
        "ranks": 1,
        "choose": True,
    }
    said = capsys.readouterr()
    assert "entrypoint: trial: INT8: hang: no result within 60 s" in said.err
    assert "a line of vLLM's" in said.out
    usual = {"moe": "MARLIN", "linear": "DECODE", "experts": "DECODE"}
    wanted = {kind: name for kind, name in {**usual, **verdict["expect"]}.items() if name}
    failed = ",".join(verdict["failed"]) or None
    backend = verdict["moe_backend"] or "marlin"
    for server in (small, real):
        words = options.for_plugin(server.command)
        config = json.loads(options.value(words, "--additional-config") or "{}")
        assert config.get("sparkforge", {}).get("failed") == failed
        assert options.value(words, "--moe-backend") == backend
    assert real.expected == wanted
    # the same device, driver and options: neither is run again
    assert len(start(NOTHING)) == 1
    assert len(asked(tmp_path)) == 1


def test_what_failed_must_be_said_by_vllm() -> None:
    watch = Watch({"failed": "BF16,INT8"})
    assert watch.missing()
    line = "WARNING [model.py:1] Kernels that failed their trial: %s."
    assert watch.feed(line % "BF16,INT8") is None
    assert watch.missing() == []
    assert watch.feed(line % "BF16") is not None


def test_a_lack_of_memory_is_tried_again(start: Any, tmp_path: Path) -> None:
    for count in (1, 2):
        start({**FAILED, "keep": False})
        assert len(asked(tmp_path)) == count


def test_another_driver_and_always_try_again(
    start: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
    start(NOTHING)
    monkeypatch.setattr(devices, "driver", lambda: "590.1")
    start(NOTHING)
    monkeypatch.setenv("VLLM_SPARKFORGE", '{"off": ["rotary"]}')
    start(NOTHING)
    monkeypatch.setenv("SPARKFORGE_CHECKS", "preflight=always")
    start(NOTHING)
    assert len(asked(tmp_path)) == 4


@pytest.mark.parametrize("text", ["", '{"asked": [', "[]", "null", '{"asked": 1}', "\0\0"])
def test_a_damaged_verdict_is_no_obstacle(start: Any, tmp_path: Path, text: str) -> None:
    start(NOTHING)
    (file,) = (tmp_path / "jit").glob(f"*/{trial.NAME}")
    kept = file.read_text()
    file.write_text(text)
    start(NOTHING)
    assert len(asked(tmp_path)) == 2
    assert file.read_text() == kept


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SPARKFORGE_CHECKS": "preflight=off"}, ()),
        ({"VLLM_PLUGINS": "lora_filesystem_resolver"}, ()),
        ({}, ("--decode-kernels", "off")),
    ],
    ids=["no preflight", "no plugin", "no kernels"],
)
def test_there_may_be_nothing_to_try(
    start: Any, tmp_path: Path, monkeypatch: Patch, variables: dict[str, str], words: tuple[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    plans = start(FAILED, *words)
    assert asked(tmp_path) == []
    assert "--failed-kernels" not in plans[-1].command


def test_kernels_that_must_be_used_end_the_start(
    start: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    assert start(FAILED, "--decode-kernels", "on") == []
    assert "--decode-kernels on: these failed their trial: INT8" in capsys.readouterr().err
    monkeypatch.setenv("SPARKFORGE_CHECKS", "preflight=always")
    assert len(start(NOTHING, "--decode-kernels", "on")) == 2
    assert len(start(CHOSEN, "--decode-kernels", "on")) == 2  # a tactic of CUTLASS is none


@pytest.mark.parametrize(
    ("words", "choice"), [(("--moe-backend", "triton"), None), ((), "exact")], ids=str
)
def test_experts_of_prompts_are_chosen_only_where_they_may(
    start: Any, tmp_path: Path, monkeypatch: Patch, words: tuple[str], choice: str | None
) -> None:
    if choice:
        image = tmp_path / "share" / "profile.json"
        image.write_text((tmp_path / "profile.json").read_text())
        monkeypatch.setenv("SPARKFORGE_PROFILE", choice)
    start(NOTHING, *words)
    assert asked(tmp_path)[0]["choose"] is False


def test_a_trial_without_a_verdict_is_no_obstacle(
    start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plugin" / trial.MODULE / "trial.py").write_text("raise SystemExit(3)")
    assert len(start(NOTHING)) == 2
    assert "trial: no verdict (exit code 3); going on without" in capsys.readouterr().err


def test_a_process_that_cannot_be_killed_is_no_obstacle() -> None:
    """It has the pipe that the verdict comes by."""
    script = "import subprocess; subprocess.Popen(['sleep', '60']); print('verdict: {}')"
    signals: Any = Signals()
    began = time.monotonic()
    assert trial.tried([sys.executable, "-c", script], os.environ, signals) == trial.Verdict()
    assert time.monotonic() - began < 50


def test_a_signal_ends_it(monkeypatch: Patch, tmp_path: Path) -> None:
    signals: Any = Signals()
    signals.came.append(signal.SIGTERM)
    module = tmp_path / trial.MODULE
    module.mkdir()
    (module / "__init__.py").touch()
    (module / "trial.py").write_text("print('verdict: {}')")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with pytest.raises(supervise.StoppedError):
        trial.run({"options": {}}, variables, signals, "", None)
    assert signals.child is None


def test_a_signal_ends_the_process_with_the_kernels(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    path = f"{ROOT / 'kernels'}{os.pathsep}{tmp_path}"
    asked = json.dumps({"options": {}, "moe_backend": "marlin", "choose": False})
    command = [sys.executable, "-m", f"{trial.MODULE}.trial", asked]
    parent = supervise.start(command, {**os.environ, "PYTHONPATH": path})
    try:
        wait_for(lambda: len(supervise.session(parent.pid)) == 2)
        parent.terminate()
        said, _ = parent.communicate(timeout=PATIENCE_S)  # the child has the same pipe
        assert b"verdict" not in said
        wait_for(lambda: not supervise.session(parent.pid))
    finally:
        supervise.kill(parent.pid)


def test_options_that_are_no_json_are_refused(monkeypatch: Patch) -> None:
    with pytest.raises(StartError):
        trial.plan(["--additional-config", "{", "--mxfp4-layers", "qkv"], {}, choose=False)
