"""`potstill tune`: tries what a recipe's stages could do instead, and writes the recipe that meets the targets."""
