"""``accept --gpqa FILE``: vLLM's own accuracy job for gpt-oss, on a running server.

vLLM's CI has a job for a Spark (0.31.0, .buildkite/test_areas/lm_eval.yaml, "(DGX) Spark GPQA
Eval"): GPQA diamond by the package gpt-oss, each question eight times with the choices in another
order, /v1/responses, temperature 1, reasoning effort low, at most 32,768 tokens. This is the same
task: the same questions, orders, prompt and limits. Only the search for the letter in an answer is
our own.

GPQA's authors ask not to publish its questions, so they are neither stored nor printed.
"""

from __future__ import annotations

import csv
import hashlib
import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from threading import Event, Lock
from typing import Any

from sparkforge.core.disk import disk_errors
from sparkforge.core.errors import UsageError
from sparkforge.core.log import counted, log
from sparkforge.core.parallel import in_parallel
from sparkforge.inspect.accept.row import Subject, Unmet
from sparkforge.runtime import client

SOURCE = "https://openaipublic.blob.core.windows.net/simple-evals/gpqa_diamond.csv"
"""The source of the questions in vLLM's job (gpt-oss 0.0.9, evals/gpqa_eval.py)."""
QUESTIONS, REPEATS = 198, 8
THRESHOLD_20B = 0.568 - 0.05
"""metric_threshold of gpt-oss-20b-sm120.yaml less TOL of test_gpqa_correctness.py, both in
tests/evals/gpt_oss of vLLM 0.31.0. All of its configurations are for 20b: 120b has no figure."""
_EFFORT, _TOKENS, _AT_ONCE = "low", 32_768, 200
_TRIES, _PAUSE_S = 3, 5.0
_ANSWER_S = 3600.0
_KEPT = re.compile(r"(?m)^(\d{1,6}) ([A-D]?)-? (\d+\.\d+);$")
_CORRECT = "Correct Answer"
_COLUMNS = (_CORRECT, *(f"Incorrect Answer {number}" for number in (1, 2, 3)))
_LETTERS = "ABCD"
# the prompt of gpt-oss 0.0.9 (Apache-2.0) and of the thresholds
_ASK = "Express your final answer as the corresponding option 'A', 'B', 'C', or 'D'."
# the clearest pattern first; of its matches the last
_SAID = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?i:answers?)[\s*_:\-–(]*(?i:is|option)?[\s*_:(]*([ABCD])\b",
        r"\\boxed\{[^{}]*?(?:\\text\w*\{)?[\s(]*([ABCD])\b",
        r"(?i:option|choice)[\s*_:(]*([ABCD])\b",
        r"(?m)^[\s*_(\[]*([ABCD])(?:[).:*_\]]|\s*$)",
        r"[(\[*_]\s*([ABCD])\s*[)\]*_]",
    )
)


@dataclass(frozen=True)
class Questions:
    """The data set.

    Attributes:
        rows: each question's text, its right answer and three wrong ones.
        sha256: of the file.
    """

    rows: tuple[tuple[str, ...], ...]
    sha256: str

    @classmethod
    def load(cls, path: Path) -> Questions:
        """Read gpqa_diamond.csv.

        Raises:
            UsageError: the file is missing, or a different one.
        """
        hint = f"download {SOURCE} yourself; nothing is downloaded here (docs/accept.md)"
        try:
            data = path.read_bytes()
            rows = list(csv.DictReader(StringIO(data.decode(), newline=""), strict=True))
        except OSError as error:
            raise UsageError(f"--gpqa {path}: {error.strerror}", hint) from None
        except (UnicodeDecodeError, csv.Error) as error:
            raise UsageError(f"--gpqa {path} is not CSV: {error}", hint) from None
        names = ("Question", *_COLUMNS)
        if missing := [name for name in names if any(not row.get(name) for row in rows or [{}])]:
            raise UsageError(f"--gpqa {path}: a row without {missing[0]!r}", hint)
        if len(rows) != QUESTIONS:
            msg = f"--gpqa {path} has {len(rows)} questions, GPQA diamond has {QUESTIONS}"
            raise UsageError(msg, hint)
        found = tuple(tuple(row[name] for name in names) for row in rows)
        return cls(found, hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class Score:
    """The result.

    Attributes:
        score: share of right answers.
        error: its standard error, over the questions.
        unclear: number of answers without a letter; they count as wrong.
        seconds: of all runs; of an interrupted one up to its last answer.
    """

    score: float
    error: float
    threshold: float
    unclear: int
    repeats: int
    sha256: str
    seconds: float

    def document(self) -> dict[str, Any]:
        """Return it as JSON values, with the task."""
        return {
            "task": "GPQA diamond",
            "source": SOURCE,
            "sha256": self.sha256,
            "questions": QUESTIONS,
            "repeats": self.repeats,
            "reasoning_effort": _EFFORT,
            "score": round(self.score, 4),
            "standard_error": round(self.error, 4),
            "unclear": self.unclear,
            "threshold": round(self.threshold, 4),
            "seconds": round(self.seconds, 1),
        }

    def judge(self) -> str:
        """Return it as a line.

        Raises:
            Unmet: it is below the threshold.
        """
        line = f"{self.score:.3f} (standard error {self.error:.3f}, {self.unclear} unclear)"
        wanted = f"{self.threshold:.3f} at least"
        if self.score < self.threshold:
            raise Unmet(wanted, line, "compare SPARKFORGE_PROFILE=exact; then bench quality")
        return f"{line}; {wanted}; questions {self.sha256[:12]}"


def threshold(name: str, chosen: float | None) -> float:
    """Return the lowest score that passes: the user's, or vLLM's for gpt-oss-20b.

    Raises:
        UsageError: the model has none.
    """
    if chosen is not None:
        return chosen
    if name.rpartition("/")[2].lower().startswith("gpt-oss-20b"):
        return THRESHOLD_20B
    hint = "add --gpqa-threshold SCORE, for example of a server that you trust (docs/accept.md)"
    raise UsageError(f"--gpqa: vLLM has no threshold for {name}", hint)


@dataclass
class Kept:
    """Answers of this measurement so far, in a file that survives an interrupted run.

    Each line has number and letter of an answer, no question, and the seconds since the answer
    before it, or since the run began. State: the file, and the time of its last answer.
    """

    path: Path
    lock: Lock = field(default_factory=Lock)
    last: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, folder: Path, subject: Subject, questions: Questions, repeats: int) -> Kept:
        """Return the file of a measurement: of this server, as far as known, and this task."""
        behind = subject.behind
        served = (subject.place.url, subject.model.name, str(subject.model.max_len), behind.image)
        words = (*served, *behind.options, *behind.layers, questions.sha256, str(repeats))
        name = hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
        return cls(folder / f"gpqa-{name}.part")

    def letters(self) -> dict[int, str]:
        """Return the letters (or "") by number of the case."""
        return {int(number): letter for number, letter, _ in self._lines()}

    def seconds(self) -> float:
        """Return the time of all answers."""
        return sum(float(took) for _, _, took in self._lines())

    def _lines(self) -> list[tuple[str, str, str]]:
        """Return number, letter and seconds of each complete line."""
        if not self.path.is_file():
            return []
        return _KEPT.findall(self.path.read_text(encoding="ascii", errors="replace"))

    def add(self, number: int, chosen: str) -> None:
        """Store an answer."""
        with self.lock, disk_errors(self.path):
            now = time.monotonic()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="ascii") as file:
                file.write(f"\n{number} {chosen or '-'} {now - self.last:.6f};")
            self.last = now

    def remove(self) -> None:
        """Remove the file, after the result is written."""
        self.path.unlink(missing_ok=True)


def run(
    subject: Subject, questions: Questions, wanted: float, kept: Kept, repeats: int = REPEATS
) -> Score:
    """Ask all questions without an answer from an interrupted run.

    Args:
        wanted: lowest score that passes.

    Raises:
        Unmet: a question gets no answer.
        StoreError: an answer cannot be stored.
    """
    kept.last = began = time.monotonic()
    before = kept.seconds()
    cases = list(_cases(questions.rows, repeats))
    letters = {number: said for number, said in kept.letters().items() if number < len(cases)}
    if letters:
        there = counted(len(letters), "answer")
        log.info(f"continuing with {there} from {kept.path}; delete it to start over")
    open_ = [number for number in range(len(cases)) if number not in letters]

    def ask(number: int, stopping: Event) -> str:
        said = letter(_ask(subject, cases[number][1], stopping))
        kept.add(number, said)
        return said

    width = min(_AT_ONCE, subject.profile.max_num_seqs or _AT_ONCE)
    good = sum(said == cases[number][2] for number, said in letters.items())
    for number, said in zip(open_, in_parallel(ask, open_, width), strict=True):
        letters[number] = said
        good += said == cases[number][2]
        note = f"{good / len(letters):.3f}"
        log.progress("GPQA", len(letters), len(cases), "answers", note=note)
    right: dict[int, list[bool]] = {}
    for number, (at, _, best) in enumerate(cases):
        right.setdefault(at, []).append(letters[number] == best)
    unclear = sum(not said for said in letters.values())
    means = [statistics.fmean(right[at]) for at in range(len(questions.rows))]
    error = statistics.stdev(means) / len(means) ** 0.5
    seconds = before + time.monotonic() - began
    mean = statistics.fmean(means)
    return Score(mean, error, wanted, unclear, repeats, questions.sha256, seconds)


def _cases(rows: Sequence[Sequence[str]], repeats: int) -> list[tuple[int, str, str]]:
    """Return index, prompt and right letter of each case, in gpt-oss's own order of choices."""
    dice = random.Random(0)
    found = []
    for _ in range(repeats):
        for at, (question, *choices) in enumerate(rows):
            order = dice.sample(range(4), 4)
            options = [f"({_LETTERS[i]}) {choices[index]}" for i, index in enumerate(order)]
            text = "\n\n".join([question, "\n".join(options), _ASK])
            found.append((at, text, _LETTERS[order.index(0)]))
    return found


def letter(text: str) -> str:
    """Return the option that an answer chooses, or ""."""
    for pattern in _SAID:
        if matches := pattern.findall(text):
            return str(matches[-1])
    first = text.strip().strip("*")[:1]
    return first if first and first in _LETTERS else ""


def _ask(subject: Subject, text: str, stopping: Event) -> str:
    """Return an answer's text; "" if it is not complete.

    Raises:
        Unmet: no answer after several tries.
    """
    body = {
        "model": subject.model.name,
        "input": [{"role": "user", "content": text}],
        "temperature": 1.0,
        "max_output_tokens": min(_TOKENS, max(1, subject.model.max_len // 2)),
        "reasoning": {"effort": _EFFORT},
    }
    problem = ""
    for number in range(_TRIES):
        if number and stopping.wait(_PAUSE_S):
            break
        try:
            found = client.post(subject.place, client.RESPONSES, body, _ANSWER_S).json()
            output = [item for item in found["output"] if item["type"] == "message"]
            return "".join(part.get("text") or "" for item in output for part in item["content"])
        except (OSError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        except (TypeError, KeyError, AttributeError):
            problem = "no response of a known shape"
    # without the server's words, which may quote the question
    raise Unmet("an answer to each question", problem.partition(":")[0])
