"""docker-compose.yml: what it passes on, and what it keeps."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from tests.support import ROOT

TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE: Mapping[str, Any] = yaml.safe_load(TEXT)
NAMED = re.compile(
    r"\b(?:(?:SPARKFORGE|VLLM|HF|HUGGING_FACE|TIKTOKEN|FASTSAFETENSORS|PYTORCH|NCCL|GLOO)_[A-Z0-9_]+"
    r"|MAX_JOBS|(?:HTTPS?|NO|ALL)_PROXY|(?:https?|no|all)_proxy)\b"
)
NOT_FOR_THE_CONTAINER = {
    "of build.py": {"SPARKFORGE_STORE", "SPARKFORGE_CPU_ISA"},
    "of a vLLM of your own": {"VLLM_PLUGINS", "VLLM_SPARKFORGE"},
    "in the image": {"SPARKFORGE_JIT_DIR", "SPARKFORGE_RELEASE", "SPARKFORGE_SERVE_ARGS"},
    "an example of docker-compose.override.yml": {"VLLM_LOG_STATS_INTERVAL"},
}


def environment(service: str) -> Mapping[str, str | None]:
    found: Mapping[str, str | None] = COMPOSE["services"][service]["environment"]
    return found


def test_every_variable_that_a_page_names_reaches_the_container() -> None:
    passed = set(re.findall(r"\$\{(\w+)", TEXT))
    for service in COMPOSE["services"]:
        passed |= set(environment(service))
    left = set().union(*NOT_FOR_THE_CONTAINER.values())
    pages = {page: set(NAMED.findall(page.read_text())) for page in (ROOT / "docs").glob("*.md")}
    lost = {page.name: sorted(names - passed - left) for page, names in pages.items()}
    assert {page: names for page, names in lost.items() if names} == {}
    assert left - passed == left  # and what is passed after all leaves the list
    unheard = left - set().union(*pages.values())
    assert unheard == set(), "no page names these any more"


def test_every_variable_that_compose_passes_by_name_alone_is_on_the_page() -> None:
    page = (ROOT / "docs/variables.md").read_text()
    bare = {
        name
        for service in COMPOSE["services"]
        for name, value in environment(service).items()
        if value is None
    }
    assert {name for name in bare if name.upper() not in page} == set()


def test_no_default_of_the_image_is_taken_away() -> None:
    """A variable without a value, which nobody sets, is removed from those of the image."""
    image = set(
        re.findall(
            r"^(?:ENV)? +(\w+)=\S+(?: \\)?$", (ROOT / "Dockerfile").read_text(), re.MULTILINE
        )
    )
    assert {"HF_HOME", "SPARKFORGE_JIT_DIR"} <= image
    for service in COMPOSE["services"]:
        bare = {name for name, value in environment(service).items() if value is None}
        assert not bare & image


def test_the_router_has_the_rights_of_the_servers_and_no_folder() -> None:
    router, server = COMPOSE["services"]["router"], COMPOSE["services"]["cpu"]
    for name in ("secrets", "read_only", "cap_drop", "security_opt", "logging", "restart"):
        assert router[name] == server[name]
    assert "volumes" not in router
    assert router["stop_signal"] == "SIGUSR1"
    # what an unset variable means is decided in one place, as for the servers
    assert router["environment"]["SPARKFORGE_BIND"] == "${SPARKFORGE_ROUTER:-127.0.0.1:8080}"
    assert router["ports"] == ["${SPARKFORGE_ROUTER:-127.0.0.1:8080}:8000"]


@pytest.mark.parametrize("service", ["cpu", "spark", "spark-head", "spark-worker", "rtx"])
def test_each_service_gets_the_proxies(service: str) -> None:
    names = ["HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"]
    found = environment(service)
    assert all(found[name] is None for name in (*names, *map(str.lower, names)))


def test_down_with_volumes_keeps_the_models() -> None:
    assert COMPOSE["volumes"]["models"] == {"name": "sparkforge-models", "external": True}
    with_models = {
        name for name, one in COMPOSE["services"].items() if "models}" in str(one.get("volumes"))
    }
    assert with_models == {"spark", "spark-head", "spark-worker", "rtx"}
