"""Sources, of a file or of words: what is opened, and what is refused in one line."""

import os
from pathlib import Path

import pytest
import yaml

from mlm_common.cli.command_line import parse_arguments, typed_settings
from mlm_common.corpus.config import CorpusConfig, SourcesConfig
from mlm_common.corpus.sources import corpora_of, open_mixture
from mlm_common.errors import InputError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a text for each of three languages."""
    for name in ("de", "en", "fo"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {number}\n" for number in range(40)), encoding="utf-8")
    (tmp_path / "blank.txt").write_text(" \n\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    # Extracting the real one takes a minute.
    monkeypatch.setattr("mlm_common.corpus.corpus.read_builtin_corpus", lambda: tuple(map(str, range(40))))
    return tmp_path


def write(text: str) -> str:
    Path("sources.yaml").write_text(text, encoding="utf-8")
    return "sources.yaml"


def test_sources_are_corpora_in_the_order_of_the_file():
    file = write(
        "fo: {data_files: [fo.txt], weight: 0.5}\nde: {data-files: de*.txt, validation-percent: 50, weight: 2}\n"
        "code: {dataset_name: builtin, limit: 30, weight: 1}\n"
    )
    mixture = open_mixture(CorpusConfig(validation_percent=20, seed=3), SourcesConfig(file))
    assert list(mixture.corpora) == ["fo", "de", "code"]
    assert mixture.weights == {"fo": 0.5, "de": 2, "code": 1}
    configs = [corpus.config for corpus in mixture.corpora.values()]
    settings = [(config.validation_percent, config.seed, config.limit) for config in configs]
    assert settings == [(20, 3, None), (50, 3, None), (20, 3, 30)]
    assert next(mixture.corpora["fo"].documents("train")).startswith("fo ")
    assert corpora_of(mixture.record) == {name: corpus.record for name, corpus in mixture.corpora.items()}


def test_words_and_a_file_name_sources_alike():
    file = write("fo: {data_files: [fo.txt, blank.txt], weight: 0.5}\nde: {data_files: d*.txt, weight: 2}\n")
    mixture = open_mixture(CorpusConfig(seed=3), SourcesConfig(file))
    weights = ["de=2", "fo=0.5"]
    flags = "sources: {fo: [fo.txt, blank.txt], de: d*.txt}\nsource-weights: {de: 2, fo: 0.5}"
    Path("flags.yaml").write_text(flags, encoding="utf-8")
    for words in (
        ["--sources", "fo=fo.txt", "de=d*.txt", "fo=blank.txt", "--source-weights", *weights],
        ["--sources", file, "--source-weights", *weights],
        ["--config-file", "flags.yaml"],
    ):
        sources, corpus = parse_arguments([SourcesConfig, CorpusConfig], [*words, "--seed", "3"], "")
        assert open_mixture(corpus, sources).record == mixture.record
    sources, _ = parse_arguments([SourcesConfig, CorpusConfig], ["--sources", "de=d*.txt"], "")
    assert list(open_mixture(CorpusConfig(), sources).corpora) == ["de"]
    os.link("de.txt", "a=b.txt")
    words = ["--sources", "fo=fo.txt", "de=./a=b.txt", "code=hub:builtin", "--limit", "30"]
    sources, corpus = parse_arguments([SourcesConfig, CorpusConfig], words, "")
    configs = {name: source.config for name, source in open_mixture(corpus, sources).corpora.items()}
    assert list(configs) == ["fo", "de", "code"]
    assert configs["code"].dataset_name == "builtin"


@pytest.mark.parametrize(
    ("text", "weights", "message"),
    [
        ("de=de.txt fo.txt", [], "--sources must be NAME=VALUE for each source; received 'fo.txt'"),
        ("de.txt fo.txt", [], "must be one path, or several with names, such as a=de.txt b=fo.txt; received de.txt"),
        ("de=f.txt", [], "--sources de: --data-files: no file .* did you mean fo.txt"),
        ("de=de.txt fo=fo.txt", ["de=1"], r"--source-weights must name each source once \(de, fo\); received de"),
        ("de=de.txt fo=fo.txt", ["de=1", "fo=0"], "--source-weights must give each source a weight above 0"),
        ("de=de.txt fo=fo.txt", ["de=1", "fo=1", "de=2"], "--source-weights must name each source once; received de 2"),
        (
            "de=de.txt fo=fo.txt",
            ["de=1e300", "fo=1e-300"],
            "must give each source at least a millionth of the sum of all weights; .*e-300",
        ),
        (
            "de=de.txt fo=fo.txt",
            ["de=1e308", "fo=1e308"],
            "must give each source at least a millionth of the sum of all weights; .*e.308",
        ),
        (None, ["de=1"], "--source-weights needs --sources; received de=1"),
    ],
)
def test_bad_words_are_one_line(text, weights, message):
    with pytest.raises(InputError, match=message) as caught:
        open_mixture(CorpusConfig(), SourcesConfig(text, weights))
    assert "\n" not in str(caught.value)


def test_a_source_with_validation_text_does_without_the_default():
    file = write("de: {data_files: de.txt, validation_files: en.txt}\nfo: {data_files: fo.txt}")
    mixture = open_mixture(CorpusConfig(validation_percent=20, test_percent=10), SourcesConfig(file))
    percents = {name: corpus.config.validation_percent for name, corpus in mixture.corpora.items()}
    assert percents == {"de": 0, "fo": 20}
    assert {corpus.config.test_percent for corpus in mixture.corpora.values()} == {10}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("de: {data_files: de.txt}\nde: {data_files: en.txt}", "`de` is given twice"),
        ("de: {data_files: de.txt}\nfo: {}", "fo: No corpus was given"),
        ("de: {data_files: de.txt}\nfo: {data_files: f.txt}", "fo: --data-files: no file .* did you mean fo.txt"),
        ("de: {data_files: de.txt}\nfo: {data_files: '*e.txt'}", "`de` and `fo`, both .*de.txt"),
        ("de: {data_files: de.txt}\nfo: {data_files: fo.txt, test_files: de.txt}", "`de` and `fo`, both .*de.txt"),
        ("de: {data_file: de.txt}", "de: unknown flag data_file; did you mean --data-files"),
        ("de: {data_files: de.txt, wieght: 2}", "de: unknown flag wieght; did you mean --weight"),
        ("de: {data_files: de.txt, weight: 0}", "de: --weight must be above 0; received 0"),
        ("de: {data_files: de.txt, weight: 1}\nfo: {data_files: fo.txt}", "must have a weight or none; fo"),
        ("de: {data_files: de.txt}\nno: {data_files: fo.txt}", "reads a name in sources.yaml as False. Quote it"),
        ("a/b: {data_files: de.txt}", "sources.yaml .*'a/b'"),
        ("de: de.txt", "de must map flags to values; it contains 'de.txt'"),
        ("", "must be a mapping of names to settings"),
        ("de: [", "--sources must be a YAML"),
    ],
)  # fmt: skip
def test_bad_files_are_one_line(text, message):
    with pytest.raises(InputError, match=message) as caught:
        open_mixture(CorpusConfig(), SourcesConfig(write(text)))
    assert "\n" not in str(caught.value)


def test_the_file_of_the_documentation_has_known_settings():
    page = (Path(__file__).parents[3] / "docs" / "guides" / "corpora.md").read_text(encoding="utf-8")
    content = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    for name, settings in content.items():
        assert CorpusConfig(**typed_settings([CorpusConfig], settings, name)).is_given
    assert "validation_split" in content["en"]  # beside --validation-percent on the command line
