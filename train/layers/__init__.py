"""Building blocks of layers: random bits from keys, dropout, attention and matrix products that suit the TPU."""
