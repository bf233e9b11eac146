"""The sources of a mixture: found, weighted and compared before TensorFlow is imported."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import yaml

from mlm_common.errors import InputError
from mlm_common.mixture import MixtureSource, write_mixture
from tests.fixtures.tiny_corpus import flags
from tests.fixtures.tiny_mixture import TEXTS
from tfrecord_prep.manifest import open_shards
from tfrecord_prep.prepare_tfrecord_shards import main as prepare
from train.config.learning import DataConfig
from train.config.settings import parse_training_config
from train.data.shards import TrainingInputs, check_phases, open_inputs


def opened(train: object, evaluation: object = None, **settings: object) -> TrainingInputs:
    return open_inputs(DataConfig(str(train), evaluation and str(evaluation), **settings))


def pairs(shards: Path, split: str = "train", **others: Path) -> str:
    folders = {name: shards / name / split for name in TEXTS} | others
    return " ".join(f"{name}={folder}" for name, folder in folders.items())


def weights(inputs: TrainingInputs) -> dict[str, float]:
    total = sum(source.weight for source in inputs.sources)
    return {source.name: source.weight / total for source in inputs.sources}


def test_a_folder_and_its_sources_by_name_are_one_mixture(mixture_shards):
    inputs = opened(mixture_shards, mixture_shards)
    assert [source.name for source in inputs.sources] == sorted(TEXTS)
    named = opened(pairs(mixture_shards), pairs(mixture_shards, "validation"))
    assert named.identities() == inputs.identities()
    assert inputs.num_rows == sum(source.train.num_rows for source in inputs.sources)
    assert list(inputs.evaluated()) == sorted(TEXTS)
    assert sum(weight for _, weight in inputs.evaluated().values()) == pytest.approx(1)


def test_command_line_and_file_name_sources_alike(tmp_path):
    weights = ("--source-weights", "de=0.5", "fo=0.5")
    words = ["--train-dataset", "de=a b/train", "fo=gs://c/d", *weights, "--output-dir", "x"]
    parsed = parse_training_config(words, "")
    assert parsed.data.folders() == {"--train-dataset de": "a b/train", "--train-dataset fo": "gs://c/d"}
    settings = {
        "mapping": {"train_dataset": {"de": "a b/train", "fo": "gs://c/d"}, "source_weights": {"de": 0.5, "fo": 0.5}},
        "words": {"train-dataset": "'de=a b/train' fo=gs://c/d", "source-weights": ["de=0.5", "fo=0.5"]},
    }
    for name, content in settings.items():
        (tmp_path / name).write_text(yaml.safe_dump(content), encoding="utf-8")
        assert parse_training_config(["--config-file", str(tmp_path / name), "--output-dir", "x"], "") == parsed
    single_source = parse_training_config(["--train-dataset", "a folder/of 'one", "--output-dir", "x"], "")
    assert single_source.data.folders() == {"--train-dataset": "a folder/of 'one"}


def test_weights_are_by_rows_or_as_they_are_given(mixture_shards, tmp_path, monkeypatch):
    rows = {name: open_shards(str(mixture_shards / name / "train")).num_rows for name in TEXTS}
    tokens = {name: open_shards(str(mixture_shards / name / "train")).manifest.totals.num_tokens for name in TEXTS}
    total = sum(rows.values())
    assert weights(opened(mixture_shards)) == {name: number / total for name, number in rows.items()}
    given = opened(mixture_shards, source_weights=["small=0.5", "large=0.25", "back=0.25"], shuffle_buffer_size=10)
    assert weights(given) == pytest.approx({"large": 0.25, "small": 0.5, "back": 0.25})
    monkeypatch.setattr("train.data.pipeline.training_batches", lambda order, *_: order)
    assert [order.window_rows for order in given.training_batches({}, None, seed=0).sources] == [3, 3, 5]
    roots = {name: number**0.3 for name, number in tokens.items()}
    expected = {name: root / sum(roots.values()) for name, root in roots.items()}
    assert weights(opened(mixture_shards, sampling_alpha=0.3)) == pytest.approx(expected)
    passes = opened(mixture_shards, source_passes=["small=3", "large=1", "back=0.5"])
    assert passes.num_rows == round(3 * rows["small"] + rows["large"] + 0.5 * rows["back"])
    used = passes.rows_used(passes.num_rows)
    for source, number in zip(passes.sources, (0.5, 1, 3), strict=True):
        assert used[source.identity] == pytest.approx(number * source.train.num_rows, abs=2)
    write_mixture(str(tmp_path), {name: MixtureSource(f"{name}/train", None, 2.0) for name in TEXTS})
    for name in TEXTS:
        (tmp_path / name).symlink_to(mixture_shards / name)
    assert weights(opened(tmp_path)) == pytest.approx(dict.fromkeys(TEXTS, 1 / 3))
    for num_without in (1, 2):
        sources = {
            name: MixtureSource(f"{name}/train", None, None if index < num_without else 2.0)
            for index, name in enumerate(TEXTS)
        }
        write_mixture(str(tmp_path), sources)
        with pytest.raises(InputError, match="must give a weight to every source or to none"):
            opened(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source_weights": ["large=0.5", "small=0.5"]}, r"each source once \(back, large, small\)"),
        ({"source_weights": ["large=0.9", "small=0.5", "back=0.5"]}, r"sum of 1; received 1\.9"),
        ({"source_passes": ["large=1", "small=0", "back=1"]}, "above 0"),
        ({"source_passes": ["large=1", "small", "back=1"]}, "NAME=VALUE"),
    ],
)
def test_weights_that_do_not_suit_are_refused(mixture_shards, settings, message):
    with pytest.raises(InputError, match=message):
        opened(mixture_shards, **settings)


def test_only_one_way_to_weight_sources_may_be_given(mixture_shards):
    with pytest.raises(InputError, match="--sampling-alpha and --source-passes"):
        DataConfig(sampling_alpha=0.3, source_passes=["a=1"])
    with pytest.raises(InputError, match="one folder and --sampling-alpha"):
        opened(mixture_shards / "large" / "train", sampling_alpha=0.3)


def test_sources_that_do_not_suit_each_other_are_refused(mixture_shards, tmp_path):
    large = mixture_shards / "large" / "train"
    corpus = ("--data-files", str(mixture_shards / "back.jsonl"))
    assert prepare(flags(mixture_shards, tmp_path / "long", *corpus, "--max-length", "32")) == 0
    shutil.copytree(large, tmp_path / "other")
    manifest = (tmp_path / "other" / "manifest.json").read_text("utf-8")
    sha256 = open_shards(str(large)).manifest.tokenizer.sha256
    (tmp_path / "other" / "manifest.json").write_text(manifest.replace(sha256, "0" * 64), "utf-8")
    (tmp_path / "empty").mkdir()
    (tmp_path / "no_rows").mkdir()
    (tmp_path / "no_rows" / "dataset-0-0.tfrecord").touch()
    whole, small = pairs(mixture_shards), f"small={mixture_shards}/small/train"
    for train, evaluation, message in (
        (pairs(mixture_shards, copy=large), None, "no text in common"),
        (f"large={large} long={tmp_path}/long/train", None, "must have rows of the same length as the first .*, 16"),
        (f"{small} other={tmp_path}/other", None, "--tokenizer must be the one the shards were made with"),
        (whole, f"fo={large}", r"must name sources of --train-dataset \(back, large, small\); received fo"),
        (whole, f"small={large}", "must not contain text of --train-dataset"),
        (pairs(mixture_shards, empty=tmp_path / "empty"), None, r"contains no \*.tfrecord files"),
        (f"{small} other={tmp_path}/no_rows", None, "--train-dataset other must have rows"),
    ):
        with pytest.raises(InputError, match=message):
            opened(train, evaluation)


def test_phases_with_other_weights_are_compared_source_by_source(mixture_shards):
    phases = [opened(mixture_shards), opened(mixture_shards, sampling_alpha=0.0)]
    check_phases(phases)
    assert not phases[1].has_rows_of(phases[0])
    later = phases[1].after(phases[0].rows_used(30))
    assert [source.first_row for source in later.sources] == [
        phases[0].interleaving.num_rows(index, 30) for index in range(3)
    ]
    # A source that no phase has read yet starts at its first row.
    second = later.sources[1]
    later = phases[1].after({second.identity: 7})
    assert [source.first_row for source in later.sources] == [0, 7, 0]
    assert phases[1].after({"another source": 7}) is phases[1]


def test_the_entropy_is_the_mean_of_those_of_the_sources_by_their_weights(mixture_shards):
    inputs = opened(mixture_shards, mixture_shards, source_weights=["large=0.25", "small=0.625", "back=0.125"])
    entropies = {source.name: source.evaluation.manifest.unigram_entropy_nats for source in inputs.sources}
    assert len(set(entropies.values())) == 3
    expected = 0.25 * entropies["large"] + 0.625 * entropies["small"] + 0.125 * entropies["back"]
    assert inputs.unigram_entropy_nats == pytest.approx(expected)
    first, *others = inputs.sources
    unknown = dataclasses.replace(first, evaluation=dataclasses.replace(first.evaluation, manifest=None))
    assert dataclasses.replace(inputs, sources=(unknown, *others)).unigram_entropy_nats is None
    assert opened(mixture_shards).unigram_entropy_nats is None


def test_many_passes_are_warned_of(mixture_shards, caplog):
    inputs = opened(mixture_shards, source_weights=["large=0.25", "small=0.5", "back=0.25"])
    text = inputs.describe_sources(0, inputs.num_rows)["sources"]
    assert "small" in text
    assert "weight 50.000%" in text
    assert not caplog.records
    inputs.describe_sources(0, 9 * inputs.num_rows)
    assert [record.getMessage().split()[3] for record in caplog.records] == ["small"]
