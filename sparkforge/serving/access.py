"""Who may ask: the API key, and whether a server without one may be open to others."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sparkforge.serving.errors import StartError

KEY_FILE = Path("/run/secrets/api_key")
_SECRET_OPTIONS = ("--api-key", "--hf-token")
SECRET_NAME = r"(?:api[-_]?key|token(?!iz|s)|secret|passw|credential|authorization)"
"""Pattern, in lower case, of what names of secrets hold; ``max_tokens`` is none."""
IN_URL = re.compile(r"(?<=://)(?:[^/\s\"'<>]+|[^/@:\s\"'<>]+:(?!\d{1,5}/)[^\s\"'<>]*)@")
"""User name and password of an address; a password may hold a slash, which a port's number ends
at."""
_IN_JSON = re.compile(
    rf'("[^"]*{SECRET_NAME}[^"]*"\s*:\s*)"(?:[^"\\]|\\.)*"?', re.IGNORECASE | re.DOTALL
)
_IN_DOTTED = re.compile(rf"--[^.]+\..*{SECRET_NAME}", re.IGNORECASE)
_INSTEAD = {
    # vLLM then takes these keys alone, whatever else we gave it; and options show to everybody
    "--api-key": "name a file with the key in SPARKFORGE_API_KEY_FILE",
    "--port": "the port on the host is SPARKFORGE_PORT, the one in the container"
    " SPARKFORGE_LISTEN_PORT",
    "--uds": "put a proxy in front that listens there",
    "--ssl-keyfile": "put a proxy in front that speaks TLS",
    "--ssl-certfile": "put a proxy in front that speaks TLS",
}


_NO_HEADER = (
    "holds what no HTTP header can carry: use ASCII letters, digits and signs (an editor may have"
    " put a byte order mark in front)"
)
_HOSTS = ("127.0.0.1", "localhost", "0.0.0.0")
"""Where the health check finds the server."""


class AccessError(StartError):
    """The server would be open to others, or closed to us; the message says what to do."""


def api_key(variables: Mapping[str, str], file: Path = KEY_FILE) -> str:
    """Return the key that requests must carry, or "" for none.

    A secret's file comes before VLLM_API_KEY: what is in the environment shows in
    ``docker inspect``. An empty file (Compose mounts /dev/null where none is named) is no key.

    Raises:
        AccessError: the file is there and cannot be read, or holds more than one line; one that
            SPARKFORGE_API_KEY_PATH names is missing; or no request could carry the key.
    """
    named = variables.get("SPARKFORGE_API_KEY_PATH")
    path = Path(named or file)
    try:
        key = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        if named:
            msg = f"SPARKFORGE_API_KEY_PATH names {path}, and there is no such file"
            raise AccessError(msg) from None
        key = ""
    except UnicodeDecodeError:
        raise AccessError(f"the API key in {path} {_NO_HEADER}") from None
    except OSError as error:
        msg = (
            f"the API key in {path} cannot be read by user {os.getuid()}: {error};"
            " make the file readable for that user on the host (it is mounted as it is)"
        )
        raise AccessError(msg) from None
    if any(character.isspace() for character in key):
        msg = f"the API key in {path} is more than one word: write nothing else into the file"
        raise AccessError(msg)
    where = path if key else "VLLM_API_KEY"
    key = key or variables.get("VLLM_API_KEY", "")
    if not (key.isascii() and key.isprintable()):  # our own looks would fail, for ever
        raise AccessError(f"the API key in {where} {_NO_HEADER}")
    return key


def check_options(words: Sequence[str]) -> None:
    """Refuse options with which health check and warm-up would not reach the server.

    It would load for minutes, serve, and never be healthy.

    Raises:
        AccessError: such an option is among the caller's.
    """
    for index, word in enumerate(words):
        given, equals, value = word.partition("=")
        if option := _meant(given, _INSTEAD):
            msg = f"{option} among the options hides the server from its health check:"
            raise AccessError(f"{msg} {_INSTEAD[option]}")
        value = value if equals else "".join(words[index + 1 : index + 2])
        if _meant(given, ("--host",)) and value not in _HOSTS:
            msg = f"--host {value} among the options hides the server from its health check:"
            raise AccessError(f"{msg} SPARKFORGE_BIND is the address on the host")


def _meant(word: str, options: Iterable[str]) -> str:
    """Return the one of some options that vLLM could take a word for, which it may cut short."""
    plain = word.replace("_", "-")
    whole = (one for one in options if len(plain) > len("--") and one.startswith(plain))
    return next(whole, "")


def check_open(variables: Mapping[str, str], key: str) -> None:
    """Refuse to serve others than this machine without a key.

    Args:
        variables: SPARKFORGE_BIND is the host's address that Compose publishes the port on.

    Raises:
        AccessError: that would happen, and SPARKFORGE_ALLOW_OPEN is not 1.
    """
    import ipaddress  # every command imports this module, for its patterns

    bind = variables.get("SPARKFORGE_BIND", "127.0.0.1")
    try:
        local = ipaddress.ip_address(bind.strip("[]")).is_loopback
    except ValueError:
        local = bind == "localhost"
    if local or key or variables.get("SPARKFORGE_ALLOW_OPEN") == "1":
        return
    msg = (
        f"port published on {bind} without an API key: anybody who reaches it may use the model."
        " Name a file with a key in SPARKFORGE_API_KEY_FILE, or say SPARKFORGE_ALLOW_OPEN=1"
    )
    raise AccessError(msg)


def shown(text: object) -> str:
    """Return what another program said, in one line, without passwords of URLs and tokens."""
    line = IN_URL.sub("***@", " ".join(str(text).split()))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if len(secret := os.environ.get(name, "").strip()) > 3:
            line = line.replace(secret, "***")
    return "".join(one if one.isprintable() else "?" for one in line)[:300]


def redacted(words: Sequence[str]) -> list[str]:
    """Return a command with the secrets in it replaced, for the log.

    Secrets are the values of options for them, texts below such names in JSON and in options with
    dots (``--kv-transfer-config.token``), and what stands in front of a URL's host.
    """
    shown: list[str] = []
    secret = False
    for word in words:
        option, equals, _ = word.partition("=")
        if _meant(option, _SECRET_OPTIONS) or _IN_DOTTED.match(option):
            secret = not equals
            shown.append(f"{option}=***" if equals else option)
        elif secret and not word.startswith("--"):  # --api-key takes several
            shown.append("***")
        else:
            secret = False
            shown.append(IN_URL.sub("***@", _IN_JSON.sub(r'\1"***"', word)))
    return shown
