"""What the image runs: order of options, checks before the start, and what is refused."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build.packs import compiling, modules
from sparkforge.checkpoints.tiny import make_tiny_gpt_oss
from sparkforge.pins import pins
from sparkforge.serving import (
    checks,
    command,
    compilers,
    devices,
    door,
    hub,
    memory,
    packed,
    pagecache,
    starts,
    supervise,
)
from sparkforge.serving.errors import (
    EX_CANTCREAT,
    EX_CONFIG,
    EX_DATAERR,
    EX_NOHOST,
    EX_NOINPUT,
    EX_UNAVAILABLE,
    StartError,
)
from sparkforge.serving.hub import Snapshot
from tests.support import ROOT, load_script

VARIABLES = (
    "MODEL_REVISION",
    "MODEL_NAME",
    "LISTEN_PORT",
    "PROFILE",
    "SERVE_ARGS",
    "EXTRA_ARGS",
    "MXFP4_LAYERS",
    "GPU_MEMORY_UTILIZATION",
    "BACKEND_CHECK",
    "HANG_SECONDS",
    "API_KEY_PATH",
    "BIND",
    "ALLOW_OPEN",
    "START_LIMIT",
    "RESTART",
    "MEMORY_GUARD",
    "MEMORY_MARKS",
    "PREFLIGHT",
    "SHARE",
)


class Door:
    """A front door that is not there."""

    died = False

    def __init__(self, rules: door.Rules) -> None:
        self.rules = rules
        self.said: list[str] = []

    def refuse(self, short: bool) -> None:
        self.said.append(f"refuse {short}")

    def stall(self, stalled: bool) -> None:
        self.said.append(f"stall {stalled}")

    def ready(self) -> None:
        self.said.append("ready")

    def close(self) -> None:
        self.said.append("close")


@pytest.fixture
def entrypoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module, in an environment of its own; the server is not run."""
    module = load_script("entrypoint")
    for name in VARIABLES:
        monkeypatch.delenv(f"SPARKFORGE_{name}", raising=False)
    for name in ("VLLM_API_KEY", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("SPARKFORGE_LISTEN_HOST", "127.0.0.1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("SPARKFORGE_MODEL", "some/model")
    monkeypatch.setenv("SPARKFORGE_DOWNLOAD", "vllm")
    monkeypatch.setattr(shutil, "which", lambda name, **options: f"/usr/bin/{name}")
    monkeypatch.setattr(devices, "unified_bytes", lambda: None)
    monkeypatch.setattr(door, "Door", Door)
    return module


def plan_of(
    entrypoint: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> supervise.Plan:
    """Return what the entrypoint would run."""
    plans: list[supervise.Plan] = []

    def run(plan: supervise.Plan) -> supervise.End:
        plans.append(plan)
        return supervise.End(7)

    monkeypatch.setattr(supervise, "run", run)
    assert entrypoint.main(arguments) == 7
    return plans[0]


def profile(tmp_path: Path, **keys: Any) -> str:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(keys))
    return str(path)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("--mxfp4-layers qkv,o", ["--mxfp4-layers", "qkv,o"]),
        ("--hf-overrides '{\"a\": 1}'", ["--hf-overrides", '{"a": 1}']),
        ("", []),
        (None, []),
    ],
)
def test_extra_arguments_stand_between_the_targets_and_the_callers(
    monkeypatch: pytest.MonkeyPatch, entrypoint: Any, extra: str | None, words: list[str]
) -> None:
    monkeypatch.setenv("SPARKFORGE_SERVE_ARGS", "--max-model-len 9")
    if extra is not None:
        monkeypatch.setenv("SPARKFORGE_EXTRA_ARGS", extra)
    plan = plan_of(entrypoint, monkeypatch, ["--max-num-seqs", "4"])
    assert plan.command == [
        *command.serve("some/model", door.engine_socket(), []),
        *("--max-model-len", "9", *words, "--max-num-seqs", "4"),
    ]


def test_the_profiles_options_come_first_and_its_backends_are_expected(
    monkeypatch: pytest.MonkeyPatch, entrypoint: Any, tmp_path: Path
) -> None:
    path = profile(
        tmp_path, moe_backend="marlin", expect={"moe": "MARLIN", "attention": "TRITON_ATTN"}
    )
    monkeypatch.setenv("SPARKFORGE_PROFILE", path)
    monkeypatch.setenv("SPARKFORGE_MXFP4_LAYERS", "qkv")
    plan = plan_of(entrypoint, monkeypatch, ["--attention-backend=FLASHINFER"])
    assert plan.command[6:] == [
        "--moe-backend",
        "marlin",
        "--mxfp4-layers=qkv",
        "--attention-backend=FLASHINFER",
    ]
    # who names another attention backend gets it
    assert plan.expected == {"moe": "MARLIN"}
    assert plan.strict


CHOICES = {
    "choices": {"exact": {}, "fast": {"mxfp4_layers": "qkv,o,lm_head"}},
    "choice": "exact",
    "expect": {"moe": "MARLIN", "linear": "DECODE"},
}


@pytest.mark.parametrize(
    ("chosen", "variables", "arguments", "layers"),
    [
        (None, {}, [], []),
        ("exact", {}, [], []),
        ("fast", {}, [], ["--mxfp4-layers", "qkv,o,lm_head"]),
        # where nobody chose, other settings of layers count as ever
        (None, {"MXFP4_LAYERS": "qkv"}, [], ["--mxfp4-layers=qkv"]),
        (None, {}, ["--mxfp4-layers", "o"], ["--mxfp4-layers", "o"]),
        (
            "fast",
            {"MXFP4_LAYERS": "o,qkv,lm_head"},
            [],
            ["--mxfp4-layers", "qkv,o,lm_head", "--mxfp4-layers=o,qkv,lm_head"],
        ),
    ],
)
def test_a_choice_of_the_images_profile_is_taken_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: Any,
    tmp_path: Path,
    chosen: str | None,
    variables: dict[str, str],
    arguments: list[str],
    layers: list[str],
) -> None:
    profile(tmp_path, **CHOICES)
    monkeypatch.setenv("SPARKFORGE_SHARE", str(tmp_path))
    for name, value in {**variables, **({"PROFILE": chosen} if chosen else {})}.items():
        monkeypatch.setenv(f"SPARKFORGE_{name}", value)
    plan = plan_of(entrypoint, monkeypatch, arguments)
    assert plan.command[6:] == layers
    assert set(plan.expected) == ({"moe", "linear"} if layers else {"moe"})


def test_the_line_of_the_choice_comes_before_the_command(
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    profile(tmp_path, **CHOICES)
    model = make_tiny_gpt_oss(tmp_path / "model").path
    monkeypatch.setenv("SPARKFORGE_SHARE", str(tmp_path))
    monkeypatch.setenv("SPARKFORGE_MODEL", str(model))
    plan_of(entrypoint, monkeypatch, [])
    said = capsys.readouterr().err
    assert "entrypoint: profile exact: a token reads 0.00" in said
    assert "; with fast 0.00" in said
    assert said.index("profile exact") < said.index("vllm serve")


@pytest.mark.parametrize(
    ("chosen", "layers", "arguments", "words"),
    [
        (
            "fats",
            "",
            [],
            "SPARKFORGE_PROFILE 'fats': no such profile: did you mean fast? use exact",
        ),
        ("mine.json", "", [], "SPARKFORGE_PROFILE 'mine.json': no such profile: use exact or fast"),
        (
            "fast",
            "qkv",
            [],
            "SPARKFORGE_PROFILE=fast quantises qkv,o,lm_head, but SPARKFORGE_MXFP4_L",
        ),
        (
            "exact",
            "",
            ["--mxfp4_layers=o"],
            "=exact quantises no layers, but --mxfp4-layers is 'o'",
        ),
    ],
)
def test_a_choice_that_is_none_or_is_contradicted_is_one_error(
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    chosen: str,
    layers: str,
    arguments: list[str],
    words: str,
) -> None:
    profile(tmp_path, **CHOICES)
    monkeypatch.setenv("SPARKFORGE_SHARE", str(tmp_path))
    monkeypatch.setenv("SPARKFORGE_PROFILE", chosen)
    monkeypatch.setenv("SPARKFORGE_MXFP4_LAYERS", layers)
    assert entrypoint.main(arguments) == EX_CONFIG
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("check", "strict", "expected"),
    [("fail", True, {"moe": "M"}), ("warn", False, {"moe": "M"}), ("off", False, {})],
)
def test_the_check_of_backends_can_be_loosened(
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: Any,
    tmp_path: Path,
    check: str,
    strict: bool,
    expected: dict[str, str],
) -> None:
    monkeypatch.setenv("SPARKFORGE_PROFILE", profile(tmp_path, expect={"moe": "M"}))
    monkeypatch.setenv("SPARKFORGE_BACKEND_CHECK", check)
    plan = plan_of(entrypoint, monkeypatch, [])
    assert (plan.strict, plan.expected) == (strict, expected)


def test_an_unknown_kind_of_check_is_refused(
    monkeypatch: pytest.MonkeyPatch, entrypoint: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARKFORGE_BACKEND_CHECK", "Fail")
    assert entrypoint.main([]) == EX_CONFIG
    assert "use fail, warn or off" in capsys.readouterr().err


def test_without_a_compiler_a_cpu_is_served_without_torch_compile(
    monkeypatch: pytest.MonkeyPatch, entrypoint: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, **options: None)
    plan = plan_of(entrypoint, monkeypatch, [])
    assert plan.command[-1] == "--enforce-eager"
    assert plan.variables["TORCH_COMPILE_DISABLE"] == "1"
    assert "serving without torch.compile" in capsys.readouterr().err


def gpu_without_compilers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: devices.Capability
) -> None:
    """Have a device, the profile of a GPU and the default pack, and neither nvcc nor g++."""
    monkeypatch.setattr(shutil, "which", lambda name, **options: None)
    monkeypatch.setattr(devices, "capabilities", lambda: [device])
    names = tuple(one.name for one in modules.chosen("default"))
    monkeypatch.setattr(packed, "installed", lambda: packed.Pack("sm121f", names))
    path = profile(tmp_path, cuda_arch="12.1", attention_backend="FLASHINFER")
    monkeypatch.setenv("SPARKFORGE_PROFILE", path)
    monkeypatch.setenv("SPARKFORGE_PREFLIGHT", "off")


def test_a_gpu_is_served_by_its_pack_without_compilers_and_with_torch_compile(
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpu_without_compilers(monkeypatch, tmp_path, (12, 1))
    plan = plan_of(entrypoint, monkeypatch, [])
    assert "--enforce-eager" not in plan.command
    assert "TORCH_COMPILE_DISABLE" not in plan.variables
    assert plan.variables["FLASHINFER_DISABLE_JIT"] == "1"
    said = capsys.readouterr().err
    assert "and compiles no other" in said
    assert "MAX_JOBS" not in said


def test_what_no_module_is_there_for_ends_the_start_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpu_without_compilers(monkeypatch, tmp_path, (12, 1))
    assert entrypoint.main(["--kv-cache-dtype", "fp8_e5m2"]) == EX_CONFIG
    assert "error: --kv-cache-dtype fp8_e5m2: this image lacks" in capsys.readouterr().err
    monkeypatch.setenv("SPARKFORGE_BACKEND_CHECK", "warn")
    plan_of(entrypoint, monkeypatch, ["--kv-cache-dtype", "fp8_e5m2"])
    assert "warning: --kv-cache-dtype fp8_e5m2: this image lacks" in capsys.readouterr().err


def test_a_pack_for_another_device_ends_the_start_unless_triton_computes_attention(
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpu_without_compilers(monkeypatch, tmp_path, (12, 0))
    assert entrypoint.main([]) == EX_CONFIG
    said = capsys.readouterr().err
    assert "error: attention by FlashInfer: this image has none for this device" in said
    assert "--attention-backend TRITON_ATTN" in said
    plan_of(entrypoint, monkeypatch, ["--attention-backend", "TRITON_ATTN"])
    assert "so vLLM cannot use FlashInfer" in capsys.readouterr().err


def test_without_a_device_no_server_is_started_but_where_the_user_wants_it(
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SPARKFORGE_PROFILE", profile(tmp_path, cuda_arch="12.1"))
    monkeypatch.setattr(devices, "capabilities", list)
    assert entrypoint.main([]) == EX_UNAVAILABLE
    assert "error: no CUDA device is visible in this container" in capsys.readouterr().err
    for check, said in (("warn", "warning: no CUDA device"), ("off", "")):
        monkeypatch.setenv("SPARKFORGE_BACKEND_CHECK", check)
        plan_of(entrypoint, monkeypatch, [])
        told = capsys.readouterr().err
        assert said in told if said else "CUDA" not in told
    monkeypatch.setenv("SPARKFORGE_BACKEND_CHECK", "fail")
    monkeypatch.setattr(devices, "capabilities", lambda: [(9, 0)])
    monkeypatch.setenv("SPARKFORGE_PREFLIGHT", "off")
    plan_of(entrypoint, monkeypatch, [])
    assert "for devices of compute capability 12.1, not 9.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "waits"), [(EX_NOHOST, False), (EX_CANTCREAT, False), (EX_DATAERR, True)]
)
def test_a_failed_download_is_one_line_and_no_failed_start(
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    code: int,
    waits: bool,
) -> None:
    def fetch(model: str, revision: str, *more: object) -> None:
        assert (model, revision) == ("some/model", "abc")
        raise StartError("the network is down", code)

    waited: list[object] = []
    monkeypatch.setattr(hub, "fetch", fetch)
    monkeypatch.setattr(starts, "wait", waited.append)
    monkeypatch.setenv("SPARKFORGE_DOWNLOAD", "")
    monkeypatch.setenv("SPARKFORGE_RESTART", "unless-stopped")
    assert entrypoint.main(["--revision", "abc"]) == code
    assert "entrypoint: error: the network is down\n" in capsys.readouterr().err
    assert bool(waited) == waits
    assert not list(tmp_path.rglob("starts-*"))


def test_vllm_gets_the_folder_and_clients_the_models_name(
    monkeypatch: pytest.MonkeyPatch, entrypoint: Any
) -> None:
    found = Snapshot(Path("/hub/snapshots/abc"), "abc")
    monkeypatch.setattr(hub, "fetch", lambda *words: found)
    monkeypatch.setenv("SPARKFORGE_DOWNLOAD", "entrypoint")
    monkeypatch.setenv("SPARKFORGE_MODEL_REVISION", "abc")
    command = plan_of(entrypoint, monkeypatch, []).command
    assert command[2] == "/hub/snapshots/abc"
    assert command[6:] == ["--served-model-name=some/model"]
    monkeypatch.setenv("SPARKFORGE_MODEL_NAME", "mine")
    assert plan_of(entrypoint, monkeypatch, []).command[6:] == ["--served-model-name=mine"]


def test_a_device_is_tried_once_before_the_model(
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "share" / "preflight"
    folder.mkdir(parents=True)
    (folder / "reference.json").write_text("{}")
    monkeypatch.setenv("SPARKFORGE_SHARE", str(tmp_path / "share"))
    monkeypatch.setattr(devices, "capabilities", lambda: [(12, 1)])
    monkeypatch.setattr(devices, "driver", lambda: "580.95.05, CUDA 13.0")
    monkeypatch.setenv("SPARKFORGE_JIT_DIR", str(tmp_path / "jit"))
    monkeypatch.setenv(
        "SPARKFORGE_PROFILE",
        profile(
            tmp_path,
            cuda_arch="12.1",
            moe_backend="marlin",
            max_model_len=131072,
            expect={"moe": "MARLIN", "linear": "MARLIN"},
        ),
    )
    plans: list[supervise.Plan] = []
    codes = iter([1, 0, 7, 7])

    def run(plan: supervise.Plan) -> supervise.End:
        plans.append(plan)
        return supervise.End(next(codes))

    monkeypatch.setattr(supervise, "run", run)
    assert entrypoint.main([]) == EX_CONFIG  # the first trial fails, and no model is looked at
    assert "the preflight failed (exit code 1)" in capsys.readouterr().err
    assert entrypoint.main([]) == 7
    first, second, real = plans
    assert first.trial is not None
    assert list(second.command[1:3]) == ["serve", str(folder)]
    assert second.command[second.command.index("--moe-backend") + 1] == "marlin"
    assert "131072" not in second.command
    assert second.expected == {"moe": "MARLIN"}
    assert second.variables["TRITON_CACHE_DIR"].startswith(str(tmp_path / "jit"))
    assert (real.trial, real.command[2]) == (None, "some/model")
    assert entrypoint.main([]) == 7
    assert "passed before" in capsys.readouterr().err
    assert len(plans) == 4
    assert plans[3].trial is None


def test_an_empty_profile_variable_means_none(
    monkeypatch: pytest.MonkeyPatch, entrypoint: Any, tmp_path: Path
) -> None:
    profile(tmp_path, max_num_seqs=3)
    monkeypatch.setenv("SPARKFORGE_SHARE", str(tmp_path))
    assert plan_of(entrypoint, monkeypatch, []).command[6:] == ["--max-num-seqs", "3"]
    monkeypatch.setenv("SPARKFORGE_PROFILE", "")
    assert plan_of(entrypoint, monkeypatch, []).command[6:] == []


SPARK_MEMORY = {"keep_free_gib": 12, "most_percent": 80, "least_gib": 75}


@pytest.mark.parametrize(
    ("arguments", "share", "words"),
    [
        ([], None, ["--gpu-memory-utilization", "0.74"]),
        ([], "0.5", ["--gpu-memory-utilization", "0.5"]),
        (["--gpu_memory_utilization=0.6"], None, ["--gpu_memory_utilization=0.6"]),
        (["--kv-cache-memory-bytes", "9"], None, ["--kv-cache-memory-bytes", "9"]),
    ],
)
def test_the_share_of_memory_is_computed_unless_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: Any,
    tmp_path: Path,
    arguments: list[str],
    share: str | None,
    words: list[str],
) -> None:
    monkeypatch.setenv("SPARKFORGE_PROFILE", profile(tmp_path, memory=SPARK_MEMORY))
    monkeypatch.setenv("SPARKFORGE_MEMORY_GUARD", "off")
    if share:
        monkeypatch.setenv("SPARKFORGE_GPU_MEMORY_UTILIZATION", share)
    reading = memory.Reading(total=120 * memory.GIB, available=101 * memory.GIB)
    monkeypatch.setattr(memory, "read", lambda: reading)
    assert plan_of(entrypoint, monkeypatch, arguments).command[6:] == words


@pytest.mark.parametrize(("mode", "refuses"), [("", True), ("warn", False), ("off", False)])
def test_a_shared_memory_is_guarded(
    monkeypatch: pytest.MonkeyPatch, entrypoint: Any, tmp_path: Path, mode: str, refuses: bool
) -> None:
    monkeypatch.setenv("SPARKFORGE_PROFILE", profile(tmp_path, memory=SPARK_MEMORY))
    monkeypatch.setenv("SPARKFORGE_GPU_MEMORY_UTILIZATION", "0.5")
    monkeypatch.setenv("SPARKFORGE_MEMORY_GUARD", mode)
    plan = plan_of(entrypoint, monkeypatch, [])
    assert (plan.guard is None) is (mode == "off")
    assert plan.guard is None or plan.guard.acts is refuses


def test_a_machine_of_two_needs_room_for_half_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "unified_bytes", lambda: None)
    reading = memory.Reading(total=120 * memory.GIB, available=60 * memory.GIB)
    monkeypatch.setattr(memory, "read", lambda: reading)
    plan = memory.MemoryPlan(**SPARK_MEMORY)
    options, description = memory.options(plan, [], "", machines=2)
    assert options == ["--gpu-memory-utilization", "0.40"]
    assert description == "60.0 of 120.0 GiB are available: --gpu-memory-utilization 0.40"
    with pytest.raises(memory.MemoryShortError):
        memory.options(plan, [], "", machines=1)


def test_too_little_memory_ends_a_start_before_the_download(
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fetch(*words: object) -> None:
        raise AssertionError("65 GB are fetched")

    reading = memory.Reading(total=120 * memory.GIB, available=80 * memory.GIB)
    monkeypatch.setattr(memory, "read", lambda: reading)
    monkeypatch.setattr(hub, "fetch", fetch)
    monkeypatch.setenv("SPARKFORGE_PROFILE", profile(tmp_path, memory=SPARK_MEMORY))
    monkeypatch.setenv("SPARKFORGE_DOWNLOAD", "entrypoint")
    assert entrypoint.main([]) == EX_CONFIG
    assert "error: 80.0 of 120.0 GiB are available; 12 are kept" in capsys.readouterr().err


def test_without_counters_a_busy_server_is_not_ended(
    monkeypatch: pytest.MonkeyPatch, entrypoint: Any
) -> None:
    assert plan_of(entrypoint, monkeypatch, []).hang_s == 60
    assert plan_of(entrypoint, monkeypatch, ["--disable-log-stats"]).hang_s == 0


def test_the_key_reaches_the_front_door_and_no_log(
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "key").write_text("very-secret\n")
    monkeypatch.setenv("SPARKFORGE_API_KEY_PATH", str(tmp_path / "key"))
    monkeypatch.setenv("SPARKFORGE_EXTRA_ARGS", "--seed 1")
    plan = plan_of(entrypoint, monkeypatch, ["--hf-token=token-secret"])
    assert "very-secret" not in plan.variables.values()
    assert "very-secret" not in door.configuration(door.rules(os.environ), "outer")
    said = capsys.readouterr()
    assert "secret" not in said.out + said.err
    assert "--seed 1 '--hf-token=***'" in said.err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--api-key", "my-secret"], "SPARKFORGE_API_KEY_FILE"),
        (["--seed", "1", "--api_key=my-secret"], "SPARKFORGE_API_KEY_FILE"),
        (["--port", "9000"], "SPARKFORGE_PORT"),
        (["--ssl-keyfile=/k"], "use a proxy for TLS"),
        (["--api-ke", "my-secret"], "SPARKFORGE_API_KEY_FILE"),
        (["--por=9000"], "SPARKFORGE_PORT"),
        (["--host", "192.168.1.4"], "SPARKFORGE_BIND"),
        (["--host=127.0.0.1"], "SPARKFORGE_BIND"),
        (["--uds", "/tmp/x"], "uses that socket"),
        (["--grpc"], "nothing would check"),
        (["--config", "f.yaml"], "SPARKFORGE_EXTRA_ARGS"),
        (["--allowed-origins", '["*"]'], "SPARKFORGE_ORIGINS"),
    ],
)
@pytest.mark.parametrize("role", ["", "head", "worker"])
@pytest.mark.parametrize("where", ["SPARKFORGE_SERVE_ARGS", "SPARKFORGE_EXTRA_ARGS", ""])
def test_options_that_open_another_way_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: Any,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    hint: str,
    role: str,
    where: str,
) -> None:
    for name, value in {"ROLE": role, "HEAD": "::1", "WORKER": "::2", "IFNAME": "lo"}.items():
        monkeypatch.setenv(f"SPARKFORGE_CLUSTER_{name}", value)
    if where:
        monkeypatch.setenv(where, shlex.join(words))
        words = []
    assert entrypoint.main(words) == EX_CONFIG
    said = capsys.readouterr().err
    assert hint in said
    assert "my-secret" not in said


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("EXTRA_ARGS", '--hf-token "my-secret', "SPARKFORGE_EXTRA_ARGS is not valid shell"),
        ("SERVE_ARGS", "--seed '1", "SPARKFORGE_SERVE_ARGS is not valid shell"),
        ("LISTEN_PORT", "abc", "SPARKFORGE_LISTEN_PORT is 'abc': use 1 to 65535"),
        ("LISTEN_PORT", "0", "SPARKFORGE_LISTEN_PORT is '0'"),
        ("LISTEN_PORT", "65536", "SPARKFORGE_LISTEN_PORT is '65536'"),
        ("LISTEN_PORT", "8" * 5000, "use 1 to 65535"),
        ("MODEL", "--api-key=my-secret", "SPARKFORGE_MODEL begins with -"),
        ("MODEL_NAME", "a\udcff", "SPARKFORGE_MODEL_NAME is not UTF-8 text"),
        (
            "GPU_MEMORY_UTILIZATION",
            "lots",
            "SPARKFORGE_GPU_MEMORY_UTILIZATION is 'lots': use a num",
        ),
        ("GPU_MEMORY_UTILIZATION", "5", "SPARKFORGE_GPU_MEMORY_UTILIZATION is '5': use a number"),
        ("GPU_MEMORY_UTILIZATION", "nan", "SPARKFORGE_GPU_MEMORY_UTILIZATION is 'nan': use a num"),
        (
            "MXFP4_LAYERS",
            "--host 0.0.0.0",
            "SPARKFORGE_MXFP4_LAYERS is '--host 0.0.0.0': use a list",
        ),
        (
            "API_KEY_PATH",
            "/nowhere/key",
            "SPARKFORGE_API_KEY_PATH names /nowhere/key, and there is",
        ),
        ("START_LIMIT", "some", "SPARKFORGE_START_LIMIT is 'some': use a number"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: Any,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    said: str,
) -> None:
    monkeypatch.setenv(f"SPARKFORGE_{variable}", value)
    assert entrypoint.main([]) == EX_CONFIG
    err = capsys.readouterr().err
    assert said in err
    assert "my-secret" not in err


def test_empty_variables_mean_the_defaults(
    monkeypatch: pytest.MonkeyPatch, entrypoint: Any, tmp_path: Path
) -> None:
    for name in ("LISTEN_PORT", "EXTRA_ARGS", "HANG_SECONDS"):
        monkeypatch.setenv(f"SPARKFORGE_{name}", "")
    command = plan_of(entrypoint, monkeypatch, [""]).command
    assert command[2:4] == ["some/model", "--uds"]
    monkeypatch.setenv("SPARKFORGE_JIT_DIR", str(tmp_path / "jit"))
    monkeypatch.setenv("SPARKFORGE_JIT_BUDGET_GIB", "1e308")
    assert str(tmp_path) in plan_of(entrypoint, monkeypatch, []).variables["TRITON_CACHE_DIR"]
    monkeypatch.setenv("HF_HOME", "~nobody-of-that-name")
    assert plan_of(entrypoint, monkeypatch, []).hang_s == 60
    monkeypatch.setenv("SPARKFORGE_MODEL", "")
    assert entrypoint.main([]) == EX_NOINPUT  # /model is not there


@pytest.mark.parametrize("own", [False, True])
def test_the_images_module_of_triton_is_in_the_servers_cache(
    monkeypatch: pytest.MonkeyPatch, entrypoint: Any, tmp_path: Path, own: bool
) -> None:
    module = tmp_path / "share" / "triton" / "cuda_utils.so"
    module.parent.mkdir(parents=True)
    module.write_bytes(b"compiled with the image")
    backend = tmp_path / "installed" / "triton" / "backends" / "nvidia"
    backend.mkdir(parents=True)
    (backend / "driver.c").touch()
    (tmp_path / "installed" / "triton" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.setenv("SPARKFORGE_SHARE", str(tmp_path / "share"))
    monkeypatch.setenv("SPARKFORGE_JIT_DIR", str(tmp_path / "jit"))
    if own:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    variables = plan_of(entrypoint, monkeypatch, []).variables
    cache = Path(variables["TRITON_CACHE_DIR"])
    assert cache.is_relative_to(tmp_path / ("own" if own else "jit"))
    (found,) = cache.glob("*/cuda_utils.so")
    assert found.read_bytes() == module.read_bytes()
    assert variables["TRITON_LIBCUDA_PATH"] == str(module.parent)


def test_the_health_check_asks_where_the_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_script("healthcheck")
    asked: list[Path] = []

    def client(address: Path, *more: object) -> Any:
        asked.append(address)
        raise OSError

    monkeypatch.setattr(module, "Client", client)
    monkeypatch.setattr(module.state, "read", lambda: module.state.State(module.state.READY))
    with pytest.raises(OSError, match=r"^$"):
        module.check()
    assert asked == [door.own_socket()]


def test_a_name_that_looks_like_an_option_stays_a_name(
    monkeypatch: pytest.MonkeyPatch, entrypoint: Any
) -> None:
    monkeypatch.setenv("SPARKFORGE_MODEL_NAME", "--host")
    monkeypatch.setenv("SPARKFORGE_MODEL_REVISION", "-x")
    command = plan_of(entrypoint, monkeypatch, []).command
    assert command[6:8] == ["--revision=-x", "--served-model-name=--host"]


@pytest.mark.parametrize(
    ("options", "own", "expected"),
    [
        (["--moe-backend", "flashinfer_cutlass"], "", "2"),  # 20.1 GiB beside the model
        ([], "", "2"),  # vLLM chooses: it may be the same
        (["--moe-backend=marlin"], "", "8"),
        (["--moe-backend", "marlin", "--gpu-memory-utilization=0.9"], "", "2"),
        (["--moe-backend", "marlin", "--gpu-memory-utilization=0.99"], "", "1"),
        ([], "5", "5"),
    ],
)
def test_compilers_at_once_are_those_that_fit_beside_the_model(
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: Any,
    tmp_path: Path,
    options: list[str],
    own: str,
    expected: str,
) -> None:
    monkeypatch.setenv("SPARKFORGE_PROFILE", profile(tmp_path, memory=SPARK_MEMORY))
    monkeypatch.setenv("MAX_JOBS", own)
    reading = memory.Reading(int(119.7 * memory.GIB), int(115.85 * memory.GIB))
    monkeypatch.setattr(memory, "read", lambda: reading)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(20)))
    assert plan_of(entrypoint, monkeypatch, options).variables["MAX_JOBS"] == expected


def test_compilers_fit_into_the_containers_limit_too() -> None:
    reading = memory.Reading(120 * memory.GIB, 115 * memory.GIB, 24 * memory.GIB, 8 * memory.GIB)
    words = ["--moe-backend", "marlin", "--gpu-memory-utilization", "0.8"]
    assert compilers.jobs(words, reading, unified=True, cpus=20) == 6  # (24 - 8 - 4) / 2
    roomy = memory.Reading(120 * memory.GIB, 115 * memory.GIB, 112 * memory.GIB)
    assert compilers.jobs(words, roomy, unified=True, cpus=20) == 7  # (115 - 96 - 4) / 2


def test_a_card_of_its_own_memory_leaves_the_hosts_to_compilers() -> None:
    reading = memory.Reading(64 * memory.GIB, 40 * memory.GIB)
    words = ["--gpu-memory-utilization", "0.9"]
    assert compilers.jobs(words, reading, unified=False, cpus=20) == 4
    assert compilers.jobs(words, reading, unified=False, cpus=2) == 2
    # the image has nothing of the driver's
    assert compiling.LARGEST_GIB == compilers.LARGEST_GIB


@pytest.mark.parametrize("own", ["lots", "0", "-1", "2.5"])
def test_compilers_at_once_are_a_whole_number(
    monkeypatch: pytest.MonkeyPatch, entrypoint: Any, capsys: pytest.CaptureFixture[str], own: str
) -> None:
    monkeypatch.setenv("MAX_JOBS", own)
    assert entrypoint.main([]) == EX_CONFIG
    assert f"error: MAX_JOBS is '{own}': use a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "words",
        "[]",
        '{"memory": 5}',
        '{"memory": {"least_gib": "x"}}',
        '{"expect": ["x"]}',
        '{"cudagraph_capture_sizes": 5}',
        '{"cudagraph_capture_sizes": [1, "x"]}',
        '{"vocabulary_sha256": 5}',
        '{"warm_up": []}',
        '{"moe_backend": {}}',
        '{"expect": {"a": 1}}',
        '{"enforce_eager": "yes"}',
        '{"max_num_seqs": true}',
        '{"max_num_seqs": "4"}',
        '{"max_model_length": 4096}',
        "[" * 200_000,
        '{"a":' * 5000,
    ],
)
def test_a_file_that_is_no_profile_is_named(
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
) -> None:
    (tmp_path / "mine.json").write_text(text)
    monkeypatch.setenv("SPARKFORGE_PROFILE", str(tmp_path / "mine.json"))
    assert entrypoint.main([]) == EX_CONFIG
    said = capsys.readouterr().err
    assert "entrypoint: error: invalid profile: " in said
    assert "mine.json" in said
    assert said.count("\n") == 1


def test_a_profiles_own_value_is_not_called_a_variable(
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SPARKFORGE_PROFILE", profile(tmp_path, on_mismatch="maybe"))
    assert entrypoint.main([]) == EX_CONFIG
    assert "the profile's value for SPARKFORGE_BACKEND_CHECK is 'maybe'" in capsys.readouterr().err


def test_weights_that_cannot_be_read_are_told_before_the_server_starts(
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    # root may read any file
    monkeypatch.setattr(os, "access", lambda path, how: "model" not in Path(path).name)
    assert entrypoint.main([str(tmp_path)]) == EX_NOINPUT
    assert "has files that user" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("index", "keep", "fragment"),
    [
        (None, 1 / 2, "model.safetensors: {size} bytes, its header says {whole}"),
        (None, 0, "model.safetensors: no safetensors header"),
        (["model.safetensors", "b.safetensors"], 1, "b.safetensors: missing"),
        (["a.safetensors", "b.safetensors"], 1, "a.safetensors: missing (and 1 more)"),
        (["../model.safetensors"], 1, "names '../model.safetensors', which is no shard"),
    ],
)
def test_weights_that_are_cut_off_are_told_before_the_server_starts(
    entrypoint: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    index: list[str] | None,
    keep: float,
    fragment: str,
) -> None:
    model = make_tiny_gpt_oss(tmp_path / "model").path
    weights = model / "model.safetensors"
    whole = weights.stat().st_size
    checks.checkpoint(model)
    os.truncate(weights, size := int(whole * keep))
    if index is not None:
        names = {str(number): name for number, name in enumerate(index)}
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert entrypoint.main([str(model)]) == EX_NOINPUT
    said = capsys.readouterr().err
    assert f"error: the model in {model} is not complete: " in said
    assert fragment.format(size=size, whole=whole) in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("seconds", ["a minute", "-1", "nan", "inf"])
def test_seconds_without_progress_are_a_number(
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: Any,
    capsys: pytest.CaptureFixture[str],
    seconds: str,
) -> None:
    monkeypatch.setenv("SPARKFORGE_HANG_SECONDS", seconds)
    assert entrypoint.main([]) == EX_CONFIG
    assert f"SPARKFORGE_HANG_SECONDS is '{seconds}': use a number" in capsys.readouterr().err


def test_weights_are_evicted_before_memory_is_measured_and_after_loading(
    monkeypatch: pytest.MonkeyPatch, entrypoint: Any, tmp_path: Path
) -> None:
    snapshot = tmp_path / "hf/hub/models--some--model/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model-00001.safetensors").write_bytes(b"x" * 9)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setenv("SPARKFORGE_MODEL_REVISION", "abc")
    monkeypatch.setenv(
        "SPARKFORGE_PROFILE", profile(tmp_path, memory=SPARK_MEMORY, evict_page_cache=True)
    )
    order: list[str] = []

    def evict(files: list[Path]) -> int:
        order.extend(file.name for file in files)
        return 9

    def read() -> memory.Reading:
        order.append("read")
        return memory.Reading(120 << 30, 110 << 30)

    monkeypatch.setattr(pagecache, "evict", evict)
    monkeypatch.setattr(memory, "read", read)
    plan = plan_of(entrypoint, monkeypatch, [])
    plan.at_first_token()
    # first of all: is there enough at all?
    assert order == ["read", "model-00001.safetensors", "read", "read", "model-00001.safetensors"]


@pytest.mark.parametrize("target", ["spark", "rtx"])
def test_compose_and_pins_name_the_same_model(target: str) -> None:
    loaded = pins.load(ROOT / "pins.yaml")
    name = loaded.target(target).model
    assert name is not None
    compose = (ROOT / "docker-compose.yml").read_text()
    assert f"SPARKFORGE_MODEL: {loaded.models[name].repository}\n" in compose
    assert f"SPARKFORGE_MODEL_REVISION: {loaded.models[name].revision}\n" in compose
