"""Results in the store: each loads as its type, and what does not is made again."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkforge.build import executor, results
from sparkforge.build.item import Item, Results
from sparkforge.build.results import (
    Answer,
    BuilderResult,
    CheckpointResult,
    CompiledWheelResult,
    EnvironmentResult,
    ExternalResult,
    ImageArchiveResult,
    ImageResult,
    KernelsResult,
    NativeFile,
    PackResult,
    PluginResult,
    ReleaseProof,
    SeriesResult,
    SmokeResult,
    SourceResult,
    WheelhouseResult,
    WheelResult,
)
from sparkforge.core import plain
from sparkforge.core.disk import key_of
from sparkforge.store.store import Store

WHEEL: dict[str, Any] = {
    "file": "x.whl",
    "sha256": "0" * 64,
    "version": "1",
    "replaced": ("a.py",),
    "added": ("b.py",),
    "removed": (),
    "left_out": ("tests/c.py",),
    "compile_only": (),
}
SMOKE: dict[str, Any] = {
    "ready_s": 1.5,
    "completion_s": 0.25,
    "tokens": 24,
    "text": "'x'",
    "stop_s": 0.5,
    "answers": (Answer(5, -0.5), Answer(33, -1.0)),
}
EACH = [
    SourceResult("git", "a" * 40, "b" * 40, "here"),
    ExternalResult("a" * 40, "b" * 64),
    SeriesResult("a" * 40, "b" * 40, "c" * 40, {"x.py": "0001-x.patch"}),
    KernelsResult({"sm_90a.cubin": "0" * 64}),
    BuilderResult("sha256:1", "x:1", ("debian libc6 2 amd64",)),
    WheelResult(**WHEEL),
    CompiledWheelResult(
        **WHEEL,
        natives={"_C.so": NativeFile("1" * 64, "compiled"), "_D.so": NativeFile("2", "release")},
        differs=("d.py",),
    ),
    WheelhouseResult(3),
    CheckpointResult({"preflight/config.json": "0" * 64}),
    EnvironmentResult(),
    ImageResult("x:1", "sha256:1", "sha256:2", "base", ("debian libc6 2 amd64",)),
    ImageResult("x:1", "sha256:1", None, "base", ()),
    ImageArchiveResult("sha256:2", "image.oci.tar"),
    SmokeResult(**SMOKE),
    SmokeResult(**SMOKE, release=ReleaseProof("compared", "Error", "amx", 0.01)),
    PluginResult("x.whl", "0" * 64, "1", {"own/sm_90a.cubin": "0" * 64}),
    PackResult("x.whl", "0" * 64, "1+a.1", {"sampling": "1" * 64}, 3),
]


def kinds() -> set[str]:
    """Return the names of all types of results."""
    return {name for name in vars(results) if name.endswith("Result")}


def test_no_kind_is_left_out() -> None:
    assert {type(one).__name__ for one in EACH} == kinds()


@pytest.mark.parametrize("result", EACH, ids=lambda result: type(result).__name__)
def test_a_result_is_the_same_from_the_store(store: Store, result: Any) -> None:
    made = store.build("any", {"a": 1}, type(result), lambda folder: result)
    assert made.result == result
    assert store.find("any", {"a": 1}, type(result)) == made
    again = store.build("any", {"a": 1}, type(result), lambda folder: pytest.fail("made again"))
    assert again == made


def test_documents_have_the_fields_that_they_had() -> None:
    natives = plain.as_json(EACH[6])["natives"]
    assert natives["_C.so"] == {"sha256": "1" * 64, "from": "compiled"}
    assert plain.as_json(EnvironmentResult()) == {}
    assert plain.as_json(CheckpointResult({})) == {"files": {}}
    assert plain.as_json(WheelResult(**WHEEL)) == {
        **WHEEL,
        "replaced": ["a.py"],
        "added": ["b.py"],
        "removed": [],
        "left_out": ["tests/c.py"],
        "compile_only": [],
    }


@pytest.mark.parametrize("result", EACH, ids=lambda result: type(result).__name__)
def test_a_missing_unknown_or_changed_field_is_another_type(result: Any) -> None:
    values = plain.as_json(result)
    kind = type(result)
    assert plain.load(kind, values) == result
    assert plain.load(kind, {**values, "size": 3}) is None
    for field in fields(kind):
        assert plain.load(kind, {k: v for k, v in values.items() if k != field.name}) is None
        assert plain.load(kind, {**values, field.name: {"of": 3}}) is None


@pytest.mark.parametrize(
    "value", [None, 3, [], "text", {"kind": "no such kind"}, {"kind": "image"}]
)
def test_a_record_of_another_kind_is_none(value: Any) -> None:
    assert plain.load(EnvironmentResult, value) is None


def test_numbers_and_texts_are_not_taken_for_each_other() -> None:
    assert plain.load(WheelhouseResult, {"files": "3"}) is None
    assert plain.load(WheelhouseResult, {"files": 3.0}) is None
    assert plain.load(WheelhouseResult, {"files": True}) is None
    assert plain.load(WheelhouseResult, {"files": 3}) == WheelhouseResult(3)


def test_a_value_of_another_type_is_not_written() -> None:
    wrong: Any = "3"
    with pytest.raises(ValueError, match="files"):
        plain.as_json(WheelhouseResult(wrong))


# -- artefacts of other versions --------------------------------------------------------------


def rewrite(record: Path, outputs: Any, **more: Any) -> None:
    """Write an artefact's record as another version would, with a seal that is right."""
    meta = json.loads(record.read_text()) | {"outputs": outputs} | more
    del meta["seal"]
    record.write_text(json.dumps({**meta, "seal": key_of(meta)}))


@pytest.mark.parametrize(
    ("outputs", "more"),
    [
        ({}, {}),
        ({"file": "x.whl", "sha256": "0" * 64}, {}),
        ({**plain.as_json(WheelResult(**WHEEL)), "size": 3}, {}),
        ({**plain.as_json(WheelResult(**WHEEL)), "version": 1}, {}),
        ({**plain.as_json(WheelResult(**WHEEL)), "replaced": "a.py"}, {}),
        ({"kind": "hologram"}, {}),
        (None, {}),
        (plain.as_json(WheelResult(**WHEEL)), {"inputs": 2}),
    ],
)
def test_an_artefact_of_another_version_is_made_again(
    store: Store, outputs: Any, more: dict[str, Any]
) -> None:
    def make(folder: Path, results: Results) -> WheelResult:
        (folder / "new").touch()
        return WheelResult(**WHEEL)

    item = Item("wheels", "wheel demo", {"a": 1}, WheelResult, make)
    context: Any = SimpleNamespace(store=store, force=frozenset(), target_name="tiny")
    first = executor.run(context, [item]).artefact(item)
    (first.path / "new").unlink()
    assert not next(iter(executor.run(context, [item]))).made_now
    rewrite(first.path / "artefact.json", outputs, **more)
    assert item.find(store) is None
    (planned,) = executor.plan(context, [item])
    assert planned.why == ("its result is missing or damaged in the store",)
    (again,) = executor.run(context, [item])
    assert again.made_now
    assert again.artefact.result == first.result
    assert (again.artefact.path / "new").exists()
    assert not list((store.root / "tmp").iterdir())


def test_a_record_without_its_seal_is_damaged(store: Store) -> None:
    made = store.build("any", {"a": 1}, WheelhouseResult, lambda folder: WheelhouseResult(3))
    record = made.path / "artefact.json"
    meta = json.loads(record.read_text())
    record.write_text(json.dumps(meta | {"outputs": {"files": 4}}))
    assert store.find("any", {"a": 1}, WheelhouseResult) is None
    rewrite(record, {"files": 4})
    found = store.find("any", {"a": 1}, WheelhouseResult)
    assert found is not None
    assert found.result == WheelhouseResult(4)
