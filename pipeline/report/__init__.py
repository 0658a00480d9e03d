"""What a run's report shows, as a page and on the terminal."""
