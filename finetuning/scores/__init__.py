"""How good predictions are, and what a guess without the text would score."""
