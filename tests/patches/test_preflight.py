"""The preflight with vLLM itself, on the CPU: right answers pass, another model's do not.

No patch is tested here; it stands here for the interpreters that are baked for this folder.
"""

import json
from pathlib import Path

import pytest

from sparkforge.checkpoints.tiny import make_trial
from sparkforge.serving import preflight
from sparkforge.serving.options import EX_CONFIG
from tests.patches.forks import known
from tests.patches.served import READY_S, serving


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
def test_the_preflight_with_vllm(patched_python: Path, tmp_path: Path, right: bool) -> None:
    folder = tmp_path / preflight.NAME  # the entrypoint's share is tmp_path
    make_trial(folder)
    if not right:  # half a nat is what the mildest of the wrong models is away
        reference = json.loads((folder / preflight.REFERENCE).read_text())
        for answer in reference["answers"]:
            answer["prompt"] = [one + 0.5 for one in answer["prompt"]]
        (folder / preflight.REFERENCE).write_text(json.dumps(reference))
    given = {**known(patched_python), "SPARKFORGE_CHECKS": "preflight=always"}
    with serving(patched_python, tmp_path, given) as one:
        if right:
            one.wait_for("entrypoint: preflight: log-probabilities", READY_S)
            assert "backends: moe BF16_DEQUANT" in one.output()
            one.wait_for(f"vllm serve {one.env['SPARKFORGE_MODEL']}", READY_S)
            one.process.terminate()
            one.process.wait(READY_S)
        else:
            assert one.process.wait(READY_S) == EX_CONFIG
            assert "nats from the reference" in one.output()
            assert "entrypoint: error: the preflight failed" in one.output()
            assert f"vllm serve {one.env['SPARKFORGE_MODEL']}" not in one.output()
