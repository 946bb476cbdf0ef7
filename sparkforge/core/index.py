"""Find the address of a release file, in the package index of pip's configuration.

pip's own settings (index, extra indexes, find-links, certificates, from its files and from
PIP_* variables) are read with ``pip config``; unearth reads the pages by pip's rules. The
result is only an address: the sha256 of the file is checked later.
"""

from __future__ import annotations

import ast
import logging
import os
import sys
import tomllib
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit, urlunsplit

from sparkforge.core.errors import CommandError, FetchError
from sparkforge.core.run import call

if TYPE_CHECKING:
    from unearth import PackageFinder
    from unearth.link import Link


@cache
def pip_settings() -> dict[str, str]:
    """Return pip's configuration; it is read once in a run, and only if a download is needed."""
    values = {}
    lines = [line.partition(".") for line in pip_config().splitlines()]
    # variables (:env:) override files, and within files a command's section overrides global
    for wanted in ("global", "install", "download", ":env:"):
        for section, _, rest in lines:
            key, _, value = rest.partition("=")
            if section == wanted and (text := str(ast.literal_eval(value))):
                values[key] = text  # pip ignores an empty variable
    return values


def pip_config() -> str:
    """Return the output of ``pip config list``: lines of ``SECTION.KEY='VALUE'``."""
    return call(sys.executable, "-m", "pip", "config", "list").stdout.decode()


def uv_variables() -> dict[str, str]:
    """Return the variables with which uv finds what pip finds (scripts/lock.sh)."""
    settings = pip_settings()
    found = {"UV_FIND_LINKS": ",".join(settings.get("find-links", "").split())}
    if "UV_INDEX_URL" not in os.environ:  # the older name of the same
        found["UV_DEFAULT_INDEX"] = settings.get("index-url", "")
    return {name: value for name, value in found.items() if value and name not in os.environ}


def _indexes() -> list[str]:
    """Return the index URLs; FetchError for one that is no URL (its text may have a password)."""
    settings = pip_settings()
    if settings.get("no-index", "").lower() in ("1", "true", "t", "yes", "y", "on"):
        return []
    from unearth import PackageFinder

    default = PackageFinder().sources[0]["url"]  # this project names no index
    urls = [settings.get("index-url", default), *settings.get("extra-index-url", "").split()]
    for at, url in enumerate(urls, 1):
        try:
            _ = urlsplit(url).port
        except ValueError:
            msg = f"index URL {at} of pip's configuration has an invalid host or port"
            raise FetchError(msg, "fix it; encode special characters of a password") from None
    return urls


class Index:
    """Files by name and hash, in indexes and find-links."""

    @cached_property
    def _finder(self) -> PackageFinder:
        from unearth import PackageFinder

        settings = pip_settings()
        cert, proxy = settings.get("cert"), settings.get("proxy")
        wanted = {"SSL_CERT_FILE": cert, "REQUESTS_CA_BUNDLE": cert}
        for name, value in (wanted | {"http_proxy": proxy, "https_proxy": proxy}).items():
            if value and name not in os.environ and name.upper() not in os.environ:
                os.environ[name] = value  # for the downloads, too
        finder = PackageFinder(
            trusted_hosts=settings.get("trusted-host", "").split(),
            ignore_compatibility=True,  # an amd64 machine needs arm64 wheels, too
        )
        finder.sources.clear()  # of its default
        for url in _indexes():
            finder.add_index_url(url)
        for place in settings.get("find-links", "").split():
            finder.add_find_links(place)
        auth: Any = finder.session.auth  # type: ignore[attr-defined]
        auth.prompting = False  # 401 is an answer, not a question to the terminal
        return finder

    def links(self, project: str, *, all_answer: bool = False) -> list[Link]:
        """Return all files of a project that the index lists; FetchError: no index can be read.

        ``all_answer`` refuses an index that gives no answer, even if another one has files: the
        newest version is in any. 404 is an answer: that index does not have the project.
        """
        from logging.handlers import BufferingHandler

        links, said = [], []
        # unearth's only sign of an unusable answer
        logger, warnings = logging.getLogger("unearth.collector"), BufferingHandler(1 << 20)
        warnings.setLevel(logging.WARNING)
        logger.addHandler(warnings)
        try:
            found = self._finder.find_all_packages(project, allow_yanked=True)
            links = [package.link for package in found]
        except FetchError:
            raise
        except Exception as error:  # httpx's, unearth's and parser errors share no base class
            said.append(f"{type(error).__name__}: {error}")
        finally:
            logger.removeHandler(warnings)
        said += [record.getMessage() for record in warnings.buffer]
        refused = [text for text in said if "Client Error(404)" not in text]
        if refused and (all_answer or not links):
            msg = f"{project}: cannot read the package index: {'; '.join(refused)}"
            raise FetchError(msg, "check network, proxy and pip's configuration (pip config list)")
        return links

    def url_of(self, project: str, file: str) -> str:
        """Return the address of a file by its name; FetchError if no index lists it."""
        for link in self.links(project):
            if link.filename == file:
                return address_of(link)
        msg = f"{file}: the package index of pip's configuration has no such file"
        raise FetchError(msg, "configure pip with one that has it, or a folder (PIP_FIND_LINKS)")


def address_of(link: Link) -> str:
    """Return a file's address, with the user and password that pip's settings have for the host."""
    url = str(link.normalized)
    parts = urlsplit(url)
    places = (pip_settings().get(one, "") for one in ("index-url", "extra-index-url", "find-links"))
    for known in map(urlsplit, " ".join(places).split()):
        user, at, host = known.netloc.rpartition("@")
        if at and (known.scheme, host) == (parts.scheme, parts.netloc):
            return urlunsplit(parts._replace(netloc=f"{user}@{host}"))
    return url


def sha256_of(link: Link) -> str | None:
    """Return the sha256 of a file in the index, or None."""
    found = (link.hash_option or {}).get("sha256")
    return found[0] if found else None


def torch_files(
    requirement: str, python: str, machine: str, backend: str, uv: Path
) -> list[tuple[str, str, str]]:
    """Return (name, url, sha256) of torch's files by uv, which has PyTorch's indexes by backend.

    For example of ``torch==2.13.0+cpu``, ``3.11``, ``x86_64``, ``cpu``. FetchError: there is none.
    """
    words = ["--no-deps", "--quiet", "--no-header", "--format", "pylock.toml"]
    words += ["--python-version", python, "--torch-backend", backend]
    words += ["--python-platform", f"{machine}-manylinux_2_28"]
    try:
        done = call(uv, "pip", "compile", "-", *words, stdin=requirement.encode())
    except CommandError as error:
        msg = f"{requirement}: neither pip's index nor PyTorch's has it:\n{error}"
        remedy = "check the network, or give pip a folder with the wheel (PIP_FIND_LINKS)"
        raise FetchError(msg, remedy) from error
    (package,) = tomllib.loads(done.stdout.decode())["packages"]  # --no-deps
    wheels = package.get("wheels", [])
    found = [(str(one["url"]), str(one.get("hashes", {}).get("sha256"))) for one in wheels]
    return [(unquote(urlsplit(url).path.rpartition("/")[2]), url, sha256) for url, sha256 in found]
