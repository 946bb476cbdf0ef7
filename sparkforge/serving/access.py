"""Access to the server: the API key, options that would open another way in, secrets in logs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sparkforge.serving.errors import StartError

KEY_FILE = Path("/run/secrets/api_key")
_SECRET_OPTIONS = ("--api-key", "--hf-token")
SECRET_NAME = r"(?:api[-_]?key|token(?!iz|s)|secret|passw|credential|authorization)"
"""Pattern, in lower case, in the names of secrets; it does not match ``max_tokens``."""
IN_URL = re.compile(r"(?<=://)(?:[^/\s\"'<>]+|[^/@:\s\"'<>]+:(?!\d{1,5}/)[^\s\"'<>]*)@")
"""User name and password of an address. A password may have a slash, which also ends a port."""
_IN_JSON = re.compile(
    rf'("[^"]*{SECRET_NAME}[^"]*"\s*:\s*)"(?:[^"\\]|\\.)*"?', re.IGNORECASE | re.DOTALL
)
_IN_DOTTED = re.compile(rf"--[^.]+\..*{SECRET_NAME}", re.IGNORECASE)
_REFUSED = {
    # each would open another way in, or move the one that the front door uses
    "--api-key": "name a file with the key in SPARKFORGE_API_KEY_FILE",
    "--host": "SPARKFORGE_BIND is the address on the host",
    "--port": "SPARKFORGE_PORT is the port on the host",
    "--uds": "the front door uses that socket",
    "--grpc": "nothing would check its requests",
    "--config": "write the options into SPARKFORGE_EXTRA_ARGS",
    "--root-path": "the paths are the front door's",
    "--data-parallel-multi-port-external-lb": "use replicas",
    **dict.fromkeys(
        ("--allow-credentials", "--allowed-headers", "--allowed-methods", "--allowed-origins"),
        "name the web pages in SPARKFORGE_ORIGINS",
    ),
    **dict.fromkeys(("--enable-ssl-refresh", "--ssl-"), "use a proxy for TLS"),
}


class AccessError(StartError):
    """The server would be open to others, or unreachable for our checks; the message has a hint."""


def api_key(variables: Mapping[str, str], file: Path = KEY_FILE) -> str:
    """Return the key that requests have to send, or "" for none.

    The file of the secret has priority over VLLM_API_KEY, since ``docker inspect`` shows the
    environment. An empty file stands for no key: Compose mounts /dev/null by default.

    Raises:
        AccessError: the file cannot be read, or no request could send the key.
    """
    try:
        key = file.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        key = ""
    except OSError as error:
        msg = (
            f"the API key in {file} cannot be read by user {os.getuid()}: {error};"
            " make the file readable for that user on the host"
        )
        raise AccessError(msg) from None
    where = file if key else "VLLM_API_KEY"
    key = key or variables.get("VLLM_API_KEY", "").strip()
    if not re.fullmatch("[!-~]*", key):  # our own checks would always fail
        msg = f"the API key in {where} must be one word of ASCII letters, digits and signs"
        raise AccessError(f"{msg} (an editor may have added a byte order mark)")
    return key


def check_options(words: Sequence[str]) -> None:
    """Refuse options that would open the server another way than by the front door.

    Raises:
        AccessError: one of the words is such an option, or an abbreviation.
    """
    for word in words:
        name = word.partition("=")[0]
        option = _meant(name, _REFUSED) or ("--ssl-" if name.startswith("--ssl") else "")
        if option:
            raise AccessError(f"the option {name} is not possible here: {_REFUSED[option]}")


def _meant(word: str, options: Iterable[str]) -> str:
    """Return the option that vLLM's parser could take a word for, abbreviated or not, or ""."""
    plain = word.replace("_", "-")
    whole = (option for option in options if len(plain) > len("--") and option.startswith(plain))
    return next(whole, "")


def check_open(bind: str, key: str, *, allowed: bool) -> None:
    """Refuse to serve other machines without a key.

    Args:
        bind: address that the port is published on.
        allowed: the user wants it so (SPARKFORGE_ALLOW_OPEN).

    Raises:
        AccessError: there is no key.
    """
    import ipaddress  # every command imports this module, for its patterns

    try:
        local = ipaddress.ip_address(bind.strip("[]")).is_loopback
    except ValueError:
        local = bind == "localhost"
    if not (local or key or allowed):
        msg = (
            f"port published on {bind} without an API key: everybody who reaches it can use the"
            " model. Name a file with a key in SPARKFORGE_API_KEY_FILE, or set"
            " SPARKFORGE_ALLOW_OPEN=1"
        )
        raise AccessError(msg)


def shown(text: object) -> str:
    """Return another program's message in one line, without passwords of URLs and tokens."""
    line = IN_URL.sub("***@", " ".join(str(text).split()))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if len(secret := os.environ.get(name, "").strip()) > 3:
            line = line.replace(secret, "***")
    return "".join(letter if letter.isprintable() else "?" for letter in line)[:300]


def redacted(words: Sequence[str]) -> list[str]:
    """Return a command for the log, with its secrets replaced.

    Secrets are values of options, of keys in JSON and of options with dots
    (``--kv-transfer-config.token``) with a secret's name, and user and password of a URL.
    """
    shown: list[str] = []
    secret = False
    for word in words:
        option, equals, _ = word.partition("=")
        if _meant(option, _SECRET_OPTIONS) or _IN_DOTTED.match(option):
            secret = not equals
            shown.append(f"{option}=***" if equals else option)
        elif secret and not word.startswith("--"):  # --api-key takes several values
            shown.append("***")
        else:
            secret = False
            shown.append(IN_URL.sub("***@", _IN_JSON.sub(r'\1"***"', word)))
    return shown
