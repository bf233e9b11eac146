"""The benchmarks: their flags, the texts that they generate, what they measure, and that each prints its table."""

import gzip
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import embedding_step, finetune_step
from benchmarks.measuring.generated_text import write_generated_text
from benchmarks.measuring.measured_run import run_measured
from benchmarks.time_to_quality import message
from finetuning.config.settings import ClassificationData
from finetuning.tasks.classification import read_splits
from tests.fixtures.other_environments import output_of
from tests.fixtures.results import read_json, write_jsonl
from tests.fixtures.same_run import logged
from tests.fixtures.script_help import ask_for_help
from tests.fixtures.tiny_models import HAS_TF_CLASSES

PROJECT = Path(__file__).parents[2]
# A tenth, a half and nine tenths of the 87,599 questions of the training part have at most these, and their paragraphs.
SQUAD_WORDS = {"query": (6, 10, 15), "passage": (72, 110, 183)}
# What needs transformers 4.
TUTORIAL = ("tutorial",) if HAS_TF_CLASSES else ()
INPUTS = ("ours-masked", *(TUTORIAL or ("ours",)))
FINETUNERS = ("trainer grouped", *(("tf script dynamic",) if HAS_TF_CLASSES else ()))
CURVE = [(10.0, 6.0), (20.0, 5.0), (30.0, 5.5), (40.0, 4.0)]


def test_generated_text_repeats_and_a_shorter_one_is_its_head(tmp_path):
    for name, num_bytes, seed in (("long", 300_000, 0), ("short", 100_000, 0), ("other", 100_000, 1)):
        write_generated_text(tmp_path / name, num_bytes, seed)
    long, short, other = ((tmp_path / name).read_bytes() for name in ("long", "short", "other"))
    assert (len(long), len(short)) == (300_000, 100_000)
    assert long.startswith(short)
    assert other != short


def test_new_words_keep_coming_in_generated_text(tmp_path):
    path = tmp_path / "text"
    write_generated_text(path, 4_000_000)
    words = path.read_text(encoding="ascii").replace(",", "").replace(".", "").split()
    num_distinct = [len(set(words[: len(words) // part])) for part in (16, 4, 1)]
    assert all(2.2 < larger / smaller < 3.2 for smaller, larger in itertools.pairwise(num_distinct))
    assert 6 < 4_000_000 / len(words) < 8
    assert 0.04 < max(map(words.count, set(words[:100]))) / len(words) < 0.1


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_of_a_command_and_its_children_is_measured_together():
    child = "import time; held = b'x' * 40_000_000; time.sleep(1)"
    program = (
        f"import subprocess, sys; print('started', file=sys.stderr); held = b'x' * 30_000_000; "
        f"subprocess.run([sys.executable, '-c', {child!r}]); sys.exit(3)"
    )
    run = run_measured([sys.executable, "-c", program])
    assert 70e6 < run.peak.num_bytes < 110e6
    assert len(run.peak.process_bytes) == 2
    assert (run.status, run.output) == (3, "started")
    assert 0 < run.seconds_of_line("^start") < run.seconds - 0.9
    assert run.seconds_of_line("never written") == run.seconds


def test_texts_of_the_stand_in_are_as_long_as_those_of_squad(tmp_path):
    embedding_step.write_stand_in(tmp_path / "pairs.jsonl", num_rows=2000)
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    for name, quantiles in SQUAD_WORDS.items():
        words = [len(row[name].split()) for row in rows]
        assert np.quantile(words, [0.1, 0.5, 0.9]) == pytest.approx(quantiles, rel=0.15), name


def test_sentences_of_the_stand_in_are_as_long_as_those_of_sst2(tmp_path):
    finetune_step.write_stand_in(tmp_path, num_rows=5000)
    parts = read_splits(ClassificationData(task_name="sst2", glue_dir=str(tmp_path)))
    words = [len(text.split()) for text in parts.train.texts[0]]
    assert (len(words), parts.validation[""].num_rows) == (5000, 872)
    # Counted in the 67,349 rows of GLUE's download.
    assert np.mean(words) == pytest.approx(9.41, rel=0.05)
    assert np.quantile(words, [0.1, 0.5, 0.9]) == pytest.approx([2, 7, 21], abs=1)
    assert set(parts.train.labels or ()) == {"negative", "positive"}


def test_tokens_of_a_row_are_those_that_it_is_filled_up_to():
    settings, names = {"batch_rows": 2, "length": 64}, ["ours", "trainer", "trainer grouped", "tf script"]
    tokens = finetune_step.tokens_of_rows([*names, "tf script dynamic"], np.array([3, 16, 17, 40] * 5000), settings)
    assert tokens["ours"] == (4 + 16 + 20 + 40) / 4
    assert tokens["tf script"] == 40
    assert tokens["trainer grouped"] == pytest.approx((3 + 16 + 17 + 40) / 4, rel=0.02)
    assert 19 < tokens["trainer"] == tokens["tf script dynamic"] < 40
    assert finetune_step.tokens_of_rows(["ours with XLA"], np.array([3, 17]), settings) == {"ours with XLA": 20}


def test_the_title_compares_ours_with_the_best_of_the_others():
    faster, slower = [(5.0, 6.0), (10.0, 3.0)], [(10.0, 6.0), (80.0, 3.5)]
    curves = {"trainer-roberta": CURVE, "trainer-modernbert": slower, "trainer-modernbert-sparse": faster}
    assert message({**curves, "ours-modernbert": CURVE}) == (
        "This project's ModernBERT does not reach the final loss of Hugging Face Trainer, sparse_prediction (3.00)",
        "It does not reach the final loss of Hugging Face Trainer (3.50).",
    )
    assert message({"trainer-modernbert": slower, "ours-modernbert": faster})[0].endswith("in 9 s instead of 80 s")
    assert message({"trainer-roberta": CURVE, "ours-modernbert": CURVE}) == ("Validation loss over training time", "")


def test_benchmarks_show_their_flags_without_tensorflow():
    names = (
        "input_pipeline prepare preemption resume start train_step_cpu train_step_tpu time_to_quality finetune_step "
        "recipes runtime_cost"
    )
    peers = "peers/input_contenders peers/prepare_peers peers/tpu_step_contenders"
    speedrun = "speedrun/race speedrun/prepare"
    scripts = tuple(f"benchmarks/{name}.py" for name in f"{names} {peers} {speedrun}".split())
    for script, (printed, imported, _) in ask_for_help(scripts).items():
        assert re.search("--(length|rates|minutes|quickstart|shards|rounds)|data", printed), script
        assert "argparse" in imported, script
        assert "tensorflow" not in imported, script


TINY = "--num-layers=1 --hidden-size=32"
STEPS = "--rounds=1 --steps-per-round=2"
# {script: (flags with {folders}, what its tables have)}
TABLES = {
    "tokenizer_training.py": (
        "--train-file={tmp}/train.jsonl.gz --valid-file={tmp}/valid.jsonl.gz --vocab-sizes 1000 --repeats 1 "
        "--trainer-repeats 1 --generated-megabytes 1",
        [
            *(rf"^{name} +1 .* 1,000 +[34]\.\d{{4}} " for name in ("ours", "ours, no byte fallback", "UnigramTrainer")),
            *(r"^SentencePiece +1 .* 1,000 +[34]\.\d{4} ", "memory of ours / UnigramTrainer", r"^1 .* 1\.00 "),
        ],
    ),
    "input_pipeline.py": (
        f"--num-rows=600 --length=32 --batch-rows=64 --vocab-size=1000 --repeats=1 --contenders {' '.join(INPUTS)}",
        [*(rf"^{name} +1 +[\d,]+ +\(" for name in INPUTS), *(["ours-masked / tutorial "] if HAS_TF_CLASSES else [])],
    ),
    "prepare.py": (
        "--train-file={tmp}/train.jsonl --vocab-size=1000 --length=64 --repeats=1 --generated-megabytes 1",
        [
            *(rf"^{name} +1 +\d+\.\d+ " for name in ("ours", "tutorial", "tokenizer")),
            *("time of tutorial / ours", r"^1 .* 1\.00 "),
        ],
    ),
    "train_step_cpu.py": (
        f"--torch-python {{torch}} --contenders {' '.join(TUTORIAL)} ours 'torch gathered in bfloat16' {TINY} "
        f"--vocab-size=500 --length=16 {STEPS}",
        [
            *(rf"^{name} +[\d,]+ +\(" for name in (*TUTORIAL, "ours", "torch gathered in bfloat16")),
            *(rf"^ours / {name} +\d" for name in TUTORIAL),
        ],
    ),
    "resume.py": (
        "--num-rows=2000 --length=16 --late-step=900 --repeats=1 --num-layers=1 --saves=1",
        [rf"^{name} +1 +\d" for name in ("101", "901", "run-mlm", "CheckpointManager")],
    ),
    "runtime_cost.py": (
        "--num-layers=1 --num-steps=4 --warmup-steps=2 --rounds=1 --runs TensorFlow 'JAX, cold cache'",
        [
            *(rf"^{name} +1 +\d+\.\d +\(" for name in ("TensorFlow", "JAX, cold cache")),
            r"^JAX, cold cache / TensorFlow start \d+\.\d\d, step \d",
        ],
    ),
    "embedding_step.py": (
        f"--torch-python {{torch}} --num-rows=300 {TINY} --vocab-size=600 --length=32 --batch-rows=8 {STEPS} "
        "--warmup-steps=2",
        [
            *(rf"^{name} +[\d,.]+ +\(" for name in ("ours", "sentence-transformers")),
            *("300 pairs of a stand-in for SQuAD", r"^ours / sentence-transformers +\d"),
        ],
    ),
    "finetune_step.py": (
        f"--torch-python {{torch}} --num-rows=700 {TINY} --vocab-size=600 --length=32 {STEPS} --warmup-steps=2 "
        f"--contenders ours {' '.join(map(repr, FINETUNERS))}",
        [
            *(rf"^{name} +[\d,]+ +\(" for name in ("ours", *FINETUNERS)),
            *(rf"^ours / {name} +\d" for name in FINETUNERS),
            *("700 rows of a stand-in for SST-2", r"^ours is warm: programs \d, seconds to compile "),
        ],
    ),
    "time_to_quality.py": (
        "--shards {shards} --recipes trainer-roberta ours-modernbert --steps-per-round=2 --rounds=2 "
        "--torch-python {torch} --picture {tmp}/c.png",
        [r"^2( +\d+ +\d+\.\d{3}){2}$", r"^ours-modernbert reaches the final loss of trainer-roberta, \d"],
    ),
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("script", TABLES)
def test_each_prints_its_table(script, shards, tmp_path, request):
    """What it wrote to stderr is shown where a test fails."""
    flags, patterns = TABLES[script]
    if "{tmp}/train" in flags:
        write_generated_text(tmp_path / "text", 1_000_000)
        texts = (tmp_path / "text").read_text(encoding="utf-8").split("\n")
        write_jsonl(tmp_path / "train.jsonl", *({"text": text} for text in texts))
        rows = (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        for name, some in (("train", rows[100:]), ("valid", rows[:100])):
            (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress("".join(some).encode()))
    torch = request.getfixturevalue("torch_python") if "{torch}" in flags else None
    command = shlex.split(flags.format(tmp=tmp_path, shards=shards, torch=torch))
    program = [sys.executable, PROJECT / "benchmarks" / script, *command]
    printed = subprocess.run(program, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout
    for pattern in patterns:
        assert re.search(pattern, printed, re.MULTILINE), (pattern, printed)
    assert "--picture" not in flags or (tmp_path / "c.png").stat().st_size > 10_000


NO_TENSORFLOW = """
import sys
for name in ("tensorflow", "tf_keras", "keras", "transformers", "huggingface_hub", "tokenizers"):
    sys.modules[name] = None
"""


@pytest.mark.slow
def test_steps_lowered_here_are_executed_and_compared_where_there_is_no_tensorflow(shards, tmp_path):
    program = [sys.executable, PROJECT / "benchmarks" / "accelerator_step.py"]
    variants = ("reference layers", "Muon")  # the second with TPU layers
    lower = [*program, "lower", tmp_path / "steps", "--shards", shards, "--tiny", "--num-steps=4"]
    subprocess.run([*lower, "--presets", "modernbert-base", "--variants", *variants], check=True)
    (tmp_path / "sitecustomize.py").write_text(NO_TENSORFLOW, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = [*program, "run", tmp_path / "steps", "--rounds=1", "--steps-per-round=1", "--without-torch"]
    printed = subprocess.run(run, stdout=subprocess.PIPE, encoding="utf-8", check=True, env=environment).stdout
    for name in ("short-float32", "short-bfloat16"):
        followed = rf"^cpu, {name}: the first 4 of 4 losses follow the CPU's, within "
        assert re.search(followed, printed, re.MULTILINE), printed
    for variant in variants:
        assert re.search(rf"^modernbert-base-2, {variant} +[\d,]+ +\(", printed, re.MULTILINE), printed
    losses = read_json(tmp_path / "steps" / "results.json")["results"]["short-float32"]["losses"]
    assert len(set(losses)) == 4


EVALUATE = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from transformers import AutoModelForMaskedLM
from benchmarks.peers.quality_trainer import evaluation_loss
print(evaluation_loss(AutoModelForMaskedLM.from_pretrained(sys.argv[2]), dict(np.load(sys.argv[3]))))
"""


@pytest.mark.slow
def test_pytorch_evaluates_the_rows_and_masks_of_ours(torch_python, shards, finished_run, tmp_path):
    program = PROJECT / "benchmarks" / "peers" / "quality_handover.py"
    subprocess.run([sys.executable, program, shards, "tiny-cpu", tmp_path], check=True)
    arguments = (str(PROJECT), str(finished_run / "export"), str(tmp_path / "validation.npz"))
    loss = output_of(torch_python, EVALUATE, *arguments)
    ours = [line["loss"] for line in logged(finished_run, "validation")]
    assert float(loss) == pytest.approx(ours[-1], abs=1e-5)
