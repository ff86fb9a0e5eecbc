"""A live view of runs, from their files: `runs` reads them, `view` shows them in the terminal and as a local page."""
