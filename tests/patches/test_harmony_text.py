"""Long text in Harmony chats, and requests of many objects: none holds up the event loop.

test_chat.py has a server that answers others meanwhile.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.patches.probing import ask

COUNT = 300


@pytest.fixture(scope="module")
def answers(patched_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("harmony")
    return ask(patched_python, "probe_harmony_text", str(COUNT), folder=folder)


def test_tokens_are_those_of_oss_harmony(answers: dict[str, Any]) -> None:
    assert answers["wrong"] == []
    assert answers["rendered"] == COUNT


def test_oss_harmony_sees_no_long_piece(answers: dict[str, Any]) -> None:
    """Its time grows with the square of a piece's length, and this bounds the length."""
    for place, (longest, size, whole) in answers["unbroken"].items():
        assert longest < 600, place  # 128 of the text, each escaped at most, and the JSON around
        if place.startswith(("user", "instructions", "result")):
            assert size < 600, place
        assert whole, place


def test_what_cannot_be_encoded_is_refused_in_words(answers: dict[str, Any]) -> None:
    said = answers["refused"]
    assert "blank characters in a row" in said["blank"]
    assert "more than 1048576 tokens" in said["many tokens"]
    assert "descriptions and schemas of the tools" in said["schema"]
    assert "too many numerals" in said["numerals"]
    assert said["nearly as blank"] == said["numerals as text"] == "rendered"
    # as before: refused by oss-harmony
    assert said["surrogate"] is said["surrogate in a schema"] is True


def test_long_conversations_wait_for_each_other_only(answers: dict[str, Any]) -> None:
    threads = {size: names for size, (names, rendered) in answers["threads"].items() if rendered}
    assert threads["100"] == []  # oss-harmony's own way, in the loop
    (shared,) = threads["3000"]
    (own,) = threads["300000"]
    assert shared.startswith("asyncio_")
    assert own.startswith("harmony_long_text")


SHAPES = """
import json
from fastapi import Depends, FastAPI, Request
from fastapi.testclient import TestClient
from pydantic import ValidationError
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

app, reached = FastAPI(), []

@app.post("/", dependencies=[Depends(validate_json_request)])
async def take(request: Request) -> str:
    reached.append(await request.body())
    return ""

asked = TestClient(app)
json_type = {"content-type": "application/json"}
bodies = {
    "flat": [{}] * 10_001,
    "deep": {"a": [[[{"b": [0] * 10}]] * 4_000]},
    "fewer": {"a": [{}] * 9_990, "b": [0] * 100_000},
}
found = {}
for name, body in bodies.items():
    reply = asked.post("/", content=json.dumps(body), headers=json_type)
    found[name] = [reply.status_code, "10000 objects and lists" in reply.text]
found["empty"] = [asked.post("/", content=b"", headers=json_type).status_code, False]
try:
    ResponsesRequest.model_validate({"model": "m", "input": [{"type": "x"}] * 9})
except ValidationError as error:
    places = {part for one in error.errors() for part in one["loc"] if isinstance(part, int)}
    found["places"] = sorted(places)
found["reached"] = len(reached)
print(json.dumps(found))
"""


def test_a_request_of_many_objects_is_refused_at_once(patched_python: Path) -> None:
    done = subprocess.run(
        [patched_python, "-c", SHAPES], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["flat"] == found["deep"] == [422, True]  # vLLM's own app answers 400
    assert found["fewer"] == found["empty"] == [200, False]
    assert found["reached"] == 2
    assert found["places"] == [0]  # pydantic stops at the first wrong item
