"""A trial of the kernels on a device that is not there, and what a server makes of its verdict."""

import json
import shlex
import sys
import types
from typing import Any
from unittest import mock

from tests.patches.probes.decode_device import configured, fail, forget, logged, mx_layer
from tests.patches.probes.decode_device import right as unspoilt

LAYERS = "qkv=int8,o=mxfp8"
KIND_S = 2.0
KINDS = (
    *("rotary embedding and KV cache", "INT8", "MXFP8", "BF16"),
    *("MXFP4 experts", "norms and routers"),
)


def _tile(out: Any) -> Any:
    """Spoil 16 columns of the largest product, by 5 %."""
    if out.shape[-1] > 400:
        out[..., 16 * 7 : 16 * 8] *= 1.05
    return out


def _exhaust(_: Any) -> Any:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory")


SPOILS = {"right": unspoilt, "one tile": _tile, "no memory": _exhaust, "an error": fail}
ENDS = {"a fault": "kill -SEGV $$", "a hang": "sleep 60"}


def trial(launches: Any) -> dict[str, Any]:
    """Verdicts by what is wrong, and the key, the metrics and the layers of a server with each."""
    from vllm_sparkforge.trial import kinds

    with mock.patch.object(kinds, "replayed", new=lambda compute: compute()):
        result: dict[str, Any] = {name: _case(launches, spoil) for name, spoil in SPOILS.items()}
        result |= {name: _case(launches, unspoilt, end) for name, end in ENDS.items()}
        found: dict[str, Any] = {}
        given = {"mxfp4_layers": "qkv=lossless,o=nvfp4,lm_head=int6"}
        plan = {"options": given, "moe_backend": "marlin", "kv_cache_dtype": "fp8"}
        _tried(launches, found, **plan)
        result["all kinds"] = {kind: [one["problem"], one["part"]] for kind, one in found.items()}
    for name in (*SPOILS, *ENDS):
        result[name] |= _server(result[name]["verdict"]["failed"])
    result["prompts"] = _prompts(launches)
    half = kinds.Sizes.on(2)
    result["two ranks"] = [half.dense, half.inner]
    return result


def _tried(launches: Any, found: dict[str, Any], spoil: Any = unspoilt, **plan: Any) -> list[str]:
    """Return what the process with the kernels tells; INT8 layers are spoilt."""
    import torch
    from vllm_sparkforge.decode import selfcheck
    from vllm_sparkforge.trial import child, kinds

    lines: list[str] = []

    def tell(**what: Any) -> None:
        launches.spoil = spoil if what.get("begin") == "INT8" else unspoilt
        lines.append(json.dumps(what))

    sizes = kinds.Sizes(hidden=192, inner=128, experts=16, heads=4, kv_heads=2, vocabulary=410)
    asked: dict[str, Any] = {"options": {"mxfp4_layers": LAYERS}, "moe_backend": "none"}
    asked |= {"kv_cache_dtype": "auto", "ranks": 1, "choose": False}
    before = list(selfcheck.RUNS)
    with torch.inference_mode():
        child.run(kinds.Trial({**asked, **plan, "found": found}, sizes).kinds(), found, tell)
    selfcheck.RUNS[:], launches.spoil = before, unspoilt
    return lines


def _case(launches: Any, spoil: Any, end: str = "") -> dict[str, Any]:
    """Return the verdict of the process that has the deadlines; ``end``: how INT8 ends."""
    from vllm_sparkforge.trial import __main__ as parent

    found: dict[str, Any] = {}
    lines = _tried(launches, found, spoil)
    begun = next(i for i, line in enumerate(lines) if json.loads(line).get("begin") == "INT8") + 1
    if end or "end" not in json.loads(lines[-1]):
        first = lines[:begun] if end else lines
        if not end:
            end = "exit 1"
        others = {kind: one for kind, one in found.items() if kind in "".join(lines[: begun - 1])}
        rest = _tried(launches, {**others, "INT8": {"problem": "fault", "part": "layers"}})
    else:
        first, rest, end = lines, [], ""
    one, other = (f"printf '%s\\n' {shlex.join(some)}" for some in (first, rest))
    script = f"""case $0 in *'"found": {{}}'*) {one}; {end or ":"};; *) {other};; esac"""
    said: list[str] = []
    verdict = parent.run({}, ["sh", "-c", script], said.append, KIND_S, 5.0)
    return {"verdict": verdict, "said": said, "kinds": [line.partition(":")[0] for line in said]}


def _server(failed: list[str]) -> dict[str, Any]:
    """Return key, metrics, and what becomes of a layer, in a server that is given the verdict."""
    import torch

    from tests.patches.probes import decode_cache, decode_metrics

    forget()
    options = {"mxfp4_layers": LAYERS, "failed": ",".join(failed)}
    with configured("auto", **options) as config, logged() as lines:
        config.instance_id = "of a trial " + " ".join(failed)
        key = config.compute_hash()
        decode_cache.begin(config)
        layer = mx_layer("int8")
        text = decode_metrics._text(config, [0])
    return {
        "key": key,
        "metrics": [line for line in text if "INT8" in line],
        "packed": layer.weight.dtype == torch.int32,
        "told": [line for line in lines if "trial" in line or "Using" in line],
    }


class Cutlass:
    """Stands in for FlashInfer's CUTLASS MoE: nine tactics, of which some are wrong or slow."""

    def __init__(self, wrong: set[int], faults: set[int]) -> None:
        self.wrong, self.faults = wrong, faults
        self.made: Any = None  # the experts, as a checkpoint has them
        self.stage = 0

    def get_valid_tactics(self, inputs: Any, profile: Any) -> list[int]:
        return [0, 1, 2, 3] if self.stage == 1 else [4, 5, 6]

    def __call__(self, **given: Any) -> Any:
        from vllm_sparkforge.decode import expertcheck

        pair = given["profile_ids"]
        if pair is None:
            pair = []
            tuner = sys.modules["flashinfer.autotuner"].AutoTuner()
            for self.stage in (1, 2):
                name = f"trtllm::fused_moe::gemm{self.stage}"
                pair.append(tuner.choose_one(name, [self], None, [], gemm_idx=self.stage)[1])
        if self.faults & set(pair):
            raise RuntimeError("CUDA error: an illegal instruction was encountered")
        x, out = given["input"].float(), given["output"]
        ids, shares = given["token_selected_experts"], given["token_final_scales"]
        from vllm_sparkforge.trial import prompts

        out.copy_(expertcheck.checkpoint_experts(x, self.made, ids, shares, prompts._as_mxfp8))
        if self.wrong & set(pair):
            out[:, 16:32] *= 1.05
        return out


class Tuner:
    """Stands in for FlashInfer's autotuner: what was tuned before may have failed since."""

    tuned = -1

    def choose_one(self, op: str, runners: Any, config: Any, inputs: Any, **_: Any) -> Any:
        return runners[0], self.tuned


def _prompts(launches: Any) -> dict[str, Any]:
    """Choices between Marlin and CUTLASS."""
    import vllm.platforms
    from vllm.model_executor.layers.fused_moe.experts import marlin_moe
    from vllm.model_executor.layers.quantization.utils import mxfp8_utils
    from vllm.utils import flashinfer
    from vllm_sparkforge.trial import __main__ as parent
    from vllm_sparkforge.trial import kinds, prompts

    from tests.patches.probes import decode_row_major

    compiled = types.SimpleNamespace(is_compiled=True)
    for name, what in (
        ("autotuner", {"AutoTuner": Tuner}),
        ("jit.fused_moe", {"gen_cutlass_fused_moe_sm120_module": lambda: compiled}),
    ):
        module = types.ModuleType(f"flashinfer.{name}")
        vars(module).update(what)
        sys.modules[module.__name__] = module
    sys.modules["flashinfer.jit"] = types.ModuleType("flashinfer.jit")
    sys.modules["flashinfer"].block_scale_interleave = decode_row_major._interleave  # type: ignore[attr-defined]
    result: dict[str, Any] = {}
    cases: dict[str, Any] = {
        "faster": ({}, 2.0),
        "as fast": ({}, 1.04),
        "one is wrong": ({"wrong": {0}}, 2.0),
        "two fault": ({"faults": {1, 5}}, 2.0),
        "all are wrong": ({"wrong": {0, 1, 2, 3}}, 2.0),
        "not compiled": ({}, 2.0),
        "another FlashInfer": ({}, 2.0),
    }
    platform, usual = vllm.platforms._current_platform, kinds.Trial.experts_of
    layers: dict[str, Any] = {}  # all cases have the same experts
    for name, (how, speed) in cases.items():
        cutlass = Cutlass(**{"wrong": set(), "faults": set(), **how})
        compiled.is_compiled = name != "not compiled"
        if name == "another FlashInfer":
            del compiled.is_compiled

        def ms(call: Any, speed: float = speed) -> float:
            call()
            return speed if getattr(call, "func", None) is marlin_moe.fused_marlin_moe else 1.0

        def made(self: Any, order: str, cutlass: Any = cutlass) -> Any:
            if order not in layers:
                layers[order] = usual(self, order)
            cutlass.made = layers["row-major MXFP4 experts"][0]
            return layers[order]

        right = {"problem": "", "part": "", "text": ""}
        found: dict[str, Any] = dict.fromkeys(KINDS, right)
        with (
            mock.patch.multiple(prompts, ROWS=(8, 16), _ms=ms),
            mock.patch.object(kinds, "replayed", new=lambda compute: compute()),
            mock.patch.object(kinds.Trial, "experts_of", new=made),
            mock.patch.object(flashinfer, "flashinfer_cutlass_fused_moe", new=cutlass),
            mock.patch.object(flashinfer, "has_flashinfer_cutlass_fused_moe", new=lambda: True),
            mock.patch.object(mxfp8_utils, "mxfp8_e4m3_quantize", new=lambda x, _: (x, None)),
            mock.patch.object(marlin_moe, "fused_marlin_moe", new=lambda **_: None),
            mock.patch.object(
                type(platform), "is_device_capability_family", new=lambda self, n: n == 120
            ),
        ):
            while True:  # a fault ends the process, and another one goes on
                lines = _tried(launches, found, moe_backend="marlin", choose=True)
                if "end" in json.loads(lines[-1]):
                    break
        result[name] = {"verdict": parent.verdict(found), "kinds": list(found)[len(KINDS) :]}
    result["left out"] = _left_out()
    return result


def _left_out() -> list[Any]:
    """Return what a server's autotuner chooses, where tactics 0 and 5 failed."""
    from vllm_sparkforge.trial import prompts

    found: list[Any] = []
    usual = Tuner.choose_one
    prompts.leave_out(frozenset({"INT8", "CUTLASS tactic 0", "CUTLASS tactic 5"}))
    try:
        for stage, tuned in ((1, -1), (1, 0), (1, 2), (2, 5), (2, 6)):
            runner: Any = Cutlass(set(), set())
            runner.stage, Tuner.tuned = stage, tuned
            name = f"trtllm::fused_moe::gemm{stage}"
            chosen = Tuner().choose_one(name, [runner], None, [])[1]
            found.append([runner.get_valid_tactics([], None), chosen])
        found.append(Tuner().choose_one("another", [None], None, [])[1])
    finally:
        Tuner.choose_one, Tuner.tuned = usual, -1  # type: ignore[method-assign]
    return found
