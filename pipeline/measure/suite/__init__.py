"""Small tasks of potstill's own, for which nothing is downloaded: how many of its prompts a model passes."""
