"""Model families: one file each, with how its fields["json"] is read and written and what its layers have."""
