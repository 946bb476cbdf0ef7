"""Instructions → a warp's work: its main loop, and its bytes in flight.

A listing has no loops, only branches. The main loop is the one with the most loads of weights. Its
path is the way through it that loads and multiplies most; of several such ways the shortest. So
the branches that end a row, or that leave the loop early, are not on it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparkforge.core.errors import ProofError
from sparkforge.inspect.proofs.listing import Instruction

WARP = 32
"""Threads of a warp."""

_ADDRESS = re.compile(r"0x([0-9a-f]+)\s*$")
_BARRIER = re.compile(r"\bB\d+")
_REGISTER = re.compile(r"\bR(\d+)")
_UNKNOWN = frozenset({"BRX", "BRXU", "JMP", "JMX", "JMXU"})
_WAIT = "ACQBULK"
_CONVERSIONS = frozenset({"F2F", "F2FP", "F2I", "I2F", "I2FP", "MUFU"})
_WIDTH = re.compile(r"\.(U8|S8|U16|S16|64|128)\b")
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}

_PIPES: Mapping[str, frozenset[str]] = {
    "matrix": frozenset({"HMMA", "QMMA", "OMMA", "IMMA"}),
    "multiply": frozenset({"IMAD"}),
    "float32": frozenset({"FADD", "FFMA", "FMUL", "HADD2", "HFMA2", "HMUL2"}),
    "integer": frozenset(
        {
            *(
                "IADD",
                "IADD3",
                "VIADD",
                "ISETP",
                "LEA",
                "LOP3",
                "MOV",
                "PRMT",
                "SEL",
                "SHF",
                "CS2R",
            ),
            *("IMNMX", "VIMNMX", "VIADDMNMX", "PLOP3", "IABS", "FMNMX", "FSETP", "FSEL", "P2R"),
        }
    ),
}


@dataclass(frozen=True)
class Flow:
    """A warp's work.

    Attributes:
        looped: whether there is a main loop; otherwise all weights are loaded before their use.
        weights: bytes that one pass of the path loads, of 16 bytes a thread.
        instructions: of one pass.
        integer, multiply, float32, matrix: of these, those of each unit.
        loaded, shared: bytes that one pass loads, through the first cache and from shared memory.
        beside: instructions of the loop that are not on its path.
        once: number of all instructions outside the loop.
        in_flight: maximum bytes of weights that are loaded and not yet used.
        early: whether weights are loaded before the wait for the previous kernel.
        narrow: global loads of the path with fewer than 16 bytes a thread.
        conversions: of numbers, on the path.
    """

    looped: bool
    weights: int
    instructions: int
    integer: int
    multiply: int
    float32: int
    matrix: int
    loaded: int
    shared: int
    beside: int
    once: int
    in_flight: int
    early: bool
    narrow: tuple[str, ...]
    conversions: tuple[str, ...]


def flow(body: Sequence[Instruction], weights: str) -> Flow | None:
    """Return a warp's work, or None if it loads no weights.

    Args:
        body: of a kernel.
        weights: pattern of the loads of weights, each 16 bytes a thread.

    Raises:
        ProofError: the code branches in an unknown way.
    """
    is_weight = [re.fullmatch(weights, instruction.word) is not None for instruction in body]
    if not any(is_weight):
        return None
    graph = _Graph(body)
    counts = [_counts(instruction) for instruction in body]
    loop = _main_loop(graph, is_weight)
    if loop is None:
        path = graph.path(0, graph.ends(), range(len(body)), lambda i: counts[i])
        inside: frozenset[int] = frozenset(path)
        seen = path
    else:
        head, latches, inside = loop
        path = graph.path(head, latches, inside, lambda i: counts[i])
        before = graph.path(0, [head], range(len(body)), lambda i: is_weight[i])[:-1]
        seen = [*before, *path, *path]
    done = [body[i] for i in path if body[i].opcode != "NOP"]
    real = sum(instruction.opcode != "NOP" for instruction in body)
    within = sum(body[i].opcode != "NOP" for i in inside)
    units = Counter(
        unit
        for instruction in done
        for unit, words in _PIPES.items()
        if instruction.opcode in words
    )
    first = is_weight.index(True)
    waits = [i for i, instruction in enumerate(body) if instruction.opcode == _WAIT]
    return Flow(
        looped=loop is not None,
        weights=16 * WARP * sum(is_weight[i] for i in path),
        instructions=len(done),
        integer=units["integer"],
        multiply=units["multiply"],
        float32=units["float32"],
        matrix=units["matrix"],
        loaded=sum(
            _width(instruction) for instruction in done if instruction.opcode in ("LDG", "LD")
        )
        * WARP,
        shared=sum(_width(instruction) for instruction in done if instruction.opcode == "LDS")
        * WARP,
        beside=within - len(done),
        once=real - within,
        in_flight=16 * WARP * _most_in_flight([body[i] for i in seen], weights),
        early=bool(waits) and first < waits[0],
        narrow=_words(
            done, lambda instruction: instruction.opcode == "LDG" and _width(instruction) < 16
        ),
        conversions=_words(done, lambda instruction: instruction.opcode in _CONVERSIONS),
    )


def _words(done: Sequence[Instruction], wanted: Callable[[Instruction], bool]) -> tuple[str, ...]:
    return tuple(sorted({instruction.word for instruction in done if wanted(instruction)}))


def _counts(instruction: Instruction) -> bool:
    """Return whether the path must have an instruction, if one exists with it."""
    return instruction.opcode in _PIPES["matrix"] or (
        instruction.opcode in ("LDG", "LDS", "STG") and instruction.word.endswith(".128")
    )


def _width(instruction: Instruction) -> int:
    width = _WIDTH.search(instruction.word)
    return _BYTES[width[1]] if width else 4


def _most_in_flight(seen: Sequence[Instruction], weights: str) -> int:
    """Return a warp's maximum number of waiting loads of weights; a use ends a load's wait."""
    waiting: set[int] = set()
    most = 0
    for instruction in seen:
        named = [int(number) for number in _REGISTER.findall(instruction.operands)]
        if re.fullmatch(weights, instruction.word):
            if not re.match(r"R\d+,", instruction.operands):
                msg = f"{instruction.text}: fills no registers, so its bytes in flight are unknown"
                raise ProofError(msg, "add these loads to sparkforge/inspect/proofs/flow.py")
            waiting -= {first for first in waiting if any(0 <= r - first < 4 for r in named[1:])}
            waiting.add(named[0])
            most = max(most, len(waiting))
        else:
            waiting -= {first for first in waiting if any(0 <= r - first < 4 for r in named)}
    return most


class _Graph:
    """The forward branches of a kernel; backward ones are its loops."""

    def __init__(self, body: Sequence[Instruction]) -> None:
        self._at = {instruction.offset: i for i, instruction in enumerate(body)}
        self._next: list[list[int]] = []
        self.back: list[tuple[int, int]] = []  # latch, head
        for i in range(len(body)):
            targets = self._targets(body, i)
            self.back += [(i, target) for target in targets if target < i]
            self._next.append([target for target in targets if i < target < len(body)])

    def _targets(self, body: Sequence[Instruction], i: int) -> list[int]:
        instruction = body[i]
        if instruction.opcode in _UNKNOWN:
            msg = f"{instruction.text}: a branch whose target is not in the code"
            raise ProofError(msg, "this version of sparkforge cannot follow it")
        if instruction.opcode in ("EXIT", "RET"):
            return [i + 1] if instruction.predicate else []
        if instruction.opcode == "BRA":
            target = _ADDRESS.search(instruction.operands)
            if target is None:
                raise ProofError(f"{instruction.text}: no address", "this version cannot read it")
            always = not instruction.predicate and target.start() == 0
            there = self._at[int(target[1], 16)]
            return [there] if always else [i + 1, there]
        if instruction.opcode == "BSYNC":  # it continues at the target of its barrier's BSSY
            barrier = _BARRIER.findall(instruction.operands)
            for before in reversed(body[:i]):
                if before.opcode == "BSSY" and _BARRIER.findall(before.operands) == barrier:
                    target = _ADDRESS.search(before.operands)
                    there = self._at[int(target[1], 16)] if target else i + 1
                    return [there] if there > i else [i + 1]
        return [i + 1]

    def ends(self) -> list[int]:
        """Return the instructions without a successor."""
        return [i for i, after in enumerate(self._next) if not after]

    def reached(self, start: int, last: int) -> set[int]:
        """Return the instructions that forward branches reach from one, up to ``last``."""
        found = {start}
        for i in range(start, last + 1):
            if i in found:
                found.update(after for after in self._next[i] if after <= last)
        return found

    def inside(self, head: int, latch: int) -> frozenset[int]:
        """Return the instructions between a loop's head and its latch; none if it is no loop."""
        found = self.reached(head, latch)
        if latch not in found:
            return frozenset()
        leads = {latch}
        for i in range(latch - 1, head - 1, -1):
            if i in found and any(after in leads for after in self._next[i]):
                leads.add(i)
        return frozenset(leads)

    def path(
        self,
        start: int,
        goals: Sequence[int],
        within: Sequence[int] | frozenset[int],
        counts: Callable[[int], bool],
    ) -> list[int]:
        """Return the way with the most instructions that count, the shortest of several.

        Raises:
            ProofError: none of the goals can be reached.
        """
        inside = set(within)
        best: dict[int, tuple[int, int]] = {start: (counts(start), -1)}
        came: dict[int, int] = {}
        for i in range(start, max(goals) + 1):
            if i not in best:
                continue
            most, length = best[i]
            for after in self._next[i]:
                value = (most + counts(after), length - 1)
                if after in inside and (after not in best or best[after] < value):
                    best[after], came[after] = value, i
        reached = [goal for goal in goals if goal in best]
        if not reached:
            raise ProofError("no way through the code", "this version cannot follow it")
        at = max(reached, key=lambda goal: best[goal])
        way = [at]
        while at != start:
            at = came[at]
            way.append(at)
        return way[::-1]


def _main_loop(
    graph: _Graph, is_weight: Sequence[bool]
) -> tuple[int, list[int], frozenset[int]] | None:
    """Return head, latches and instructions of the smallest loop that loads the most weights."""
    loops: dict[int, tuple[list[int], frozenset[int]]] = {}
    for latch, head in graph.back:
        if inside := graph.inside(head, latch):
            latches, known = loops.get(head, ([], frozenset()))
            loops[head] = ([*latches, latch], known | inside)
    found = [
        (sum(is_weight[i] for i in inside), -len(inside), head)
        for head, (_, inside) in loops.items()
    ]
    loads, _, head = max(found, default=(0, 0, 0))
    return (head, *loops[head]) if loads else None
