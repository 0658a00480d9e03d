"""Model families: one file each, with how its config.json is read and written and what its layers have."""
