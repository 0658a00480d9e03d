"""A student trained towards its teacher."""
