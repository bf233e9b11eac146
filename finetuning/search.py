r"""Search texts with a model that embeds them: embed a corpus once, and answer questions with the nearest texts.

Examples:
    python finetuning/search.py --model work/embedding --corpus corpus.jsonl \
        "Who wrote the book?"
"""

try:
    from mlm_common.cli.command_line import command, log_start, parse_arguments
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from finetuning.config.prediction import SearchConfig
from mlm_common.cli.process import run_as_script

if TYPE_CHECKING:
    from finetuning.tasks.vectors import TextSearch

# Maximum number of characters of a printed text; longer texts are cut.
MAX_PRINTED_CHARACTERS = 300


def open_search(**settings: Any) -> "TextSearch":
    """Open a corpus for searches from Python; the result's method `find` answers questions.

    Args:
        settings: fields of `SearchConfig`, which are the flags of the command: `model`, `corpus` and so on.

    Raises:
        InputError: the model, a file or a column does not exist, or the folder has vectors of another model or of
            other texts.
        HubAwayError: the Hub cannot be reached.
    """
    from finetuning.tasks.vectors import open_search

    return open_search(SearchConfig(**settings))


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Embed the texts that have no vectors yet, and print the texts nearest to each question."""
    (config,) = parse_arguments((SearchConfig,), argv, __doc__ or "", needed=("model", "corpus", "question"))
    log_start(__file__)
    search = open_search(**vars(config))
    if not config.question:
        print(f"{len(search.texts):,} vectors  {config.folder}")
        return
    answers = search.find(config.question, config.top_k)
    for question, nearest in zip(config.question, answers, strict=True):
        print(question)
        for text, score in nearest:
            line = " ".join(text.split())
            is_short = len(line) <= MAX_PRINTED_CHARACTERS
            print(f"{score:8.4f}  {line if is_short else f'{line[:MAX_PRINTED_CHARACTERS]}…'}")


if __name__ == "__main__":
    run_as_script(main)
