"""Asks vLLM's own functions how they pad; runs in a baked interpreter, prints JSON."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Read {"experts": [[backend, hidden, intermediate]], "dense": [[rows, columns]]}; answer."""
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_padded_nk

    asked = json.loads(sys.argv[1])
    experts = [
        mxfp4.mxfp4_round_up_hidden_size_and_intermediate_size(
            mxfp4.Mxfp4MoeBackend[backend], hidden, intermediate
        )
        for backend, hidden, intermediate in asked["experts"]
    ]
    dense = [marlin_padded_nk(rows, columns, 32) for rows, columns in asked["dense"]]
    print("\n" + json.dumps({"experts": experts, "dense": dense}))


if __name__ == "__main__":
    main()
