"""A run of classification beside PyTorch's: losses step by step, from the same export."""

import json
import shutil

import numpy as np
import pytest
import tensorflow as tf
from transformers import PreTrainedTokenizerFast

from finetuning.config.settings import ClassificationConfig, parse_finetuning_config
from finetuning.run_classification import main
from finetuning.tasks.classification import ClassificationJob
from tests.fixtures.other_environments import output_of
from tests.fixtures.tiny_classification import flags
from train.metrics.log import read_metrics
from train.runtime.machines import Cluster
from train.runtime.run_folder import RunFolder
from train.step.schedule import build_schedule

pytestmark = pytest.mark.slow

NUM_STEPS = 20

# Trains on the batches of a file by AdamW, and prints the losses.
TRAINER = """
import json, sys
import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

model = AutoModelForSequenceClassification.from_pretrained(
    sys.argv[1], hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
)
model.train()
settings = json.loads(sys.argv[4])
loss_function = torch.nn.CrossEntropyLoss(torch.tensor(settings["weights"]), label_smoothing=settings["smoothing"])

def factor_of(name):
    layers = model.config.num_hidden_layers
    power = layers + 1 if "embeddings" in name else layers - int(name.split(".")[3]) if ".layer." in name else 0
    return settings["decay"] ** power

groups = [
    {"params": [parameter], "weight_decay": 0.0 if name.endswith("bias") or "LayerNorm" in name else 0.01,
     "factor": factor_of(name)}
    for name, parameter in model.named_parameters()
]
optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999))
losses = []
for step, (batch, rate) in enumerate(zip(json.load(open(sys.argv[2])), json.loads(sys.argv[3])), start=1):
    ids, mask, labels = (torch.tensor(batch[name]) for name in ("input_ids", "attention_mask", "labels"))
    loss = loss_function(model(input_ids=ids, attention_mask=mask).logits, labels)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["factor"]
        # PyTorch adds it after the correction of the moment's bias, tf_keras before.
        group["eps"] = settings["epsilon"] / (1 - 0.999**step) ** 0.5
    optimizer.step()
    losses.append(loss.item())
print(json.dumps(losses))
"""


@pytest.mark.usefixtures("one_device")
def test_losses_are_those_of_torch(classified, tiny_start, torch_python, tmp_path):
    """From a model that was fine-tuned before, on the same batches of several lengths, with dropout 0.

    Texts hold the padding token, which PyTorch's mask, the tokenizer's, attends to.
    """
    # Near the least loss of smoothed labels, a small epsilon would make whole steps of rounding errors.
    weights, smoothing, decay, epsilon = [0.5, 3.0], 0.1, 0.7, 1e-3
    shutil.copytree(tiny_start, tmp_path / "tiny")
    table = tmp_path / "tiny" / "glue" / "SST-2" / "train.tsv"
    lines = [line.replace("the ", "<pad> ") for line in table.read_text(encoding="utf-8").splitlines(keepends=True)]
    table.write_text("".join(lines), encoding="utf-8")
    texts = [line.rsplit("\t", 1)[0] for line in lines[1:]]
    encoded = PreTrainedTokenizerFast.from_pretrained(tiny_start / "start")(texts, truncation=True, max_length=30)
    assert any(1 in ids for ids in encoded["input_ids"])
    extra_flags = ("--init-from", str(classified / "export"), "--dropout", "0", "--log-steps", "1")
    extra_flags = (*extra_flags, "--learning-rate", "0.002")
    extra_flags = (*extra_flags, "--class-weights", *map(str, weights), "--label-smoothing", str(smoothing))
    extra_flags = (*extra_flags, "--layer-lr-decay", str(decay), "--adam-epsilon", str(epsilon))
    argv = flags(tmp_path / "tiny", tmp_path / "run", *extra_flags, "--max-steps", str(NUM_STEPS))
    assert main(argv) == 0
    ours = [line["loss"] for line in read_metrics(RunFolder(tmp_path / "run")) if line["split"] == "train"]

    config = parse_finetuning_config(ClassificationConfig, argv, "")
    run = ClassificationJob().open_run(config, Cluster()).planned(1)
    (phase,), (plan,) = run.phases, run.plans
    batches = phase.inputs.training_batches(
        phase.task.features(plan.max_length),
        tf.distribute.InputContext(),
        seed=config.run.seed,
        global_batch_rows=plan.global_batch_rows,
        start_step=0,
        num_steps=NUM_STEPS,
    )
    written = []
    for batch in batches.as_numpy_iterator():
        is_row = batch["index"] >= 0
        ids, labels = (batch[name][is_row].tolist() for name in ("input_ids", "label"))
        masks = [encoded["attention_mask"][index] for index in batch["index"][is_row]]
        masks = [mask + [0] * (len(ids[0]) - len(mask)) for mask in masks]
        written.append({"input_ids": ids, "attention_mask": masks, "labels": labels})
    assert len({len(batch["input_ids"][0]) for batch in written}) == 2
    (tmp_path / "batches.json").write_text(json.dumps(written), encoding="utf-8")
    schedule = build_schedule(config.optimization, **plan.schedule_steps)
    rates = json.dumps([float(schedule(step)) for step in range(NUM_STEPS)])
    settings = json.dumps({"weights": weights, "smoothing": smoothing, "decay": decay, "epsilon": epsilon})
    given = (str(classified / "export"), str(tmp_path / "batches.json"), rates, settings)
    theirs = json.loads(output_of(torch_python, TRAINER, *given))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
