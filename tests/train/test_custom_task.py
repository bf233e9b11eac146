"""Custom tasks of pretraining: the two of recipes/ from shards to export, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from recipes.document_label import LABEL
from recipes.document_label import main as label_documents
from tests.fixtures.finetuned_runs import run_on_one_device
from tests.fixtures.made_once import made_once
from tests.fixtures.read_in_pytorch import TOLERANCE, read_in_pytorch, write_expected
from tests.fixtures.results import read_json
from tests.fixtures.same_run import timeless_lines
from tests.fixtures.tiny_run import MODEL, run_flags
from tfrecord_prep.records import decode_feature, read_records
from train.checks.machine import check_run
from train.config.settings import parse_training_config
from train.fill_mask import main as fill_mask
from train.model.from_pretrained import load_model
from train.publishing.saved_model import read_saved_model
from train.run_mlm import main

RECIPES = Path(__file__).parents[2] / "recipes"
ELECTRA = ("--task", f"{RECIPES}/replaced_tokens.py:GradientDisentangled")
ELECTRA += ("--mask-token-rate=1", "--random-token-rate=0")
LABELS = ("--task", f"{RECIPES}/document_label.py:DocumentLabel")


def electra_flags(folder: Path) -> tuple[str, ...]:
    config = {"model_type": "electra", "embedding_size": 16, "max_position_embeddings": 16}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return (*ELECTRA, "--pretrained-model-config", str(folder))


@pytest.fixture(scope="session")
def electra(shards, tmp_path_factory) -> Path:
    """The folder of a configuration, and of a run from its start to its end."""

    def make(folder: Path) -> None:
        run_on_one_device(
            main, run_flags(shards, folder / "run", *electra_flags(folder), "--max-steps", "2"), eagerly=True
        )

    return made_once(tmp_path_factory, "custom-electra", make)


@pytest.fixture(scope="session")
def labelled(shards, tmp_path_factory) -> Path:
    """Shards whose rows have the label of their folder, and a run that learns from them."""

    def make(folder: Path) -> None:
        sources = [f"one={shards / 'train'}", f"two={shards / 'validation'}"]
        assert label_documents([str(folder / "train"), *sources]) == 0
        assert label_documents([str(folder / "validation"), *reversed(sources)]) == 0
        # All rows are in both: not a run to learn from, but one whose labels are known.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("train.data.shards.check_nothing_is_shared", lambda *_: None)
            run_on_one_device(main, run_flags(folder, folder / "run", *LABELS, "--max-steps", "2"), eagerly=True)

    return made_once(tmp_path_factory, "custom-labels", make)


def test_the_export_is_the_discriminator(electra):
    """As the checkpoint says: with the delta added, and without the generator."""
    export = electra / "run" / "export"
    assert read_json(export / "config.json")["architectures"] == ["ElectraForPreTraining"]
    saved = read_saved_model(str(electra / "run")).snapshot.arrays
    table, delta = (saved[f"model/{part}electra/embeddings/word_embeddings/weight"] for part in ("", "delta/"))
    assert np.abs(delta).max() > 0
    exported = load_file(export / "model.safetensors")
    name = "electra.embeddings.word_embeddings.weight"
    np.testing.assert_array_equal(exported[name], (table + delta)[: len(exported[name])])
    loaded = load_model(str(export), "TFAutoModelForPreTraining")
    num_exported = sum(array.size for array in exported.values())
    assert sum(weight.shape.num_elements() for weight in loaded.weights) == num_exported
    lines = timeless_lines(electra / "run")
    assert all(np.isfinite(line["discriminator_loss"]) for line in lines)
    for line in lines:
        assert line["loss"] == pytest.approx(line["generator_loss"] + 50 * line["discriminator_loss"], rel=1e-5)
    assert "discriminator of replaced tokens (ELECTRA), pretrained from" in (export / "README.md").read_text("utf-8")


def test_the_plan_and_the_doctor_count_all_that_is_trained(electra, shards, tmp_path, run):
    """With the generator and the delta."""
    number = read_json(electra / "run" / "run.json")["num_parameters"]
    assert number > sum(array.size for array in load_file(electra / "run" / "export" / "model.safetensors").values())
    flags = run_flags(shards, tmp_path / "run", *electra_flags(tmp_path))
    assert f"\nparameters             {number:,}\n" in f"\n{run(main, *flags, '--dry-run').out}"
    assert check_run(parse_training_config(flags, ""))["num_parameters"] == number


@pytest.mark.slow
def test_labels_are_read_from_the_shards(labelled, shards, run):
    paths = sorted((labelled / "train").glob("*.tfrecord"))
    labels = [int(decode_feature(record, LABEL)[0]) for path in paths for record in read_records(path.read_bytes())]
    counts = [read_json(shards / split / "manifest.json")["totals"]["num_rows"] for split in ("train", "validation")]
    assert labels == [0] * counts[0] + [1] * counts[1]
    names = [(labelled / split / "labels.txt").read_text(encoding="utf-8") for split in ("train", "validation")]
    assert names == ["one\ntwo"] * 2  # although their words came in another order
    last = timeless_lines(labelled / "run")[-1]
    assert last["loss"] == pytest.approx(last["mlm_loss"] + 0.1 * last["label_loss"], rel=1e-5)
    assert last["perplexity"] == pytest.approx(np.exp(last["mlm_loss"]))
    exported = load_file(labelled / "run" / "export" / "model.safetensors")
    assert exported["custom_head.dense.weight"].shape == (2, 32)
    assert "lm_head.dense.weight" in exported
    # As the run says at its end, it is used without its second head.
    assert run(fill_mask, "--model", labelled / "run", "--text", "many [MASK] rows").status == 0


BAD = {
    "{tmp}/x.py:Other": ("class Task: pass", "has no class Other; it has Task."),
    "{tmp}/x.py:Task": ("class Task: pass", "is not a subclass of train.tasks.task.PretrainingTask."),
    "{tmp}/z.py:Task": (
        "from train.tasks.masked_lm import MaskedLanguageModeling as M\nfrom train.data.inputs import Feature as F\n"
        "class Task(M):\n    def features(self, length):\n        return {**super().features(length), 'age': F()}",
        "--task needs rows with the features age; received",
    ),
    "{tmp}/x.py:Named": (
        "from train.tasks.masked_lm import MaskedLanguageModeling as M\nfrom train.tasks.task import Mean\n"
        "class Named(M):\n    means = (*M.means, Mean('loss_de', 'loss', 'num_masked'))",
        "--task must not have a metric named loss_…, which is reserved for the losses of sources; received loss_de.",
    ),
}


@pytest.mark.parametrize("task", BAD)
def test_what_is_no_task_is_one_line(task, shards, tmp_path, run):
    content, message = BAD[task]
    for name in ("x.py", "z.py"):
        (tmp_path / name).write_text(content, encoding="utf-8")
    flags = run_flags(shards, tmp_path / "run", "--task", task.format(tmp=tmp_path), "--dry-run")
    assert message in run(main, *flags).refusal


@pytest.mark.slow
def test_labels_of_other_shards_are_refused(labelled, tmp_path, run, monkeypatch):
    monkeypatch.setattr("train.data.shards.check_nothing_is_shared", lambda *_: None)  # as for the run
    shutil.copytree(labelled, tmp_path / "other", ignore=shutil.ignore_patterns("run"))
    (tmp_path / "other" / "validation" / "labels.txt").write_text("one\nthree", encoding="utf-8")
    outcome = run(main, *run_flags(tmp_path / "other", tmp_path / "run", *LABELS, "--dry-run"))
    assert "All shards must have the labels ['one', 'two'];" in outcome.refusal


REFUSED = {
    ELECTRA: "needs an electra, without --block-attention; received a roberta.",
    LABELS: "--task needs shards of recipes/document_label.py;",
    (*ELECTRA, "--objective", "mlm+nsp"): "--objective cannot be combined with --task; received mlm+nsp.",
    (*ELECTRA, "--score-words", "5"): "--task must have the model_class TFAutoModelForMaskedLM with --score-pairs or",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_does_not_suit_is_refused(flags, shards, tmp_path, run):
    assert REFUSED[flags] in run(main, *run_flags(shards, tmp_path / "run", *flags, "--dry-run")).refusal


@pytest.mark.usefixtures("one_device")
def test_another_file_is_another_run(electra, shards, tmp_path, run):
    recipe = tmp_path / "moved.py"
    flags = [*run_flags(shards, electra / "run", *electra_flags(electra)), "--task", f"{recipe}:GradientDisentangled"]
    recipe.write_bytes((RECIPES / "replaced_tokens.py").read_bytes())
    assert run(main, *flags, "--dry-run").status == 0
    recipe.write_bytes(recipe.read_bytes() + b"# changed\n")
    assert "contains a different run (task: GradientDisentangled" in run(main, *flags, "--dry-run").refusal


@pytest.mark.slow
def test_pytorch_opens_the_exports(electra, labelled, python, tmp_path):
    batch = {"input_ids": np.random.default_rng(0).integers(5, 40, (3, 12), dtype=np.int32)}
    batch["attention_mask"] = (np.arange(12) < [[12], [7], [3]]).astype(np.int32)
    for folder, name in ((electra, "AutoModelForPreTraining"), (labelled, "AutoModelForMaskedLM")):
        export = Path(shutil.copytree(folder / "run" / "export", tmp_path / name))
        heads = {"head_labels": {}, "adapt_network": lambda network: network} if folder is labelled else {}
        model = load_model(str(export), f"TF{name}", **heads)
        write_expected(
            export, {"rows": batch}, {name: lambda rows, model=model: [model(rows).logits], "AutoModel": None}
        )
    for result in read_in_pytorch(python, tmp_path):
        missing = result["wrong_keys"].get("missing_keys", [])
        assert all("pooler" in key and result["asked"] == "AutoModel" for key in missing)
        assert result["difference"] < TOLERANCE


@pytest.mark.slow
def test_an_export_is_trained_on(electra, shards, tmp_path):
    flags = run_flags(shards, tmp_path / "run", *ELECTRA, "--init-from", str(electra / "run"), "--max-steps", "1")
    for word in ("--config-overrides", MODEL):
        flags.remove(word)
    run_on_one_device(main, [*flags, "--learning-rate", "1e-9"], eagerly=True)
    name = "electra.embeddings.word_embeddings.weight"
    first, then = (load_file(folder / "run" / "export" / "model.safetensors")[name] for folder in (electra, tmp_path))
    np.testing.assert_allclose(first, then, atol=1e-6)
