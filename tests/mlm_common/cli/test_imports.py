"""Imports without what is not needed: the packages it hides are there afterwards, and transformers is the same."""

import json
import subprocess
import sys

import pytest

from mlm_common.cli.imports import hidden

PROGRAM = """
import json, sys
if sys.argv[1] == "faster":
    from mlm_common.cli.imports import set_up_imports
    set_up_imports()
import transformers.models
modules = [sorted(module._class_to_module.items()) for module in (transformers, transformers.models)]
num_read = transformers.utils.import_utils.create_import_structure_from_path.cache_info().misses
print(json.dumps([modules, num_read, transformers.utils.is_sklearn_available()]))
"""


def imported(how: str) -> tuple[list[list[str]], int, bool]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, encoding="utf-8", check=True)
    return json.loads(done.stdout)


def test_transformers_is_the_same_but_reads_each_folder_once_and_sees_no_scikit_learn():
    modules, num_read, sees_sklearn = imported("faster")
    plain_modules, plain_num_read, _ = imported("plainly")
    assert modules == plain_modules
    assert 0.4 * plain_num_read < num_read < 0.6 * plain_num_read
    assert not sees_sklearn  # else its metrics import it


def test_hidden_packages_are_there_afterwards(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with hidden(["colorsys", "json"]):
        with pytest.raises(ImportError):
            import colorsys
        import json as imported_before
    import colorsys

    assert colorsys.rgb_to_hsv(0, 0, 0) == (0, 0, 0)
    assert imported_before is json
