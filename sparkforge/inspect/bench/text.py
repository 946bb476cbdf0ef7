"""The generated text for prompts: the same bytes on every machine.

Its sentences are plain English without a meaning. Speed depends on the number of tokens. A router's
choice of experts depends on the words, too, so a comparison uses one text.
"""

from __future__ import annotations

from random import Random

_SEED = 4
_BYTES_PER_TOKEN = 8
"""Above the 5.4 of this text with gpt-oss's vocabulary."""
_LEAST = 1 << 18


def _phrases(text: str) -> tuple[str, ...]:
    """Return the phrases between commas."""
    return tuple(phrase.strip() for phrase in text.split(","))


_WHO = _phrases(
    """
    the smith, an old baker, the night guard, a young engineer, her brother,
    the ferryman, our neighbour, a clerk from the harbour, the teacher, a tired courier,
    the gardener, a woman in grey, the last passenger, my uncle, the printer,
    a stranger, the captain, one of the children, the mayor, a watchmaker
    """
)
_DID = _phrases(
    """
    opened, carried, forgot, measured, repaired, described, sold, counted,
    painted, returned, hid, lifted, borrowed, examined, remembered, drew,
    weighed, cleaned, followed, wrapped
    """
)
_WHAT = _phrases(
    """
    the iron gate, a box of letters, seven copper coins, the broken clock, a map,
    the long table, a basket of apples, the second key, a lantern, the account book,
    an empty bottle, the wooden bridge, a bundle of rope, the heavy curtain,
    a photograph, the garden wall, two silver spoons, the weather report, a small boat,
    the unfinished letter
    """
)
_WHERE = _phrases(
    """
    behind the station, in the market hall, at the edge of the forest, on the third floor,
    beside the river, under the stairs, near the old mill, in the reading room,
    outside the town, between the two houses, in the north tower, along the canal,
    at the end of the street, above the workshop, across the square, by the window
    """
)
_WHEN = _phrases(
    """
    before sunrise, on Tuesday, after the storm, at noon, in the first week of March,
    late in the evening, during the concert, a year ago, while it rained,
    when the bells rang, for the second time, without a word, with great care,
    in spite of the cold, as usual, to everybody's surprise
    """
)
_JOINED = (", and", ", but", "; then", ", because", ", although", "; meanwhile")


def generate(size: int) -> str:
    """Return at least ``size`` bytes of text; a longer text begins with a shorter one."""
    random = Random(_SEED)

    def pick(words: tuple[str, ...]) -> str:
        # random() is the same in every Python; choice() need not be
        return words[int(random.random() * len(words))]

    def clause() -> str:
        return f"{pick(_WHO)} {pick(_DID)} {pick(_WHAT)} {pick(_WHERE)} {pick(_WHEN)}"

    parts: list[str] = []
    written = 0
    while written < size:
        sentence = clause()
        if random.random() < 0.5:
            sentence += f"{pick(_JOINED)} {clause()}"
        end = ".\n\n" if random.random() < 0.15 else ". "
        parts.append(sentence[0].upper() + sentence[1:] + end)
        written += len(parts[-1])
    return "".join(parts)


def enough(tokens: int) -> int:
    """Return the bytes for sequences of so many tokens, with room for several starts."""
    return max(_LEAST, 2 * tokens * _BYTES_PER_TOKEN)
