"""What a run prints of its end."""

from train.loop.run_record import describe_entropy


def test_what_was_learned_is_held_against_the_entropy_of_the_frequencies() -> None:
    assert describe_entropy(6.5, 4.0).endswith("frequencies alone; the model's is 2.5000 lower, by context")
    assert describe_entropy(6.5, 6.5).endswith("frequencies alone; the model's is no lower")
