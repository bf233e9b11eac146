"""The manifest of a mixture, and weights: read as they were written; what is wrong is said in one line."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_common.errors import InputError
from mlm_common.mixture import (
    MIXTURE_NAME,
    MixtureSource,
    named_folders,
    named_weights,
    read_mixture,
    sampling_weights,
    write_mixture,
)


def test_sources_are_read_as_they_were_written_and_in_their_order(tmp_path):
    sources = {"fo": MixtureSource("fo/train", "fo/validation", 0.25), "de": MixtureSource("de/train")}
    write_mixture(str(tmp_path), sources)
    read = read_mixture(str(tmp_path))
    assert read == sources
    assert list(read or ()) == ["fo", "de"]
    assert read_mixture(str(tmp_path / "none")) is None


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "JSON"),
        ({"format_version": 2, "sources": {}}, "format_version 1"),
        ({"format_version": 1, "sources": {}}, "at least one source"),
        ({"format_version": 1, "sources": {"de": {"validation": "de/validation"}}}, "sources of a mixture"),
        ({"format_version": 1, "sources": {"a/b": {"train": "t"}}}, "'a/b'"),
        ({"format_version": 1, "sources": {"de": {"train": "t", "weight": -1}}}, "de=-1"),
        ([], "sources of a mixture"),
    ],
)
def test_a_manifest_that_is_not_one_is_refused(tmp_path, record, message):
    (tmp_path / MIXTURE_NAME).write_text(record if isinstance(record, str) else json.dumps(record), "utf-8")
    with pytest.raises(InputError, match=message):
        read_mixture(str(tmp_path))


@pytest.mark.parametrize("pairs", [["de"], ["de="], ["de=x"], ["de=1", "de=2"], ["=1"], ["de=1", "en=1"], ["de=0"]])
def test_pairs_of_another_form_are_refused(pairs):
    with pytest.raises(InputError, match="--weights"):
        named_weights(pairs, "--weights", ["de"])


def test_one_folder_or_several_are_read_by_name():
    assert named_folders("work/a b", "--train-dataset") == {"": "work/a b"}
    named = {"de": "work/de", "en": "work/a b", "fo": "gs://b/a=b"}
    assert named_folders("de=work/de 'en=work/a b' fo=gs://b/a=b", "--train-dataset") == named
    assert named_folders("work/a=b", "--train-dataset") == {"": "work/a=b"}
    for text in ("de=a'b", "work/a en=work/en"):
        with pytest.raises(InputError, match="--train-dataset must be a path, or NAME=PATH for each source; received"):
            named_folders(text, "--train-dataset")
    with pytest.raises(InputError, match=r"of letters, digits, .* and start with a letter or digit; received 'größe'"):
        named_folders("größe=work/a en=work/en", "--train-dataset")


@given(st.lists(st.integers(1, 10**15), min_size=1, max_size=9), st.floats(0, 1))
def test_a_lower_alpha_brings_sources_closer_together(sizes, alpha):
    named = {str(index): float(size) for index, size in enumerate(sizes)}
    weights = sampling_weights(named, alpha)
    assert sum(weights.values()) == pytest.approx(1)
    assert max(weights.values()) / min(weights.values()) == pytest.approx((max(sizes) / min(sizes)) ** alpha)
