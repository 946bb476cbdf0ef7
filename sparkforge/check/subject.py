"""The server that is checked, its container, and how a check says what it found."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkforge.core import plain
from sparkforge.core.errors import MachineError, ServerError
from sparkforge.core.run import glimpse
from sparkforge.runtime import client
from sparkforge.runtime.client import Model, Place, Said
from sparkforge.serving.profile import Profile

ASK_S = 60.0  # for a look at /metrics, or one call of docker
TOKENS = 512  # of an answer: reasoning of low effort takes tens, the rest is a reserve
WEATHER = {"role": "user", "content": "What is the weather in Paris? Use the tool."}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Weather of a city", "parameters": CITY}
TOOLS = [{"type": "function", "function": FUNCTION}]

Asked = str | Sequence[Mapping[str, Any]]  # one question, or messages


class Unmet(Exception):
    """A check failed; the message says what was expected, and what came."""


class Unseen(Exception):
    """A check is not possible here; the message is the reason."""


@dataclass(frozen=True)
class Container:
    """A server's output since its last start, and its image."""

    log: str = ""
    image: str = ""
    problem: str = ""  # why none was found


@dataclass(frozen=True)
class Subject:
    """The server under test."""

    place: Place
    model: Model
    profile: Profile = field(default_factory=Profile)
    container: Container = field(default_factory=Container)
    options: Sequence[str] = ()  # the user's own of ``vllm serve``
    long_tokens: int = 100_000

    @property
    def most_tokens(self) -> int:
        """Return the limit of an answer."""
        return min(TOKENS, max(1, self.model.max_len // 2))

    def body(self, asked: Asked, **options: Any) -> dict[str, Any]:
        """Return a chat at temperature 0."""
        return {
            "model": self.model.name,
            "messages": [{"role": "user", "content": asked}] if isinstance(asked, str) else asked,
            "temperature": 0,
            "reasoning_effort": "low",
            "max_tokens": self.most_tokens,
            **options,
        }

    def chat(self, asked: Asked, *, stream: bool = False, **options: Any) -> Said:
        """Ask, with or without streaming."""
        ask = client.streamed if stream else client.chat
        return ask(self.place, self.body(asked, **options))

    def metrics(self, name: str) -> dict[str, float]:
        """Return the values of a metric in /metrics, by labels; raises Unseen."""
        text = client.look(self.place, "/metrics", ASK_S).text
        found = re.findall(rf"(?m)^{name}(?:\{{(.*)\}})? (\S+)$", text)
        if not found:
            raise Unseen(f"/metrics has no {name} (--disable-log-stats?)")
        return {labels: float(value) for labels, value in found}

    def total(self, name: str) -> float:
        """Return the sum of one of vLLM's metrics; raises Unseen."""
        return sum(self.metrics(f"vllm:{name}").values())


def docker(*words: str) -> str:
    """Return what docker prints, of a log also its other stream; raises Unseen."""
    seen = glimpse("docker", *words, timeout_s=ASK_S)
    if seen.code != 0:
        raise Unseen(f"docker {words[0]}: {shown(seen.problem or seen.err)}")
    return seen.out + (seen.err if words[0] == "logs" else "")


def of_compose(variables: Mapping[str, str], target: str) -> Any:
    """Return the inspection of Compose's container of a target.

    MachineError: Docker does not answer. ServerError: there is no container.
    """
    label, services = "com.docker.compose", (target, f"{target}-head", f"{target}-worker")
    project = f"label={label}.project={variables.get('COMPOSE_PROJECT_NAME') or 'sparkforge'}"
    lasting = f"label={label}.oneoff=False"  # not what is run once, such as `model fetch`
    try:
        names = docker("ps", "-aq", "--filter", project, "--filter", lasting).split()
        every = json.loads(docker("inspect", *names)) if names else []
    except (Unseen, ValueError) as why:  # or what docker prints is no JSON
        raise MachineError(f"no container can be seen: {why}", "start Docker") from None
    for one in every:
        if one["Config"]["Labels"].get(f"{label}.service") in services:
            return one
    raise ServerError(f"Compose has no server of target {target}", "start one: build.py up")


def container_of(place: Place, variables: Mapping[str, str], target: str) -> Container:
    """Return Compose's container of a target, if its port is that of a server."""
    if place != client.place_of(variables):
        return Container(problem=f"{place.url} is not Compose's: name its log with --log")
    try:
        seen = of_compose(variables, target)
        return Container(output(seen), seen["Config"]["Image"])
    except (Unseen, MachineError, ServerError) as why:
        return Container(problem=str(why).partition("\n")[0])


def output(seen: Any) -> str:
    """Return a container's log since its last start; raises Unseen."""
    return docker("logs", "--since", seen["State"]["StartedAt"], seen["Id"])


def need(truth: object, expected: str, got: object) -> None:
    """Raise Unmet unless ``truth`` is true."""
    if not truth:
        raise Unmet(f"expected {expected}, got {shown(got)}")


def shown(value: object) -> str:
    """Return a value on one short line."""
    line = plain.escaped(" ".join((value if isinstance(value, str) else repr(value)).split()))
    return (line if len(line) <= 160 else f"{line[:160]}…") or "nothing"
