"""An agent's conversation finds its own past in the prefix cache, turn after turn."""

import re
from typing import Any
from uuid import uuid4

import requests

from tests.patches.scripting import Scripts, answer, call, reply, thought
from tests.patches.served import Served
from tests.support import PATIENCE_S, wait_for

TURNS = 10
FUNCTION = {"name": "read", "description": "Reads a file", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
TEXT = " ".join(f"line {number}: return value" for number in range(60))
"""A tool's result: several blocks of the cache."""


class Conversation:
    """What a client keeps, and what its last request and the reply to it were as tokens."""

    def __init__(self, server: Served) -> None:
        self._server = server
        self._salt = uuid4().hex  # nothing is cached from another conversation
        self.messages: list[Any] = []
        self.before: list[int] = []

    def ask(self) -> tuple[list[int], int, dict[str, Any]]:
        """Return the prompt, the tokens of it that were cached, and the reply's message."""
        hits, queries = self._counted()
        body = {"messages": self.messages, "tools": TOOLS, "return_token_ids": True}
        body["cache_salt"] = self._salt
        found = self._server.post("/v1/chat/completions", {**body, "temperature": 0}).json()
        (choice,) = found["choices"]
        prompt: list[int] = found["prompt_token_ids"]
        # not exactly: an idle server's health check asks for a few more
        wait_for(lambda: self._counted()[1] >= queries + len(prompt))
        cached, message = self._counted()[0] - hits, choice["message"]
        kept = {name: message.get(name) for name in ("role", "reasoning", "content", "tool_calls")}
        self.messages.append(kept)
        self.before = prompt + choice["token_ids"]
        return prompt, cached, message

    def _counted(self) -> tuple[int, int]:
        """Return how many tokens were found in the cache, of how many."""
        hits, queries = (
            int(float(self.metric(rf"prefix_cache_{name}_total\S* (\S+)$")))
            for name in ("hits", "queries")
        )
        return hits, queries

    def metric(self, pattern: str) -> str:
        """Return what the server's metrics have for a group."""
        url = f"http://127.0.0.1:{self._server.port}/metrics"
        key = {"Authorization": "Bearer the-key"}
        text = requests.get(url, headers=key, timeout=PATIENCE_S).text
        return str(re.findall(rf"(?m)^vllm:{pattern}", text)[0])


def common(first: list[int], second: list[int]) -> int:
    """Return how many tokens are the same from the start."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))


def test_only_dropped_reasoning_is_not_found_again(scripted: Scripts) -> None:
    """Within a turn all is; across turns all up to the first reasoning, which Harmony drops.

    A call is rendered in the one of Harmony's two forms that the template has. In the other one it
    is read anew, once.
    """
    one = Conversation(scripted.server)
    block = int(one.metric(r'cache_config_info\{.*\bblock_size="(\d+)"'))
    kept = 0  # tokens of the request before and its reply, which the next prompt has to have
    for turn in range(TURNS):
        as_rendered = f' to=functions.read<|channel|>commentary json<|message|>{{"file":"é{turn}"}}'
        name = scripted.write(
            f"turn-{turn}",
            reply(thought(f"First step of {turn}."), f"{as_rendered}<|call|>"),
            reply(thought("Another."), call("read", f'{{ "file" : "b/{turn}" , "from": 1.0}}')),
            reply(thought("All is read."), answer(f"File {turn} is fine.")),
        )
        one.messages.append({"role": "user", "content": f"Read file {turn} ({name})."})
        began = 0
        for step in range(3):
            before = one.before
            prompt, cached, message = one.ask()
            began = began or len(prompt)
            same = common(before, prompt)
            assert same >= kept, (turn, step)
            # of a reply's last token nothing is computed
            found = max(0, min(same, len(before) - 1))
            assert cached == found // block * block, (turn, step)
            last_header = len(one.before) - one.before[::-1].index(prompt[0])
            kept = (len(one.before), last_header, began)[step]
            for called in message.get("tool_calls") or []:
                result = {"role": "tool", "tool_call_id": called["id"], "content": TEXT}
                one.messages.append(result)
        assert message["content"] == f"File {turn} is fine."
