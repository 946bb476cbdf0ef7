"""Load with long unbroken text in the mix, run by hand against any server of vLLM (docs/accept.md).

Eight clients stream completions, whose tokens are counted. The others chat: short ones, ones that
go away, bad ones, and in one of ten a text without a break. Prints what was lost, the slowest
/health, and the memory of a process and its descendants.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests

TOKENS = 200  # of a stream
PATIENCE_S = 120
KINDS = ("x", " ", "\n", "=", "\u00e9", "\u4e2d", "ACGT")
MIB = 1 << 20


class Load:
    """What is sent, and what came of it."""

    def __init__(self, url: str, key: str, unbroken: int) -> None:
        self.url, self.unbroken = url.rstrip("/"), unbroken
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.end = threading.Event()
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.lost: list[str] = []
        self.health: list[float] = []
        self.model = self.get("/v1/models").json()["data"][0]["id"]

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, headers=self.headers, timeout=PATIENCE_S)

    def post(self, path: str, body: dict[str, Any]) -> requests.Response:
        return requests.post(
            self.url + path,
            json={"model": self.model, **body},
            headers=self.headers,
            stream=bool(body.get("stream")),
            timeout=PATIENCE_S,
        )

    def chat(self, text: str, **options: Any) -> requests.Response:
        messages = [{"role": "user", "content": text}]
        return self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 64} | options)

    def until_end(self, name: str, act: Callable[[], str]) -> None:
        """Repeat an act; what it returns is counted, and what it raises is lost."""
        while not self.end.is_set():
            try:
                said = act()
            except Exception as error:
                with self.lock:
                    self.lost.append(f"{name}: {type(error).__name__}: {error}"[:300])
                continue
            with self.lock:
                self.counts[said] += 1

    def stream(self) -> str:
        body = {"prompt": "Hello", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        tokens, last = 0, b""
        with self.post("/v1/completions", body | {"return_token_ids": True}) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                last = line or last
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    tokens += len(choice["token_ids"])
        assert (tokens, last) == (TOKENS, b"data: [DONE]"), f"{tokens} tokens, then {last!r}"
        return "streams"

    def other(self) -> str:
        kind = random.random()
        if kind < 0.1 and self.unbroken:
            unit = random.choice(KINDS)
            text = unit * (self.unbroken // len(unit.encode()))
            status = self.chat(text, max_tokens=1).status_code
            assert status in (200, 400), f"status {status} for {unit!r}"
            return f"unbroken text: {status}"
        if kind < 0.4:
            with self.chat("Tell me a story.", stream=True) as reply:
                for _ in zip(range(random.randrange(9)), reply.iter_lines(), strict=False):
                    pass
            return "cancelled"
        if kind < 0.5:
            status = self.chat("Hello", max_tokens=-1).status_code
            assert status == 400, f"status {status} for a bad request"
            return "bad requests"
        self.chat("What is the weather in Paris?").raise_for_status()
        return "short chats"

    def look(self) -> str:
        began = time.monotonic()
        self.get("/health").raise_for_status()
        self.health.append(time.monotonic() - began)
        time.sleep(0.05)
        return "looks at /health"


def resident(root: int) -> dict[str, int]:
    """Return the resident memory of a process and its descendants, in MiB by name and id."""
    parents: dict[int, int] = {}
    sizes: dict[int, tuple[str, int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            said = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        except OSError:
            continue  # it has ended
        pid = int(folder.name)
        parents[pid] = int(said["PPid"])
        kib = int(said.get("VmRSS", "0 kB").split()[0])
        sizes[pid] = (said["Name"].strip(), kib >> 10)

    def ours(pid: int) -> bool:
        return pid == root or (pid in parents and ours(parents[pid]))

    return {f"{name} {pid}": mib for pid, (name, mib) in sorted(sizes.items()) if ours(pid)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="for example http://127.0.0.1:8000")
    parser.add_argument("--key", default="")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--unbroken", type=int, default=600_000, help="bytes; 0: none")
    parser.add_argument("--pid", type=int, default=0, help="of the server; its memory is printed")
    asked = parser.parse_args()
    load = Load(asked.url, asked.key, asked.unbroken)
    acts = [load.stream] * 8 + [load.other] * (asked.clients - 8) + [load.look]
    threads = [
        threading.Thread(target=load.until_end, args=(act.__name__, act), daemon=True)
        for act in acts
    ]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    while (passed := time.monotonic() - began) < asked.seconds:
        if asked.pid:
            print(f"{passed:4.0f} s", {k: v for k, v in resident(asked.pid).items() if v >= 100})
        time.sleep(min(30, asked.seconds - passed))
    load.end.set()
    for thread in threads:
        thread.join()
    print(dict(sorted(load.counts.items())))
    print(f"lost: {len(load.lost)}", *load.lost[:9], sep="\n  ")
    times = sorted(load.health) or [float("inf")]
    print(f"/health: slowest {times[-1]:.3f} s, median {times[len(times) // 2]:.3f} s")


if __name__ == "__main__":
    main()
