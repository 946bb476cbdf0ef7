"""Names of images in registries."""

from __future__ import annotations

import pytest

from sparkforge.core.errors import UsageError
from sparkforge.runtime import registry

DIGEST = f"sha256:{'0' * 64}"


@pytest.mark.parametrize("name", ["127.0.0.1:5000/x1", "ghcr.io/a/b-c", "localhost/xy"])
def test_a_name_in_a_registry(name: str) -> None:
    assert registry.repository(name) == name
    assert str(registry.reference(f"{name}@{DIGEST}")) == f"{name}@{DIGEST}"


@pytest.mark.parametrize(
    "name",
    [
        "https://r.example.org/x",
        "r.example.org/x:1",
        f"r.example.org/x@{DIGEST}",
        "team/xy",
        "r.example.org/X",
        "r.example.org/",
        "r.example.org/a//b",
        "user:password@r.example.org/x",
        "",
    ],
)
def test_another_name_is_an_error_that_does_not_quote_it(name: str) -> None:
    with pytest.raises(UsageError) as error:
        registry.repository(name)
    assert "password" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [f"sparkforge/cpu@{DIGEST}", "r.example.org/x:1", "x.tar", "r.example.org/x@sha256:1"],
)
def test_a_name_of_the_engine_is_no_reference(text: str) -> None:
    assert registry.reference(text) is None
