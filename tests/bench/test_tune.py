"""The comparison of what `tune` finds with recipes by hand: which ones, and when one beats another."""

from bench.train.tune import TIME_NOISE, beats, by_hand, chart
from pipeline.schema import Recipe, Tracking
from pipeline.tune.targets import Measured
from pipeline.tune.trials import Space

SHAPES = ("layers 24", "layers 25", "mlp 1280", "layers 25, mlp 1280", "layers 20", "mlp 1024", "layers 15", "mlp 768")
BITS = ("int4, 5.9 bits", "int4, activations, 5.9 bits", "int8", "int8, activations", "int4", "int4, activations")


def test_twelve_recipes_are_written_by_hand() -> None:
    """Of the names that SmolLM2 gives them."""
    recipe = Recipe("r", {}, {}, (), None, Tracking())
    space = Space(recipe, 2, (dict.fromkeys(SHAPES), dict.fromkeys(BITS)), (0, 1), {})
    written = by_hand(space)
    assert len(set(written)) == 12 and set(written) <= set(space.combinations())
    assert {trial.choices[0] for trial in written} == {None, "layers 25", "layers 20", "mlp 1024"}


def test_one_beats_another_that_is_better_nowhere() -> None:
    one = Measured("one", 100.0, 1.0, 0.1)
    assert not beats(one, one)
    assert beats(one, Measured("more memory", 101.0, 1.0, 0.1)) and beats(one, Measured("worse", 100.0, 1.0, 0.2))
    assert not beats(one, Measured("worse and smaller", 99.0, 1.0, 0.2))
    assert not beats(one, Measured("as slow, for what can be known", 100.0, 0.99 * TIME_NOISE, 0.1))
    assert beats(one, Measured("slow", 100.0, 1.01 * TIME_NOISE, 0.1))
    assert not beats(one, Measured("fast", 100.0, 0.5, 0.2))


def test_the_plot_names_what_was_found() -> None:
    hand = [Measured("by hand", 2e6, 1.0, 0.2), Measured("smaller", 1e6, 1.0, 0.4)]
    best = Measured("found", 1.5e6, 1.0, 0.1)
    drawn = chart(hand, best).html(alone=True)
    assert "tune: found" in drawn and "by hand" in drawn
