"""Every preset is a complete run: its settings parse, its model is one that can be trained, its batch is reasonable."""

import pytest

from mlm_common.errors import InputError
from tests.fixtures import plans
from train.checks.preflight.report import synthetic_inputs
from train.config.learning import OptimizationConfig
from train.config.presets import about_preset, preset_markdown, preset_names, preset_table, read_preset
from train.config.settings import parse_training_config
from train.model.computation import count_parameters, step_flops
from train.model.config import padded_vocabulary_size, resolve_model_config

INPUTS = synthetic_inputs(max_length=512, vocab_size=32_000)
OF_TPU = [name for name in preset_names() if name.endswith(("-8", "-tpu-shaped")) or name.startswith("modernbert")]
LANES = 128


def config_of(name):
    return plans.config_of("--preset", name)


def model_of(name):
    return resolve_model_config(config_of(name).model, INPUTS)


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_resolves_to_a_model_that_can_be_trained(name):
    model_config = model_of(name)
    counted = count_parameters(exact_model_of(name))
    assert counted is not None
    assert counted.total == about_preset(name).parameters
    multiple = config_of(name).model.pad_vocab_to_multiple_of
    assert model_config.vocab_size == padded_vocabulary_size(32_000, multiple)
    assert model_config.hidden_size % model_config.num_attention_heads == 0
    assert set(read_preset(name)["model"]) <= set(model_config.to_dict())
    config = config_of(name)
    assert config.model.preset == name
    for key, value in read_preset(name)["settings"].items():
        assert [settings[key] for settings in config.as_dict().values() if key in settings] == [value], key


@pytest.mark.parametrize("name", OF_TPU)
def test_presets_of_tpus(name):
    config = config_of(name)
    assert config.hardware.bfloat16
    optimization = config.optimization
    global_batch_rows = 8 * optimization.per_replica_batch_size * optimization.gradient_accumulation_steps
    assert 256 <= global_batch_rows <= 2048
    assert optimization.per_replica_batch_size % 8 == 0
    assert OptimizationConfig().learning_rate < optimization.learning_rate <= 7e-4  # RoBERTa's at 2,048 rows
    assert optimization.warmup_ratio < OptimizationConfig().warmup_ratio
    assert 0.15 <= config.masking.mlm_probability <= 0.4


@pytest.mark.parametrize("name", ["roberta-base", "bert-base", "modernbert-base", "modernbert-large"])
def test_a_tpu_shaped_model_is_as_large_and_fills_the_lanes(name):
    plain, shaped = model_of(name), model_of(f"{name}-tpu-shaped")
    assert shaped.hidden_size // shaped.num_attention_heads == LANES
    sizes = {"num_rows": 8, "length": 512, "num_predictions": 128}
    assert step_flops(shaped, **sizes) == step_flops(plain, **sizes)
    differing = {key for key, value in plain.to_dict().items() if shaped.to_dict()[key] != value}
    of_bert = {"hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob"}
    assert differing == {"num_attention_heads", *(() if name.startswith("modernbert") else of_bert)}


def exact_model_of(name):
    about = about_preset(name)
    inputs = synthetic_inputs(max_length=about.row_length, vocab_size=about.vocab_size)
    return resolve_model_config(config_of(name).model, inputs)


def test_the_table_lists_each_preset_once_the_smallest_first():
    shown = preset_table()
    first_words = [line.split()[0] for line in shown.splitlines()[1 : len(preset_names()) + 1]]
    assert sorted(first_words) == preset_names()
    assert first_words[0] == "tiny-cpu"
    assert first_words[-1] == "modernbert-large-tpu-shaped"
    assert max(map(len, shown.splitlines())) <= 132
    assert "1,024 x 512" in next(line for line in shown.splitlines() if line.startswith("roberta-base-v5e-8"))
    assert "| `tiny-cpu` | 1.7 M | 2 CPU cores | 32 x 64 |" in preset_markdown()


@pytest.mark.parametrize("words", [["--preset", "list"], ["--preset=list", "--dry-run"]])
def test_the_list_is_printed_without_any_other_flag(words, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_training_config(words, "")
    assert ended.value.code == 0
    assert capsys.readouterr().out == preset_table() + "\n"


@pytest.mark.parametrize(
    ("name", "hint"),
    [("tiny_cpu", "did you mean tiny-cpu? "), ("tiny-german", ""), ("robberta-base", "did you mean roberta-base? ")],
)
def test_an_unknown_preset_is_one_line_with_the_nearest(name, hint):
    with pytest.raises(InputError) as refused:
        parse_training_config(["--preset", name], "")
    assert str(refused.value) == f"--preset: there is no preset {name}; {hint}--preset list shows all."


def test_rates_are_pinned():
    """The reason for each is in its file."""
    names = ("learning_rate", "muon_learning_rate", "weight_decay_rate", "warmup_ratio")
    pinned = {
        "tiny-cpu": (8e-3, 1.2e-2, None, 0.1),
        "tiny-roberta-cpu": (2e-3, None, None, None),
        "roberta-small": (7e-4, None, None, 0.02),
        **dict.fromkeys(("bert-base", "roberta-base"), (None,) * 4),
        **dict.fromkeys(("bert-base-tpu-shaped", "roberta-base-tpu-shaped"), (5e-4, None, None, 0.02)),
        **dict.fromkeys(("roberta-base-v3-8", "roberta-base-v5e-8"), (5e-4, None, None, 0.02)),
        **dict.fromkeys(("modernbert-base", "modernbert-base-tpu-shaped"), (4e-4, None, 0.0125, 0.02)),
        "modernbert-base-muon": (4e-4, 4e-4, 0.0125, 0.02),
        **dict.fromkeys(("modernbert-large", "modernbert-large-tpu-shaped"), (2.5e-4, None, 0.02, 0.02)),
    }
    settings = {name: read_preset(name)["settings"] for name in preset_names()}
    assert {name: tuple(chosen.get(key) for key in names) for name, chosen in settings.items()} == pinned
