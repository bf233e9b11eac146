"""Command lines: flags as dataclass fields, help in groups, progress and messages on the terminal."""
