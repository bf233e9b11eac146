"""`--dry-run` of pretraining and of fine-tuning: the plan of the run, in seconds, since it takes no TensorFlow."""

import json
import shutil

from mlm_common.errors import EXIT_PERMANENT
from tests.fixtures.fresh_process import answers_of
from tests.fixtures.results import read_json
from tests.fixtures.tiny_classification import flags as classification_flags
from tests.fixtures.tiny_models import CONFIGS, of_transformers_4
from tests.fixtures.tiny_pairs import PAIRS
from tests.fixtures.tiny_phases import phases_flags
from tests.fixtures.tiny_run import run_flags
from train.run_mlm import main

# Lets no module import TensorFlow, once transformers has looked whether there is one.
NO_TENSORFLOW = """
import sys, train, transformers

class NoTensorFlow:
    def find_spec(self, name, *_):
        if name == "tensorflow":
            raise ImportError("there is no TensorFlow here")

sys.meta_path.insert(0, NoTensorFlow())
"""


def test_the_plan_counts_parameters_without_tensorflow(
    shards, finished_run, pair_shards, pair_run, phase_shards, classified, tiny_start, tmp_path
):
    runs = [
        ("train.run_mlm", run_flags(shards, tmp_path / "run"), finished_run),
        ("train.run_mlm", run_flags(pair_shards, tmp_path / "run", *PAIRS), pair_run),
        ("train.run_mlm", phases_flags(phase_shards, tmp_path / "run"), None),
        ("finetuning.run_classification", classification_flags(tiny_start, tmp_path / "run"), classified),
    ]
    answers = answers_of(((module, [*flags, "--dry-run"]) for module, flags, _ in runs), before=NO_TENSORFLOW)
    assert "The first row is not shown: there is no TensorFlow here" in answers[0].err  # to which all log
    for answer, (*_, run) in zip(answers, runs, strict=True):
        assert (answer.status, answer.has_tensorflow) == (0, False)
        assert "card cannot be built" not in answer.err
        if run is not None:
            number = read_json(run / "run.json")["num_parameters"]
            assert f"\nparameters             {number:,}\n" in f"\n{answer.out}"
    assert not (tmp_path / "run").exists()


@of_transformers_4
def test_a_network_of_which_the_arithmetic_is_not_known_is_built(shards, tmp_path, run):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIGS["roformer"]), encoding="utf-8")
    model = ("--pretrained-model-config", tmp_path / "model", "--position-init", "random")
    status, plan, _ = run(main, *run_flags(shards, tmp_path / "run"), *model, "--dry-run")
    assert status == 0
    assert "parameters  " in plan


def test_a_shard_that_is_damaged_is_one_line(shards, tmp_path, run):
    shutil.copytree(shards, tmp_path / "shards")
    for path in (tmp_path / "shards" / "train").glob("*.tfrecord"):
        path.write_bytes(bytes(path.stat().st_size))
    outcome = run(main, *run_flags(tmp_path / "shards", tmp_path / "run"), "--dry-run")
    assert outcome.status == EXIT_PERMANENT
    assert "Find it with `prepare_tfrecord_shards.py --verify`" in outcome.error
