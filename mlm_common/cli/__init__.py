"""Command lines: flags as dataclass fields, help in groups, progress and messages on the terminal.

The first import of every script.
"""

from mlm_common.cli.process import begin_script, runs_command

if runs_command():
    begin_script()
