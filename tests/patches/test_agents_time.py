"""Renderer and parser of gpt-oss take linear time, and little, for 100,000 tokens."""

from pathlib import Path

from tests.patches.probing import ask

MOST_S = {"rendered": 1.0, "parsed": 10.0}
"""CPU time for all tokens. On a quiet core 0.03 to 0.11 s and 0.5 to 2 s; for many small messages
the release takes 3 s to render, and 20 s to parse."""


def test_time_is_linear_and_short(patched_python: Path, tmp_path: Path) -> None:
    found = ask(patched_python, "probe_agents_time", folder=tmp_path)
    for kind, cases in found.items():
        for case, (tokens, quarter, whole) in cases.items():
            print(f"{kind} {case}: {tokens} tokens, {whole:.3f} s of CPU")
            assert tokens > 80_000, case
            assert whole < MOST_S[kind], (case, whole)
            assert whole < 6 * max(quarter, MOST_S[kind] / 20), (case, quarter, whole)
