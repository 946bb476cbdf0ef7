"""`build.py bench`: tables, text, llama-benchy's files, servers and the comparison."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkforge.build import cached, smoke
from sparkforge.build.cached import Cached
from sparkforge.build.results import EnvironmentResult, WheelResult
from sparkforge.build.smoke import of_release
from sparkforge.check.bench import command
from sparkforge.check.bench.benchy import FILE, Result, compare, load
from sparkforge.cli.main import main
from sparkforge.core.errors import CheckError, ServerError
from sparkforge.runtime.servers import Launch
from sparkforge.store.store import Store
from tests.results import build_of, reached

ONE, FOUR = "pp512 tg32 (c1): decode, tok/s", "pp512 tg32 (c4): decode, tok/s"
FIRST = "pp512 tg32 (c1): first token, ms"


# -- llama-benchy's files -----------------------------------------------------------------------


def theirs(**changes: Any) -> dict[str, Any]:
    """Return one test in a result of llama-benchy 0.4.0."""
    sizes = {"prompt_size": 512, "response_size": 32, "context_size": 0, "concurrency": 1}
    return {
        **sizes,
        "is_context_prefill_phase": False,
        "pp_throughput": {"values": [4500.0]},
        "tg_throughput": {"values": [59.0, 60.0, 61.0]},
        "e2e_ttft": {"values": [100.0, 110.0, 120.0]},
        "requests_throughput_over_time": [[[[0.0, 1.0]] * 29]] * 3,
        **changes,
    }


def read(folder: Path, *runs: Any) -> Result:
    """Read a file with these tests."""
    (folder / "theirs.json").write_text(json.dumps({"version": "0.4.0", "benchmarks": runs}))
    result = Result({})
    result.add(folder / "theirs.json")
    return result


def test_samples_are_the_values_of_each_run(tmp_path: Path) -> None:
    found = read(tmp_path, theirs(), theirs(context_size=4096, concurrency=2))
    deep = ONE.replace("(c1)", "@ d4096 (c2)")
    assert {ONE, deep} < set(found.tests)
    assert found.tests[ONE] == [59, 60, 61]
    found.add(tmp_path / "theirs.json")  # the next round
    assert found.tests["pp512 tg32 (c1): prefill, tok/s"] == [4500, 4500]


def test_values_that_are_read_in_another_way(tmp_path: Path) -> None:
    # requests of one run are one sample of the first token
    late = theirs(e2e_ttft={"values": [1.0, 3.0, 10.0, 20.0]}, concurrency=2)
    assert read(tmp_path, late).tests[FIRST.replace("c1", "c2")] == [2, 15]
    # a request that loads the context is apart
    found = read(tmp_path, theirs(), theirs(is_context_prefill_phase=True))
    assert len(found.tests[ONE]) == len(found.tests[ONE.replace(":", ", loading the context:")])
    # an answer in one piece has no speed of decoding
    nothing: list[Any] = [None, {"values": []}, {"values": [0.0]}]
    for none in nothing:
        found = read(tmp_path, theirs(tg_throughput=none))
        assert ONE not in found.tests and FIRST in found.tests


def test_answers_that_end_early_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three = [[0.0, 1.0]] * 3
    found = read(tmp_path, theirs(), theirs(requests_throughput_over_time=[[three], [three]]))
    assert found.short == {"pp512 tg32 (c1)": 3}
    assert capsys.readouterr().out.count("answers ended after 3 of 32 tokens (mean)") == 1


# -- the servers --------------------------------------------------------------------------------


def test_release_gets_the_same_options_but_ours() -> None:
    words = ["--moe-backend", "marlin", "--mxfp4-layers=qkv,o", "--max-num-seqs", "8"]
    assert of_release(words) == ["--max-num-seqs", "8", "--moe-backend=marlin"]
    words = ["--moe-backend=bf16_dequant", "--enforce-eager", "--decode_kernels", "on"]
    assert of_release(words) == ["--enforce-eager"]
    words = ["--mxfp4-layers", "o", "--additional-config", '{"another": 1}']
    assert of_release(words) == ['--additional-config={"another": 1}']
    assert of_release(["--additional-config", "{"]) == ["--additional-config={"]


def test_sides_of_a_build_differ_in_the_patches_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = ("--hf-token", "hunter2")
    build = build_of("cpu", store=Store(tmp_path / "store"), arguments=secret)
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
    monkeypatch.setattr(smoke, "start_server", started)
    monkeypatch.setattr(command, "wait_ready", lambda *_: 1.0)
    given = (build, tmp_path / "model", build.context.serving, tmp_path / "work")
    (tmp_path / "work").mkdir()
    found = command.of_build(*given, versus=True)
    assert [(one.name, one.identity["origin"]) for one in found] == [
        ("unpatched", "release"),
        ("patched", "build"),
    ]
    for one in found:
        with one.start():
            pass
    (theirs, plain), (ours, full) = asked
    assert (theirs, ours) == ("theirs", "ours")
    assert list(plain) == of_release(full) != list(full)
    assert found[1].identity["options"] == [*full, "--hf-token", "***"]
    (alone,) = command.of_build(*given, versus=False)
    assert (alone.name, alone.identity) == ("", found[1].identity)


# -- results and their comparison ---------------------------------------------------------------


def result(tests: dict[str, list[float]], **identity: Any) -> Result:
    return Result({"machine": "a CPU", **identity}, tests)


@pytest.mark.parametrize("change", ["", "[]", "{}", {"tests": 7}, {"tests": {ONE: []}}])
def test_only_a_result_is_loaded(tmp_path: Path, change: Any) -> None:
    one = result({ONE: [59.0, 60.0, 61.0]})
    one.save(tmp_path)
    assert load(tmp_path) == load(tmp_path / FILE) == one
    document = json.loads((tmp_path / FILE).read_text())
    text = change if isinstance(change, str) else json.dumps({**document, **change})
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ServerError, match=FILE):
        load(tmp_path)


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ([50.0, 50.2, 50.4], "slower"),
        ([60.0, 60.2, 60.4], "same"),
        ([70.0, 70.2, 70.4], "faster"),
        ([50.0, 60.0, 70.0], "unclear"),
        ([30.0, 30.1], "unclear"),  # too few
    ],
)
def test_verdict(after: list[float], verdict: str) -> None:
    before = [60.0, 60.2, 60.4]
    (found,) = compare(result({ONE: before}), result({ONE: after}), 0.03)
    assert found.verdict == verdict
    assert found.low <= found.ratio <= found.high or not found.low
    # the first token is better sooner
    late = {"slower": "faster", "faster": "slower"}.get(verdict, verdict)
    (found,) = compare(result({FIRST: before}), result({FIRST: after}), 0.03)
    assert found.verdict == late


def test_slower_result_has_a_code_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast, slow, other = (str(tmp_path / name) for name in ("fast", "slow", "other"))
    result({ONE: [60.0, 60.1, 60.2]}).save(Path(fast))
    result({ONE: [50.0, 50.1, 50.2]}, machine="another").save(Path(slow))
    result({FOUR: [50.0]}).save(Path(other))
    assert main(["bench", "compare", fast, slow, "--json"]) == CheckError.exit_code
    document = json.loads(capsys.readouterr().out)
    assert [change["verdict"] for change in document["changes"]] == ["slower"]
    assert document["differs"] == ["machine"]
    assert main(["bench", "compare", fast, slow, "--tolerance", "20"]) == 0
    assert main(["bench", "compare", slow, fast]) == 0
    assert main(["bench", "compare", fast, other]) == ServerError.exit_code
