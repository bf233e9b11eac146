"""Settings of what is published on the Hugging Face Hub, and when."""

from dataclasses import dataclass, field
from typing import Literal

from tokenizer_training.hub import MAIN_BRANCH, HubRepository
from train.config_fields import flag, require

MASK = "[MASK]"


@dataclass(frozen=True)
class HubConfig:
    """Where the export is pushed to, how often, and what its card says that the run does not know."""

    hub_model_id: str | None = flag(None, "USER/NAME on the Hub that the export is pushed to.")
    hub_private: bool = flag(False, "Make the Hub's repository private when it is created.")
    hub_revision: str | None = flag(
        None, "Branch that is pushed to, made where it is missing; by default main, which others load."
    )
    hub_tag: str | None = flag(None, "Name of a tag that the commit of the last push gets.")
    hub_strategy: Literal["end", "epoch", "steps", "checkpoint"] = flag(
        "end",
        "When to push: after the last update; also after each pass over the rows; also every --push-steps updates; or "
        "with each of these the newest checkpoint of the training, too, to the branch `checkpoints`. Training goes on "
        "meanwhile, and a push that is late is skipped for a newer one.",
    )
    push_steps: int | None = flag(
        None, "Updates between two pushes of --hub-strategy steps or checkpoint; by default as between checkpoints."
    )
    resume_from_hub: bool = flag(
        False,
        "Where --output-dir holds no run, go on from the checkpoint that --hub-strategy checkpoint put on the Hub.",
    )
    hub_license: str | None = flag(
        None, "License of the model, for its card, as the Hub calls it: apache-2.0, mit, cc-by-4.0 …"
    )
    hub_language: list[str] = field(
        default_factory=list,
        metadata={"help": "Languages of the corpus, for the card: ISO 639 codes such as en de, or multilingual."},
    )
    hub_example: str = flag(
        f"The capital of France is {MASK}.", f"Sentence in the card's lines of code, with {MASK} for the mask token."
    )

    def __post_init__(self) -> None:
        require(self.push_steps is None or self.push_steps >= 1, "must be at least 1", "--push-steps", self.push_steps)
        is_by_steps = self.push_steps is None or self.hub_strategy in ("steps", "checkpoint")
        require(is_by_steps, "needs --hub-strategy steps or checkpoint", "--push-steps", self.hub_strategy)
        for name in ("hub_revision", "hub_tag", "hub_strategy", "resume_from_hub"):
            value = getattr(self, name)
            is_of_use = value in (None, "end", False) or self.hub_model_id is not None
            require(is_of_use, "needs --hub-model-id", f"--{name.replace('_', '-')}", value)
        require(self.hub_example.count(MASK) == 1, f"must have one {MASK}", "--hub-example", repr(self.hub_example))

    def repository(self) -> HubRepository | None:
        """Return what is pushed to, None when nothing is."""
        if self.hub_model_id is None:
            return None
        return HubRepository(
            self.hub_model_id, private=self.hub_private, branch=self.hub_revision or MAIN_BRANCH, tag=self.hub_tag
        )


def preliminary_card(config: HubConfig) -> str:
    """Return a card of what the settings say: the part of the metadata that the Hub could refuse."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(license=config.hub_license, language=config.hub_language or None, pipeline_tag="fill-mask")
    return f"---\n{data.to_yaml()}\n---\n"
