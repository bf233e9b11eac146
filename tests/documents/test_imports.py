"""Every module can be imported, with the packages and the version of Python of this environment."""

import importlib
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PACKAGES = ("mlm_common", "tokenizer_training", "tfrecord_prep", "train", "finetuning")
MODULES = sorted(
    ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")
    for package in PACKAGES
    for path in (PROJECT / package).rglob("*.py")
)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_can_be_imported(package):
    of_package = [name for name in MODULES if name.partition(".")[0] == package]
    assert len(of_package) > 5
    for name in of_package:
        assert importlib.import_module(name).__doc__
