"""Exact, balanced, fast: which one counts, what contradicts it, and the bytes a token."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sparkforge.checkpoints.tiny import TINY, VOCAB_SIZE, json_files
from sparkforge.inspect.perf.roofline import ceiling
from sparkforge.inspect.perf.shapes import SHAPES
from sparkforge.pins import pins
from sparkforge.serving import choices, traffic
from sparkforge.serving.document import Document, DocumentError
from sparkforge.serving.profile import Choice, Profile
from sparkforge.serving.shapes import Shape
from tests.support import ROOT

LOADED = pins.load(ROOT / "pins.yaml")
THREE = Profile(
    moe_backend="marlin",
    choices={
        "exact": Choice(),
        "balanced": Choice("qkv=mxfp8,o=mxfp8,lm_head=mxfp8"),
        "fast": Choice("qkv,o,lm_head"),
    },
    choice="exact",
    expect={"moe": "MARLIN", "linear": "DECODE"},
)
TARGETS = [name for name, target in LOADED.targets.items() if target.profile is not None]


def profile_of(target: str) -> Profile:
    return Profile.of(Document(target, LOADED.profile_of(LOADED.target(target))))


def checkpoint(folder: Path, shape: Shape = SHAPES["gpt-oss-120b"], **changes: Any) -> Path:
    """Write the config.json of a gpt-oss checkpoint; returns the folder."""
    full = ["full_attention"] * (shape.layers - shape.sliding_layers)
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": shape.layers,
        "layer_types": ["sliding_attention"] * shape.sliding_layers + full,
        "sliding_window": shape.sliding_window,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
    }
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


# -- which one -------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_every_profile_has_the_three_and_the_first_changes_nothing(target: str) -> None:
    profile = profile_of(target)
    assert set(profile.choices) == {"exact", "balanced", "fast"}
    assert profile.choice == "exact"
    assert profile.layers is None
    assert "--mxfp4-layers" not in profile.options()
    formats = {
        name: set(traffic.parse_layers(one.mxfp4_layers or "moe").items())
        for name, one in profile.choices.items()
    }
    assert formats == {
        "exact": set(),
        "balanced": {(kind, "mxfp8") for kind in traffic.KINDS},
        "fast": {(kind, "mxfp4") for kind in traffic.KINDS},
    }


@pytest.mark.parametrize("target", TARGETS)
def test_a_choice_changes_the_layers_and_the_expected_backends(target: str) -> None:
    default = profile_of(target)
    for name, one in default.choices.items():
        profile = choices.pick(default, name, "--profile")
        options = profile.options()
        added = [] if one.mxfp4_layers is None else ["--mxfp4-layers", one.mxfp4_layers]
        rest = [word for word in options if word not in added]
        assert rest == default.options()
        assert len(options) == len(rest) + len(added)
        wanted = set(default.expect) if added else set(default.expect) - {"linear"}
        assert set(profile.expectations(options, [])) == wanted


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "fats",
            "--profile 'fats': no such profile: did you mean fast? use balanced, exact or fast",
        ),
        ("", "--profile '': no such profile: use balanced, exact or fast"),
    ],
)
def test_an_unknown_name_is_told_with_those_that_there_are(name: str, words: str) -> None:
    with pytest.raises(choices.ChoiceError) as refused:
        choices.pick(THREE, name, "--profile")
    assert str(refused.value) == words
    assert refused.value.code == 78
    with pytest.raises(choices.ChoiceError, match="omit it: there is none"):
        choices.pick(Profile(), name, "--profile")


@pytest.mark.parametrize(
    ("name", "others", "words"),
    [
        ("fast", {"--a": None, "--b": ""}, ""),
        ("fast", {"--a": "lm_head=mxfp4, o ,qkv,moe"}, ""),
        ("exact", {"--a": "moe"}, ""),
        ("fast", {"--a": "qkv,o"}, "--p quantises qkv,o,lm_head, but --a is 'qkv,o': remove one"),
        ("exact", {"--a": None, "--b": "o"}, "--p quantises no layers, but --b is 'o': remove one"),
        ("fast", {"--a": "head"}, "--a head: 'head' is not a layer kind: use qkv, o, lm_head or"),
    ],
)
def test_other_layers_contradict_a_choice(
    name: str, others: Mapping[str, str | None], words: str
) -> None:
    profile = choices.pick(THREE, name, "--p")
    if not words:
        choices.check(profile, "--p", others)
        return
    with pytest.raises(choices.ChoiceError) as refused:
        choices.check(profile, "--p", others)
    assert str(refused.value).startswith(words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"choices": {"a": {}}}', "choice of mine is None, which is not in choices"),
        ('{"choice": "a"}', "choice of mine is 'a', which is not in choices"),
        ('{"choices": {"a": {}}, "choice": "b"}', "choice of mine is 'b'"),
        ('{"choices": {"a": {"x": 1}}, "choice": "a"}', "a of mine has an unknown key: 'x'"),
        ('{"choices": {"a": []}, "choice": "a"}', "choices.a of mine is [], not a mapping"),
        (
            '{"choices": {"a": {"mxfp4_layers": "b"}}, "choice": "a"}',
            "mxfp4_layers of a of mine: b",
        ),
        ('{"choices": {"a": {}}, "choice": "a", "mxfp4_layers": "o"}', "has both"),
    ],
)
def test_choices_of_a_file_that_do_not_fit_are_named(text: str, words: str) -> None:
    with pytest.raises(DocumentError) as refused:
        Profile.of(Document.parse("mine", text))
    assert words in str(refused.value)


# -- the bytes -------------------------------------------------------------------------------------


def test_the_shape_of_a_checkpoint_is_read_from_its_files(tmp_path: Path) -> None:
    for shape in SHAPES.values():
        assert Shape.of(checkpoint(tmp_path, shape)) == shape
    (tmp_path / "config.json").write_text(json.dumps(json_files()["config.json"]))
    tiny = Shape.of(tmp_path)
    assert tiny is not None
    assert (tiny.layers, tiny.sliding_layers, tiny.vocab) == (TINY.layers, 2, VOCAB_SIZE)
    assert (tiny.top_k, tiny.qkv_rows) == (TINY.experts_per_token, (4 + 2 * 2) * 32)
    assert Shape.of(checkpoint(tmp_path, model_type="llama")) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "exact",
            "5.08 GB at 2,048 tokens of context; with balanced 3.60 GB (accuracy not measured)",
        ),
        (
            "balanced",
            "3.60 GB at 2,048 tokens of context; with fast 2.83 GB (accuracy not measured)",
        ),
        ("fast", "2.83 GB at 2,048 tokens of context"),
    ],
)
def test_the_line_has_the_bytes_now_and_of_the_next_faster(
    tmp_path: Path, name: str, words: str
) -> None:
    profile = choices.pick(THREE, name, "--profile")
    told = choices.line(profile, profile.options(), checkpoint(tmp_path))
    assert told == f"profile {name}: a token reads {words}"


@pytest.mark.parametrize("page", ["README.md", "docs/serving.md"])
def test_the_pages_have_the_bytes_and_ceilings_that_are_computed(page: str) -> None:
    target = LOADED.target("spark")
    assert target.memory_gb_s == 273
    rows = re.findall(r"^\| `(exact|balanced|fast)`.*", text := (ROOT / page).read_text(), re.M)
    assert rows == ["exact", "balanced", "fast"]
    for name, one in profile_of("spark").choices.items():
        layers = traffic.parse_layers(one.mxfp4_layers or "moe")
        setup = traffic.Setup("marlin", layers)
        big, small = (traffic.step_bytes(shape, setup, context=2048) for shape in SHAPES.values())
        cells = f" | {big.total / 1e9:.2f} | {ceiling(big, 273):.0f} tokens/s | "
        (row,) = re.findall(rf"^\| `{name}`.*", text, re.M)
        assert cells in row
        assert page == "README.md" or row.endswith(f" {small.total / 1e9:.2f} |")


def test_the_line_follows_the_command_and_the_checkpoint(tmp_path: Path) -> None:
    def line(*words: str, folder: Path | None = tmp_path, machines: int = 1) -> str:
        told = choices.line(THREE, [*THREE.options(), *words], folder, machines)
        assert told is not None
        return told

    checkpoint(tmp_path)
    assert line("--mxfp4-layers=qkv").startswith(
        "--mxfp4-layers qkv: a token reads 4.30 GB at 2,048"
    )
    assert line("--mxfp4-layers=qkv").endswith("; with balanced 3.60 GB (accuracy not measured)")
    # a choice by another way is still that choice
    assert line("--mxfp4-layers", "lm_head,qkv,o").startswith("profile fast: a token reads 2.83 GB")
    assert "reads 5.17 GB at" in line(
        "--moe-backend", "flashinfer_cutlass", "--max-model-len", "2048"
    )
    assert "reads 5.00 GB at 1 tokens" in line("--max-model-len", "1")
    assert "reads 5.04 GB at" in line("--kv-cache-dtype", "fp8")
    assert "reads 5.08 GB on 2 machines together at" in line(machines=2)
    checkpoint(tmp_path, SHAPES["gpt-oss-20b"])
    assert line().startswith("profile exact: a token reads 3.")
    assert line(folder=None) == "profile exact"  # vLLM downloads it
    assert line("--mxfp4-layers", "head") == "--mxfp4-layers head"  # vLLM refuses it
    checkpoint(tmp_path, model_type="llama")
    assert line() == "profile exact"
    checkpoint(tmp_path, vocab_size=None)
    assert line().startswith("profile exact; bytes a token are unknown: vocab_size of")
    assert choices.line(Profile(), [], tmp_path) is None
