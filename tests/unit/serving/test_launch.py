"""A start: order of options, checks before it, and what is refused."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from sparkforge.serving import (
    checkpoint,
    devices,
    door,
    health,
    launch,
    memory,
    supervise,
)
from sparkforge.serving.memory import GIB
from sparkforge.serving.options import (
    EX_CONFIG,
    EX_DATAERR,
    EX_NOHOST,
    EX_NOINPUT,
    EX_UNAVAILABLE,
    StartError,
)
from sparkforge.serving.settings import Variables
from tests.reference import make_tiny

Patch = pytest.MonkeyPatch

FOLDER = "/hub/snapshots/abc"
SPARK_MEMORY = {"keep_free_gib": 12, "most_percent": 80, "least_gib": 75}


class Door:
    """A front door that does not exist."""

    died = False

    def __init__(self, variables: Variables, key: str) -> None:
        pass

    def refuse(self, short: bool) -> None:
        pass

    def close(self) -> None:
        pass


class Signals:
    """None comes."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.child = None


def main(words: list[str]) -> int:
    return launch.main(words, os.environ)


@pytest.fixture(autouse=True)
def machine(monkeypatch: Patch, tmp_path: Path) -> None:
    """An environment of its own; nothing is downloaded, and no server is run."""
    monkeypatch.setattr(launch, "Signals", Signals)
    for name in (*os.environ, "VLLM_API_KEY", "MAX_JOBS"):
        if name.startswith("SPARKFORGE_") or name in ("VLLM_API_KEY", "MAX_JOBS"):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("SPARKFORGE_LISTEN", "127.0.0.1:8000")
    monkeypatch.setenv("SPARKFORGE_MODEL", "some/model")
    monkeypatch.setattr(shutil, "which", lambda name, **options: f"/usr/bin/{name}")
    monkeypatch.setattr(devices, "unified_bytes", lambda: None)
    monkeypatch.setattr(door, "Door", Door)
    monkeypatch.setattr(checkpoint, "fetch", lambda *words: Path(FOLDER))


def plan_of(monkeypatch: Patch, arguments: list[str]) -> supervise.Server:
    """Return what the entrypoint would run."""
    plans: list[supervise.Server] = []

    def run(plan: supervise.Server) -> int:
        plans.append(plan)
        return 7

    monkeypatch.setattr(supervise.Server, "run", run)
    assert main(arguments) == 7
    return plans[0]


def profile(tmp_path: Path, **keys: Any) -> str:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(keys))
    return str(path)


def test_options_are_those_of_profile_target_and_user(monkeypatch: Patch, tmp_path: Path) -> None:
    expect = {"moe": "MARLIN", "attention": "TRITON_ATTN"}
    path = profile(tmp_path, moe_backend="marlin", expect=expect)
    monkeypatch.setenv("SPARKFORGE_PROFILE", path)
    monkeypatch.setenv("SPARKFORGE_SERVE_ARGS", "--max-model-len 9")
    monkeypatch.setenv("SPARKFORGE_EXTRA_ARGS", "--hf-overrides '{\"a\": 1}'")
    plan = plan_of(monkeypatch, ["--attention-backend=FLASHINFER"])
    assert plan.command == [
        *launch.serve(FOLDER, ["--served-model-name=some/model"]),
        *("--moe-backend", "marlin", "--max-model-len", "9"),
        *("--hf-overrides", '{"a": 1}', "--attention-backend=FLASHINFER"),
    ]
    # who names another attention backend gets it
    assert plan.expected == {"moe": "MARLIN"}
    assert plan.strict


@pytest.mark.parametrize(
    ("chosen", "words"),
    [(None, "--max-num-seqs 3"), ("fast", "--max-num-seqs 3 --mxfp4-layers qkv,o"), ("", "")],
)
def test_a_choice_of_the_images_profile(
    monkeypatch: Patch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    chosen: str | None,
    words: str,
) -> None:
    choices = {"exact": {}, "fast": {"mxfp4_layers": "qkv,o"}}
    profile(tmp_path, choices=choices, choice="exact", max_num_seqs=3)
    monkeypatch.setenv("SPARKFORGE_SHARE", str(tmp_path))
    if chosen is not None:
        monkeypatch.setenv("SPARKFORGE_PROFILE", chosen)
    assert plan_of(monkeypatch, []).command[7:] == words.split()
    said = capsys.readouterr()
    assert ("MXFP4, as before: --mxfp4-layers qkv,o,lm_head" in said.out + said.err) == (
        chosen == "fast"
    )
    monkeypatch.setenv("SPARKFORGE_PROFILE", "fats")
    assert main([]) == EX_CONFIG


def test_without_a_compiler_a_cpu_is_served_without_torch_compile(monkeypatch: Patch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, **options: None)
    plan = plan_of(monkeypatch, [])
    assert plan.command[-1] == "--enforce-eager"
    assert plan.variables["TORCH_COMPILE_DISABLE"] == "1"


def test_without_a_device_the_user_must_agree(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARKFORGE_PROFILE", profile(tmp_path, cuda_arch="12.1"))
    monkeypatch.setattr(devices, "capabilities", list)
    assert main([]) == EX_UNAVAILABLE
    for check in ("warn", "off"):
        monkeypatch.setenv("SPARKFORGE_CHECKS", f"backends={check}")
        plan_of(monkeypatch, [])


@pytest.mark.parametrize(("code", "waits"), [(EX_NOHOST, False), (EX_DATAERR, True)])
def test_a_failed_download_is_no_failed_start(
    monkeypatch: Patch, tmp_path: Path, code: int, waits: bool
) -> None:
    def fetch(model: str, revision: str, *more: object) -> None:
        assert (model, revision) == ("some/model", "abc")
        raise StartError("the network is down", code)

    def sleep(seconds: float) -> None:
        raise supervise.StoppedError

    monkeypatch.setattr(checkpoint, "fetch", fetch)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setenv("SPARKFORGE_RESTART", "unless-stopped")
    assert main(["--revision", "abc"]) == code
    assert (health.read_mark("state") is not None) == waits
    assert not list(tmp_path.rglob("starts-*"))


def test_a_stop_ends_the_wait_from_its_first_word_on(monkeypatch: Patch) -> None:
    def say(text: str) -> None:
        if text.startswith("to try again"):  # who waits for the line before stops it now
            raise supervise.StoppedError

    monkeypatch.setattr(launch, "say", say)
    monkeypatch.setenv("SPARKFORGE_RESTART", "unless-stopped")
    monkeypatch.setenv("SPARKFORGE_LISTEN", "x")
    assert main([]) == EX_CONFIG


def test_a_device_is_tried_once_before_the_model(monkeypatch: Patch, tmp_path: Path) -> None:
    folder = tmp_path / "share" / "preflight"
    folder.mkdir(parents=True)
    (folder / "reference.json").write_text("{}")
    monkeypatch.setenv("SPARKFORGE_SHARE", str(tmp_path / "share"))
    monkeypatch.setenv("SPARKFORGE_JIT_DIR", str(tmp_path / "jit"))
    monkeypatch.setattr(devices, "capabilities", lambda: [(12, 1)])
    path = profile(tmp_path, cuda_arch="12.1", moe_backend="marlin", max_model_len=131072)
    monkeypatch.setenv("SPARKFORGE_PROFILE", path)
    plans: list[supervise.Server] = []
    codes = iter([1, 0, 7, 7])

    def run(plan: supervise.Server) -> int:
        plans.append(plan)
        return next(codes)

    monkeypatch.setattr(supervise.Server, "run", run)
    assert main([]) == EX_CONFIG  # the first trial fails, and nothing is downloaded
    assert main([]) == 7
    first, second, real = plans
    assert first.trial
    assert list(second.command[1:3]) == ["serve", str(folder)]
    assert second.command[second.command.index("--moe-backend") + 1] == "marlin"
    assert "131072" not in second.command
    assert second.variables["TRITON_CACHE_DIR"].startswith(str(tmp_path / "jit"))
    assert (real.trial, real.command[2]) == (False, FOLDER)
    assert main([]) == 7  # it passed before
    assert len(plans) == 4
    assert not plans[3].trial


def test_the_share_of_memory_is_computed_unless_it_is_given(
    monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPARKFORGE_PROFILE", profile(tmp_path, memory=SPARK_MEMORY))
    reading = memory.Reading(total=120 * GIB, available=101 * GIB)
    monkeypatch.setattr(memory, "read", lambda *root: reading)
    plan = plan_of(monkeypatch, [])
    assert plan.command[7:] == ["--gpu-memory-utilization", "0.74"]
    assert plan.guard is not None
    assert plan.guard.acts
    for own, mode, acts in (
        (["--gpu_memory_utilization=0.6"], "warn", False),
        (["--kv-cache-memory-bytes", "9"], "off", None),
    ):
        monkeypatch.setenv("SPARKFORGE_CHECKS", f"guard={mode}")
        plan = plan_of(monkeypatch, own)
        assert plan.command[7:] == own
        assert (plan.guard and plan.guard.acts) == acts
    reading = memory.Reading(total=120 * GIB, available=80 * GIB)
    monkeypatch.delattr(checkpoint, "fetch")  # too little ends a start before the download
    assert main([]) == EX_CONFIG


def test_no_key_reaches_the_log(monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "very-private")
    plan = plan_of(monkeypatch, ["--hf-token=token-private"])
    assert "very-private" not in plan.variables.values()
    assert "very-private" not in door.configuration(Variables(), "very-private", "outer")
    said = capsys.readouterr()
    assert "private" not in said.out + said.err
    assert "'--hf-token=***'" in said.err


@pytest.mark.parametrize(
    "words",
    [
        *("--api-key my-secret", "--api-ke my-secret", "--seed 1 --port 9000", "--por=9000"),
        *("--ssl_keyfile=/k", "--host=127.0.0.1", "--uds /tmp/x", "--grpc", "--config f.yaml"),
        "--allowed-origins x",
    ],
)
def test_options_that_open_another_way_are_refused(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    for where in ("SPARKFORGE_SERVE_ARGS", "SPARKFORGE_EXTRA_ARGS", None):
        with monkeypatch.context() as patch:
            if where:
                patch.setenv(where, words)
            assert main([] if where else words.split()) == EX_CONFIG
        said = capsys.readouterr().err
        assert "is not possible here: the front door" in said
        assert "my-secret" not in said


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("EXTRA_ARGS", '--hf-token "my-secret'),
        ("LISTEN", "192.168.1.4:8000"),
        ("MODEL", "--api-key=my-secret"),
        ("CHECKS", "preflight=off,hangs=60"),
        ("ALLOW_OPEN", "perhaps"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str], variable: str, value: str
) -> None:
    monkeypatch.setenv(f"SPARKFORGE_{variable}", value)
    assert main([]) == EX_CONFIG
    said = capsys.readouterr().err
    assert f"SPARKFORGE_{variable}" in said
    assert said.count("\n") == 1
    assert variable == "MODEL" or "my-secret" not in said


def test_empty_variables_mean_the_defaults(monkeypatch: Patch, tmp_path: Path) -> None:
    for name in ("EXTRA_ARGS", "CHECKS", "ALLOW_OPEN"):
        monkeypatch.setenv(f"SPARKFORGE_{name}", "")
    for name in ("HF_ENDPOINT", "HF_HUB_ETAG_TIMEOUT", "VLLM_FASTSAFETENSORS_QUEUE_SIZE"):
        monkeypatch.setenv(name, "")
    assert plan_of(monkeypatch, ["--disable-log-stats"]).hang_s == 0  # a busy one would look hung
    plan = plan_of(monkeypatch, [])
    assert plan.hang_s == 60
    empty = {name for name, value in plan.variables.items() if not value}
    assert not [name for name in empty if name.startswith(("HF_", "VLLM_"))]
    monkeypatch.setenv("SPARKFORGE_MODEL", "")
    assert main([]) == EX_NOINPUT  # /model does not exist


@pytest.mark.parametrize(
    ("index", "keep", "fragment"),
    [
        (None, 1 / 2, "bytes, its header says"),
        (None, 0, "model.safetensors: Expecting value"),
        (["model.safetensors", "b.safetensors"], 1, "b.safetensors: No such file"),
        (["../model.safetensors"], 1, "is no shard's"),
    ],
)
def test_damaged_weights_fail_before_the_start(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    index: list[str] | None,
    keep: float,
    fragment: str,
) -> None:
    model = make_tiny(tmp_path / "model").path
    checkpoint.check(model)
    weights = model / "model.safetensors"
    os.truncate(weights, int(weights.stat().st_size * keep))
    if index is not None:
        names = {str(number): name for number, name in enumerate(index)}
        (model / checkpoint.INDEX).write_text(json.dumps({"weight_map": names}))
    assert main([str(model)]) == EX_NOINPUT
    assert fragment in capsys.readouterr().err
