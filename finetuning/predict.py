r"""Predict with a fine-tuned model: classes, labels, numbers, tags or answers, for given texts or a file.

Examples:
    python finetuning/predict.py --model work/reviews \
        --text "A wonderful cast and a clever story."
    python finetuning/predict.py --model work/questions \
        --question "Where was she born?" --context "She was born in Turku in 1920."
    python finetuning/predict.py --model work/reviews --file new.csv \
        --output work/predictions.csv
"""

try:
    from mlm_common.cli.command_line import command, log_start, parse_arguments
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None
from collections.abc import Sequence

from finetuning.config.prediction import PredictionConfig
from mlm_common.cli.process import run_as_script
from mlm_common.storage import output_file


@command
def main(argv: Sequence[str] | None = None) -> None:
    (config,) = parse_arguments((PredictionConfig,), argv, __doc__ or "")
    log_start(__file__)
    from finetuning.tasks.prediction import open_predictor

    if config.output is not None:
        folder, name = output_file(config.output, "--output")
    with open_predictor(config) as predictor:
        outputs = predictor.predict()
    if config.file is None:
        print("\n\n".join(predictor.format_outputs(outputs)))
        return
    text, num_predictions = predictor.file_text(outputs)
    if config.output is None:
        print(text, end="")
    else:
        folder.write_text(name, text)
        print(f"{num_predictions:,} predictions  {config.output}")


if __name__ == "__main__":
    run_as_script(main)
