"""The table of presets: `--preset list` prints it; `python -m train.config.preset_table` prints it as Markdown."""

from train.config.learning import OptimizationConfig
from train.config.presets import about_preset, presets_by_size, read_preset

HEADER = ("preset", "parameters", "made for", "batch", "note")
FOOTNOTE = """Batch: rows per step x tokens per row that the settings are made for. Parameters: with a vocabulary of
32,000; the tiny presets with 4,096. Modelled: by the TPU's compiler, not measured."""


def preset_rows() -> list[tuple[str, ...]]:
    """List the presets, the smallest first, as texts under `HEADER`."""
    return [
        (name, _parameters(name), about_preset(name).made_for, _batch(name), about_preset(name).note)
        for name in presets_by_size()
    ]


def preset_table() -> str:
    """Render the table for a terminal."""
    rows = [HEADER, *preset_rows()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, "", FOOTNOTE])


def preset_markdown() -> str:
    """Render the table as Markdown."""
    rows = [HEADER, ("---",) * len(HEADER), *((f"`{name}`", *more) for name, *more in preset_rows())]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", FOOTNOTE])


def _parameters(name: str) -> str:
    millions = about_preset(name).parameters / 1e6
    return f"{millions:.1f} M" if millions < 10 else f"{millions:.0f} M"


def _batch(name: str) -> str:
    about, settings = about_preset(name), read_preset(name)["settings"]
    rows = settings.get("per_replica_batch_size", OptimizationConfig.per_replica_batch_size)
    rows *= settings.get("gradient_accumulation_steps", 1) * (about.replicas or 1)
    return f"{rows:,} x {about.row_length:,}" + ("" if about.replicas else " per replica")


if __name__ == "__main__":
    print(preset_markdown())
