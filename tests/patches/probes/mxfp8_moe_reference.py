"""MXFP8 experts from the definition, and the contract of FlashInfer's CUTLASS MoE in float64.

`cutlass_fused_moe` here reads the very tensors that vLLM hands to FlashInfer, by the layout that
FlashInfer's sources define (flashinfer_cutlass_fused_moe_binding.cu, quantization_utils.cuh,
0.7.0.post1), so that a wrong order, layout or flag gives a wrong result or an error. `experts`
computes the same layer from the checkpoint. Runs inside the interpreter under test.
"""

from typing import Any

import torch

from tests.patches import mx_reference
from tests.patches.mx_reference import BLOCK

SWIGLU = "Swiglu"


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [M, K] to MXFP8: float8_e4m3fn [M, K] and E8M0 as uint8 [M, K / 32]."""
    found = mx_reference.mxfp8(x.to(torch.float64).numpy())
    codes, scales = (torch.from_numpy(each) for each in (found.codes, found.scales))
    return codes.view(torch.float8_e4m3fn), scales


def dense(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Expand MXFP8 [..., K] with plain scales [..., K / 32] to float64."""
    factors = torch.exp2(scales.to(torch.float64) - 127).repeat_interleave(BLOCK, -1)
    return values.to(torch.float64) * factors


def places(rows: int, blocks: int) -> torch.Tensor:
    """Return where each scale of a matrix is in 128x4 tiles: int64 [rows, blocks]."""
    place = mx_reference.scale_offset
    return torch.tensor(
        [[place(row, block, blocks) for block in range(blocks)] for row in range(rows)]
    )


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Lay out [rows, blocks] in 128x4 tiles, byte by byte: uint8, one-dimensional."""
    rows, blocks = scales.shape
    flat = torch.zeros(-(-rows // 128) * 128 * -(-blocks // 4) * 4, dtype=torch.uint8)
    flat[places(rows, blocks)] = scales
    return flat


def unswizzle(scales: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Read 128x4 tiles: bytes to uint8 [rows, blocks]."""
    flat = scales.contiguous().view(torch.uint8).reshape(-1)
    if flat.numel() != -(-rows // 128) * 128 * -(-blocks // 4) * 4:
        raise ValueError(f"{flat.numel()} bytes of scales for {rows} rows of {blocks} blocks")
    return flat[places(rows, blocks)]


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, alpha: float, beta: float, limit: float
) -> torch.Tensor:
    """FlashInfer's SwigluBias; with 1, 0 and infinity it is SiLU times up."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def _through(inner: torch.Tensor) -> torch.Tensor:
    # Between the GEMMs: rounded to BF16, then to MXFP8.
    return dense(*quantise(inner.to(torch.bfloat16).to(torch.float64)))


def experts(data: dict[str, torch.Tensor], alpha: float, beta: float, limit: float) -> torch.Tensor:
    """Compute the layer from the checkpoint's tensors, gate before up, in float64."""
    x = dense(*quantise(data["x"]))
    out = torch.zeros_like(x)
    inter = data["w2"].shape[-1]
    for expert in range(data["w2"].shape[0]):
        w13 = dense(data["w13"][expert], data["w13_scale"][expert])
        w2 = dense(data["w2"][expert], data["w2_scale"][expert])
        for token, place in (data["ids"] == expert).nonzero().tolist():
            both = (w13 @ x[token]).to(torch.bfloat16).to(torch.float64)
            inner = swiglu(both[:inter], both[inter:], alpha, beta, limit)
            out[token] += data["shares"][token, place].to(torch.float64) * (w2 @ _through(inner))
    return out


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}")


def cutlass_fused_moe(
    *,
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[torch.Tensor],
    fc1_expert_biases: torch.Tensor | None = None,
    fc2_expert_biases: torch.Tensor | None = None,
    input_sf: torch.Tensor,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    output: torch.Tensor,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    activation_type: Any,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
) -> torch.Tensor:
    """Compute what FlashInfer's function does for MXFP8 x MXFP8, of the tensors as they are.

    Raises:
        ValueError: what FlashInfer refuses, or what would select another kernel.

    """
    local, both, hidden = fc1_expert_weights.shape
    inter, tokens = both // 2, input.shape[0]
    if not use_mxfp8_act_scaling or use_deepseek_fp8_block_scale or use_w4_group_scaling:
        raise ValueError("these flags select another kernel")
    if activation_type != SWIGLU or fc1_expert_biases is not None or fc2_expert_biases is not None:
        raise ValueError("SwiGLU without biases only")
    if hidden % 128 or inter % 128:
        raise ValueError(f"{hidden} x {inter} are no multiples of 128")
    _check("input", input, torch.float8_e4m3fn, tokens, hidden)
    _check("fc1", fc1_expert_weights, torch.float8_e4m3fn, local, both, hidden)
    _check("fc2", fc2_expert_weights, torch.float8_e4m3fn, local, hidden, inter)
    _check("experts", token_selected_experts, torch.int32, tokens, token_final_scales.shape[1])
    _check("output", output, output_dtype, tokens, hidden)
    fc1_sf, fc1_alpha, fc2_sf, fc2_alpha = quant_scales
    _check("fc1's scales", fc1_sf, torch.int32, local, both, hidden // 128)
    _check("fc2's scales", fc2_sf, torch.int32, local, hidden, inter // 128)
    for alpha in (fc1_alpha, fc2_alpha):
        _check("a global scale", alpha, torch.float32, local)
        if not bool((alpha == 1).all()):
            raise ValueError("global scales are ones")

    x = dense(input, unswizzle(input_sf, tokens, hidden // BLOCK))
    out = torch.zeros(tokens, hidden, dtype=torch.float64)
    for index in range(local):
        w13 = dense(fc1_expert_weights[index], unswizzle(fc1_sf[index], both, hidden // BLOCK))
        w2 = dense(fc2_expert_weights[index], unswizzle(fc2_sf[index], hidden, inter // BLOCK))

        def parameter(given: torch.Tensor | None, otherwise: float, index: int = index) -> float:
            if given is None:
                return otherwise
            _check("a swiglu parameter", given, torch.float32, local)
            return float(given[index])

        chosen = token_selected_experts == ep_rank * local + index
        for token, place in chosen.nonzero().tolist():
            product = (w13 @ x[token]).to(output_dtype).to(torch.float64)
            inner = swiglu(
                product[inter:],
                product[:inter],  # the second half is the gate
                parameter(swiglu_alpha, 1.0),
                parameter(swiglu_beta, 0.0),
                parameter(swiglu_limit, float("inf")),
            )
            share = token_final_scales[token, place].to(torch.float64)
            out[token] += share * (w2 @ _through(inner))
    output.copy_(out.to(output_dtype))
    return output
