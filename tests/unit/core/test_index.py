"""pip's settings, and files found on a loopback index and in folders."""

import os
from pathlib import Path

import pytest

from sparkforge.core import index
from sparkforge.core.errors import FetchError
from sparkforge.core.index import Index, pip_settings, torch_files
from sparkforge.core.log import log
from tests.support import Page, Server, add_project, make_wheel

_pip_config = index.pip_config


@pytest.fixture
def conf(isolated: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one configuration file that pip itself reads."""
    monkeypatch.setattr(index, "pip_config", _pip_config)
    path = isolated / "pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(path))
    return path


def settings() -> dict[str, str]:
    pip_settings.cache_clear()
    return pip_settings()


def test_a_commands_section_wins_over_global_and_a_variable_over_both(
    conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf.write_text(
        "[global]\nindex-url = http://127.0.0.1:1/g\nextra-index-url =\n    http://127.0.0.1:1/a\n"
        "    http://127.0.0.1:1/b\n"
        "[install]\nindex-url = http://127.0.0.1:1/i\nfind-links = /one /two\n"
        "[list]\nindex-url = http://127.0.0.1:1/other-command\n"
    )
    found = settings()
    assert (found["index-url"], found["find-links"]) == ("http://127.0.0.1:1/i", "/one /two")
    assert found["extra-index-url"].split() == ["http://127.0.0.1:1/a", "http://127.0.0.1:1/b"]
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/v")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "a b")
    found = settings()
    assert (found["index-url"], found["trusted-host"]) == ("http://127.0.0.1:1/v", "a b")


@pytest.fixture
def web(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("PIP_INDEX_URL", server.url("/simple"))
    pip_settings.cache_clear()
    return server


@pytest.mark.parametrize("as_address", [False, True])
def test_a_folder_of_files_is_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_address: bool
) -> None:
    path = make_wheel(tmp_path / "link\u00fcs%41")
    monkeypatch.setenv("PIP_FIND_LINKS", path.parent.as_uri() if as_address else str(path.parent))
    monkeypatch.setenv("PIP_NO_INDEX", "true")
    pip_settings.cache_clear()
    assert Index().url_of("demo", path.name) == path.as_uri()


def test_a_file_is_found_by_its_name_or_said_to_be_missing(web: Server) -> None:
    add_project(web, "demo", {"demo-1.0.tar.gz": b"one", "demo-1.1.tar.gz": b"two"})
    url = Index().url_of("demo", "demo-1.1.tar.gz")
    assert url.partition("#")[0] == web.url("/files/demo-1.1.tar.gz")
    for project in ("demo", "nobody"):
        with pytest.raises(FetchError, match="PIP_FIND_LINKS"):
            Index().url_of(project, "demo-9.whl")


def test_certificates_and_proxy_of_pip_reach_the_downloads(
    monkeypatch: pytest.MonkeyPatch, web: Server, tmp_path: Path
) -> None:
    import certifi

    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "x")  # so that what Index sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CERT", certifi.where())
    monkeypatch.setenv("PIP_PROXY", web.url(""))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    pip_settings.cache_clear()
    add_project(web, "demo", {"demo-1.0.tar.gz": b"one"})
    assert Index().url_of("demo", "demo-1.0.tar.gz")
    assert os.environ["REQUESTS_CA_BUNDLE"] == os.environ["SSL_CERT_FILE"] == certifi.where()
    assert os.environ["https_proxy"] == os.environ["http_proxy"] == web.url("")


def test_torchs_files_are_those_of_uvs_lock(tmp_path: Path) -> None:
    uv = tmp_path / "uv"
    uv.write_text(
        "#!/bin/sh\ncat <<'END'\n[[packages]]\nname = \"torch\"\nwheels = [\n"
        '{ url = "http://127.0.0.1/w/torch-2.0%2Bcpu-py3-none-any.whl", hashes = { sha256 = "x" }'
        " },\n]\nEND\n"
    )
    uv.chmod(0o755)
    url = "http://127.0.0.1/w/torch-2.0%2Bcpu-py3-none-any.whl"
    found = torch_files("torch==2.0+cpu", "3.11", "x86_64", "cpu", uv)
    assert found == [("torch-2.0+cpu-py3-none-any.whl", url, "x")]


@pytest.mark.parametrize("status", [401, 500])
def test_an_index_that_refuses_is_named(web: Server, status: int) -> None:
    web.add("/simple/demo/", Page(b"", statuses=[status]))
    with pytest.raises(FetchError, match=rf"demo: cannot read the package index.*{status}"):
        Index().url_of("demo", "demo-1.0.tar.gz")


def test_a_file_gets_the_password_of_its_index(
    web: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = web.url("/simple").replace("//", "//me:hush@")
    monkeypatch.setenv("PIP_INDEX_URL", secret)
    pip_settings.cache_clear()
    files = {
        "demo-1.0.tar.gz": web.url("/f/demo-1.0.tar.gz"),
        "demo-2.0.tar.gz": "http://127.0.0.2:1/demo-2.0.tar.gz",
    }
    links = "".join(f'<a href="{url}">{name}</a>' for name, url in files.items())
    web.add("/simple/demo/", Page(links.encode()))
    ours = web.url("/f/demo-1.0.tar.gz").replace("//", "//me:hush@")
    assert Index().url_of("demo", "demo-1.0.tar.gz") == ours
    assert "hush" not in Index().url_of("demo", "demo-2.0.tar.gz")


def test_a_malformed_index_url_is_one_error_without_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:hunter2/x@127.0.0.1:1/simple/")
    pip_settings.cache_clear()
    with pytest.raises(FetchError) as caught:
        Index().links("demo")
    assert "hunter2" not in str(caught.value)


def test_a_proxy_with_a_wrong_port_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple/")
    monkeypatch.setenv("PIP_PROXY", "http://u:hunter2/x@127.0.0.1:1")
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    pip_settings.cache_clear()
    with pytest.raises(FetchError) as caught:
        Index().links("demo")
    log.failure(caught.value)
    assert "hunter2" not in capsys.readouterr().err
