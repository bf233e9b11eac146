"""Text that has the statistics of a language: words of syllables, few of them frequent, with signs and numbers."""

import random
from itertools import accumulate

SYLLABLES = [onset + vowel + coda for onset in "bdfklmnprst" for vowel in "aeiou" for coda in ("", "n", "r", "st")]


def generated_lines(num_lines: int, seed: int = 0, num_words: int = 3000) -> list[str]:
    """Return lines of 70 bytes on average, the same for the same arguments."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(SYLLABLES, k=draw.choice((1, 2, 2, 3)))) for _ in range(num_words)]
    cumulative = list(accumulate(1 / rank for rank in range(1, num_words + 1)))
    lines = []
    for _ in range(num_lines):
        line = draw.choices(words, cum_weights=cumulative, k=draw.randint(4, 20))
        line[0] = line[0].capitalize()
        if draw.random() < 0.3:
            line[-2] += ","
        if draw.random() < 0.2:
            line[1] = str(draw.randint(1, 2100))
        lines.append(" ".join(line) + draw.choice(".!?."))
    return lines
