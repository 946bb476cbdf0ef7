"""`build.py bench`: tables, text, llama-benchy's files, the guard, the page and the plots."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from sparkforge.build import executor
from sparkforge.build.executor import Build
from sparkforge.build.graph import graph_of
from sparkforge.build.item import Item, Results
from sparkforge.build.launcher import of_release
from sparkforge.build.results import EnvironmentResult, ImageResult, WheelResult
from sparkforge.core.errors import BenchError
from sparkforge.inspect import plot
from sparkforge.inspect.bench import pictures, result, sides, tables, text
from sparkforge.inspect.bench import samples as measured
from sparkforge.inspect.bench.benchy import check_tokenizer
from sparkforge.inspect.bench.guard import Guard, Times, times
from sparkforge.inspect.perf import roofline
from sparkforge.runtime.servers import Launch
from sparkforge.store.store import Store
from tests.results import artefact, context_of, step

from .bench_results import DEEP, FOUR, ONE, samples
from .bench_results import result as made

# -- tables and text --------------------------------------------------------------------------


def test_the_tables_are_those_that_others_publish() -> None:
    shapes = {name: list(table.tests()) for name, table in tables.TABLES.items()}
    seeds = {(one.prompt, one.generated) for one in shapes["seeds"]}
    assert seeds == {(pp, tg) for pp in (512, 2048, 8192) for tg in (32, 128)}
    community = tables.TABLES["community"]
    assert (community.prompts, community.generated, community.runs) == ((2048,), (128,), 3)
    assert community.concurrency == (1, 2, 5, 10)
    assert community.depths[0] == 0
    assert community.depths[-1] == 100_000
    assert community.prefix_caching
    assert len(shapes["community"]) == 28
    assert ONE.name == "pp512 tg32 (c1)"
    assert DEEP.name == "pp512 tg32 @ d4096 (c1)"
    every = [one.slug for found in shapes.values() for one in found]
    assert all(re.fullmatch(r"[\w-]+", slug) for slug in every)


def test_the_text_is_the_same_everywhere_and_as_long_as_is_needed() -> None:
    short, long = text.generate(1000), text.generate(50_000)
    assert len(short) >= 1000
    assert long.startswith(short)
    # recorded: a change would make results incomparable, so it is one to be made on purpose
    assert short.startswith("An old baker ") or short[0].isupper()
    words = long.split()
    assert len({*words}) > 100
    assert 4.5 < len(long) / len(words) < 7
    longest = max(test.tokens for test in tables.TABLES["community"].tests())
    # a token has at most 8 bytes of it, and there are several places to begin at
    assert text.enough(longest) >= 2 * 8 * longest


# -- llama-benchy's files ----------------------------------------------------------------------


def theirs(**changes: Any) -> dict[str, Any]:
    """Return a result file of llama-benchy 0.4.0 with one test of one request."""
    metric = {"mean": 60.0, "std": 0.8, "values": [59.0, 60.0, 61.0]}
    run = {
        "concurrency": 1,
        "context_size": 0,
        "prompt_size": 512,
        "response_size": 32,
        "is_context_prefill_phase": False,
        "pp_throughput": {**metric, "values": [4500.0]},
        "tg_throughput": metric,
        "peak_throughput": None,
        "e2e_ttft": {**metric, "values": [100.0, 110.0, 120.0]},
        **changes,
    }
    return {"version": "0.4.0", "model": "m", "latency_ms": 1.0, "benchmarks": [run]}


def read(folder: Path, content: object, test: tables.Test = ONE) -> list[measured.Samples]:
    path = folder / "theirs.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return measured.read(path, test)


def test_samples_are_the_values_of_each_run(tmp_path: Path) -> None:
    found = {one.metric: one for one in read(tmp_path, theirs())}
    assert found["decode"].rounds == ((59.0, 60.0, 61.0),)
    assert found["decode"].mean == 60
    assert found["decode"].deviation == 1
    assert found["prefill"].values == (4500.0,)
    assert found["ttft"].values == (100.0, 110.0, 120.0)


def test_requests_of_one_run_are_one_sample_of_the_first_token(tmp_path: Path) -> None:
    values = {"mean": 1.0, "std": 1.0, "values": [1.0, 2.0, 3.0, 4.0, 10.0, 10.0, 20.0, 20.0]}
    found = read(tmp_path, theirs(concurrency=4, e2e_ttft=values), FOUR)
    (first,) = (one for one in found if one.metric == "ttft")
    assert first.values == (2.5, 15.0)


def test_the_request_that_loads_the_context_is_apart(tmp_path: Path) -> None:
    both = theirs(context_size=4096)
    both["benchmarks"].append({**both["benchmarks"][0], "is_context_prefill_phase": True})
    found = read(tmp_path, both, DEEP)
    assert [one.context for one in found] == [False] * 3 + [True] * 3
    assert len({one.key for one in found}) == 6


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        json.dumps({"version": "0.4.0"}),
        json.dumps(theirs(tg_throughput={"values": ["fast"]})),
        json.dumps(theirs(tg_throughput={"values": [-1.0]})),
        json.dumps(theirs(concurrency=None)),
        json.dumps(theirs(prompt_size=2048)),  # of another test
    ],
)
def test_a_file_of_another_shape_is_one_error(tmp_path: Path, content: str) -> None:
    with pytest.raises(BenchError) as refusal:
        read(tmp_path, content)
    assert "theirs.json" in refusal.value.what
    assert refusal.value.remedy


@pytest.mark.parametrize("none", [None, {"values": []}])
def test_an_answer_in_one_piece_has_no_speed_of_decode(tmp_path: Path, none: Any) -> None:
    assert measured.decoded(read(tmp_path, theirs()))
    assert not measured.decoded(read(tmp_path, theirs(tg_throughput=none)))


def test_rounds_are_joined_by_test_and_metric() -> None:
    first, second = [samples(ONE, [1.0]), samples(FOUR, [2.0])], [samples(ONE, [3.0])]
    joined = measured.joined([first, second])
    assert [one.rounds for one in joined] == [((1.0,), (3.0,)), ((2.0,), ())]
    assert joined[0].mean == 2


@pytest.mark.parametrize(
    "content", [None, "no JSON", "[]", "[" * 100_000, '{"vocab": 1}'], ids=range(5)
)
def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BenchError, match=r"tokenizer\.json"):
        check_tokenizer(tmp_path)


def test_the_tokenizer_is_looked_for_where_it_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(root: object = None, named: Path | None = None) -> Path:
        return sides.tokenizer(named, "openai/gpt-oss-120b", "b5c9", {"id": "m", "root": root})

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with pytest.raises(BenchError, match=r"no tokenizer\.json of the model m") as refusal:
        found("/somewhere/else")
    assert "hf download openai/gpt-oss-120b tokenizer.json --revision b5c9" in refusal.value.remedy
    snapshot = tmp_path / "hf" / "hub" / "models--openai--gpt-oss-120b" / "snapshots" / "b5c9"
    served = tmp_path / "served"
    for folder in (snapshot, served):
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text("{}")
    assert found("openai/gpt-oss-120b") == snapshot
    assert found(str(served)) == served
    assert found(str(served), tmp_path) == tmp_path
    with pytest.raises(BenchError, match="no tokenizer"):
        sides.tokenizer(None, "", "", {"id": "m"})


# -- the guard ----------------------------------------------------------------------------------


def smi(reason: str = "", pids: tuple[int, ...] = (), kind: str = "C") -> Callable[[], ET.Element]:
    """Return what reads a GPU that is slowed down for a reason, and has users."""
    users = "".join(
        f"<process_info><pid>{pid}</pid><type>{kind}</type><process_name>p{pid}</process_name>"
        "</process_info>"
        for pid in pids
    )
    slowed = f"<clocks_event_reason_{reason}>Active</clocks_event_reason_{reason}>" * bool(reason)
    xml = (
        "<nvidia_smi_log><gpu><clocks><sm_clock>702 MHz</sm_clock></clocks>"
        f"<clocks_event_reasons>{slowed}</clocks_event_reasons>"
        f"<processes>{users}</processes></gpu></nvidia_smi_log>"
    )
    return lambda: ET.fromstring(xml)


def guard(*readings: tuple[float, float], ours: bool = True, **more: Any) -> Guard:
    """Return a guard of a machine with four cores, on which each reading is a second later."""
    left: Iterator[tuple[float, float]] = iter(readings)
    clock = iter(range(1000))
    return Guard(
        ours=ours,
        read_times=lambda: Times(*next(left)) if readings else None,
        read_smi=more.get("read_smi", lambda: None),
        sleep=lambda seconds: None,
        clock=lambda: float(next(clock)),
        cores=4,
    )


def test_an_idle_machine_does_not_disturb() -> None:
    one = guard((10, 1), (10.1, 1), (20, 1), (23.2, 4.1))
    one.quiet("before")
    with one.during("a test"):  # 3.2 s of CPU, 3.1 of them the server's
        pass
    assert one.disturbed == []


def test_other_programs_are_noticed_before_and_during() -> None:
    one = guard((10, 1), (11.5, 1), (20, 1), (23.2, 2))
    one.quiet("before")
    with one.during("a test"):
        pass
    assert one.disturbed == [
        "before: other programs keep 1.5 of 4 CPU cores busy",
        "a test: other programs keep 2.2 of 4 CPU cores busy",
    ]


def test_of_a_server_that_is_not_ours_only_the_idle_machine_counts() -> None:
    one = guard((10, 1), (10.1, 1), (20, 1), (23.9, 1), ours=False)
    one.quiet("before")
    with one.during("a test"):
        pass
    assert one.disturbed == []


def test_a_gpu_that_slows_down_is_noticed_once() -> None:
    one = guard(read_smi=smi("sw_thermal_slowdown"))
    one.quiet("before")
    with one.during("a test"):
        pass
    with one.during("a test"):
        pass
    words = "the GPU slows down (sw_thermal_slowdown; SM at 702 MHz)"
    assert one.disturbed == [f"before: {words}", f"a test: {words}"]
    tree = smi("sw_thermal_slowdown")()
    next(tree.iter("sm_clock")).text = "708 MHz"
    one.read_smi = lambda: tree
    one.quiet("before")
    assert one.disturbed == [f"before: {words}", f"a test: {words}"]
    # that is how a GPU always runs at full power
    calm = guard(read_smi=smi("sw_power_cap"))
    calm.quiet("before")
    assert calm.disturbed == []


@pytest.mark.parametrize(
    ("now", "most", "load", "reason", "noticed"),
    [
        ("702 MHz", "3003 MHz", "96 %", "", True),  # a Spark after a power fault
        ("850 MHz", "3003 MHz", "50 %", "sw_power_cap", True),
        ("1600 MHz", "3003 MHz", "96 %", "sw_power_cap", False),
        ("208 MHz", "3003 MHz", "3 %", "", False),  # idle
        ("702 MHz", "3003 MHz", "96 %", "hw_slowdown", False),  # noticed by its reason
        ("N/A", "3003 MHz", "96 %", "", False),
        ("702 MHz", "[N/A]", "96 %", "", False),
        ("702 MHz", "3003 MHz", "", "", False),
    ],
)
def test_a_low_clock_without_a_reason_disturbs(
    now: str, most: str, load: str, reason: str, *, noticed: bool
) -> None:
    tree = smi(reason)()
    gpu = next(tree.iter("gpu"))
    values = {"clocks/sm_clock": now, "max_clocks/sm_clock": most, "utilization/gpu_util": load}
    for path, value in values.items():
        group, name = path.split("/")
        parent = gpu.find(group)
        parent = ET.SubElement(gpu, group) if parent is None else parent
        found = parent.find(name)
        (ET.SubElement(parent, name) if found is None else found).text = value
    one = guard(read_smi=lambda: tree)
    one.quiet("before")
    with one.during("a test"):
        pass
    words = f"a test: the GPU is busy, and without a reason its SM is at {now} of {most}"
    assert (one.disturbed == [words]) == noticed
    assert bool(one.disturbed) == (noticed or reason == "hw_slowdown")


def test_other_programs_on_the_gpu_are_noticed() -> None:
    one = guard(read_smi=smi(pids=(7,)))
    one.before_start()
    assert one.disturbed == ["before the start: another program uses the GPU: p7 (7)"]
    # the server, and what comes while it is measured
    seen = iter([smi(pids=(9,))(), *[smi(pids=(9, 12))()] * 9])
    one = guard(read_smi=lambda: next(seen))
    one.quiet("before")
    with one.during("a test"):
        pass
    assert one.disturbed == ["a test: another program uses the GPU: p12 (12)"]
    foreign = guard(read_smi=smi(pids=(9, 12)), ours=False)
    foreign.quiet("before")
    assert foreign.disturbed == ["before: 2 programs use the GPU: p12 (12), p9 (9)"]


def test_a_desktop_does_not_disturb() -> None:
    one = guard(read_smi=smi(pids=(7, 8), kind="G"), ours=False)
    one.before_start()
    one.quiet("before")
    with one.during("a test"):
        pass
    assert one.disturbed == []
    both = guard(read_smi=smi(pids=(7,), kind="C+G"))
    both.before_start()
    assert len(both.disturbed) == 1


def test_our_processes_are_this_one_and_its_descendants(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  100 20 30 5000 9 1 2 40 0 0\ncpu0 1 1\n")
    tick = 100

    def process(pid: int, parent: int, seconds: float, name: str = "x") -> None:
        (tmp_path / str(pid)).mkdir()
        ticks = int(seconds * tick)
        fields = f"S {parent} 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20"
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) {fields}\n")

    process(10, 1, 1.0)
    process(11, 10, 2.0, "a name) with ( brackets")
    process(12, 11, 4.0)
    process(13, 1, 8.0)
    (tmp_path / "14").mkdir()  # it has ended
    found = times(tmp_path, 10)
    assert found is not None
    assert found.ours == pytest.approx(7.0)
    # all but idle and waiting for a disk
    assert found.all == pytest.approx((100 + 20 + 30 + 1 + 2 + 40) / tick)
    assert times(tmp_path / "nothing") is None


# -- what only the patches have, and ceilings ----------------------------------------------------


def test_the_release_gets_the_same_options_but_ours() -> None:
    words = ["--moe-backend", "marlin", "--mxfp4-layers=qkv,o", "--max-num-seqs", "8"]
    assert of_release(words) == ["--moe-backend", "marlin", "--max-num-seqs", "8"]
    words = ["--moe-backend=bf16_dequant", "--enforce-eager", "--decode_kernels", "on"]
    assert of_release(words) == ["--enforce-eager"]


def test_the_sides_of_a_build_differ_in_what_only_the_patches_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of("cpu", store=Store(tmp_path / "store"))
    graph = graph_of(context)
    product, environment = graph.product, EnvironmentResult()
    wheels = [step(item, WheelResult(f"{item.label}.whl", "0", "1")) for item in graph.own]
    build = Build(graph, Results([*wheels, step(product, environment, tmp_path / "ours")]))

    def run(context: object, items: list[Item[Any]]) -> Results:
        return Results([step(item, environment, tmp_path / "theirs") for item in items])

    @contextmanager
    def started(engine: object, product: Any, launch: Launch, *more: object) -> Iterator[object]:
        asked.append((product.path.name, launch.options))
        yield SimpleNamespace(url="http://127.0.0.1:1")

    asked: list[tuple[str, Sequence[str]]] = []
    monkeypatch.setattr(executor, "run", run)
    monkeypatch.setattr(sides, "start_server", started)
    monkeypatch.setattr(sides, "kept_log", lambda *_: nullcontext())
    monkeypatch.setattr(sides, "wait_ready", lambda *_: 1.0)
    served = sides.Served(tmp_path / "model", context.serving)
    (tmp_path / "work").mkdir()
    found = sides.of_build(context, build, served, tmp_path / "work", versus=True)
    assert [(one.name, one.identity.origin, one.ours) for one in found] == [
        ("unpatched", "release", True),
        ("patched", "build", True),
    ]
    for one in found:
        with one.start():
            pass
    (theirs, plain), (ours, full) = asked
    assert (theirs, ours) == ("theirs", "ours")
    assert list(plain) == of_release(full) != list(full)
    assert found[1].identity.options == (*full,)
    (alone,) = sides.of_build(context, build, served, tmp_path / "work", versus=False)
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
    context = context_of("cpu", store=Store(tmp_path / "store"))
    image = artefact(ImageResult("x:1", "sha256:1", None, "base", ()))
    found: Any = SimpleNamespace(
        results=SimpleNamespace(artefact=lambda _: image),
        graph=SimpleNamespace(product=None, own=()),
    )
    work = tmp_path / "work"
    work.mkdir()
    served = sides.Served(model, context.serving)
    for one in sides.of_build(context, found, served, work, versus=True):
        with one.start():
            pass
    (release, put_back), (ours, nothing) = started
    assert (put_back, nothing) == (originals, None)
    assert release.variables["VLLM_PLUGINS"] == ""
    assert "VLLM_PLUGINS" not in ours.variables
    named = [shlex.split(one.variables.get("SPARKFORGE_SERVE_ARGS", "")) for one in (release, ours)]
    if model is None:  # the same, in place of the image's own
        assert release.options == ours.options == named[1]
        assert ours.variables["SPARKFORGE_PROFILE"] == ""
        assert "bf16_dequant" not in ours.options
    else:
        assert named[1] == []
        assert "bf16_dequant" in ours.options


def test_ceilings_are_those_of_the_roofline() -> None:
    context = context_of("spark")
    deep = tables.Test(100_000, 2048, 128, 1)
    found = sides.ceilings(context, context.serving, [ONE, FOUR, deep])
    assert [(one.context, one.batch) for one in found] == [(528, 1), (528, 4), (102_112, 1)]
    case = roofline.case(context.target, "spark", context=528)
    row = next(one for one in roofline.rows(case) if one.name == "Marlin pads less")
    assert found[0].tok_s == pytest.approx(row.ceiling_tok_s)
    assert found[2].tok_s < found[0].tok_s < found[1].tok_s
    cpu = context_of("cpu")
    assert sides.ceilings(cpu, cpu.serving, [ONE]) == ()


# -- page and plots ------------------------------------------------------------------------------


def test_the_page_has_figures_identity_and_what_disturbed(tmp_path: Path) -> None:
    one = made(samples(ONE, (59.0, 60.0, 61.0)), samples(ONE, [100.0], metric="ttft"))
    result.save(one, tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "| pp512 tg32 (c1) | 60.00 ± 1.00 |  | 100 ± 0 |" in page
    assert "Clean: nothing disturbed" in page
    assert f"`a_b.whl` {'4' * 64}" in page
    assert "svg" not in page
    disturbed = made(samples(ONE, [60.0]), disturbed=("other <b>programs</b>",))
    page = result.page(disturbed, tmp_path)
    assert "**Disturbed; do not quote" in page
    assert "* other \\<b\\>programs\\</b\\>" in page
    assert "Incomplete" in result.page(made(samples(ONE, [60.0]), complete=False), tmp_path)


def test_plots_have_the_measured_points_and_the_ceiling(tmp_path: Path) -> None:
    one = made(
        samples(ONE, (59.0, 60.0, 61.0)),
        samples(FOUR, [150.0]),
        samples(DEEP, [40.0]),
        samples(ONE, [4000.0], metric="prefill"),
        samples(DEEP, [9.0], context=True),
    )
    pictures.draw(one, tmp_path)
    decode = ET.parse(tmp_path / "decode.svg")
    spots = [node for node in decode.iter() if node.tag.endswith("circle")]
    assert len(spots) == 3  # the request that loads the context is no answer
    lines = [node for node in decode.iter() if node.tag.endswith("polyline")]
    assert [node.get("stroke-dasharray") for node in lines] == [None, None, "6 4"]
    words = [node.text for node in decode.iter() if node.tag.endswith("text")]
    assert words[-3:] == ["one request", "4 at once", "ceiling of one request"]
    # y grows downwards: 150 is above 60, and 60 above 40
    heights = {round(float(node.get("cx", 0))): float(node.get("cy", 0)) for node in spots}
    assert len(heights) == 2
    ys = [float(node.get("cy", 0)) for node in spots]
    assert ys[2] < ys[0] < ys[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(result.PICTURES)
    page = result.page(one, tmp_path)
    assert all(f"({name})" in page for name in result.PICTURES)


def test_a_plot_without_ceiling_or_other_concurrency_is_left_out() -> None:
    found = pictures.plots(made(samples(ONE, [60.0]), ceilings=()))
    assert list(found) == ["decode.svg"]
    assert "ceiling" not in found["decode.svg"]


@pytest.mark.parametrize(
    ("most", "last"),
    [(0, 1.0), (1, 1.0), (60, 60.0), (61, 80), (99.5, 100), (2048, 2500), (7e6, 8e6)],
)
def test_axes_end_at_a_round_number_above_the_largest_value(most: float, last: float) -> None:
    found = plot.ticks(most)
    assert found[0] == 0
    assert found[-1] >= most
    assert len(found) <= 8
    assert found[-1] == pytest.approx(last)


def test_names_cannot_break_a_picture() -> None:
    picture = plot.svg("a <b>", "x", "y", [plot.Line('"&<', [(1, 1)])])
    assert ET.fromstring(picture) is not None
