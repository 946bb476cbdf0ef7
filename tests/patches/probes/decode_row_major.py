"""FlashInfer's CUTLASS MoE for MXFP4 experts with the decode kernels, with stand-ins for both.

Real are vLLM's
conversion of the weights, its choice and FlashInferExperts. FlashInfer's operators are written down
here, with scales where ``mx_reference.scale_offset`` has them, which is compared with its sources.
"""

import sys
from typing import Any

from tests.patches.mx_reference import scale_offset
from tests.patches.probes import decode_experts
from tests.patches.probes.decode_device import (
    SPOILS,
    configured,
    error_of,
    forget,
    load,
    logged,
    right,
)

HIDDEN, INNER, EXPERTS = 192, 96, 6
PADDED = {"hidden": 256, "inner": 128}


def scale_order(places: dict[str, Any]) -> dict[str, bool]:
    """Whether experts.cuh reads scales where FlashInfer puts them, and every column and k once."""
    table = places["row_major"]
    columns, groups = table["columns"], table["groups"]
    wanted = [scale_offset(row, group, groups) for row in range(columns) for group in range(groups)]
    return {
        "scales": table["scale_at"] == wanted,
        "columns": sorted(table["column_of"]) == list(range(columns)),
        "chunks": sorted(table["chunk_at"]) == list(range(len(table["chunk_at"]))),
        # four columns of a tile are 32 apart, so their scales lie in one word of 16 bytes
        "words": all(
            table["column_of"][at] + 32 == table["column_of"][at + 8]
            for at in range(columns)
            if at % 32 < 24
        ),
    }


def _interleave(scales: Any) -> Any:
    """``flashinfer.block_scale_interleave`` of uint8 [E, N, K / 32], N and K multiples of 128."""
    import torch

    from tests.patches.probes import mxfp8_moe_reference

    return torch.cat([mxfp8_moe_reference.swizzle(each) for each in scales])


def _mxfp8(x: Any) -> Any:
    from tests.patches.probes import mxfp8_moe_reference as reference

    return reference.dense(*reference.quantise(x)) if x.numel() else x


class Cutlass:
    """Stands in for ``flashinfer.fused_moe.cutlass_fused_moe`` with MXFP8 activations."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.spoil: Any = lambda result: result

    def __call__(self, *, input: Any, output: Any, **given: Any) -> None:
        import torch

        from tests.patches.probes.marlin_layout import dense, swiglu
        from tests.patches.probes.mxfp8_moe_reference import places

        assert given["use_mxfp8_act_scaling"]
        assert given["input_sf"] is not None
        self.calls.append(input.shape[0])
        limits = [given[f"swiglu_{name}"][0].item() for name in ("alpha", "beta", "limit")]
        assert [round(each, 3) for each in limits] == [1.702, 1.0, 7.0]

        def matrix(name: str, scales: Any, expert: int) -> Any:
            codes = given[f"{name}_expert_weights"][expert].view(torch.uint8)
            at = places(codes.shape[0], codes.shape[1] // 16)
            return dense(codes, scales[expert].view(torch.uint8).flatten()[at])

        total = torch.zeros(output.shape, dtype=torch.float64)
        for row, ids in enumerate(given["token_selected_experts"].tolist()):
            for slot, expert in enumerate(ids):
                both = matrix("fc1", given["quant_scales"][0], expert) @ input[row].double()
                up, gate = (both + given["fc1_expert_biases"][expert].double()).chunk(2)
                hidden = _mxfp8(swiglu(gate, up)[None])[0]
                part = matrix("fc2", given["quant_scales"][2], expert) @ hidden
                part += given["fc2_expert_biases"][expert].double()
                total[row] += part * given["token_final_scales"][row, slot].double()
        output.copy_(self.spoil(total))


def _layer(cutlass: Cutlass) -> tuple[Any, Any, dict[str, Any]]:
    """Return the experts, the layer with its weights, and the checkpoint."""
    import torch
    import torch.nn.functional as F
    from vllm.model_executor.layers.fused_moe.experts import flashinfer_cutlass_moe as moe
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as oracle
    from vllm_sparkforge import quant as ours

    from tests.patches.probes.probe_marlin_padding import _checkpoint, _moe_config

    backend = oracle.Mxfp4MoeBackend.FLASHINFER_CUTLASS_MXFP4_MXFP8
    sizes = oracle.mxfp4_round_up_hidden_size_and_intermediate_size(backend, HIDDEN, INNER)
    assert sizes == (PADDED["hidden"], PADDED["inner"])
    more, inner_more = sizes[0] - HIDDEN, sizes[1] - INNER
    size = {"hidden": HIDDEN, "intermediate": INNER, "experts": EXPERTS, "top_k": 4}
    size |= {"tokens": 17, "ranks": 1, "seed": 5}
    data = _checkpoint(size)
    config = _moe_config(size)
    config.hidden_dim, config.intermediate_size_per_partition = sizes
    padded = {  # as the loader fills them
        "w13_weight": F.pad(data["w13_weight"], (0, more // 2, 0, 2 * inner_more)),
        "w13_weight_scale": F.pad(data["w13_weight_scale"], (0, more // 32, 0, 2 * inner_more)),
        "w13_bias": F.pad(data["w13_bias"], (0, 2 * inner_more)),
        "w2_weight": F.pad(data["w2_weight"], (0, inner_more // 2, 0, more)),
        "w2_weight_scale": F.pad(data["w2_weight_scale"], (0, inner_more // 32, 0, more)),
        "w2_bias": F.pad(data["w2_bias"], (0, more)),
    }
    sys.modules["flashinfer"].block_scale_interleave = _interleave  # type: ignore[attr-defined]
    layer, quant = decode_experts.converted(backend.name, padded, gemm1_alpha=1.702, gemm1_beta=1.0)
    moe.flashinfer_cutlass_fused_moe = cutlass
    moe.activation_to_flashinfer_type = lambda activation: activation.value
    ours.moe_kernel_quantize_input = lambda x, *_, **__: (_mxfp8(x), torch.ones(1))
    data["x"] = F.pad(data["x"], (0, more))
    return ours.few_rows(moe.FlashInferExperts)(config, quant), layer, data


def _apply(experts: Any, layer: Any, data: dict[str, Any], rows: int) -> Any:
    """Compute rows as the modular kernel does: quantised only where the experts want it so."""
    import torch

    given = {}
    if not experts.expects_unquantized_inputs:
        given = {"hidden_states": _mxfp8(data["x"][:rows]), "a1q_scale": torch.ones(1)}
    return decode_experts.apply(experts, layer, data, rows, **given)[:, :HIDDEN]


def row_major(launches: Any) -> dict[str, Any]:
    """Few rows and more, and the self-check."""
    import torch
    from vllm_sparkforge.decode.experts import products

    from tests.patches.probes.probe_marlin_padding import _reference

    cutlass = Cutlass()
    result: dict[str, Any] = {}

    def loaded(option: str, spoil: Any = None, **moe: Any) -> tuple[Any, Any, Any, list[str]]:
        forget()
        with configured(option), logged() as lines:
            experts, layer, data = _layer(cutlass)
            for name, value in moe.items():
                setattr(experts.moe_config, name, value)
            if spoil is not None:
                spoil(layer)
            load(experts, layer)
        return experts, layer, data, lines

    experts, layer, data, lines = loaded("auto")
    result["said"] = lines
    wanted = _reference(data | {"x": data["x"][:, :HIDDEN]})
    for rows in (0, 1, 2, 8, 9, 16, 17):
        launches.names.clear()
        cutlass.calls.clear()
        out = _apply(experts, layer, data, rows)
        result[str(rows)] = {
            "error": error_of(out, wanted[:rows]) if rows else 0.0,
            "launches": list(launches.names),
            "cutlass": list(cutlass.calls),
        }
    # as the operator of half a layer calls them: rows without their padding
    weights = experts.decode_weights(layer.w13_weight, layer.w2_weight)
    x = data["x"][:3, :HIDDEN].contiguous()
    sums = products(x, weights, data["topk_ids"][:3], data["topk_weights"][:3])
    total = sums.view(3, 4, HIDDEN).double().sum(1)
    result["without padding"] = {"error": error_of(total, wanted[:3]), "inner": weights.inner}

    def scale_191(layer: Any) -> None:
        layer.w2_scale.view(torch.uint8)[3, 1, 1] = 191

    def zero(layer: Any) -> None:
        layer.w13_weight.zero_()

    for name, options in {
        "off": {"option": "off"},
        "LoRA": {"option": "auto", "is_lora_enabled": True},
        "a scale of 191": {"option": "auto", "spoil": scale_191},
        "zero weights": {"option": "auto", "spoil": zero},
        "an odd size": {"option": "auto", "intermediate_size_per_partition_unpadded": 90},
    }.items():
        cutlass.calls.clear()
        one, its_layer, its_data, lines = loaded(**options)  # type: ignore[arg-type]
        result[name] = [one.uses_decode_kernels, lines, len(cutlass.calls)]
        if name == "off":
            out = _apply(one, its_layer, its_data, 3)
            result["off computes"] = error_of(out, wanted[:3])

    launches.spoil = SPOILS["3 % too large"]
    result["3 % too large"] = loaded("auto")[3]
    launches.spoil = right
    cutlass.spoil = lambda values: values.flip(-1)
    result["CUTLASS is wrong"] = loaded("auto")[3]
    return result
