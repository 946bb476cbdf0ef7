"""The front door's settings: the API key, and a router's servers. With HAProxy: integration."""

import os
from pathlib import Path

import pytest

from sparkforge.serving import door
from sparkforge.serving.options import EX_CONFIG, StartError
from sparkforge.serving.settings import Variables

TWO = "192.168.100.1:8000,192.168.100.2:8000"


@pytest.mark.parametrize(
    "text",
    [
        *("", " , ", "192.168.100.1", "http://192.168.100.1:8000", "192.168.100.1:8000/v1"),
        *("fd00::2:8000", "a'b:1", "spärk:1", "127.0.0.1:80", "localhost:80", "[::1]:80"),
    ],
)
def test_a_wrong_list_is_one_error(text: str) -> None:
    with pytest.raises(StartError, match="SPARKFORGE_REPLICAS") as error:
        door.replicas(text)
    assert error.value.code == EX_CONFIG


def key(file: Path, bind: str = "127.0.0.1", environment: str = "", opened: bool = False) -> str:
    return door.key_of(Variables(bind=bind, allow_open=opened), {"VLLM_API_KEY": environment}, file)


def test_a_secret_comes_before_the_environment(tmp_path: Path) -> None:
    secret, none = tmp_path / "key", tmp_path / "none"
    secret.write_text("from-the-file\n")
    assert key(secret, environment="from-the-environment") == "from-the-file"
    assert key(none, environment="from-the-environment") == "from-the-environment"
    assert key(Path(os.devnull), environment="from-the-environment") == "from-the-environment"
    assert key(none) == ""


@pytest.mark.parametrize("text", ["one two", "\ufeffword", "schlüssel", "a\0b"])
def test_a_key_that_no_request_can_carry_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    for file, given in (("key", ""), ("none", text)):
        with pytest.raises(StartError, match="one word") as refused:
            key(tmp_path / file, environment=given)
        assert text not in str(refused.value)


@pytest.mark.parametrize(
    ("bind", "local"),
    [
        *((one, True) for one in ("127.0.0.1", "127.8.8.8:1", "::1", "[::1]:80", "localhost:1")),
        *((one, False) for one in ("0.0.0.0", "192.168.1.4:80", "::", "spark", "")),
    ],
)
def test_this_machine_alone_needs_no_key(tmp_path: Path, bind: str, local: bool) -> None:
    none = tmp_path / "none"
    if local:
        assert key(none, bind) == ""
    else:
        with pytest.raises(StartError, match="SPARKFORGE_API_KEY_FILE"):
            key(none, bind)
    assert key(none, bind, "a-key") == "a-key"
    assert key(none, bind, opened=True) == ""
