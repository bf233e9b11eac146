"""Score masked language models without fine-tuning: bits per byte and words of a text, minimal pairs of sentences."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

try:
    from mlm_common.cli.command_line import command, log_start, parse_arguments
except ModuleNotFoundError:
    sys.exit("error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)")
from mlm_common.cli.local_paths import check_file, check_folder_or_hub
from mlm_common.cli.settings import Bounded, flag, require
from mlm_common.corpus.config import DEFAULT_SAMPLE_BY, SampleBy
from mlm_common.storage import folder_and_name
from train.config.settings import HardwareConfig


@dataclass(frozen=True)
class ScoreConfig(Bounded):
    """The models, and what they are scored on."""

    FLAG_GROUP = "Models and texts"

    model: list[str] = field(
        metadata={
            "help": "Runs (OUTPUT_DIR of run_mlm.py), exported models, local or gs://, or models on the Hub.",
            "metavar": "MODEL",
            "is_usual": True,
        }
    )
    text: list[str] = flag(
        list,
        "Files or quoted globs of text that none of the models was trained on: .txt, .jsonl, .csv, .parquet, local or "
        "gs://.",
        metavar="FILE",
        is_usual=True,
    )
    minimal_pairs: list[str] = flag(
        list,
        "Files in BLiMP's form: lines of JSON with sentence_good and sentence_bad, and perhaps field and "
        "linguistics_term; also .gz.",
        metavar="FILE",
        is_usual=True,
    )
    output: str | None = flag(
        None, "Also write scores, errors and comparisons to this .json file, local or gs://.", metavar="FILE"
    )
    num_words: int = flag(2000, "Number of words to draw from the text.", at_least=2)
    sample_by: SampleBy | None = flag(
        DEFAULT_SAMPLE_BY, "What one document of a .txt file is: no row has tokens of two of them."
    )
    text_column: str = flag("text", "Column or JSON key with the text.")
    max_length: int = flag(512, "Longest row, in tokens; at most what the model reads.", at_least=16)
    left_to_right: bool = flag(
        False,
        "Mask what follows in the same word as well as the token itself (Kauf and Ivanova 2023), so that the rest of a "
        "word does not give a token away.",
    )
    seed: int = flag(42, "Seed of the draw of words.")
    tpu_name: str | None = flag(None, "TPU to compute on: local on a TPU VM, otherwise its name or grpc:// address.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.text or self.minimal_pairs), "is required, or --minimal-pairs", "--text", "neither")
        require(self.output is None or self.output.endswith(".json"), "must end in .json", "--output", self.output)
        require(len(set(self.model)) == len(self.model), "must not repeat", "--model", " ".join(self.model))


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Check what is asked for, score model after model, print the tables, and write the file if one is named."""
    (config,) = parse_arguments((ScoreConfig,), argv, __doc__, needed=("model",))
    log_start(__file__)
    for model in config.model:
        check_folder_or_hub(model, "--model")
    for path in config.minimal_pairs:
        check_file(path, "--minimal-pairs")
    if config.output is not None:
        folder, name = folder_and_name(config.output)
        folder.check_writable()
    from train.scoring.material import read_material
    from train.scoring.queries import ask

    material = read_material(
        config.text,
        config.minimal_pairs,
        config.num_words,
        config.seed,
        sample_by=config.sample_by,
        text_column=config.text_column,
    )
    questions = [ask(model, material, config.max_length, left_to_right=config.left_to_right) for model in config.model]
    from train.runtime.machines import Cluster  # TensorFlow, not for bad input
    from train.runtime.strategy import connect
    from train.scoring.scores import as_json, as_text, score_model

    strategy = connect(HardwareConfig(tpu_name=config.tpu_name), Cluster())
    scored = [score_model(of_model, material, strategy) for of_model in questions]
    print(as_text(scored))
    if config.output is not None:
        folder.write_json(name, as_json(scored))


if __name__ == "__main__":
    sys.exit(main())
