"""Samples of several sources in one: how much of each is read, and how often its words count.

In the sum each source has the part that its weight says, or bytes^alpha (Conneau et al. 2020, section 3.1), whatever
its size: the words of a source that has too little text count several times, as if it were read again.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from mlm_common.corpus.sources import Mixture
from mlm_common.mixture import normalized, sampling_weights
from tokenizer_training.unigram.corpus_sample import CorpusSample, WordCounts


def max_bytes_of(mixture: Mixture, max_bytes: int, alpha: float | None) -> dict[str, int]:
    """Divide `max_bytes` of text among the sources; undivided if their sizes are known only once they are read."""
    files = {name: corpus.files(corpus.config.split) for name, corpus in mixture.corpora.items()}
    if not mixture.weights and not all(files.values()):
        return dict.fromkeys(files, max_bytes)
    sizes = {name: sum(file.num_bytes for file in found) for name, found in files.items()}
    return {name: max(1, round(share * max_bytes)) for name, share in _shares(mixture, sizes, alpha).items()}


def shares_of(
    mixture: Mixture, samples: Mapping[str, CorpusSample], max_bytes: Mapping[str, int], alpha: float | None
) -> dict[str, float]:
    """Compute the part of each source, by its weight or the size of its text, of which `max_bytes` was sampled."""
    sizes = {}
    for name, corpus in mixture.corpora.items() if not mixture.weights else ():
        fraction = corpus.sampled_fraction(corpus.config.split, max_bytes[name], corpus.config.seed)
        sizes[name] = samples[name].record["num_bytes"] / fraction
    return _shares(mixture, sizes, alpha)


def _shares(mixture: Mixture, sizes: Mapping[str, float], alpha: float | None) -> dict[str, float]:
    if mixture.weights:
        return normalized(mixture.weights)
    return sampling_weights({name: max(size, 1) for name, size in sizes.items()}, 1.0 if alpha is None else alpha)


def combine_samples(
    samples: Mapping[str, CorpusSample], shares: Mapping[str, float], max_distinct_characters: int
) -> tuple[CorpusSample, dict[str, dict[str, Any]]]:
    """Add up the counts of the sources so that each has its share, and each text counts once or more.

    Args:
        samples: of the sources.
        shares: of the sources, which sum to 1.
        max_distinct_characters: of all different segments together; the rarest are dropped.

    Returns:
        the sum, and for each source what the report says of it.
    """
    num_bytes = {name: int(sample.record["num_sampled_bytes"]) for name, sample in samples.items()}
    total = max(num_bytes[name] / shares[name] for name in samples)  # whose text is most for its share counts once
    counts, record, inputs = WordCounts(), Counter[str](), {}
    for name, sample in samples.items():
        times = shares[name] * total / num_bytes[name] if num_bytes[name] else 1.0
        counts.add(sample.counts.scaled(times))
        record.update({key: value for key, value in sample.record.items() if key != "sampling_rate"})
        inputs[name] = {"share": shares[name], "times_counted": times, "input": sample.record}
    num_dropped = counts.keep_most_frequent(max_distinct_characters)
    combined: dict[str, Any] = dict(record) | {
        "sampling_rate": sum(num_bytes.values()) / max(1, record["num_bytes"]),
        "num_distinct_segments": len(counts.segments),
        "num_dropped_segments": record["num_dropped_segments"] + num_dropped,
        "num_words": counts.num_words,
    }
    return CorpusSample(counts, [], combined), inputs
