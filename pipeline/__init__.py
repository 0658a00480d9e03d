"""Floor 5: recipes, stages, the run folder, the report, the `potstill` command."""
