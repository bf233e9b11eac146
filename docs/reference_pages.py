"""Pages of the site that are generated from the code: commands and their flags, presets, exit statuses.

mkdocs calls `on_config` and `on_files` (`hooks` in mkdocs.yml). The flags are those of the parser that prints `--help`.
"""

import argparse
import contextlib
import inspect
import io
import posixpath
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PROJECT = Path(__file__).resolve().parent.parent
SCRIPTS = {
    "Pretraining": (
        "tokenizer_training/train_unigram.py",
        "tokenizer_training/compare_tokenizers.py",
        "tfrecord_prep/prepare_tfrecord_shards.py",
        "tfrecord_prep/import_bert_tfrecords.py",
        "train/run_mlm.py",
        "train/fill_mask.py",
        "train/score_mlm.py",
        "train/compare_runs.py",
        "train/export.py",
        "train/convert_bert.py",
    ),
    "Fine-tuning": (
        "finetuning/run_classification.py",
        "finetuning/run_tagging.py",
        "finetuning/run_multiple_choice.py",
        "finetuning/run_qa.py",
        "finetuning/run_task.py",
        "finetuning/run_embedding.py",
        "finetuning/predict.py",
        "finetuning/search.py",
        "finetuning/glue_submission.py",
    ),
    "Before a run": ("install.py", "train/doctor.py", "train/tpu_preflight.py"),
}
# What pages link to in the repository, and the site has a page for.
PAGES_OF_FILES = {
    "train/config/presets": "reference/presets.md",
    "recipes": "reference/recipes.md",
    "mlm_common/errors.py": "reference/exit_statuses.md",
    "CONTRIBUTING.md": "design/contributing.md",
    "CHANGELOG.md": "design/changelog.md",
    "benchmarks/speedrun/README.md": "design/speedrun.md",
}
PRESETS = PROJECT / "train" / "config" / "presets"
RECIPES = PROJECT / "recipes"
# Weights of pages among the search's results, by the beginnings of their paths: what explains comes before what lists.
SEARCH_WEIGHTS = {"guides/plan": 4.0, "reference/": 0.5, "design/": 0.5}


class _ParserFound(Exception):  # noqa: N818
    """Carries the parser that was about to print its help."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(script: str) -> argparse.ArgumentParser:
    """Run a script with `--help`, and return its parser instead of what it prints."""

    def stop(parser: argparse.ArgumentParser, *_: Any) -> None:
        raise _ParserFound(parser)

    before = argparse.ArgumentParser.print_help, sys.argv, sys.path[:]
    argparse.ArgumentParser.print_help = stop  # type: ignore[method-assign,assignment]
    sys.argv = [script, "--help"]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(str(PROJECT / script), run_name="__main__")
    except _ParserFound as exception:
        return exception.parser
    finally:
        argparse.ArgumentParser.print_help, sys.argv, sys.path[:] = before  # type: ignore[method-assign]
    raise RuntimeError(f"{script} --help printed no help.")


def command_page(script: str) -> str:
    """Describe a command: what it does, and its flags in their groups."""
    parser = parser_of(script)
    examples = getattr(parser, "examples", "") or example_of(script)
    lines = [f"# {Path(script).name}", "", "```bash", examples, "```", ""]
    lines += [*_prose(parser.description or ""), ""]
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.dest not in ("help", "help_all")]
        if actions:
            lines += [f"## {_title(group.title or 'Flags')}", ""]
            lines += [f"{group.description}\n" if group.description else ""]
            lines += ["| flag | meaning |", "| --- | --- |"]
            lines += [f"| {_flag(action)} | {_meaning(parser, action)} |" for action in actions]
            lines.append("")
    return "\n".join(lines)


def example_of(script: str) -> str:
    """Find the first use of a script in the README, the tutorials or the guides; these are tested."""
    folders = [PROJECT / "docs" / name for name in ("tutorials", "guides", "tpu")]
    for page in [PROJECT / "README.md", *(page for folder in folders for page in sorted(folder.glob("*.md")))]:
        used = re.search(rf"^\S*python3? {script} (?:.*\\\n)*.*$", page.read_text(encoding="utf-8"), flags=re.M)
        if used:
            return used[0]
    return f"python {script} --help"


def _title(title: str) -> str:
    headings = {"options": "Flags", "optional arguments": "Flags", "positional arguments": "Arguments"}
    return headings.get(title, title[:1].upper() + title[1:])


def _prose(description: str) -> Iterator[str]:
    """Indented lines of a module's docstring are commands."""
    for paragraph in inspect.cleandoc(description).split("\n\n"):
        if paragraph.startswith("    "):
            yield f"```text\n{inspect.cleandoc(paragraph)}\n```\n"
        else:
            yield f"{paragraph}\n"


def _flag(action: argparse.Action) -> str:
    spelled = [name for name in action.option_strings if name.startswith("--no-") or "_" not in name]
    names = ", ".join(f"`{name}`" for name in spelled) or f"`{action.metavar or action.dest}`"
    names = f'<span id="{spelled[0].lstrip("-")}"></span>{names}' if spelled else names  # so that pages can link to it
    if action.option_strings and action.nargs not in (0, "?") and isinstance(action.metavar, str):
        names += f" `{action.metavar}`" + (" …" if action.nargs == "+" else "")
    return names


def _meaning(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    if action.choices and not isinstance(action.metavar, str):
        text += " One of " + ", ".join(f"`{choice}`" for choice in action.choices) + "."
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


def commands_page() -> str:
    """List the commands, with the first sentence of what each does."""
    lines = ["# Commands", "", "`--help` prints the usual flags of a command, `--help-all` prints all."]
    lines += ["`--config-file FILE.yaml` reads flags from a file; those on the command line override it.", ""]
    for title, scripts in SCRIPTS.items():
        lines += [f"## {title}", "", "| command | what it does |", "| --- | --- |"]
        for script in existing(scripts):
            lines.append(f"| [`{script}`](commands/{Path(script).stem}.md) | {first_sentence(script)} |")
        lines.append("")
    return "\n".join(lines)


def first_sentence(script: str) -> str:
    """Return the first sentence of a script's docstring."""
    docstring = re.search(r'"""(.+?)(?:\n\n|""")', (PROJECT / script).read_text(encoding="utf-8"), flags=re.S)
    return " ".join(docstring[1].split()) if docstring else ""


def existing(scripts: tuple[str, ...]) -> list[str]:
    """Leave out scripts that this checkout does not have."""
    return [script for script in scripts if (PROJECT / script).is_file()]


def presets_page() -> str:
    """Show each preset's file, whose comments give the reason of each number."""
    lines = ["# Presets", "", "The files behind `--preset NAME`, with the reason of each number.", ""]
    lines += ["Which one to choose: [Presets and batches](../guides/presets.md).", ""]
    return "\n".join([*lines, *_yaml_files(PRESETS)])


def recipes_page() -> str:
    """Show each recipe's file, whose comments give its commands and the source of each number."""
    lines = ["# Recipes", "", "Whole runs, one file each, with the paper and the section of each number.", ""]
    lines += [
        "Put your names into a copy, and start it with `run_mlm.py --phases FILE`. `scale` makes a run shorter.",
        "",
    ]
    lines += [
        "More about these files: [Phases](../guides/phases.md). Which one to choose: [Plan a run](../guides/plan.md).",
        "",
    ]
    return "\n".join([*lines, *_yaml_files(RECIPES)])


def _yaml_files(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.yaml")):
        yield f"## {path.stem}\n\n```yaml\n{path.read_text(encoding='utf-8').rstrip()}\n```\n"


def exit_statuses_page() -> str:
    """List the exit statuses of `mlm_common.errors`, and what `--supervise` does after each."""
    from mlm_common import errors

    lines = ["# Exit statuses", "", "Every command ends with one of these. The last line of its output says why.", ""]
    lines += ["| exit status | meaning | what `--supervise` does |", "| --- | --- | --- |"]
    for status, meaning in sorted(errors.MEANINGS.items()):
        what = "stops" if status in errors.FINAL_STATUSES else "starts the run again"
        lines.append(f"| {status} | {meaning} | {what} |")
    lines += [
        "| 128 + n | Killed by signal n. 137: by `kill -9`, or because memory is full. | starts the run again |",
        "",
    ]
    return "\n".join(lines)


def page_of_file(path: str) -> str:
    """Take a page outside docs/ into the site: links to pages of docs/ stay, those to other files become names."""

    def replace(link: re.Match[str]) -> str:
        name, target = link.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        return f"[{name}](../{target.removeprefix('docs/')})" if target.startswith("docs/") else name

    text = (PROJECT / path).read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)", replace, text)


def generated_pages() -> dict[str, str]:
    """Make all pages: {path in docs/: Markdown}."""
    scripts = [script for group in SCRIPTS.values() for script in existing(group)]
    return {
        "reference/index.md": commands_page(),
        **{f"reference/commands/{Path(script).stem}.md": command_page(script) for script in scripts},
        "reference/presets.md": presets_page(),
        "reference/recipes.md": recipes_page(),
        "reference/exit_statuses.md": exit_statuses_page(),
        **{page: page_of_file(path) for path, page in PAGES_OF_FILES.items() if page.startswith("design/")},
    }


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put a page for each command into the navigation, below Reference."""
    (reference,) = (section["Reference"] for section in config.nav or [] if "Reference" in section)
    scripts = [Path(script) for group in SCRIPTS.values() for script in existing(group)]
    reference[1:1] = [{"Commands": [{script.name: f"reference/commands/{script.stem}.md"} for script in scripts]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    sys.path.insert(0, str(PROJECT))
    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Weigh a page for the search, and lead its links to files of the repository to the pages about them."""
    source = page.file.src_uri
    weights = [weight for path, weight in SEARCH_WEIGHTS.items() if source.startswith(path)]
    page.meta["search"] = {"boost": weights[0] if weights else 1.0}
    return links_of_the_site(markdown, posixpath.dirname(source))


def links_of_the_site(markdown: str, folder: str) -> str:
    """Replace links of a page in this folder of docs/."""

    def replace(link: re.Match[str]) -> str:
        target = PAGES_OF_FILES.get(posixpath.normpath(posixpath.join("docs", folder, link[1])))
        return f"]({posixpath.relpath(target, folder or '.')})" if target else link[0]

    return re.sub(r"\]\((\.\./[^)#\s]+)\)", replace, markdown)
