r"""Score masked language models without fine-tuning, by bits per byte and words of a text and by minimal pairs.

Examples:
    python train/score_mlm.py --model work/model --text valid.txt
    python train/score_mlm.py --model work/model FacebookAI/roberta-base \
        --minimal-pairs blimp.jsonl.gz
    python train/score_mlm.py --run work/model --all-checkpoints --text valid.txt \
        --picture work/curve.svg
"""

try:
    from mlm_common.cli.command_line import command, log_start, parse_arguments
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from mlm_common.cli.process import run_as_script
from mlm_common.cli.settings import Bounded, flag, require
from mlm_common.corpus.config import DEFAULT_SAMPLE_BY, CorpusConfig, SampleBy
from mlm_common.corpus.corpus import open_corpus
from mlm_common.errors import InputError
from mlm_common.storage import check_file, check_folder_or_hub, output_file
from train import load_tensorflow
from train.checkpoints.store import CheckpointStore
from train.config.settings import HardwareConfig
from train.runtime.pjrt_settings import show_tpu
from train.runtime.run_folder import RunFolder, exported_model
from train.scoring.pairs import num_equal_pairs, read_pairs
from train.scoring.texts import draw_units, find_words


@dataclass(frozen=True)
class ScoreConfig(Bounded):
    """The models, and the texts and minimal pairs to score them on."""

    FLAG_GROUP = "Models and texts"

    model: list[str] = flag(
        list,
        "Runs (OUTPUT_DIR of run_mlm.py) or exported models, local or gs://, or models on the Hub.",
        metavar="MODEL",
        is_usual=True,
    )
    run: str | None = flag(
        None,
        "A run (OUTPUT_DIR of run_mlm.py) whose newest checkpoint is scored, instead of its export.",
        metavar="DIR",
        is_usual=True,
    )
    all_checkpoints: bool = flag(False, "Score all checkpoints of --run: a learning curve.", is_usual=True)
    picture: str | None = flag(
        None, "Draw the scores of --all-checkpoints into this .svg or .png file, local or gs://.", metavar="FILE"
    )
    text: list[str] = flag(
        list,
        "Files or quoted globs with text that none of the models was trained on: .txt, .jsonl, .csv or .parquet, local "
        "or gs://.",
        metavar="FILE",
        is_usual=True,
    )
    minimal_pairs: list[str] = flag(
        list,
        "Files in BLiMP's format, also as .gz: lines of JSON with sentence_good and sentence_bad, and optionally field "
        "and linguistics_term.",
        metavar="FILE",
        is_usual=True,
    )
    output: str | None = flag(
        None,
        "Also write scores, standard errors and comparisons to this .json file, local or gs://. The models' answers go "
        "into a second file next to it, so that they are not computed again. A run's model card shows the scores in "
        "OUTPUT_DIR/scores.json.",
        metavar="FILE",
    )
    num_words: int = flag(2000, "Number of words to draw from the text.", at_least=2)
    sample_by: SampleBy | None = flag(
        DEFAULT_SAMPLE_BY, "What one document of a .txt file is. A row never has tokens of two documents."
    )
    text_column: str = flag("text", "Column or JSON key with the text.")
    max_length: int = flag(512, "Longest row, in tokens; capped at the longest row that the model reads.", at_least=16)
    left_to_right: bool = flag(
        False,
        "Mask not only the scored token but also the tokens after it in the same word (Kauf and Ivanova 2023), so that "
        "the rest of a word does not give the token away.",
    )
    random_networks: int = flag(
        8,
        "Number of networks with random weights to compare each model with. Each is scored on 500 words and 1,000 "
        "pairs. With fewer networks, only a larger difference counts as significant.",
        at_least=2,
    )
    seed: int = flag(42, "Random seed for drawing the words.")
    tpu_name: str | None = flag(None, "TPU to compute on: `local` on a TPU VM, otherwise its name or grpc:// address.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.text or self.minimal_pairs), "is required, or --minimal-pairs", "--text", "neither")
        require(self.output is None or self.output.endswith(".json"), "must end in .json", "--output", self.output)
        require(bool(self.model or self.run), "is required, or --run", "--model", "neither")
        require(bool(self.run) or not self.all_checkpoints, "is required with --all-checkpoints", "--run", "nothing")
        is_drawn = self.picture is None or (self.all_checkpoints and self.picture.endswith((".svg", ".png")))
        require(is_drawn, "must end in .svg or .png, and needs --all-checkpoints", "--picture", self.picture)
        require(len(set(self.model)) == len(self.model), "must not repeat", "--model", " ".join(self.model))


@command
def main(argv: Sequence[str] | None = None) -> None:
    (config,) = parse_arguments((ScoreConfig,), argv, __doc__, needed=("model",))
    log_start(__file__)
    from train.scoring.queries import Material, Reader  # imports transformers, not needed for --help

    for model in config.model:
        check_folder_or_hub(model, "--model")
    for path in config.minimal_pairs:
        check_file(path, "--minimal-pairs")
    checkpoints: dict[str, str] = {}
    if config.run:
        store = CheckpointStore(RunFolder(config.run).checkpoints)
        steps = store.steps()
        require(bool(steps), "must be the OUTPUT_DIR of a run with checkpoints", "--run", config.run)
        steps = steps if config.all_checkpoints else steps[-1:]
        checkpoints = {f"{config.run}, step {step:,}": store.path(step) for step in steps}
    folder, name = output_file(config.output, "--output") if config.output is not None else (None, "")
    if config.picture is not None:
        picture_folder, picture_name = output_file(config.picture, "--picture")
    documents: list[str] = []
    if config.text:
        text = CorpusConfig(data_files=config.text, sample_by=config.sample_by, text_column=config.text_column)
        try:
            documents = list(open_corpus(text).documents("train"))
        except InputError as error:
            raise InputError(str(error).replace("--data-files", "--text")) from error
        find_words(documents)
    pairs = read_pairs(config.minimal_pairs) if config.minimal_pairs else []

    def read(name: str, folder: str, checkpoints: dict[str, str] | None = None) -> Reader:
        options = {"left_to_right": config.left_to_right, "checkpoints": checkpoints}
        return Reader(name, folder, documents, pairs, config.max_length, **options)

    readers = [read(model, exported_model(model)) for model in config.model]
    show_tpu(HardwareConfig(tpu_name=config.tpu_name))  # before TensorFlow is imported
    load_tensorflow()  # not needed to reject bad input
    from train.publishing.saved_model import transformers_folder
    from train.runtime.machines import Cluster
    from train.runtime.strategy import connect
    from train.runtime.tensorflow_runtime import TensorFlowRuntime
    from train.scoring.measure import KeptAnswers
    from train.scoring.scores import score_models
    from train.scoring.tables import as_json, as_text, draw_curve

    if config.run:
        with transformers_folder(list(checkpoints.values())[-1]) as export:
            readers.append(read(config.run, export, checkpoints))
    texts = [reader.texts for reader in readers]
    units = draw_units(documents, texts, config.num_words, config.seed) if documents else []
    material = Material(documents, units, pairs)
    questions_by_model = [reader.ask(material) for reader in readers]
    runtime = TensorFlowRuntime(connect(HardwareConfig(tpu_name=config.tpu_name), Cluster()))
    kept = KeptAnswers(folder, name.replace(".json", ".answers.json"))
    scored = [
        score_models(questions, material, runtime, kept, config.random_networks) for questions in questions_by_model
    ]
    num_equal = num_equal_pairs(pairs)
    # Write files before printing: printing fails if the program that reads the output has ended.
    if folder is not None:
        folder.write_json(name, {"left_to_right": config.left_to_right, **as_json(scored, num_equal)})
    if config.picture is not None:
        picture_folder.write_bytes(picture_name, draw_curve(scored[-1], PurePath(picture_name).suffix[1:]))
    print(as_text(scored, num_equal))


if __name__ == "__main__":
    run_as_script(main)
