"""A tokenizer of several sources: the part of each in the sample, its figures, and what is recorded."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_common.corpus.config import CorpusConfig, SourcesConfig
from mlm_common.corpus.sources import open_mixture
from mlm_common.mixture import sampling_weights
from tests.fixtures.generated_text import generated_lines
from tokenizer_training.config import NormalizationConfig
from tokenizer_training.corpus_sample import (
    CorpusSample,
    WordCounts,
    combine_samples,
    max_bytes_of,
    sample_corpus,
    shares_of,
)
from tokenizer_training.train_unigram import main


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A large source, and a small one in other letters."""
    folder = tmp_path_factory.mktemp("sources")
    lines = generated_lines(3000)
    (folder / "large.txt").write_text("\n".join(lines[:2700]), encoding="utf-8")
    greek = str.maketrans("aeiouknrst", "αειουκνρστ")
    (folder / "small.txt").write_text("\n".join(line.translate(greek) for line in lines[2700:]), encoding="utf-8")
    settings = {name: {"data_files": f"{folder}/{name}.txt"} for name in ("large", "small")}
    settings["small"]["validation_percent"] = 20
    (folder / "sources.yaml").write_text(json.dumps(settings), encoding="utf-8")
    return folder / "sources.yaml"


def arguments(sources: Path, output: Path, *extra_flags: str) -> list[str]:
    sizes = ["--vocab-size", "900", "--num-workers", "1"]
    return ["--sources", str(sources), "--output-dir", str(output), *sizes, *extra_flags]


def report_of(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def test_the_report_has_figures_of_each_source(sources, tmp_path, run):
    by_size = run(main, *arguments(sources, tmp_path / "size"))
    alike = run(main, *arguments(sources, tmp_path / "alike", "--sampling-alpha", "0"))
    assert (by_size.status, alike.status) == (0, 0)
    reports = [report_of(tmp_path / name)["sources"] for name in ("size", "alike")]
    num_bytes = {name: reports[0][name]["input"]["num_bytes"] for name in ("large", "small")}
    assert num_bytes["large"] == sources.with_name("large.txt").stat().st_size - 2699  # the line breaks
    assert reports[0]["small"]["share"] == pytest.approx(num_bytes["small"] / sum(num_bytes.values()))
    ratio = num_bytes["large"] / num_bytes["small"]
    times = [report["small"]["times_counted"] for report in reports]
    assert times == [pytest.approx(1, abs=0.1), pytest.approx(ratio, rel=0.1)]
    assert reports[1]["small"]["share"] == reports[1]["large"]["share"] == 0.5
    words, bytes_ = (
        [report["small"]["held_out"][figure] for report in reports] for figure in ("tokens_per_word", "bytes_per_token")
    )
    assert words[1] < words[0] - 0.1  # more of the tokens are Greek
    assert bytes_[1] > bytes_[0]
    assert reports[1]["large"]["held_out"]["tokens_per_word"] > reports[0]["large"]["held_out"]["tokens_per_word"]
    assert [source["held_out"]["part"] for source in reports[0].values()] == ["train, held out", "validation"]
    assert f"small: {words[1]:.2f} tokens per word, {bytes_[1]:.2f} bytes per token, 0.0000% unknown;" in alike.out
    assert "note        No text of large is set aside" in alike.out


def test_weights_and_record(sources, tmp_path, run):
    settings = json.loads(sources.read_text(encoding="utf-8"))
    weighted = tmp_path / "weighted.yaml"
    weights = {"large": 1, "small": 3}
    content = {name: settings[name] | {"weight": weights[name]} for name in weights}
    weighted.write_text(json.dumps(content), encoding="utf-8")
    assert run(main, *arguments(weighted, tmp_path / "out")).status == 0
    assert report_of(tmp_path / "out")["sources"]["small"]["share"] == 0.75
    record = json.loads((tmp_path / "out" / "training.json").read_text(encoding="utf-8"))
    assert (record["source_weights"], record["sampling_alpha"]) == (weights, None)
    assert [source["settings"]["data_files"] for source in record["sources"].values()] == [
        [str(sources.with_name(f"{name}.txt"))] for name in weights
    ]
    written = (tmp_path / "out" / "training.json").stat().st_mtime_ns
    assert run(main, *arguments(weighted, tmp_path / "out")).status == 0
    assert (tmp_path / "out" / "training.json").stat().st_mtime_ns == written
    refused = run(main, *arguments(sources, tmp_path / "out"))
    assert "trained with other settings: source_weights.large is 1.0 there" in refused.error
    both = run(main, *arguments(weighted, tmp_path / "new"), "--sampling-alpha", 0.5)
    assert "--sampling-alpha needs --sources without weights; received 0.5" in both.error


def test_a_published_record_names_no_files(sources, tmp_path, hub_here):
    assert main(arguments(sources, tmp_path / "out", "--push-to-hub", "alice/tokenizer")) == 0
    files = hub_here.files("alice/tokenizer")
    assert list(json.loads(files["training.json"])["sources"]) == ["large", "small"]
    assert list(json.loads(files["report.json"])["sources"]) == ["large", "small"]
    assert not any(str(sources.parent).encode() in content for content in files.values())


def test_sizes_are_estimated_from_samples(sources, tmp_path):
    (tmp_path / "tiny.txt").write_text("a word\nand another\n", encoding="utf-8")
    names = {name: sources.with_name(f"{name}.txt") for name in ("large", "small")} | {"tiny": tmp_path / "tiny.txt"}
    content = {name: {"data_files": str(path)} for name, path in names.items()}
    (tmp_path / "all.yaml").write_text(json.dumps(content), encoding="utf-8")
    mixture = open_mixture(CorpusConfig(), SourcesConfig(str(tmp_path / "all.yaml")))
    max_bytes = max_bytes_of(mixture, 60_000, None)
    sizes = {name: path.stat().st_size for name, path in names.items()}
    assert sum(max_bytes.values()) == pytest.approx(60_000, abs=2)
    assert max_bytes["tiny"] == round(60_000 * sizes["tiny"] / sum(sizes.values()))
    samples = {
        name: sample_corpus(
            corpus.sampled_documents("train", max_bytes[name]),
            NormalizationConfig(),
            max_bytes=max_bytes[name],
            max_distinct_characters=100_000,
            seed=0,
            hold_out=False,
            num_processes=1,
        )
        for name, corpus in mixture.corpora.items()
    }
    assert samples["large"].record["num_bytes"] < sizes["large"] / 2
    for alpha in (None, 0.5, 0.0):
        shares = shares_of(mixture, samples, max_bytes, alpha)
        expected = sampling_weights(sizes, 1.0 if alpha is None else alpha)
        assert shares["large"] == pytest.approx(expected["large"], rel=0.05)
        assert shares["small"] == pytest.approx(expected["small"], rel=0.1)
    assert set(max_bytes_of(mixture, 1, 1.0).values()) == {1}


COUNTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 50), min_size=1)


@given(st.lists(st.tuples(COUNTS, st.integers(1, 10_000), st.floats(0.01, 1)), min_size=1, max_size=5))
def test_each_source_has_its_share(parts):
    total = sum(share for _, _, share in parts)
    shares = {str(number): share / total for number, (_, _, share) in enumerate(parts)}
    record = {"num_documents": 1, "sampling_rate": 1.0, "num_words": 0, "num_dropped_segments": 0}
    samples = {
        str(number): CorpusSample(
            WordCounts(Counter(counts)), [], record | {"num_bytes": num_bytes, "num_sampled_bytes": num_bytes}
        )
        for number, (counts, num_bytes, _) in enumerate(parts)
    }
    combined, inputs = combine_samples(samples, shares, 100)
    times = {name: entry["times_counted"] for name, entry in inputs.items()}
    assert min(times.values()) == pytest.approx(1)
    weighted = {name: times[name] * parts[int(name)][1] for name in samples}
    assert [weighted[name] / sum(weighted.values()) for name in samples] == pytest.approx(list(shares.values()))
    expected: Counter[str] = Counter()
    for name, factor in times.items():
        expected.update({key: round(count * factor) for key, count in parts[int(name)][0].items()})
    assert combined.counts.segments == expected
    assert combined.record["num_documents"] == len(parts)
