"""`build.py bench`: tables, text, llama-benchy's files, servers and the comparison."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkforge.build import cached
from sparkforge.build.cached import Cached
from sparkforge.build.launcher import of_release
from sparkforge.build.results import EnvironmentResult, ImageResult, WheelResult
from sparkforge.check.bench import benchy, session, sides
from sparkforge.check.bench.benchy import TABLES
from sparkforge.check.bench.result import FILE, Samples, compare, interval, load, save
from sparkforge.cli.main import main
from sparkforge.core.errors import CheckError, ServerError
from sparkforge.pins import pins
from sparkforge.runtime.servers import Launch
from sparkforge.store.store import Store
from tests.results import artefact, build_of, reached
from tests.support import ROOT

from .bench_results import FOUR, ONE, result, samples

QUICK, DEEP = TABLES["quick"][0], benchy.Test(4096, 512, 32, 2)

# -- tables and text ----------------------------------------------------------------------------


def test_tables_are_those_of_published_figures() -> None:
    seeds = {(one.prompt, one.generated) for one in TABLES["seeds"]}
    assert seeds == {(pp, tg) for pp in (512, 2048, 8192) for tg in (32, 128)}
    community = TABLES["community"]
    assert {(one.prompt, one.generated) for one in community} == {(2048, 128)}
    assert {one.concurrency for one in community} == {1, 2, 5, 10}
    assert (community[0].depth, community[-1].depth, len(community)) == (0, 100_000, 28)
    assert QUICK.name == ONE
    assert DEEP.name == "pp512 tg32 @ d4096 (c2)"


def test_text_is_reproducible_and_long_enough() -> None:
    text = benchy.text_for(TABLES["quick"])
    assert text == benchy.text_for(TABLES["seeds"])
    assert text.startswith(
        "counted guard basket"
    )  # recorded: another text makes results incomparable
    assert len(benchy.text_for(TABLES["community"]).split()) > 4 * 100_000


# -- llama-benchy's files -----------------------------------------------------------------------


def theirs(**changes: Any) -> dict[str, Any]:
    """Return a result file of llama-benchy 0.4.0 with one test of one request."""
    run = {
        "concurrency": 1,
        "is_context_prefill_phase": False,
        "pp_throughput": {"values": [4500.0]},
        "tg_throughput": {"values": [59.0, 60.0, 61.0]},
        "peak_throughput": None,
        "e2e_ttft": {"values": [100.0, 110.0, 120.0]},
        **changes,
    }
    return {"version": "0.4.0", "benchmarks": [run]}


def read(folder: Path, content: object, test: benchy.Test = QUICK) -> list[Samples]:
    path = folder / "theirs.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return benchy.read(path, test)


def test_samples_are_the_values_of_each_run(tmp_path: Path) -> None:
    found = {one.metric: one for one in read(tmp_path, theirs())}
    assert (found["decode"].mean, found["decode"].deviation) == (60, 1)
    assert found["prefill"].values == (4500.0,)
    assert found["ttft"].values == (100.0, 110.0, 120.0)


def test_requests_of_one_run_are_one_sample_of_the_first_token(tmp_path: Path) -> None:
    found = read(tmp_path, theirs(e2e_ttft={"values": [1.0, 3.0, 10.0, 20.0]}), DEEP)
    assert [one.values for one in found if one.metric == "ttft"] == [(2.0, 15.0)]


def test_request_that_loads_the_context_is_apart(tmp_path: Path) -> None:
    both = theirs()
    both["benchmarks"].append({**both["benchmarks"][0], "is_context_prefill_phase": True})
    names = {one.test for one in read(tmp_path, both, DEEP)}
    assert names == {DEEP.name, f"{DEEP.name}, loading the context"}


@pytest.mark.parametrize("none", [None, {"values": []}, {"values": [0.0]}])
def test_answer_in_one_piece_has_no_decode_speed(tmp_path: Path, none: Any) -> None:
    assert "decode" not in {one.metric for one in read(tmp_path, theirs(tg_throughput=none))}


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "[" * 100_000, json.dumps(theirs(tg_throughput={"values": ["fast"]}))],
    ids=range(5),
)
def test_file_of_another_shape_is_one_error(tmp_path: Path, content: str) -> None:
    with pytest.raises(ServerError, match=r"theirs\.json"):
        read(tmp_path, content)


def test_received_tokens_are_those_of_the_measured_requests(tmp_path: Path) -> None:
    ends = [
        {"type": "request_end", "request_id": number, "total_tokens": 2 if number // 2 % 2 else 30}
        for number in (3, 0, 1, 2)
    ]
    events = [{"type": "header"}, *ends]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, events)))
    file = tmp_path / "a.json"
    assert benchy.received(file, DEEP, prefix_caching=True) == 2
    assert benchy.received(file, DEEP, prefix_caching=False) == 16


def test_tokenizer_is_in_the_cache_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pins.load(ROOT / "pins.yaml").models["gpt-oss-120b"]
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ServerError) as refusal:
        sides.tokenizer(model)
    assert f"hf download openai/gpt-oss-120b tokenizer.json --revision {model.revision}" in (
        refusal.value.remedy
    )
    folder = tmp_path / "hf/hub/models--openai--gpt-oss-120b/snapshots" / model.revision
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    assert sides.tokenizer(model) == folder


def test_busy_cores_are_read() -> None:
    assert session.busy_cores(0.05) >= 0


# -- the servers --------------------------------------------------------------------------------


def test_release_gets_the_same_options_but_ours() -> None:
    words = ["--moe-backend", "marlin", "--mxfp4-layers=qkv,o", "--max-num-seqs", "8"]
    assert of_release(words) == ["--moe-backend", "marlin", "--max-num-seqs", "8"]
    words = ["--moe-backend=bf16_dequant", "--enforce-eager", "--decode_kernels", "on"]
    assert of_release(words) == ["--enforce-eager"]


def test_sides_of_a_build_differ_in_the_patches_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = build_of("cpu", store=Store(tmp_path / "store"))
    environment = EnvironmentResult()
    for item in build.graph.own:
        reached(item, WheelResult(f"{item.label}.whl", "0", "1"))
    reached(build.graph.product, environment, tmp_path / "ours")

    def run(context: object, items: list[Cached[Any]]) -> None:
        for item in items:
            reached(item, environment, tmp_path / "theirs")

    @contextmanager
    def started(engine: object, product: Any, launch: Launch, *more: object) -> Iterator[object]:
        asked.append((product.path.name, launch.options))
        yield SimpleNamespace(url="http://127.0.0.1:1")

    asked: list[tuple[str, Sequence[str]]] = []
    monkeypatch.setattr(cached, "run", run)
    monkeypatch.setattr(sides, "start_server", started)
    monkeypatch.setattr(sides, "kept_log", lambda *_: nullcontext())
    monkeypatch.setattr(sides, "wait_ready", lambda *_: 1.0)
    given = (build, tmp_path / "model", build.context.serving, tmp_path / "work")
    (tmp_path / "work").mkdir()
    found = sides.of_build(*given, versus=True)
    assert [(one.name, one.identity.origin) for one in found] == [
        ("unpatched", "release"),
        ("patched", "build"),
    ]
    for one in found:
        with one.start():
            pass
    (theirs, plain), (ours, full) = asked
    assert (theirs, ours) == ("theirs", "ours")
    assert list(plain) == of_release(full) != list(full)
    assert found[1].identity.options == (*full,)
    (alone,) = sides.of_build(*given, versus=False)
    assert (alone.name, alone.identity) == ("", found[1].identity)


@pytest.mark.parametrize("model", [None, Path("/models/real")])
def test_both_sides_of_an_image_get_the_options_of_their_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path | None
) -> None:
    """An image has options of its own: of MXFP4 experts, which the BF16 stand-in has not."""
    started: list[tuple[Launch, object]] = []

    @contextmanager
    def start(*given: Any) -> Iterator[SimpleNamespace]:
        started.append((given[2], given[5]))
        yield SimpleNamespace(url="http://127.0.0.1:1", output=str)

    originals = {"vllm/a.py": tmp_path}
    monkeypatch.setattr(sides, "start_server", start)
    monkeypatch.setattr(sides, "wait_ready", lambda *_: 1.0)
    monkeypatch.setattr(sides, "_originals", lambda *_: originals)
    monkeypatch.setattr(sides, "standing_in", lambda *_, wide: tmp_path)
    build = build_of("cpu", store=Store(tmp_path / "store"))
    image = artefact(ImageResult("x:1", "sha256:1", None, "base", ()))
    found: Any = SimpleNamespace(
        context=build.context,
        serving=build.serving,
        tools=build.tools,
        graph=SimpleNamespace(product=SimpleNamespace(artefact=image), own=()),
    )
    work = tmp_path / "work"
    work.mkdir()
    for one in sides.of_build(found, model, build.context.serving, work, versus=True):
        with one.start():
            pass
    (release, put_back), (ours, nothing) = started
    assert (put_back, nothing) == (originals, None)
    assert release.variables["VLLM_PLUGINS"] == ""
    assert "VLLM_PLUGINS" not in ours.variables
    named = [shlex.split(one.variables.get("SPARKFORGE_SERVE_ARGS", "")) for one in (release, ours)]
    if model is None:  # the same, in place of the image's own
        assert list(release.options) == list(ours.options) == named[1]
        assert ours.variables["SPARKFORGE_PROFILE"] == ""
        assert "bf16_dequant" not in ours.options
    else:
        assert named[1] == []
        assert "bf16_dequant" in ours.options


# -- results and their comparison ---------------------------------------------------------------


def test_result_is_kept(tmp_path: Path) -> None:
    one = result(samples(ONE, 59.0, 60.0, 61.0), disturbed=("other programs",))
    save(one, tmp_path)
    assert load(tmp_path) == load(tmp_path / FILE) == one
    assert not one.clean


@pytest.mark.parametrize(
    ("content", "field"),
    [("", ""), ("[]", ""), ("{}", ""), (None, "complete"), (None, "samples"), (None, "identity")],
)
def test_other_file_is_no_result(tmp_path: Path, content: str | None, field: str) -> None:
    save(result(samples(ONE, 60.0)), tmp_path)
    document = {**json.loads((tmp_path / FILE).read_text()), field: 7}
    (tmp_path / FILE).write_text(json.dumps(document) if content is None else content)
    with pytest.raises(ServerError, match=FILE):
        load(tmp_path)


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ((50.0, 50.2, 50.4), "slower"),
        ((60.0, 60.2, 60.4), "same"),
        ((70.0, 70.2, 70.4), "faster"),
        ((50.0, 60.0, 70.0), "unclear"),
        ((30.0, 30.1), "unclear"),  # too few
    ],
)
def test_verdict(after: tuple[float, ...], verdict: str) -> None:
    before = samples(ONE, 60.0, 60.2, 60.4)
    (found,) = compare(result(before), result(samples(ONE, *after))).changes
    assert found.verdict == verdict
    assert found.low <= found.ratio or not found.low
    # the first token is better sooner
    late = {"slower": "faster", "faster": "slower"}.get(verdict, verdict)
    first = [replace(one, metric="ttft") for one in (before, samples(ONE, *after))]
    (found,) = compare(result(first[0]), result(first[1])).changes
    assert found.verdict == late


def test_differences_other_than_the_build_are_named() -> None:
    one = result(samples(ONE, 60.0), samples(FOUR, 90.0))
    other = result(samples(ONE, 60.0), machine="another", text="1", options=("--x",))
    assert compare(one, other).differs == (
        "machine differs",
        "text differs",
        "options differs",
        f"{FOUR} is in one result only",
    )
    release = result(samples(ONE, 60.0), origin="release", options=("--x",))
    assert compare(release, result(samples(ONE, 60.0))).differs == ()
    with pytest.raises(ServerError):
        compare(result(samples(ONE, 60.0)), result(samples(FOUR, 60.0)))


@pytest.mark.parametrize(("n", "rank"), [(3, 1), (4, 1), (5, 3), (6, 6), (10, 24)])
def test_intervals_are_those_of_the_exact_test(n: int, rank: int) -> None:
    """The ranks of Campbell and Gardner's table for two samples of n values, 95 %."""
    a, b = [float(2**at) for at in range(n)], [float(3**at) for at in range(n)]
    ratios = sorted(y / x for x in a for y in b)
    assert interval(a, b)[1:] == (ratios[rank - 1], ratios[-rank])


def test_slower_result_has_a_code_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast, slow, bad = (str(tmp_path / name) for name in ("fast", "slow", "bad"))
    save(result(samples(ONE, 60.0, 60.1, 60.2)), Path(fast))
    save(result(samples(ONE, 50.0, 50.1, 50.2)), Path(slow))
    save(result(samples(ONE, 50.0), disturbed=("x",)), Path(bad))
    assert main(["bench", "compare", fast, slow, "--json"]) == CheckError.exit_code
    (change,) = json.loads(capsys.readouterr().out)["changes"]
    assert change["verdict"] == "slower"
    assert main(["bench", "compare", fast, slow, "--tolerance", "20"]) == 0
    assert main(["bench", "compare", slow, fast]) == 0
    assert main(["bench", "compare", fast, bad]) == ServerError.exit_code
    assert main(["bench", "compare", fast, bad, "--disturbed"]) == 0
